"""Turn rollouts into training data, for any engine: nothing here imports TRL.

hint_distillation  channel 2, from an error site in a rollout to the loss: start here
hint_gate          whether the policy reacts to hints, and the gate that keeps channel 2 off until it does
unrelated_hints    a hint for another kind of error, for the gate, the contrast and controls
sites              rollouts from the output of a generation step, and the errors in them
resample           resample groups with equal rewards, and merge them into the batch
effort             reward functions that charge for effort and for errors
generation/        fast sampling with a key-value cache that is shared by rollouts and reused across turns
worlds/            environments of other engines: an OpenEnv server, an environment from verifiers
"""
