"""Known import path; the code lives in `loss/simpo.py`."""

from composer_replication.loss.simpo import avg_sequence_logprob, simpo_loss

__all__ = ["avg_sequence_logprob", "simpo_loss"]
