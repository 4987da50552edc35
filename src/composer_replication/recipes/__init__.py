"""This package's losses in other RL engines, one folder per engine; no folder imports another.

prime_rl  an algorithm for PRIME-RL's orchestrator, and a loss function for its trainer
monarch   four Monarch actors on one host, each of which is restarted if it dies
verl      verl's trainer, workers and engine, extended by channels 2 and 3
"""
