"""Describe the calls in a session: tools, paths, shell commands, equality of calls, and what the session had shown.

tools           the kinds of tools in the harnesses, and which of their parameters are paths
edits           the changes made by an edit or a patch
equality        whether two actions are the same, and whether two states are near-duplicates
session_state   what a session has shown up to a turn: files, paths, programs, failed attempts
shell_lexer     shell text as words, operators and redirections
shell_parser    a command line as a tree of commands
shell_programs  the option syntax of well-known programs
shell_command   the programs in a command, what it may change, and which files it writes
shell_equality  whether two shell commands do the same: equal keys for equivalent commands
known_paths     which paths exist, as far as a session has shown
file_contents   the content of files, as far as a session has shown it
"""
