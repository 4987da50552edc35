"""Two GRPO steps with channel 2 whose rollouts vLLM generates on the same GPU, and how far vLLM and the trainer agree.

    python benchmarks/vllm_colocate.py MODEL [--json FILE]

MODEL is a folder with a model that makes tool calls in the workspace, for example from
`experiments/2026-11-16-workspace-qwen/warm_up.py`. The record holds, by step: the loss of channel 2 and its number of
tokens, the difference between the log-probs of the sampled tokens as vLLM and as the trainer computed them, and the
importance ratio. Afterwards the weights are changed by hand and synchronized: greedy samples have to change, and change
back with the weights.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer.grpo_config import GRPOConfig

from composer_replication import ComposerReplicationTrainer
from composer_replication.envs.trl_environment import WorkspaceEnvironment, task_rows

PREFIXES = (
    "sampling/",
    "loss/",
    "items/",
    "ran/",
    "sites/",
    "step_time",
    "tools/",
    "completions/mean_length",
    "reward",
)


def main() -> int:
    """Train two steps, check the synchronization and print the record. Returns 1 if channel 2 or a check failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--memory", type=float, default=0.3, help="vLLM's share of the GPU")
    parser.add_argument("--engine", choices=("vllm", "own"), default="vllm")
    args = parser.parse_args()
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(args, Path(folder))
        started_training_s = time.monotonic()
        trainer.train()
        record: dict[str, Any] = {
            "engine": args.engine,
            "start_s": started_training_s - started_s,
            "train_s": time.monotonic() - started_training_s,
            "steps": [
                {name: value for name, value in row.items() if name.startswith(PREFIXES)}
                for row in trainer.state.log_history
                if "loss/total" in row
            ],
        }
        if args.engine == "vllm":
            record["synchronization"] = synchronization(trainer)
    print(json.dumps(record, indent=1))
    if args.json:
        args.json.write_text(json.dumps(record), encoding="utf-8")
    has_trained = bool(record["steps"]) and all(step.get("ran/sdpo_kl") for step in record["steps"])
    sync = record.get("synchronization", {"follows": True, "returns": True})
    return int(not (has_trained and sync["follows"] and sync["returns"]))


def build_trainer(args: argparse.Namespace, folder: Path) -> Any:
    """Return the trainer, with a trust-region teacher and the settings of the preset `composer` that matter here."""
    config = GRPOConfig(
        output_dir=str(folder),
        max_steps=2,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        num_generations=8,
        max_completion_length=1024,
        learning_rate=1e-5,
        bf16=True,
        use_vllm=args.engine == "vllm",
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=args.memory,
        vllm_max_model_length=4096,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        seed=1,
    )
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    return ComposerReplicationTrainer(
        model=model,
        args=config,
        reward_funcs=[],
        train_dataset=Dataset.from_list(task_rows(range(20_000, 20_032))),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        environment_factory=WorkspaceEnvironment,
        alpha_sdpo=0.1,
        teacher="trust_region",
    )


def synchronization(trainer: Any) -> dict[str, Any]:
    """Return whether greedy samples of vLLM follow a change of the trainer's weights, there and back."""
    generation = trainer.vllm_generation
    rows = [
        trainer.processing_class.apply_chat_template(
            [{"role": "user", "content": "Name three colors."}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
    ]

    def sample() -> list[int]:
        from vllm import SamplingParams

        generation.sync_weights()
        params = SamplingParams(temperature=0.0, max_tokens=32)
        outputs = generation.llm.generate([{"prompt_token_ids": row} for row in rows], params, use_tqdm=False)
        return [token for output in outputs for token in output.outputs[0].token_ids]

    start = sample()
    model = trainer.accelerator.unwrap_model(trainer.model)
    layer = next(parameter for name, parameter in model.named_parameters() if name.endswith("mlp.down_proj.weight"))
    original = layer.detach().clone()
    with torch.no_grad():
        layer.neg_()
        changed = sample()
        layer.copy_(original)
    restored = sample()
    return {"follows": changed != start, "returns": restored == start, "start": start[:8], "changed": changed[:8]}


if __name__ == "__main__":
    sys.exit(main())
