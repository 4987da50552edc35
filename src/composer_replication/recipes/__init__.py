"""The same kernels inside other engines, one folder each; a folder never imports another engine's.

prime_rl  an algorithm for PRIME-RL's orchestrator, and a loss function for its trainer
monarch   actors on one host, any of which may die
verl      verl's trainer, workers and engine with channels 2 and 3
"""
