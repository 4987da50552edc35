"""Entropy-aware distillation at the import path that users know; the code is in `loss/entropy_opd.py`."""

from composer_replication.loss.entropy_opd import entropy_aware_opd_loss, teacher_entropy

__all__ = ["entropy_aware_opd_loss", "teacher_entropy"]
