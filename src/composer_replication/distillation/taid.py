"""Known import path; the code lives in `loss/taid.py`."""

from composer_replication.loss.taid import TAIDScheduler, taid_loss

__all__ = ["TAIDScheduler", "taid_loss"]
