"""The command line, `crf`. Every verb is a module with `add_arguments(parser)` and `run(args) -> exit status`.

Results go to stdout, progress and log lines to stderr. The file of a verb also contains the pipeline step that the verb
runs, such as `write_sites` in `sites.py`, so that `crf run` and tests can call the step without the command line.

main        finds the verb and turns exceptions into one line and an exit status
console     tables, JSON and log lines; flags that set config keys
progress    progress bars, or lines where stderr is not a terminal
pipeline    the steps of `crf run`, and which of them are stale
run_checks  checks before `crf run` starts: inputs, enough data to learn from, enough data to evaluate
site_page   the page that `crf inspect` prints
export_weights  merged weights, GGUF, Ollama and vLLM for `crf export --to`
replicas/   the implementation of `crf diloco`

From logs to weights: ingest, split, sites, hints, judge, inspect, teachers, replay, pairs, train, evaluate, report;
`run` goes through the whole sequence. The other verbs: demo, ablate, diloco, export, chat, forget, world, doctor,
completion.
"""
