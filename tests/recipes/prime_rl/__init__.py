"""The recipe for PRIME-RL, held to our own records of its contract; and, with PRIME_RL_SOURCE, to its own classes.

engine_records   its records and formulas, written down by us: what a trace, a sample and a loss are
recorded_traces  the recorded rollouts as such traces
upstream         a checkout of PRIME-RL, if there is one, without its GPU parts
"""
