"""Verbs beside the pipeline, a file a verb. Each has HELP, add_arguments(parser) and run(args).

ablate      arms x seeds at equal budgets, with controls and intervals
diloco      replicas that share a bucket
export      weights and sessions for other programs
chat        talk to a model before and after
forget      sessions out of a run
world       sessions of agents that err on purpose
doctor      what this machine has and lacks
completion  for the shell
"""
