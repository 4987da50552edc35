"""Monarch: a trainer, a generator, a rewarder and a pool of teachers as actors on one host, none of which may not die.

actors          the four actors: thin shells around what follows
run             a run of them: batch after batch, from prompts to new weights
supervision     processes that are started anew when they die
generator       rollouts of a batch
sampling        vLLM or transformers
rewarder        reward functions by verifiers' protocol
teacher_pool    teachers under one budget
gathering       rollouts and rewards as a batch
policy_trainer  steps on numbered batches, each exactly once
step_loss       the loss of a batch
shared_weights  weights in shared memory
step_batch      a batch as a file
rollout_file    rollouts as a file
tensor_file     tensors and a record as a file
named_function  functions by name
"""
