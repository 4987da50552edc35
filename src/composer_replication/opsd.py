"""Export the self-distillation losses under the import path that users know; the code is in `loss`."""

from composer_replication.loss.jsd import generalized_jsd_loss
from composer_replication.loss.sdpo import sdpo_loss

__all__ = ["generalized_jsd_loss", "sdpo_loss"]
