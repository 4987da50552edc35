"""One trace as rows of token ids, for the collator.

sites    marked errors, and which assistant turn made each
rows     the student's sequences, a hinted context for every site, preference pairs
tensors  rows as the tensors of a batch
"""
