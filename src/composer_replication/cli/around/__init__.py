"""Verbs beside the pipeline, a file a verb. Each has HELP, add_arguments(parser) and run(args).

export  sessions for other tools
forget  sessions out of a run
world   sessions of agents that err on purpose
"""
