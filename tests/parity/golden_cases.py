"""Loads the golden vectors; they live beside the repository and may be absent."""

import json
from collections import Counter
from pathlib import Path

GOLDEN = Path(__file__).resolve().parents[2].parent / "shared" / "golden"
PRESENT = (GOLDEN / "upstream.json").is_file() and (GOLDEN / "upstream.safetensors").is_file()
WHY_SKIPPED = "the golden vectors (../shared/golden/upstream.json and .safetensors) are not beside this checkout"

NUM_CASES = {
    "opsd_jsd": 72,
    "sdpo_loss": 18,
    "taid_loss": 6,
    "taid_schedule": 3,
    "simpo": 3,
    "prime_rl_default": 2,
    "prime_rl_ref_kl": 2,
}


def load_cases():
    """[{id, kind, params, inputs: name -> tensor, outputs: name -> tensor}]."""
    from safetensors.torch import load_file

    tensors = load_file(GOLDEN / "upstream.safetensors")
    cases = json.loads((GOLDEN / "upstream.json").read_text())["cases"]
    return [
        case | {side: {name: tensors[key] for name, key in case[side].items()} for side in ("inputs", "outputs")}
        for case in cases
    ]


def of_kind(cases, kind):
    return [case for case in cases if case["kind"] == kind]


def name_of(case):
    settings = "-".join(f"{k}={v}" for k, v in case["params"].items())
    return f"{case['id']}-{settings}" if settings else str(case["id"])


def num_cases_per_kind(cases):
    return dict(Counter(case["kind"] for case in cases))
