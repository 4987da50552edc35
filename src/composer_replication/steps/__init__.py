"""The steps of a run, one file a verb: `step(section of the config, run directory) -> what the command prints`.

A step reads artefacts of the run, hands them to the stages below, and writes its own. In reading order:

    table      the pipeline: each step with what it reads and writes
    ingest     logs -> conversations.jsonl, tools.jsonl, session_sources.jsonl
    split      conversations -> split.jsonl: who is learnt from, who judges
    sites      conversations -> sites.jsonl, conventions.md
    states     the states of a run, for the two steps that compare actions
    replay     states -> teacher_calls.jsonl, within a cap
    own_pairs  corrections and their opposite, of the sessions alone
    pairs      calls and corrections -> pairs.jsonl
    train      conversations, sites and pairs -> checkpoints and weights
    evaluate   before against after, on held-out sessions -> evaluation.json
    report     all of it -> report.html, report.md
    stale      why a step has to be made: missing, or made of something else
    running/   what `run` asks first: its options, whether there is enough to learn, how long it may take
    run        every step of the table, one after the other
    dry_run    what `run` would do, cost and take
    demo       the same on generated sessions and the embedded student
    replicas/  a training by several replicas that share a bucket
    around/    what is done with a run besides: judge, inspect, export, forget; sessions of a small world
"""
