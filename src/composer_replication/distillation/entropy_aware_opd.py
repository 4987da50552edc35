"""Known import path; the code lives in `loss/entropy_opd.py`."""

from composer_replication.loss.entropy_opd import entropy_aware_opd_loss, teacher_entropy

__all__ = ["entropy_aware_opd_loss", "teacher_entropy"]
