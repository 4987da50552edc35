"""What each of two processes does in test_composer_processes.py: its share of rollouts, and what it ends with."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CASES: dict[str, dict[str, Any]] = {
    # Rollouts 2 and 3, the second process's, have no error.
    "ddp": {"teacher": "ema", "wrapper": "ddp"},
    "fsdp2": {"teacher": "live", "wrapper": "fsdp2"},
    "fsdp2, averaging teacher": {"teacher": "ema", "wrapper": "fsdp2"},
}


def run(case: dict[str, Any], policy: Path, folder: Path, *, rank: int, num_processes: int) -> tuple[Any, Any]:
    """Two steps of four rollouts, and two logged traces a step, whatever the number of processes."""
    import torch
    from test_composer_channels import SCRIPTS, TRACE, Desk, by_length
    from transformers import AutoModelForCausalLM

    from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer
    from composer_replication.trainer.data_collator import CollatorConfig, ComposerDataCollator
    from composer_replication.trainer.teacher_keeper import TeacherKeeper
    from rollouts.tiny_policy import ScriptedGeneration, load_tokenizer
    from rollouts.trainers import questions, quick_config

    share = 4 // num_processes
    config = quick_config(
        folder,
        per_device_train_batch_size=share,
        num_generations=4,
        max_completion_length=400,
        max_steps=2,
        learning_rate=0.5,
        optim="sgd",
        ddp_backend="gloo" if num_processes > 1 else None,
    )
    model: Any = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    tokenizer = load_tokenizer(policy)
    keeper = TeacherKeeper(case["teacher"], ema_rate=0.2)
    collator = ComposerDataCollator(tokenizer, CollatorConfig(hint_generator=lambda kind, meta: "Use the tools."))
    from composer_replication.trainer.sessions.reference import precompute_ref_logprobs

    traces = [TRACE, {**TRACE, "trace_id": "u", "turns": TRACE["turns"][:1], "dpo_pairs": []}]
    collator.reference = precompute_ref_logprobs(model, collator.renderer, collator.pairs(traces))
    if case["wrapper"] == "fsdp2" and num_processes > 1:
        keeper.attach(model)
        shard(model)
    trainer: Any = ComposerReplicationTrainer(
        model=model,
        reward_funcs=by_length,
        args=config,
        train_dataset=questions(["Look"] * 4),
        processing_class=tokenizer,
        environment_factory=Desk,
        alpha_sdpo=2.0,
        beta_replay=1.0,
        teacher=keeper,
        heed_gate=True,
        trace_dataset=traces,
        data_collator=collator,
        logged_batch_size=2 // num_processes,
    )
    failing, fine = SCRIPTS["Look"][:2], [SCRIPTS["Look"][2], [*SCRIPTS["Look"][2][:1], "It is done now."]]
    mine = [*failing, *fine][rank * share : (rank + 1) * share]
    ScriptedGeneration(trainer, {"Look": mine})
    with hints_seen_to_be_heeded():
        trainer.train()
    assert trainer.channels.hint_gate.is_open
    assert [row["ran/sdpo_kl"] for row in trainer.state.log_history if "loss/total" in row] == [0.0, 1.0]
    return {name: whole(value) for name, value in trainer.model.named_parameters()}, figures(trainer)


def shard(model: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)


@contextmanager
def hints_seen_to_be_heeded() -> Iterator[None]:
    """After the first step, by whoever has errors: all have to hear of it."""
    from test_heed_gate import compared

    from composer_replication.trainer.rollouts import hint_distillation

    measured = hint_distillation._comparisons
    hint_distillation._comparisons = lambda *given: [*measured(*given), *compared(0.3, 0.0, 24)]
    try:
        yield
    finally:
        hint_distillation._comparisons = measured


def figures(trainer: Any) -> list[dict[str, Any]]:
    rows = [row for row in trainer.state.log_history if "loss/total" in row]
    names = ("loss/grpo", "loss/sdpo_kl", "loss/trace_replay_dpo", "loss/total", "sites/per_100_turns")
    cells = [
        value for row in trainer.channels.hint_gate.state()["heeding"] for value in row if not isinstance(value, str)
    ]
    return [{name: row.get(name) for name in names} for row in rows] + [
        {f"heeding {n}": v for n, v in enumerate(cells)}
    ]


def whole(value: Any) -> Any:
    value = value.detach()
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone().contiguous()


def main(rank: int, port: int, policy: str, folder: str) -> None:
    sys.path[:0] = [str(HERE.parents[1]), str(HERE)]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch.distributed as dist
    from safetensors.torch import save_file

    dist.init_process_group("gloo")
    tensors, logs = {}, {}
    for name, case in CASES.items():
        weights, logs[name] = run(case, Path(policy), Path(folder, f"out-{rank}"), rank=rank, num_processes=2)
        tensors |= {f"{name}|{key}": value for key, value in weights.items()}
    save_file(tensors, Path(folder, f"{rank}.safetensors"))
    Path(folder, f"{rank}.json").write_text(json.dumps(logs))
    dist.destroy_process_group()
