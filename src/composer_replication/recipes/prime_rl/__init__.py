"""PRIME-RL: point its custom-loss setting at `composer_replication.recipes.prime_rl.composer_loss.loss_fn`.

composer_loss  the loss function, on PRIME-RL's own records
"""
