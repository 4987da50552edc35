"""One trace as rows of token ids, for the collator.

sites    marked errors, and which assistant turn made each
rows     the student's sequences, and a hinted context for every site
pairs    preference pairs
tensors  rows as the tensors of a batch
"""
