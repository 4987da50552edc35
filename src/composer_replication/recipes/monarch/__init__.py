"""Train with Monarch, using a trainer, a generator, a rewarder and a teacher pool as actors on one host.

Each actor is restarted if it dies.

actors          the four actors: thin wrappers around classes that do not need Monarch
run             the training loop: builds batches from rollouts, trains on them, and restarts actors that died
generator       samples rollouts with vLLM or transformers
rewarder        reward functions with the protocol of verifiers, and the teacher pool with its spending cap
policy_trainer  runs optimizer steps on numbered batches, each exactly once, and contains the loss
tensor_file     files of tensors: rollouts, batches, and weights in shared memory
"""
