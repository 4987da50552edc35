"""verl 0.9.1: its trainer, workers and engine with channels 2 and 3; README.md says what ran where.

settings        what the channels are told, from verl's config
columns         sites with their hints, and pairs, as columns of a batch
channel_loss    both channels from what an engine hands to a loss function
hinted_rows     what a teacher says at the targets of hinted contexts
engine          verl's FSDP engine with both channels in its step
registered      a policy loss, an advantage estimator and two distillation losses, by name
agent_loop      sites found as turns end
teacher_server  verl's teacher servers, asked about hinted contexts
worker          verl's hybrid worker, whose reference is the teacher
trainer         verl's synchronous trainer with that worker
cpu_platform    all of it on a machine without a GPU, for tests
"""
