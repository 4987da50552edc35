"""Worlds of other engines as rollouts: what `train.grpo.environment` may name besides a Python callable.

openenv          an OpenEnv server's address: its tools as methods of an environment
policy_endpoint  a chat endpoint on this machine behind which the policy in training speaks, in whole rounds
verifiers        an environment of verifiers by its id: its own loop, asking that endpoint
"""
