"""What `crf train` does, as a library: from a config to trained weights.

training      config -> run directory -> sessions or prompts -> trainer -> checkpoints, weights, record
requirements  what has to be installed
parts         tokenizer, adapter, teacher, switches, prompts
renderer      the one reader of [render]
arguments     TrainingArguments, and what the machine cannot do of what the config asks for
sessions      logged sessions, and the memory they take
offline       the offline trainer
grpo          the trainer with rollouts
folder        where it writes, and whether it begins or goes on
phases        work before the first step, told while it is done
results       what it did, and the record beside the weights
plan          what it would do, without weights
"""
