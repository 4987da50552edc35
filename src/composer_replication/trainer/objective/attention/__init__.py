"""Compute the hidden states of a token tree, in one pass where the model allows it.

attend        attention over a tree inside a Hugging Face model: flash kernels, FlexAttention, or path by path
model_checks  whether a model is causal, and what its config rules out
forward       `tree_hidden_states`: one masked pass or a padded batch, chosen by an experiment on the tree
"""
