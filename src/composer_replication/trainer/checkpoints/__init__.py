"""Checkpoints that are complete or passed over, hold no pickle, and let a run go on bit for bit.

run_checkpoints  one run's: what a Trainer does otherwise when it saves and loads
contents         what a checkpoint may hold
manifest         what makes one complete: its files and their hashes; how old ones make room
resume           which checkpoint a run goes on from, and whether it is this model's and this run's
tree_file        a tree of plain values and tensors as two files, written tensor by tensor
weights          weights and the optimiser's state, whole or sharded
data_cursor      where a run is in its data, and every random number generator of a process
save_attempt     one try at saving, agreed on by all processes
stop_signals     a signal ends training after the step at hand
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
