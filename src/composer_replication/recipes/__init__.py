"""The same kernels inside other engines, one folder each; a folder never imports another engine's.

prime_rl  a loss function for PRIME-RL's trainer
verl      verl's trainer, workers and engine with channels 2 and 3
"""
