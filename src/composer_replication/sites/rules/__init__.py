"""How each kind of failure looks: plain data, group by group.

harness    what the agent refused, and calls that it could not even make
files      failures of tools that read and change files
slips      commands that name what is not there: programs, paths, branches
machine    failures of commands that are the machine's or the network's
typed      who can have said that a command was typed wrongly, and of what
own_words  what one program says when it was called wrongly
usage      commands that could not work as they were typed
services   what was asked of a service, a database or data, and is not there
syntax     what the shell, or a program on the command line, could not read
work       failures that are the work: tests, checks, builds, programs
"""
