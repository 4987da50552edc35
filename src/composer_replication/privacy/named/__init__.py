"""Values that something names: a variable, a field, a tag, a heading, an option of a program.

names           what a name says about its value
harmless        the words that are known
plausible       what a value beside a name may be
extents         where it ends
declarations    what code puts between name and value
values          the value behind a name
assignments     all of that behind every key word
markup          names at a distance in documents
tables          names at a distance in tables
places          lines and calls that hold nothing else
commands        secrets known by their command or file alone
programs        which options of which programs hold one
options         those options on a command line
"""
