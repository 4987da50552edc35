"""A shell command, read once, as a tree: what it is about, what it changes, and which other does the same.

dollars      expansions and here-documents: where each ends
words        text as words, operators and redirections
tree         words as lists, pipelines, commands and loops
command      what a command is about: its programs, whether all it does is show other text
effects      commands that surely change nothing, or no source file
writes       files that a command surely writes, and formatters
options      a program's options, by a table
programs     the tables of programs, and of git, docker and their like
argv         one program with its words in one spelling
special      programs that no table describes
keys         a whole command in one spelling, and where the shell stands after it
"""
