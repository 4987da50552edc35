"""The distillation losses at the import path that users know; the code is in `loss`.

simpo              preference loss without a reference model
taid               a target that moves from the student to the teacher
entropy_aware_opd  KL(teacher || student) or KL(student || teacher), depending on the teacher's entropy
"""

from composer_replication.distillation.entropy_aware_opd import entropy_aware_opd_loss
from composer_replication.distillation.simpo import simpo_loss
from composer_replication.distillation.taid import TAIDScheduler, taid_loss
from composer_replication.loss.preference import dpo_loss
from composer_replication.loss.sdpo import sdpo_loss

__all__ = ["TAIDScheduler", "dpo_loss", "entropy_aware_opd_loss", "sdpo_loss", "simpo_loss", "taid_loss"]
