"""Four replicas over a store against one long run, and what payloads of fewer bits cost: tiny Qwen2 models.

    python run.py text.json --task text --arms fp32 bf16 --seeds 0 1
    python run.py text.json --table

Jobs that the file has are not made again. The task `text` is bytes of Python's own library; `chain` is a Markov chain,
of which the lowest loss is known.
"""

from __future__ import annotations

import argparse
import bisect
import json
import statistics
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen2Config

from composer_replication.diloco.rounds.manager import ObjectStoreManager
from composer_replication.diloco.store import MemoryStore
from composer_replication.diloco.training import OuterLoop, train_replica

MODULES = (
    "argparse",
    "ast",
    "configparser",
    "difflib",
    "doctest",
    "inspect",
    "logging/__init__",
    "optparse",
    "pathlib",
)
REPLICAS, OUTER_STEPS, BATCH, RATE = 4, 200, 8, 3e-3
PAYLOADS = ("fp32", "bf16", "int8", "int4", "int8, mean bf16", "int4, mean bf16")
SINGLE = {"one run": (REPLICAS * BATCH, 1), "one run, small batches": (BATCH, REPLICAS)}
# Symbols, width, layers, length of a row.
SIZES = {"text": (256, 32, 2, 32), "chain": (16, 16, 1, 16)}


def text() -> tuple[Tensor, Tensor]:
    """Bytes of Python's own library: those to learn from, and the last tenth, which is held out."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found = b"".join((library / f"{name}.py").read_bytes() for name in MODULES)
    data = torch.frombuffer(bytearray(found), dtype=torch.uint8).long()
    return data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]


def chain() -> tuple[Tensor, Tensor]:
    """100,000 symbols, each drawn by the one before it."""
    generator = torch.Generator().manual_seed(0)
    sums = (torch.randn(16, 16, generator=generator) * 1.5).softmax(-1).cumsum(-1).tolist()
    symbols = [0]
    for value in torch.rand(100_000, generator=generator).tolist():
        symbols.append(min(15, bisect.bisect(sums[symbols[-1]], value)))
    data = torch.tensor(symbols)
    return data[:90_000], data[90_000:]


TASKS = {"text": text, "chain": chain}


def tiny(task: str, seed: int) -> Any:
    torch.manual_seed(seed)
    vocab, width, layers, length = SIZES[task]
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=length,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config)


def loss_of(model: Any, rows: Tensor) -> Tensor:
    logits = model(input_ids=rows[:, :-1]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: Any, data: Tensor) -> float:
    length = model.config.max_position_embeddings + 1
    return float(loss_of(model, data[: len(data) // length * length].view(-1, length)[:500]))


def steps(model: Any, optimizer: Any, data: Tensor, number: int, batch: int, seed: int) -> None:
    """AdamW, its rate falling to 0 in a line."""
    generator, length = torch.Generator().manual_seed(seed), model.config.max_position_embeddings + 1
    for step in range(number):
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1 - step / number)
        starts = torch.randint(len(data) - length, (batch, 1), generator=generator)
        optimizer.zero_grad()
        loss_of(model, data[starts + torch.arange(length)]).backward()
        optimizer.step()


def one_run(task: str, arm: str, seed: int, every: int) -> dict[str, float]:
    train, held_out = TASKS[task]()
    batch, times = SINGLE[arm]
    model = tiny(task, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    steps(model, optimizer, train, OUTER_STEPS * every * times, batch, seed * 100)
    return {"loss": held_out_loss(model, held_out)}


def replicas(task: str, arm: str, seed: int, every: int) -> dict[str, float]:
    train, held_out = TASKS[task]()
    store, parts = MemoryStore(), train.chunk(REPLICAS)
    outer = OuterLoop(sync_every=every, outer_lr=0.7, outer_momentum=0.5)
    models = [tiny(task, seed) for _ in range(REPLICAS)]  # here: threads share the random numbers they are drawn from

    def replica(rank: int) -> tuple[float, int]:
        model = models[rank]
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        payload, _, mean = arm.partition(", mean ")
        options: dict[str, Any] = {
            "payload": payload,
            "mean_payload": mean or payload,
            "poll_s": 0.01,
            "grace_s": 300.0,
            "timeout_s": 600.0,
        }
        with ObjectStoreManager(store, rank=rank, world_size=REPLICAS, **options) as manager:
            with train_replica(manager, model, optimizer, outer):
                steps(model, optimizer, parts[rank], OUTER_STEPS * every, BATCH, seed * 100 + rank)
            assert manager.current_step() == OUTER_STEPS
            return held_out_loss(model, held_out), manager.traffic.sent

    with ThreadPoolExecutor(REPLICAS) as pool:
        ends = list(pool.map(replica, range(REPLICAS)))
    assert len({loss for loss, _ in ends}) == 1  # all end with the same weights
    return {"loss": ends[0][0], "sent_mib": sum(sent for _, sent in ends) / REPLICAS / 2**20}


def table(results: dict[str, dict[str, float]]) -> str:
    lines = [
        "| arm | held-out loss, nats a symbol | seeds | less fp32, paired | MiB sent by a replica |",
        "|---|---|---|---|---|",
    ]
    losses: dict[str, dict[str, float]] = {arm: {} for arm in (*SINGLE, *PAYLOADS)}
    for key, each in results.items():
        arm, _, seed = key.rpartition(" ")
        losses[arm][seed] = each["loss"]
    for arm, by_seed in losses.items():
        both = sorted(by_seed.keys() & losses["fp32"].keys())
        apart = interval([by_seed[seed] - losses["fp32"][seed] for seed in both]) if arm != "fp32" and both else ""
        sent = [
            each["sent_mib"] for key, each in results.items() if key.rpartition(" ")[0] == arm and "sent_mib" in each
        ]
        mib = f"{statistics.mean(sent):.1f}" if sent else ""
        if by_seed:
            lines.append(f"| {arm} | {interval(list(by_seed.values()))} | {len(by_seed)} | {apart} | {mib} |")
    return "\n".join(lines)


def interval(values: list[float]) -> str:
    """The mean, with the interval of 95% that Student's t gives."""
    t = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}.get(len(values))
    mean = statistics.mean(values)
    return f"{mean:.4f}" if t is None else f"{mean:.4f} ± {t * statistics.stdev(values) / len(values) ** 0.5:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--task", choices=[*TASKS], default="text")
    parser.add_argument("--arms", nargs="*", default=[*SINGLE, *PAYLOADS[:4]])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--every", type=int, default=4, help="inner steps between two exchanges")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    for seed, arm in [] if options.table else [(seed, arm) for seed in options.seeds for arm in options.arms]:
        if f"{arm} {seed}" not in results:
            began = time.process_time()
            made = (one_run if arm in SINGLE else replicas)(options.task, arm, seed, options.every)
            results[f"{arm} {seed}"] = made | {"cpu_s": round(time.process_time() - began, 1)}
            options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
