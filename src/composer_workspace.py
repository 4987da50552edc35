"""Export the workspace environment to verifiers (`vf-eval composer-workspace`), which imports
top-level modules only.
"""

from composer_replication.envs.verifiers_environment import WorkspaceEnv, WorkspaceHarness, WorkspaceTaskset

__all__ = ["WorkspaceEnv", "WorkspaceHarness", "WorkspaceTaskset"]
