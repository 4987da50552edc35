"""The losses of this package inside other RL engines, one folder per engine; no folder imports another one's.

prime_rl  an algorithm for PRIME-RL's orchestrator, and a loss function for its trainer
monarch   four Monarch actors on one host, any of which may die and is restarted
verl      verl's trainer, workers and engine with channels 2 and 3
"""
