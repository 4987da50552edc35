"""`crf train` as a library: from a config to trained weights.

train_run      train, plan, and decide whether a training is up to date
training       config -> run directory -> sessions or prompts -> trainer -> checkpoints, weights, record
inputs         reading the tokenizer, renderer, adapter, loss weighting and prompts
output_folder  the folder that a training writes to, and whether it resumes there
requirements   the packages and the hardware that a config needs
offline        training on logged sessions: data, memory of a step, warm-up, trainer
plan           a training's plan, its result, and the record next to the weights
"""
