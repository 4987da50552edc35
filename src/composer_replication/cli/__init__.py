"""The command line, `crf`: arguments in, tables out. Data goes to stdout, talk to stderr; the work is done by `steps/`.

main       finds the verb, and turns what went wrong into a sentence
options    flags that are short for keys of the config
console    tables and JSON, in which nothing from logs is obeyed
pages/     what is shown at length: bars and lines, a site's tokens
pipeline/  the verbs from logs to weights, in order
around/    the other verbs: what is done with a run and its weights
"""
