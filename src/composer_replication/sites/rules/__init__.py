"""The built-in failure rules: for each kind of failure, the messages that identify it.

harness           refusals by the user, permission rules and hooks; calls that the harness could not run
tools_and_builds  tools that read, search and change files; failed tests, checks, builds and programs in a shell
environment       timeouts, permissions and network; slips by the model: missing programs, paths and branches
usage             wrong options, names, argument counts and folders; shell syntax; misuse of services
by_program        usage errors specific to single programs

A comment above each rule gives examples of messages, the captured group after `->`, and near misses after `not`.
"""
