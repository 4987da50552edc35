"""The same kernels inside other engines, one folder each; a folder never imports another engine's.

monarch   actors on one host, any of which may die
prime_rl  a loss function for PRIME-RL's trainer
"""
