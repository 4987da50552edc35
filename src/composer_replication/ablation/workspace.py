"""The world of the workspace: an arm is a GRPO training of a model that works there, judged on tasks it never saw.

A unit is a held-out task, played once by the trained model: whether it was solved, its calls, those that failed by
kind, its tokens, and on the tokens that it sampled the entropy and the divergence from the start weights. All arms of a
seed have the same luck in a task. The curve is that of the training's own rollouts: its tasks are new in every step.
"""

from __future__ import annotations

import gc
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from composer_replication.ablation.episodes import Episode, play_all
from composer_replication.ablation.job import Job, Result, Spent, Unit
from composer_replication.ablation.logs import own_run
from composer_replication.ablation.plan import Metric
from composer_replication.config.schema import option, table
from composer_replication.envs.policies import MISTAKES
from composer_replication.envs.student import student_folder
from composer_replication.errors import RunError, explain
from composer_replication.runs import RunDir
from composer_replication.runs.journal import read_journal

if TYPE_CHECKING:
    from torch import Tensor, nn

KINDS = sorted({mistake.kind for mistake in MISTAKES.values() if mistake.kind})
METRICS = {
    "failing_calls": Metric(per="calls", times=100, better="down", label="failing calls of 100"),
    "solved": Metric(times=100, better="up", label="solved, %"),
    "unreadable": Metric(times=100, better="down", label="ended without a call that can be read, %"),
    "calls": Metric(label="calls a task"),
    "sampled": Metric(label="sampled tokens a task"),
    "entropy": Metric(per="sampled", label="entropy, nats a token"),
    "kl": Metric(per="sampled", label="KL to the start, nats a token"),
} | {
    f"failing_calls:{kind}": Metric(per="calls", times=100, better="down", label=f"{kind} of 100 calls")
    for kind in KINDS
}
_CURVE = {
    "world/solved": "success",
    "world/alarms": "alarms",
    "entropy": "entropy",
    "reward": "reward",
    "completions/mean_length": "length",
}


@table("world")
class Options:
    """What this world can be told."""

    is_trained: bool = option(True, "Train; false is the start model as it is.")
    held_out_first: int = option(0, "Seed of the first held-out task; below 10,000 none is trained on.", at_least=0)
    held_out: int = option(100, "Held-out tasks, one after the other.", at_least=1)
    most_tokens: int = option(512, "Tokens after the prompt at which a held-out task is over.", at_least=1)


def run_job(job: Job) -> Result:
    """Train, play the held-out tasks, and sum up by task; what an earlier process left is gone on with."""
    began = time.monotonic()
    start = job.config.train.model or str(student_folder())
    trained, lines, steps = start, list[Mapping[str, Any]](), 0
    if job.options["is_trained"]:
        trained, lines, steps = _train(job, start)
        _let_go_of_the_trainer()
    units, digests = _judged(job, start, trained)
    rollouts = job.config.train.optimiser.per_device * job.config.train.optimiser.accumulation
    result = Result(
        arm=job.arm,
        seed=job.seed,
        world=job.world,
        spent=Spent(
            rollouts=rollouts * steps,
            tokens=round(sum(line["world/tokens"] * rollouts for line in lines)),
            steps=steps,
            seconds=round(time.monotonic() - began, 1),
        ),
        units=units,
        curve=[_point(line, rollouts) for line in lines],
        digests=digests,
        config_sha256=job.config_sha256,
    )
    shutil.rmtree(job.folder / "training" / "checkpoints", ignore_errors=True)
    return result


def _train(job: Job, start: str) -> tuple[str, list[Mapping[str, Any]], int]:
    """The folder of the trained weights, a line of metrics a step, and the steps."""
    from composer_replication.trainer.from_config.training import Progress, run_training

    train = replace(job.config.train, model=start, output=str(job.folder / "training"))
    if train.run is not None:  # its pairs
        train = replace(train, run=str(own_run(RunDir.open(train.run), job.folder / "run").root))
    config = replace(job.config, train=train)
    done = run_training(config, progress=Progress(say=_say))
    if done.saved is None:
        raise RunError(explain(str(job.folder), got=f"a training that {done.stopped_by} ended", expected="all steps"))
    rows: Any = read_journal(done.metrics).rows
    by_step: dict[int, Any] = {line["step"]: line for line in rows if "world/tokens" in line}
    raised = [
        int(alarm.removeprefix("step ").partition(":")[0]) for alarm in done.alarms
    ]  # "step 12: entropy fell ..."
    lines: list[Mapping[str, Any]] = [
        {**by_step[step], "world/alarms": float(sum(at <= step for at in raised))} for step in sorted(by_step)
    ]
    return str(done.saved), lines, done.steps


def _let_go_of_the_trainer() -> None:
    """It is part of cycles: its optimiser would stay on the GPU beside the two models that are compared next."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _point(line: Mapping[str, Any], rollouts: int) -> dict[str, float]:
    """A step's rollouts, before the step; the number is that of rollouts seen before them. Alarms are all so far."""
    step = line["step"] - 1
    failing = 100 * line["world/failing_calls"] / max(line["world/calls"], 1e-9)
    figures = {name: line[key] for key, name in _CURVE.items() if key in line}
    return {"step": step, "rollouts": step * rollouts, "failing_calls": failing, **figures}


def _judged(job: Job, start: str, trained: str) -> tuple[list[Unit], dict[str, str]]:
    """Every held-out task, and the digests of both models."""
    import torch

    from composer_replication.batch.model_folder import load_model, load_tokenizer
    from composer_replication.objective.fingerprint import weights_digest

    options: Mapping[str, Any] = job.options
    tokenizer: Any = load_tokenizer(trained)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    before, after = (
        load_model(folder, what="model", dtype=torch.float32).eval().to(device) for folder in (start, trained)
    )
    first = options["held_out_first"]
    episodes = [
        Episode(tokenizer, task, f"held out:{job.seed}:{task}") for task in range(first, first + options["held_out"])
    ]
    play_all(after, tokenizer, episodes, most=options["most_tokens"])
    moved = distances(before, after, episodes)
    units = [_unit(episode, *sums) for episode, sums in zip(episodes, moved, strict=True)]
    return units, {"start": weights_digest(before), "trained": weights_digest(after)}


def _unit(episode: Episode, entropy: float, kl: float) -> Unit:
    reward = episode.workspace.reward()
    figures = {
        "solved": float(reward.solved),
        "unreadable": float(episode.is_unreadable),
        "calls": float(episode.workspace.calls),
        "failing_calls": float(episode.failures.total()),
        "tokens": float(len(episode.prompt_ids) + len(episode.ids)),
        "sampled": float(sum(episode.sampled)),
        "entropy": entropy,
        "kl": kl,
    }
    kinds = {f"failing_calls:{kind}": float(episode.failures[kind]) for kind in KINDS}
    return Unit(f"task-{episode.seed}", figures | kinds)


def distances(before: nn.Module, after: nn.Module, episodes: Sequence[Episode]) -> list[tuple[float, float]]:
    """Of each episode the sums over its sampled tokens of the entropy, and of KL(after || before), in nats.

    One episode at a time, and only the rows that predict a sampled token: with a large vocabulary a batch's do not fit.
    """
    import torch

    device = next(after.parameters()).device
    sums: list[tuple[float, float]] = []
    for episode in episodes:
        ids = torch.tensor([episode.prompt_ids + episode.ids], device=device)
        positions = (torch.tensor(episode.sampled).nonzero().squeeze(1) + len(episode.prompt_ids) - 1).to(device)
        with torch.inference_mode():
            now, then = (torch.log_softmax(_logits(model, ids, positions), -1) for model in (after, before))
            sums.append((float(-(now.exp() * now).sum()), float((now.exp() * (now - then)).sum())))
    return sums


def _logits(model: Any, ids: Tensor, positions: Tensor) -> Tensor:
    """Of one row, at these places (n, V)."""
    return model(input_ids=ids, use_cache=False, logits_to_keep=positions).logits[0].float()
