"""Rollouts generated from kept keys, as fast as plain PyTorch allows; a stand-in for transformers' sampling loop.

token_rows      which rows are equal, what they share, which go on where another ended
key_values      keys and values row by row, and attention by them
casts           copies of weights in half precision, made once and held
passes          new tokens of some rows, or the next token of every row; recorded as CUDA graphs
choice          which token comes next
suitability     whether a model may, by its config and an experiment
loop            token after token until all rows have ended
talks           whole conversations of a small model on a CPU, none of which waits for another
recorded_talks  the same on a GPU, token by token from CUDA graphs
generator       all of it: `RolloutGenerator`
"""
