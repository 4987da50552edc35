"""What a call did: its tool and paths, the shell commands in it, and what the session had shown by then.

tools           which tools a harness has, and which arguments of them are paths
edits           what an edit or a patch changes
equality        whether two calls do the same
session_state   what a session knows at a turn: files read, folders listed, attempts made
shell_words     words of a shell command as the shell splits them
shell_tree      a command line as a tree of commands
shell_programs  how well-known programs read their options
shell_command   what a command line reads and writes
shell_keys      one key for commands that do the same
shown_paths     paths that outputs have shown
shown_texts     texts of files that outputs have shown
"""
