"""Imports that stand in users' code go on working, and a name is one object wherever it is reached from.

The list is the design's; where the design pages lie beside the checkout the two are compared, so that a line added
there cannot be missed here.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

PACKAGE = "composer_replication"
KNOWN = {
    "": "ClaudeCodeIngester ComposerReplicationTrainer DEFAULT_TEACHERS IngestionStats SYSTEM_PROMPT _DILOCO_AVAILABLE"
    " build_batch compose_loss extract_dpo_pairs make_diloco_outer_loop replay_trace",
    "diloco": "DiLoCo _TORCHFT_AVAILABLE make_diloco_outer_loop",
    "diloco.serverless": "LocalProcessExecutor MockManager ObjectStoreAllReduce ReplicaHandle ServerlessExecutor",
    "diloco.serverless.hf_jobs": "HFJobsExecutor",
    "diloco.serverless.modal": "ModalExecutor",
    "diloco.serverless.replica_entrypoint": "main",
    "distillation": "TAIDScheduler entropy_aware_opd_loss simpo_loss taid_loss",
    "distillation.entropy_aware_opd": "teacher_entropy",
    "distillation.simpo": "avg_sequence_logprob",
    "hint_generator": "dispatch hint_tool_not_found register",
    "opsd": "generalized_jsd_loss",
    "recipes.monarch.actors": "TrainerActor",
    "recipes.prime_rl.composer_loss": "loss_fn",
    "replaysim": "DJNormalizer NormalizedDPOPair replay_and_normalize_trace",
    "replaysim.normalize": "replay_and_normalize_trace_sync",
    "teacher_replay": "DEFAULT_TEACHERS save_pairs",
    "trainer.data_collator": "CollatorConfig ComposerDataCollator",
}
LINES = [(f"{PACKAGE}.{module}".rstrip("."), name) for module, names in KNOWN.items() for name in names.split()]
ATTRIBUTES = [
    "batch",
    "diloco",
    "distillation",
    "hint_generator",
    "ingestion",
    "loss",
    "opsd",
    "replaysim",
    "teacher_replay",
]
SAME = {
    "DPOPair": ["", "replaysim", "teacher_replay", "types"],
    "TeacherCallResult": ["", "replaysim", "teacher_replay", "types"],
    "DEFAULT_TEACHERS": ["", "teacher_replay"],
    "extract_dpo_pairs": ["", "replaysim", "teacher_replay", "pairs.extract"],
    "replay_trace": ["", "replaysim", "teacher_replay"],
    "replay_and_normalize_trace": ["replaysim", "replaysim.normalize"],
    "DJNormalizer": ["replaysim", "replaysim.normalize"],
    "compose_loss": ["", "loss", "objective.compose"],
    "LossComponents": ["", "loss", "objective.components"],
    "generalized_jsd_loss": ["", "opsd", "loss.jsd"],
    "ClaudeCodeIngester": ["", "ingestion", "ingestion.claude_code"],
    "build_batch": ["", "batch"],
    "make_diloco_outer_loop": ["", "diloco", "diloco.outer_loop"],
}


@pytest.mark.parametrize(("module", "name"), LINES, ids=".".join)
def test_a_known_name_is_where_users_import_it_from(module, name):
    assert hasattr(import_module(module), name)


def test_the_list_is_the_designs(shared_dir):
    page = shared_dir / "design" / "known-imports.txt"
    if not page.is_file():
        pytest.skip("no known-imports.txt in shared/design")
    lines = [tuple(line.split()) for line in page.read_text().splitlines() if line.strip()]
    assert set(lines) == set(LINES)


@pytest.mark.parametrize("name", SAME)
def test_an_object_is_the_same_at_every_path(name):
    found = [getattr(import_module(f"{PACKAGE}.{module}".rstrip(".")), name) for module in SAME[name]]
    assert all(each is found[0] for each in found)


def test_packages_are_attributes_without_an_import_of_their_own():
    # A fresh process: here other tests have imported most of them.
    asked = f"import {PACKAGE} as c; [getattr(c, name) for name in {ATTRIBUTES}]"
    result = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
