"""Checkpoints without pickle that are either complete or ignored, and that resume a run bit for bit.

run_checkpoints  saving and loading in place of a Trainer's own methods; choosing and checking the one to resume from
manifest         the list of a checkpoint's files that makes it complete, and deletion of old checkpoints
weights          weights and optimizer state, whole or sharded
data_cursor      the position in the data, and a process's random number generators
"""

from composer_replication.tensor_file import load_tree, save_tree
from composer_replication.trainer.checkpoints.data_cursor import rng_tree, set_rng_tree
from composer_replication.trainer.checkpoints.manifest import check_manifest, newest_complete, write_manifest
from composer_replication.trainer.objective.fingerprint import weights_digest

__all__ = [
    "check_manifest",
    "load_tree",
    "newest_complete",
    "rng_tree",
    "save_tree",
    "set_rng_tree",
    "weights_digest",
    "write_manifest",
]
