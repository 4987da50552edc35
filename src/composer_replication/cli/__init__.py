"""The command line, `crf`. Every verb is a module with `add_arguments(parser)` and `run(args) -> exit status`.

Results go to stdout, progress and log lines to stderr. A verb's file also has the pipeline step that the verb runs,
such as `write_sites` in `sites.py`, so that `crf run` and tests can call it without the command line.

main        finds the verb and turns exceptions into one line and an exit status
console     tables, JSON and log lines; flags that are short for keys of the config
progress    progress bars, or lines where stderr is not a terminal
pipeline    the table of the steps of `crf run`, and which of them are stale
run_checks  what `crf run` checks before it starts: inputs, enough to learn from, enough to evaluate
site_page   what `crf inspect` prints
export_weights  merged weights, GGUF, Ollama and vLLM for `crf export --to`
replicas/   what `crf diloco` does

From logs to weights: ingest, split, sites, hints, judge, inspect, teachers, replay, pairs, train, evaluate, report; run
does all of it. The other verbs: demo, ablate, diloco, export, chat, forget, world, doctor, completion.
"""
