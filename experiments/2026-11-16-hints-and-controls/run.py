"""Does what channel 2 unlearns belong to the hint? See README.md beside this file.

PYTHONPATH=tests .venv/bin/python experiments/2026-11-16-hints-and-controls/run.py
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from obedient_model import World, build_world, one_thread
from obedient_model.evidence import outcome, start_logprobs
from obedient_model.evidence_table import table, world_table
from obedient_model.teaching import Training

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the tables of the stored results, run nothing")
    if not parser.parse_args().table:
        with one_thread():
            measure(json.loads((HERE / "config.json").read_text(encoding="utf-8")))
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    for lines in (table(results), world_table(results)):
        print("\n".join(lines), end="\n\n")


def measure(config: dict[str, Any]) -> None:
    began = time.process_time()
    worlds, runs = [], []
    for pretraining_seed in config["worlds"]:
        world = build_world(pretraining_seed)
        start = start_logprobs(world, config["training_seeds"][0])
        worlds.append({"world": pretraining_seed, "final_loss": world.pretraining.final_loss, "start": start})
        print(f"world {pretraining_seed}: pretrained in {world.pretraining.seconds:.0f} s", flush=True)
        runs += [run for name in config["arms"] for run in runs_of_arm(config, name, world, pretraining_seed)]
    libraries = {"torch": torch.__version__, "transformers": transformers.__version__}
    cpu_seconds = round(time.process_time() - began)
    results = {"config": config, "libraries": libraries, "cpu_seconds": cpu_seconds, "worlds": worlds, "runs": runs}
    RESULTS.write_text(as_text(_rounded(results)), encoding="utf-8")


def as_text(results: dict[str, Any]) -> str:
    """JSON with a line for each run and each world, so that a difference between two runs of this can be read."""
    fields = []
    for name, value in results.items():
        rows = ",\n".join(json.dumps(each) for each in value) if isinstance(value, list) else None
        fields.append(f'"{name}": ' + (json.dumps(value) if rows is None else f"[\n{rows}\n]"))
    return "{\n" + ",\n".join(fields) + "\n}\n"


def runs_of_arm(config: dict[str, Any], name: str, world: World, pretraining_seed: int) -> list[dict[str, Any]]:
    arm, made = config["arms"][name], []
    num_good = arm.get("good_tasks_before", config["sessions"]["good_tasks_before"])
    how = Training(**arm["training"])
    for seed in config["training_seeds"]:
        for teacher in config["teachers"]:
            for hint in arm["hints"]:
                found = outcome(world, seed, hint=hint, teacher=teacher, how=how, num_good_tasks=num_good)
                labels = {"arm": name, "teacher": teacher, "hint": hint, "world": pretraining_seed, "seed": seed}
                made.append({**labels, "training": asdict(found.training), "held_out": asdict(found.held_out)})
    return made


def _rounded(value: Any) -> Any:
    """Four digits after the point are more than the spread lets anyone read."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: value[key] if key == "config" else _rounded(value[key]) for key in value}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
