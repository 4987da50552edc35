"""A tiny policy, an environment and a script for it: rollouts whose every token is known before they are generated."""
