"""Which pairs are worth training on: data-juicer's four default operators in plain Python, read from its recipes.

pair_texts           the texts of a pair that a recipe may look at
recipe               a recipe file as steps
special_characters   the characters that one of the operators counts
operators            the operators
data_juicer_backend  the same steps run by data-juicer itself
normalizer           pairs in, pairs worth training on out, every drop counted
"""
