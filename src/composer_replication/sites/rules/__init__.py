"""The built-in failure rules: for each kind of failure, the messages that identify it.

harness    refusals by the user, permission rules and hooks; calls that the harness could not run
files      tools that read, search and change files; also failed tests, checks, builds and programs in a shell
machine    timeouts, permissions and network; slips by the model: missing programs, paths and branches
usage      programs called with wrong options, names or argument counts, or from the wrong folder
typed      checks that a message about wrong use concerns the command; wrong shell syntax; misuse of services
own_words  usage errors specific to single programs

A comment above each rule gives examples of messages, the captured group after `->`, and near misses after `not`.
"""
