"""Checkpoints without pickle that are either complete or ignored, and that resume a run bit for bit.

run_checkpoints  saves and loads checkpoints in place of a Trainer's own methods, and chooses one to resume from
manifest         lists a checkpoint's files, which makes the checkpoint complete, and deletes old checkpoints
weights          saves and loads weights and optimizer state, whole or sharded
data_cursor      saves the position in the data, and a process's random number generators
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
