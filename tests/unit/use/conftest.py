"""A run of example sessions, and an adapter on the embedded student that changes what it says; made once."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), *(str(HERE.parent / name) for name in ("cli", "ingestion"))]
EXAMPLES = HERE.parents[2] / "examples" / "sessions"


def make_adapter(folder, base, *, scale=0.2, **changes):
    """A LoRA with weights drawn at random; `base` is how its config names the start weights."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from composer_replication.envs.student import student_folder

    model = AutoModelForCausalLM.from_pretrained(student_folder(), dtype=torch.float32)
    torch.manual_seed(3)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], **changes))
    with torch.no_grad():
        for name, each in adapted.named_parameters():
            if "lora_B" in name:
                each.normal_(std=scale * 0.05)
    adapted.save_pretrained(folder)
    AutoTokenizer.from_pretrained(student_folder()).save_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(base)}))
    return folder


@pytest.fixture(scope="session")
def adapter(tmp_path_factory):
    from composer_replication.envs.student import student_folder

    return make_adapter(tmp_path_factory.mktemp("weights") / "adapter", student_folder())


@pytest.fixture(scope="session")
def example_run(tmp_path_factory):
    """A run directory with conversations, sites and pairs."""
    from composer_replication.cli.main import main

    run = tmp_path_factory.mktemp("runs") / "run"
    assert main(["ingest", str(EXAMPLES), "-o", str(run), "--workers", "1"]) == 0
    assert main(["sites", str(run)]) == 0
    assert main(["pairs", str(run)]) == 0
    return run
