"""Environments in which an agent acts, makes errors and gets a reward.

They run on any machine, and importing this package loads no heavy dependencies.

workspace               a small coding workspace: tasks, tools, tests in a sandbox, a reward
policies                scripted agents: an expert, and agents that make mistakes at set rates
student                 the embedded student: a small model that makes errors and follows hints
logs                    converts an episode to a conversation, an ATIF document or a Claude Code log
adviser_server          serves scripted teachers of adjustable skill at a local address
trl_environment         the workspace in TRL
verifiers_environment   the workspace in verifiers
openenv_server          the workspace behind an OpenEnv server, and its client
"""
