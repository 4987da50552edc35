"""Checkpoints that are complete or passed over, hold no pickle, and let a run go on bit for bit."""

from composer_replication.trainer.checkpoints.identity import weights_digest
from composer_replication.trainer.checkpoints.manifest import check_manifest, newest_complete, write_manifest
from composer_replication.trainer.checkpoints.mixin import SafeCheckpoints
from composer_replication.trainer.checkpoints.rng import rng_tree, set_rng_tree
from composer_replication.trainer.checkpoints.tree_file import load_tree, save_tree

__all__ = [
    "SafeCheckpoints",
    "check_manifest",
    "load_tree",
    "newest_complete",
    "rng_tree",
    "save_tree",
    "set_rng_tree",
    "weights_digest",
    "write_manifest",
]
