"""Values that something names: a variable, a field, a tag, a heading, an option of a program.

`names`: what a name says about its value; `harmless`: the words that are known; `plausible`: what a value beside a name
may be; `extents`: where it ends; `declarations`: what code puts between them; `values`: the value behind a name;
`assignments`: all of that behind every key word; `markup` and `tables`: names that stand at a distance; `commands`,
`programs` and `options`: what a command line shows.
"""
