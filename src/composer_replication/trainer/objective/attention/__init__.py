"""Compute the hidden rows of a token tree, in one pass where the model allows it.

attend   attention over a tree inside a Hugging Face model: flash kernels, FlexAttention, or path by path
passes   one masked pass, or the sequences as a batch; whether a model is causal; what its config says against trees
forward  `tree_hidden_states`: choose between both, by an experiment on the tree itself
"""
