"""The steps of a run, one file a verb: `step(section of the config, run directory) -> what the command prints`.

A step reads artefacts of the run, hands them to the stages below, and writes its own. In reading order:

    table      the pipeline: each step with what it reads and writes
    ingest     logs -> conversations.jsonl, tools.jsonl, session_sources.jsonl
    sites      conversations -> sites.jsonl, conventions.md
    judge      every call judged before it ran, against what happened
    inspect    a site as the tokens that a training makes of it
    states     the states of a run, for the two steps that compare actions
    replay     states -> teacher_calls.jsonl, within a cap
    own_pairs  corrections and their opposite, of the sessions alone
    pairs      calls and corrections -> pairs.jsonl
    train      conversations, sites and pairs -> checkpoints and weights
    report     all of it -> report.html, report.md
    export     conversations -> ATIF documents for other tools
    forget     a session out of all of it
    world      sessions of scripted agents, as logs
"""
