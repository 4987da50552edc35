"""The parts that `ComposerReplicationTrainer` adds to TRL's GRPO trainer: channels 2 and 3.

generation      TRL's generation step, with error sites, resampled groups and a KL penalty in the advantage
logged_batches  batches of logged traces for channels 2 and 3, and the run's state in checkpoints
channels        the loss terms of channels 2 and 3 in a micro-step, and their metrics
"""
