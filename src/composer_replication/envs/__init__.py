"""Environments in which an agent acts, makes errors and gets a reward, on any machine. Nothing heavy is imported.

workspace               a small coding workspace: tasks, tools, tests in a sandbox, a reward
policies                scripted agents: an expert, and agents that make mistakes at set rates
student                 the embedded student: a small model that makes errors and follows hints
logs                    an episode as a conversation, an ATIF document or a Claude Code log
adviser_server          scripted teachers of adjustable skill behind a local address
trl_environment         the workspace in TRL
verifiers_environment   the workspace in verifiers
openenv_server          the workspace behind an OpenEnv server, and its client
"""
