"""Generate rollouts from a shared key-value cache, as fast as plain PyTorch allows, in place of transformers' loop.

key_values  keys and values row by row, and attention to them; prefixes that rows share; casts to half precision
passes      read new tokens of some rows, or the next token of every row (with CUDA graphs); which models can
generator   `RolloutGenerator`: a replacement of the sampling loop inside `model.generate`
talks       many conversations with a small model, none of which waits for another; on a GPU with CUDA graphs
"""
