"""Generate rollouts with a shared key-value cache, as fast as plain PyTorch allows, instead of with transformers' loop.

key_values  rows of keys and values, attention to them, prefixes that rows share, and cached half-precision weights
passes      read new tokens of some rows, or the next token of every row (with CUDA graphs); check if a model allows it
generator   `RolloutGenerator`: a replacement for the sampling loop inside `model.generate`
talks       many conversations with a small model, none of which waits for another; on a GPU with CUDA graphs
"""
