"""Rollouts as something to learn from, for any engine: nothing here imports TRL.

generation/    rollouts from kept keys: what they share is read once
worlds/        environments of other engines: an OpenEnv server, an environment of verifiers
gathering      what a generation step returned, as rollouts
conversation   a rollout as a conversation, and what its environment says went wrong
failure_rules  how failures look where tools are Python functions
sites          error sites, and the hinted context of each
other_hints    hints of other turns, for a control and for a contrast
heeding        whether own hints do more than another kind's
channel        channel 2 on the rows of the policy's own pass
resample       groups with equal rewards, drawn again
merge          a batch in which some groups are exchanged
error_penalty  what a rollout's errors cost, as a reward
effort         what a rollout's effort costs, as a reward
"""
