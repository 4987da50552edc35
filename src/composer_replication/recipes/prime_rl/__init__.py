"""PRIME-RL: hints at erring turns as an algorithm of its orchestrator, and a loss for its trainer. See README.md here.

hinted_turns   the algorithm: GRPO's advantages, and a reference stream on the erring turns alone
composer_loss  a loss function for `[trainer.loss]`, on PRIME-RL's own records
start          PRIME-RL's commands with the algorithm registered
"""
