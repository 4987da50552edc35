"""Quickstart: a few optimizer steps on all three channels of one chat, every channel printed at every step.

    python examples/qwen_05b_quickstart/run.py --tiny            # a small model built here; any machine, a few seconds
    python examples/qwen_05b_quickstart/run.py                   # Qwen/Qwen2.5-0.5B-Instruct from the hub
    python examples/qwen_05b_quickstart/run.py --model PATH      # a local folder with a causal LM and its tokenizer

Exits with an error when a channel with a positive weight did not run, or when a gradient is not finite.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from composer_replication import LossComponents, build_batch, compose_loss
from composer_replication.errors import ComposerError, InactiveChannelError, NonFiniteError, explain

DEFAULT_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"


@dataclass(frozen=True)
class Step:
    number: int
    components: LossComponents
    grad_norm: float
    seconds: float


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a few steps on all three channels of one chat.")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", default=DEFAULT_MODEL, help="hub name or local folder (default: %(default)s)")
    which.add_argument("--tiny", action="store_true", help="build a small model here instead of loading one")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=None, help="default: 1e-5, with --tiny 2e-3")
    parser.add_argument("--alpha-sdpo", type=float, default=0.1, help="weight of channel 2")
    parser.add_argument("--beta-replay", type=float, default=0.05, help="weight of channel 3")
    parser.add_argument("--variant", choices=["factorial", "binary_search"], default="factorial")
    parser.add_argument("--picture", default=None, metavar="SVG", help="also save what is printed as a picture")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    return args


def load(args: argparse.Namespace) -> tuple[Any, Any]:
    if args.tiny:
        from tiny import tiny_model, tiny_tokenizer

        tokenizer = tiny_tokenizer()
        return tiny_model(tokenizer).to(args.device), tokenizer
    dtype = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    return AutoModelForCausalLM.from_pretrained(args.model, trust_remote_code=False, dtype=dtype).to(
        args.device
    ), tokenizer


def check_channels(components: LossComponents, wanted: set[str]) -> None:
    if dead := sorted(wanted - set(components.active)):
        raise InactiveChannelError(
            explain("channels that ran", got=components.active, expected=f"also {dead}", fix="Check the batch's keys.")
        )


def gradient_norm(model: torch.nn.Module) -> float:
    """Norm over all parameters; NaN or infinity anywhere is an error, with the parameter's name."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
            raise NonFiniteError(explain(f"gradient of {name}", got="NaN or infinity", expected="finite numbers"))
    return float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))


def train(model: Any, batch: dict[str, torch.Tensor], args: argparse.Namespace) -> list[Step]:
    wanted = {"lm_ce"} | ({"sdpo_jsd"} if args.alpha_sdpo > 0 else set())
    wanted |= {"trace_replay_dpo"} if args.beta_replay > 0 else set()
    rate = args.learning_rate or (2e-3 if args.tiny else 1e-5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    steps = []
    for number in range(1, args.steps + 1):
        started = time.perf_counter()
        components = compose_loss(model, batch, alpha_sdpo=args.alpha_sdpo, beta_replay=args.beta_replay)
        check_channels(components, wanted)
        optimizer.zero_grad(set_to_none=True)
        components.total.backward()
        norm = gradient_norm(model)
        optimizer.step()
        steps.append(Step(number, components, norm, time.perf_counter() - started))
    return steps


def print_table(steps: list[Step], counts: dict[str, int], console: Console) -> None:
    table = Table(title="total = lm_ce + alpha * sdpo_jsd + beta * trace_replay_dpo")
    names = ("lm_ce", "sdpo_jsd", "trace_replay_dpo", "total")
    for column in ("step", *names, "grad norm", "s"):
        table.add_column(column, justify="right")
    for step in steps:
        values = step.components.detached()
        cells = [f"{values[name]:.5g}" for name in names]
        table.add_row(str(step.number), *cells, f"{step.grad_norm:.4f}", f"{step.seconds:.2f}")
    console.print(table)
    units = {"lm_ce": "response tokens", "sdpo_jsd": "target tokens", "trace_replay_dpo": "pairs"}
    for name in steps[-1].components.active:
        console.print(f"{name} ran at every step, on {counts[name]} {units[name]}")


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    console = Console(record=args.picture is not None, width=100)
    try:
        model, tokenizer = load(args)
        model.train()
        batch = build_batch(tokenizer, device=args.device, variant=args.variant, model=model)
        steps = train(model, batch, args)
    except ComposerError as error:
        print(f"FAILED: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"FAILED: cannot load {args.model!r}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    print_table(steps, dict(steps[-1].components.counts), console)
    first, last = steps[0].components.detached()["total"], steps[-1].components.detached()["total"]
    console.print(f"total {first:.4f} -> {last:.4f} in {len(steps)} steps; every gradient was finite")
    if args.picture:
        console.save_svg(args.picture, title="make demo")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
