"""`crf train` as a library: from a config to trained weights.

train_run      train, plan, and decide whether a training is up to date
training       config -> run directory -> trainer of the mode -> checkpoints, weights, record
offline        mode "offline": data, memory of a step, warm-up, trainer
grpo           mode "grpo": prompts, rewards, environment, trainer
inputs         checking the config, and reading tokenizer, renderer, adapter and training arguments
output_folder  the folder that a training writes to, and whether it resumes there
"""
