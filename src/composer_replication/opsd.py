"""Known import path of the OPSD divergence; the code lives in `loss/jsd.py`."""

from composer_replication.loss.jsd import generalized_jsd_loss

__all__ = ["generalized_jsd_loss"]
