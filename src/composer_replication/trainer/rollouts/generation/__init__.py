"""Generate rollouts with a shared key-value cache, as fast as plain PyTorch allows, instead of with transformers' loop.

row_cache   the key-value cache, forward passes that use it, and a check of whether a model supports it
generator   `RolloutGenerator`: a replacement for the sampling loop inside `model.generate`
talks       many simultaneous conversations with a small model, none of which waits for another; CUDA graphs on a GPU
"""
