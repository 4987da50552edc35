"""One trace as rows of token ids, for the collator.

sites     marked errors, and which assistant turn made each
segments  a conversation without a chat template, turn by turn
rows      the student's sequences, a hinted context for every site, preference pairs
tensors   rows as the tensors of a batch
"""
