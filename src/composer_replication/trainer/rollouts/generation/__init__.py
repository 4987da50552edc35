"""Generate rollouts with a shared key-value cache, as fast as plain PyTorch allows, instead of with transformers' loop.

row_cache   keys and values by row, and passes over them; check whether a model allows it
generator   `RolloutGenerator`: a replacement for the sampling loop inside `model.generate`
talks       many conversations with a small model, none of which waits for another; on a GPU with CUDA graphs
"""
