"""Places where an agent acts, errs and is judged, on any machine. Nothing heavy is imported.

workspace   a pocket coding workspace: tasks, tools, tests in a sandbox, a reward
verifiers_environment   the workspace in verifiers
openenv_server          the workspace behind an OpenEnv server, and its client
"""
