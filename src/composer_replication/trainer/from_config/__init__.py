"""`crf train` as a library: from a config to trained weights.

train_run      train, plan, and decide whether a training is up to date
training       config -> run directory -> sessions or prompts -> trainer -> checkpoints, weights, record
inputs         tokenizer, renderer, adapter, loss weighting, prompts
output_folder  the folder that a training writes to, and whether it resumes there
requirements   the packages and the hardware that a config needs
offline        logged sessions, the memory of a step, the warm-up, the offline trainer
plan           what a training would do, its result, and the record next to the weights
"""
