"""Extend PRIME-RL by hints at erring turns: an algorithm for its orchestrator, and a loss for its trainer (see
README.md).

hinted_turns   the algorithm: GRPO's advantages, and reference log-probs for the erring turns only
composer_loss  a loss function for `[trainer.loss]` that uses PRIME-RL's own records
start          PRIME-RL's commands with the algorithm registered
"""
