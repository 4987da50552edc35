"""The command line, `crf`: arguments in, tables out. Data goes to stdout, talk to stderr; the work is done by `steps/`.

    main      finds the verb, and turns what went wrong into a sentence
    options   flags that are short for keys of the config
    console   tables and JSON, in which nothing from logs is obeyed
    pages/    what is shown at length: bars and lines, a site's tokens, the meaning of counts

A file a verb, in the order of the pipeline:

    ingest    logs into a run directory
    sites     which turns erred
    hints     what is said about each of them
    judge     would a call fail, said before it ran
    inspect   the tokens of a site
    teachers  who can be asked, and what they cost
    replay    ask them
    pairs     preference pairs of what they agree on
    train     train on all of it
    export    sessions for other tools
    forget    sessions out of a run
    world     sessions of agents that err on purpose
"""
