"""Integrate this package's losses into other RL engines, with one folder per engine. No folder imports another.

prime_rl  an algorithm for PRIME-RL's orchestrator, and a loss function for its trainer
monarch   four Monarch actors on one host, each of which is restarted if it dies
verl      verl's trainer, workers and engine, extended by channel 2 (hint distillation) and channel 3 (DPO pairs)
"""
