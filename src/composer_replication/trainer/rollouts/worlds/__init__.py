"""Environments of other engines: values for `train.grpo.environment` other than a Python callable.

openenv          an OpenEnv server, given by its address: its tools are methods of an environment
policy_endpoint  a chat endpoint on this machine, answered in rounds by the policy being trained
verifiers        an environment from verifiers, given by its id: its own loop, which calls that endpoint
"""
