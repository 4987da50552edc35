"""What a session has shown of files and folders.

views        what a tool shows of a file
files        whole files, as they surely are
file_text    one file as far as it was shown
texts        all files as far as they were shown, and which the agent counts as read
folder       where the shell stands
changes      which files commands have written
attempts     which calls failed, and whether anything has changed since
named_paths  which paths any text has named
paths        which paths are there, and which are not
"""
