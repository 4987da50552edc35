"""Verbs of the pipeline, a file a verb, in its order. Each has HELP, add_arguments(parser) and run(args).

ingest    logs into a run directory
split     who is learnt from, and who judges
sites     which turns erred
hints     what is said about each of them
judge     would a call fail, said before it ran
inspect   the tokens of a site
teachers  who can be asked, and what they cost
replay    ask them
pairs     preference pairs of what they agree on
train     train on all of it
evaluate  before against after, on held-out sessions
report    all of it as a page to look at
run       all of these, one after the other
demo      the same on generated sessions and the embedded student
"""
