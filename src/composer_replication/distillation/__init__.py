"""Known import path of the distillation losses; the code lives in `loss/`.

simpo              preference loss without a reference
taid               a target that moves from student to teacher
entropy_aware_opd  forward or reverse divergence, by the teacher's entropy
"""

from composer_replication.distillation.entropy_aware_opd import entropy_aware_opd_loss
from composer_replication.distillation.simpo import simpo_loss
from composer_replication.distillation.taid import TAIDScheduler, taid_loss
from composer_replication.loss.preference import dpo_loss
from composer_replication.loss.sdpo import sdpo_loss

__all__ = ["TAIDScheduler", "dpo_loss", "entropy_aware_opd_loss", "sdpo_loss", "simpo_loss", "taid_loss"]
