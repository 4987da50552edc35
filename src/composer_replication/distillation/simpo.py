"""Known import path; the code lives in `loss/preference.py`."""

from composer_replication.loss.preference import avg_sequence_logprob, simpo_loss

__all__ = ["avg_sequence_logprob", "simpo_loss"]
