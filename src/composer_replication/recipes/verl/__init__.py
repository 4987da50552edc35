"""Extend the trainer, workers and engine of verl 0.9.1 by channel 2 (hint distillation) and channel 3 (DPO pairs).

README.md lists what has been tested.

columns       sites with their hints, and pairs, as columns of a batch
channel_loss  settings, the teacher's forward passes, and both channels as loss functions for an engine
engine        verl's FSDP engine with both channels in its step
registered    a policy loss, an advantage estimator and two distillation losses, registered by name
agent_loop    an agent loop that finds sites, and queries to verl's teacher servers with hinted contexts
trainer       verl's synchronous trainer and hybrid worker with that engine
cpu_platform  verl on a machine without a GPU, for tests
"""
