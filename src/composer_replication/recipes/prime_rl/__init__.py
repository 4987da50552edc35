"""PRIME-RL with hints at erring turns: an algorithm of its orchestrator, and a loss for its trainer. See README.md
here.

hinted_turns   the algorithm: GRPO's advantages, and reference log-probs for the erring turns only
composer_loss  a loss function for `[trainer.loss]` that uses PRIME-RL's own records
start          PRIME-RL's commands with the algorithm registered
"""
