"""Compute the hidden states of a token tree, in one pass where the model allows it.

attend   attention over a tree inside a Hugging Face model: flash kernels, FlexAttention, or path by path
passes   one masked pass or a padded batch of sequences; whether a model is causal; what its config rules out
forward  `tree_hidden_states`: choose one of the two kinds of pass by an experiment on the tree
"""
