"""verl 0.9.1: its trainer, workers and engine with channels 2 and 3. README.md says what was run where.

columns       sites with their hints, and pairs, as columns of a batch
channel_loss  the settings, the teacher's passes, and both channels as a loss function for an engine
engine        verl's FSDP engine with both channels in its step
registered    a policy loss, an advantage estimator and two distillation losses, found by name
agent_loop    sites found as turns end, and verl's teacher servers queried with hinted contexts
trainer       verl's synchronous trainer and hybrid worker with that engine
cpu_platform  all of it on a machine without a GPU, for tests
"""
