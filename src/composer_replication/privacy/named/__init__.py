"""Values that something names: a variable, a field, a tag, a heading, an option of a program.

`names`: what a name says about its value; `plausible`: what a value beside one may be; `extents`: where it ends;
`declarations`: what code puts between them; `assignments`: all of that behind every key word; `markup` and `tables`:
names that stand at a distance; `commands` and `options`: what a command line shows.
"""
