"""Rollouts as training data, for any engine: nothing here imports TRL.

generation/  fast sampling with a key-value cache that rollouts and turns share
worlds/      environments of other engines: an OpenEnv server, an environment of verifiers
gathering    what a generation step returned, as rollouts
sites        a rollout's errors, and the hinted context of each
channel      channel 2 on the rows of the policy's own pass; unrelated hints for controls and contrasts
resample     sample groups with equal rewards again, and merge them into the batch
effort       reward functions that charge for effort and for errors
"""
