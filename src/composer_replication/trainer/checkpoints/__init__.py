"""Checkpoints without pickle that are either complete or ignored, and that resume a run bit for bit.

run_checkpoints  what a Trainer does differently when it saves and loads; stopping on a signal
manifest         what a checkpoint contains, what makes it complete, and how old ones are deleted
resume           which checkpoint a run resumes from, whether it fits, and saving by several processes
tree_file        a tree of plain values and tensors as two files
weights          weights and the optimizer's state, whole or sharded
data_cursor      the position in the data, and every random number generator of a process
"""

from composer_replication.trainer.checkpoints.data_cursor import rng_tree, set_rng_tree
from composer_replication.trainer.checkpoints.manifest import check_manifest, newest_complete, write_manifest
from composer_replication.trainer.checkpoints.tree_file import load_tree, save_tree
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
