"""Training with Monarch: a trainer, a generator, a rewarder and a teacher pool as actors on one host.

Any of them may die and is restarted.

actors          the four actors: thin shells around classes that do not need Monarch
run             the training loop, batch by batch; restarts actors that died, and builds batches from rollouts
generator       rollouts with vLLM or transformers
rewarder        reward functions with verifiers' protocol, and the teacher pool with its spending cap
policy_trainer  optimizer steps on numbered batches, each exactly once, and their loss
tensor_file     files of tensors: rollouts, batches, and weights in shared memory
"""
