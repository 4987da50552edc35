"""Where verifiers finds the workspace (`vf-eval composer-workspace`): it imports top-level modules only."""

from composer_replication.envs.verifiers_environment import WorkspaceEnv, WorkspaceHarness, WorkspaceTaskset

__all__ = ["WorkspaceEnv", "WorkspaceHarness", "WorkspaceTaskset"]
