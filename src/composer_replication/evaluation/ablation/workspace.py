"""The world of the workspace: GRPO trainings of a model that works there, evaluated on tasks that it never saw.

A unit is a held-out task that the trained model plays once: whether it was solved, its calls, the failed ones by kind,
its tokens, and, on the tokens that it sampled, the entropy and the KL divergence from the initial model. All arms of a
seed play a task with the same random numbers. The curve is that of the training's own rollouts, whose tasks are new in
every step.
"""

from __future__ import annotations

import gc
import json
import logging
import random
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from composer_replication.config.schema import option, table
from composer_replication.envs.policies import MISTAKES, RememberingRunner
from composer_replication.envs.student import student_folder
from composer_replication.envs.workspace import TOOLS, Difficulty, TestRunner, Workspace, generate_task
from composer_replication.errors import RunError, UnsupportedModelError, explain
from composer_replication.evaluation.ablation.job import Job, Result, Spent, Unit
from composer_replication.evaluation.ablation.logs import linked_run
from composer_replication.evaluation.ablation.plan import Metric
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
    """Options of this world in arms.toml."""

    is_trained: bool = option(True, "Train. false: evaluate the initial model unchanged.")
    held_out_first: int = option(
        0, "Seed of the first held-out task. Seeds below 10,000 are never trained on.", at_least=0
    )
    held_out: int = option(100, "Number of held-out tasks.", at_least=1)
    most_tokens: int = option(512, "Maximum tokens after the prompt of a held-out task.", at_least=1)


def run_job(job: Job) -> Result:
    """Train, play the held-out tasks, and return the sums of each task; resumes what an earlier process left."""
    began = time.monotonic()
    start = job.config.train.model or str(student_folder())
    trained, lines, steps = start, list[Mapping[str, Any]](), 0
    if job.options["is_trained"]:
        trained, lines, steps = _train(job, start)
        _free_trainer()
    units, digests = _play_held_out_tasks(job, start, trained)
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
    # The result is all that is read later; checkpoints are the largest files of a job.
    shutil.rmtree(job.folder / "training" / "checkpoints", ignore_errors=True)
    return result


def _train(job: Job, start: str) -> tuple[str, list[Mapping[str, Any]], int]:
    """Train, and return the folder of the trained weights, one line of metrics per step, and the number of steps."""
    from composer_replication.trainer.from_config.training import TrainingCallbacks, run_training

    train = replace(job.config.train, model=start, output=str(job.folder / "training"))
    if train.run is not None:  # for its pairs
        train = replace(train, run=str(linked_run(RunDir.open(train.run), job.folder / "run").root))
    config = replace(job.config, train=train)
    done = run_training(config, progress=TrainingCallbacks(say=_say))
    if done.saved is None:
        raise RunError(
            explain(str(job.folder), got=f"a training stopped by {done.stopped_by}", expected="a finished training")
        )
    rows: Any = read_journal(done.metrics).rows
    by_step: dict[int, Any] = {line["step"]: line for line in rows if "world/tokens" in line}
    # Alarms are counted up to each step.
    # "step 12: entropy fell ..." -> 12.
    raised = [int(alarm.removeprefix("step ").partition(":")[0]) for alarm in done.alarms]
    lines: list[Mapping[str, Any]] = [
        {**by_step[step], "world/alarms": float(sum(at <= step for at in raised))} for step in sorted(by_step)
    ]
    return str(done.saved), lines, done.steps


def _free_trainer() -> None:
    """Free the trainer. It is part of reference cycles: its optimizer would stay on the GPU beside the two models."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _point(line: Mapping[str, Any], rollouts: int) -> dict[str, float]:
    """Return a point of the curve: the rollouts of a step, sampled before it.

    `rollouts` counts those before the step; `alarms` all alarms until then.
    """
    step = line["step"] - 1
    # A step may have no call at all, and then none that failed.
    failing = 100 * line["world/failing_calls"] / max(line["world/calls"], 1e-9)
    figures = {name: line[key] for key, name in _CURVE.items() if key in line}
    return {"step": step, "rollouts": step * rollouts, "failing_calls": failing, **figures}


def _play_held_out_tasks(job: Job, start: str, trained: str) -> tuple[list[Unit], dict[str, str]]:
    """Play every held-out task, and return the units with the digests of both models."""
    import torch

    from composer_replication.batch.model_folder import load_model, load_tokenizer
    from composer_replication.trainer.objective.fingerprint import weights_digest

    options: Mapping[str, Any] = job.options
    tokenizer: Any = load_tokenizer(trained)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    before, after = (
        load_model(folder, what="model", dtype=torch.float32).eval().to(device) for folder in (start, trained)
    )
    first = options["held_out_first"]
    episodes = [
        TaskEpisode(tokenizer, task, f"held out:{job.seed}:{task}")
        for task in range(first, first + options["held_out"])
    ]
    play_all(after, tokenizer, episodes, most=options["most_tokens"])
    moved = distances(before, after, episodes)
    units = [_unit(episode, *sums) for episode, sums in zip(episodes, moved, strict=True)]
    return units, {"start": weights_digest(before), "trained": weights_digest(after)}


def _unit(episode: TaskEpisode, entropy: float, kl: float) -> Unit:
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


def distances(before: nn.Module, after: nn.Module, episodes: Sequence[TaskEpisode]) -> list[tuple[float, float]]:
    """Return for each episode the sums, over its sampled tokens, of the entropy and of KL(after || before), in nats.

    Episodes are scored one at a time, and only in rows that predict a sampled token: with a large vocabulary the logits
    of a batch do not fit into memory.
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
    """Return the logits of one row at these positions, shape (n, V)."""
    return model(input_ids=ids, use_cache=False, logits_to_keep=positions).logits[0].float()


# ---- episodes

logger = logging.getLogger(__name__)
SCHEMAS = [tool["function"] for tool in TOOLS]
# Ends an episode that only repeats itself.
MOST_CALLS = 24
# "Let me look. <tool_call>{...}</tool_call>" -> "{...}"; not "<tool_call>{...}" without its end
_CALL = re.compile(r"<tool_call>(.*)</tool_call>", re.DOTALL)


@cache
def _world_runner() -> TestRunner:
    """Return the test runner of this process: the same tests of the same files are run once for all episodes."""
    return RememberingRunner()


def read_call(text: str) -> tuple[str, Mapping[str, Any]] | None:
    """Return the name and arguments of the call in a turn's text, or None if no call can be parsed."""
    written = _CALL.search(text)
    try:
        call: Any = json.loads(written[1]) if written else None
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments")
    return (call["name"], arguments) if isinstance(arguments, dict) else None


# A marker for a turn's text, to find in the template's output what follows it.
_SAID = "said here"


def after_a_turn(tokenizer: Any, tool: str, answer: str) -> str:
    """Return what the model's template puts between the end of a turn with a call and the beginning of the next turn.

    Raises UnsupportedModelError if the template hides the turn or shows it twice.
    """
    messages = [
        {"role": "user", "content": "-"},
        {"role": "assistant", "content": _SAID},
        {"role": "tool", "name": tool, "content": answer},
    ]
    text = tokenizer.apply_chat_template(messages, tools=list(TOOLS), add_generation_prompt=True, tokenize=False)
    before, end, after = text.partition(_SAID + tokenizer.eos_token)
    if not end or _SAID in before:
        got = "a template without it" if not end else "a template that writes an answer twice"
        raise UnsupportedModelError(explain("chat template", got=got, expected="a turn's text, then its end token"))
    return after


class TaskEpisode:
    """One task, from its prompt to the end of the session. A turn without a readable call ends it as well."""

    def __init__(self, tokenizer: Any, seed: int, random_seed: str, *, difficulty: Difficulty = "easy") -> None:
        task = generate_task(seed, difficulty=difficulty)
        self.seed, self._tokenizer = seed, tokenizer
        self.draw = random.Random(random_seed)  # noqa: S311 (sampling, no secret)
        self.workspace = Workspace(task, runner=_world_runner(), max_calls=MOST_CALLS)
        self.prompt: list[dict[str, Any]] = [{"role": "user", "content": task.prompt}]
        self.messages: list[dict[str, Any]] = []
        text = tokenizer.apply_chat_template(self.prompt, tools=list(TOOLS), add_generation_prompt=True, tokenize=False)
        self.prompt_ids: list[int] = self._encode(text)
        self.ids: list[int] = []
        self.sampled: list[int] = []
        self.failures: Counter[str] = Counter()
        self.is_unreadable = False

    def begin(self) -> list[int]:
        return self.prompt_ids

    def hear(self, sampled_ids: list[int]) -> list[int] | None:
        self._add(sampled_ids, 1)
        text = self._tokenizer.decode(sampled_ids, skip_special_tokens=True)
        called = read_call(text)
        if called is None:
            self.messages.append({"role": "assistant", "content": text})
            self.is_unreadable = True
            return None
        name, arguments = called
        function = {"name": name, "arguments": arguments}
        words, calls = text.partition("<tool_call>")[0], [{"type": "function", "function": function}]
        self.messages.append({"role": "assistant", "content": words, "tool_calls": calls})
        outcome = self.workspace.call(name, arguments)
        if outcome.failed:
            self.failures[outcome.kind or "other"] += 1
        if self.workspace.finished:
            return None
        self.messages.append({"role": "tool", "name": name, "content": outcome.text})
        answer = self._encode(after_a_turn(self._tokenizer, name, outcome.text))
        self._add(answer, 0)
        return answer

    def _add(self, ids: Sequence[int], sampled: int) -> None:
        self.ids += ids
        self.sampled += [sampled] * len(ids)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]


def play_all(
    model: nn.Module,
    tokenizer: Any,
    episodes: Sequence[TaskEpisode],
    *,
    most: int,
    num_parallel: int | None = None,
    temperature: float = 1.0,
) -> None:
    """Play all episodes with samples from the model; one with more than `most` tokens after its prompt is over.

    `num_parallel` episodes run at a time: by default all on a GPU, which has memory for their keys, and 48 on a CPU.
    """
    from composer_replication.trainer.objective.distributed import evaluating

    room, ends = most + max(len(episode.prompt_ids) for episode in episodes), [tokenizer.eos_token_id]
    num_parallel = num_parallel or (len(episodes) if next(model.parameters()).is_cuda else 48)
    with evaluating(model):
        sampler = _sampler_for(model, room)
        sampler(model, ends=ends, places=num_parallel, room=room, most_new=most, temperature=temperature).run(episodes)


def _sampler_for(model: Any, room: int) -> Any:
    """Return the sampler: recorded passes (CUDA graphs) on a GPU if the model allows them, otherwise plain batches."""
    import torch

    from composer_replication.trainer.objective.distributed import has_adapter
    from composer_replication.trainer.rollouts.generation.row_cache import why_not_kept
    from composer_replication.trainer.rollouts.generation.talks import RecordedTalking, Talking

    if model.device.type == "cuda":
        with torch.no_grad():
            reason = why_not_kept(model, room)
        if reason is None:
            return RecordedTalking
        logger.warning("sampling without recorded passes: %s", reason)
    if has_adapter(model):
        fix = "Merge it into the weights first (`crf export RUN --to DIR`), or train without one."
        raise UnsupportedModelError(
            explain("model", got="an adapter", expected="a model without an adapter (on a CPU)", fix=fix)
        )
    return Talking


def rollouts(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
    """Return rollouts for TRL (`train.grpo.rollouts`): what the workspace's tools would produce, without TRL's waits.

    A row of the dataset names its task by seed and difficulty. A rollout is seeded by run, step and position.
    """
    import torch

    tokenizer, longest, step = trainer.processing_class, trainer.max_completion_length, trainer.state.global_step
    rows = _rows_by_prompt(trainer)
    episodes = [
        TaskEpisode(
            tokenizer,
            int(row["seed"]),
            f"{trainer.args.seed}:{step}:{position}",
            difficulty=row.get("difficulty", "easy"),
        )
        for position, row in enumerate(rows[prompt[-1]["content"]] for prompt in prompts)
    ]
    model = trainer.accelerator.unwrap_model(trainer.model)
    play_all(model, tokenizer, episodes, most=longest, num_parallel=len(episodes), temperature=trainer.temperature)
    rewards = [episode.workspace.reward() for episode in episodes]
    figures = {
        "solved": [float(reward.solved) for reward in rewards],
        "calls": [float(episode.workspace.calls) for episode in episodes],
        "failing_calls": [float(episode.failures.total()) for episode in episodes],
        "tokens": [float(len(episode.prompt_ids) + len(episode.ids)) for episode in episodes],
    }
    metrics = trainer._metrics[trainer.mode()]
    for name, values in figures.items():
        metrics[f"world/{name}"].append(sum(values) / len(values))
    # The alarm watches TRL's name for it. Summed over all processes, so that they decide alike.
    counts = [sum(figures["calls"]), float(len(episodes))]
    calls, number = trainer.sum_over(torch.tensor(counts, device=trainer.accelerator.device)).tolist()
    metrics["tools/call_frequency"].append(calls / number)
    return {
        "prompt_ids": [episode.prompt_ids for episode in episodes],
        "completion_ids": [episode.ids[:longest] for episode in episodes],
        # 0 for the tokens of tool results, which the model did not write.
        "env_mask": [episode.sampled[:longest] for episode in episodes],
        "logprobs": None,
        "messages": [episode.messages for episode in episodes],
        "tools": [SCHEMAS for _ in episodes],
        "files_worth": [reward.value for reward in rewards],
    }


# Weak keys, so that a finished trainer can be freed.
_rows: WeakKeyDictionary[Any, dict[str, Mapping[str, Any]]] = WeakKeyDictionary()


def _rows_by_prompt(trainer: Any) -> dict[str, Mapping[str, Any]]:
    """Return the dataset rows by prompt: TRL passes only prompts to a rollout function, and each
    prompt is one task's.
    """
    if trainer not in _rows:
        _rows[trainer] = {row["prompt"][-1]["content"]: row for row in trainer.train_dataset}
    return _rows[trainer]


def files_worth(files_worth: Sequence[float], **_given: Any) -> list[float]:
    """Return the reward: 1 if all tests pass, otherwise half the share of the broken tests that pass now."""
    return list(files_worth)
