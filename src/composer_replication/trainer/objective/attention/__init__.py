"""Hidden rows of a token tree, from one pass where the model allows it: which attention, and how that is found out.

attend     attention by a tree's mask inside a Hugging Face model
flash      by flash kernels: the trunk as usual, branches on the trunk's keys
paths      by scaled-dot-product attention, path by path
passes     the two ways to a tree's rows: one masked pass, or its sequences
rules      what a config says against trees
trial      the experiment: what the rows of this very tree depend on
watch      which layers attend in it, and with which mask
causality  whether rows depend on their past alone, which padding and sharing need
forward    all of it: `tree_hidden_states`
"""
