"""What `crf train` does, as a library: from a config to trained weights.

training       config -> run directory -> sessions or prompts -> trainer -> checkpoints, weights, record
inputs         tokenizer, adapter, teacher, switches, prompts
renderer       the one reader of [render]
output_folder  where it writes, and whether it begins or goes on
requirements   what has to be installed, and what the machine cannot do of what the config asks for
warmup         whether channel 1 comes first, and the model that the steps begin with
offline        logged sessions, the memory of a step, the offline trainer
grpo           prompts, rewards, environment, the trainer with rollouts
results        what it did, and the record beside the weights
plan           what it would do, without weights
"""
