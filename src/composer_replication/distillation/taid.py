"""TAID at the import path that users know; the code is in `loss/taid.py`."""

from composer_replication.loss.taid import TAIDScheduler, taid_loss

__all__ = ["TAIDScheduler", "taid_loss"]
