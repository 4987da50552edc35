"""SimPO at the import path that users know; the code is in `loss/preference.py`."""

from composer_replication.loss.preference import avg_sequence_logprob, simpo_loss

__all__ = ["avg_sequence_logprob", "simpo_loss"]
