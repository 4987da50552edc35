"""The built-in failure rules: for each kind of failure, the messages by which it is recognized.

harness    refusals by user, permission rules and hooks; calls that the harness could not make
files      tools that read, search and change files; also tests, checks, builds and programs that failed in a shell
machine    timeouts, permissions and network; the model's slips: missing programs, paths and branches
usage      programs that were called with wrong options, names or counts, or from the wrong folder
typed      checks that a message about wrong use is about the command; wrong shell syntax; misuse of services
own_words  messages of single programs that were called wrongly

A comment above each rule gives examples of messages, the captured group after `->`, and near misses after `not`.
"""
