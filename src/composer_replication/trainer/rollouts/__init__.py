"""Turn rollouts into training data, for any engine: nothing here imports TRL.

generation/  fast sampling with a key-value cache that is shared by rollouts and reused across turns
worlds/      environments of other engines: an OpenEnv server, an environment from verifiers
gathering    rollouts from the output of a generation step
sites        the errors in a rollout, and the hinted context of each error
channel      channel 2 on the hidden states of the policy's own pass; unrelated hints for controls and contrasts
resample     resample groups with equal rewards, and merge them into the batch
effort       reward functions that charge for effort and for errors
"""
