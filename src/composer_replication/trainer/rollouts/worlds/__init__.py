"""Environments of other engines: what `train.grpo.environment` may name besides a Python callable.

openenv          an OpenEnv server by its address: its tools as methods of an environment
policy_endpoint  a chat endpoint on this machine that the policy in training answers, in rounds
verifiers        an environment of verifiers by its id: its own loop, which calls that endpoint
"""
