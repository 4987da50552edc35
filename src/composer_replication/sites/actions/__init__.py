"""Describe the calls of a session: tools, paths and shell commands, whether two calls do the same, what was known.

tools           the kinds of the harnesses' tools, and which of their parameters are paths
edits           what an edit or a patch changes
equality        whether two actions are the same, and whether two states are near-duplicates
session_state   what a session has shown up to a turn: files, paths, programs, failed attempts
shell_words     shell text as words, operators and redirections
shell_tree      a command line as a tree of commands
shell_programs  how well-known programs read their options
shell_command   the programs of a command, what it may change, which files it writes
shell_keys      equal keys for commands that do the same
shown_paths     which paths exist, as far as a session has shown it
shown_texts     the content of files, as far as a session has shown it
"""
