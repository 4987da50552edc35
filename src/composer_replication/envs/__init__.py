"""Places where an agent acts, errs and is judged, on any machine. Nothing heavy is imported.

workspace               a pocket coding workspace: tasks, tools, tests in a sandbox, a reward
trl_environment         the workspace in TRL
policies                who plays in it: an expert, agents that err at set rates
logs                    an episode as a conversation, as ATIF, as a Claude Code log
student                 the embedded student: a small agent that errs and follows hints
adviser_server          advisers of adjustable skill, behind a loopback address
verifiers_environment   the workspace in verifiers
openenv_server          the workspace behind an OpenEnv server, and its client
"""
