"""What the fork server loads once, so that a child starts in a fraction of a second: imports, and nothing run."""

from __future__ import annotations

import importlib
import importlib.util
import os

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

MODULES = (
    "transformers.trainer",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.qwen2.modeling_qwen2",
    "peft",
    "trl.trainer.grpo_trainer",
)
for name in MODULES:
    if importlib.util.find_spec(name.partition(".")[0]) is not None:
        importlib.import_module(name)

torch.set_num_threads(1)  # no thread may run in a process that is forked
