"""Everything a training step reads, as tensors."""

from composer_replication.batch.smoke_chat import build_batch

__all__ = ["build_batch"]
