"""The world of the toy workspace: GRPO training of a model, evaluation on tasks that it has never seen.

A unit is a held-out task that the trained model plays once. It holds counts of solved tasks, calls, failed calls by
kind and tokens, and the entropy and the KL divergence from the initial model, each summed over the sampled tokens. With
the same seed, all arms play a task with the same random numbers. The curve shows the rollouts of the training itself,
which has new tasks in every step.
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
# Metrics of the training in the curve of a job, with their names there.
_CURVE_NAMES = {
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
    """Train, play the held-out tasks, and return the sums of each task. Training resumes from its checkpoints."""
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
        curve=[_curve_point(line, rollouts) for line in lines],
        digests=digests,
        config_sha256=job.config_sha256,
    )
    # Only the result is read later, and checkpoints are the largest files of a job.
    shutil.rmtree(job.folder / "training" / "checkpoints", ignore_errors=True)
    return result


def _train(job: Job, start: str) -> tuple[str, list[Mapping[str, Any]], int]:
    """Train, and return the folder of the weights, one record of metrics per step, and the number of steps."""
    from composer_replication.trainer.from_config.training import run_training
    from composer_replication.trainer.sessions.phases import TrainingCallbacks

    train = replace(job.config.train, model=start, output=str(job.folder / "training"))
    if train.run is not None:  # for its pairs
        train = replace(train, run=str(linked_run(RunDir.open(train.run), job.folder / "run").root))
    config = replace(job.config, train=train)
    outcome = run_training(config, progress=TrainingCallbacks(say=_log))
    if outcome.saved is None:
        raise RunError(
            explain(str(job.folder), got=f"a training stopped by {outcome.stopped_by}", expected="a finished training")
        )
    rows: Any = read_journal(outcome.metrics).rows
    by_step: dict[int, Any] = {line["step"]: line for line in rows if "world/tokens" in line}
    # "step 12: entropy fell ..." -> 12
    alarm_steps = [int(alarm.removeprefix("step ").partition(":")[0]) for alarm in outcome.alarms]
    lines: list[Mapping[str, Any]] = [
        {**by_step[step], "world/alarms": float(sum(alarm_step <= step for alarm_step in alarm_steps))}
        for step in sorted(by_step)
    ]
    return str(outcome.saved), lines, outcome.steps


def _free_trainer() -> None:
    """Free the trainer's memory.

    Otherwise reference cycles would keep its optimizer on the GPU while the two models are evaluated.
    """
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _curve_point(line: Mapping[str, Any], rollouts: int) -> dict[str, float]:
    """Return a point of the curve: the metrics of the rollouts sampled before a step.

    `rollouts` is the number of rollouts per step.
    """
    step = line["step"] - 1
    # A step may have no call at all.
    failing = 100 * line["world/failing_calls"] / max(line["world/calls"], 1e-9)
    figures = {name: line[key] for key, name in _CURVE_NAMES.items() if key in line}
    return {"step": step, "rollouts": step * rollouts, "failing_calls": failing, **figures}


def _play_held_out_tasks(job: Job, start: str, trained: str) -> tuple[list[Unit], dict[str, str]]:
    """Play the held-out tasks with the trained model, and return the units and the digests of both models."""
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
    play_all(after, tokenizer, episodes, max_tokens=options["most_tokens"])
    sums = _sum_entropy_and_kl(before, after, episodes)
    units = [_make_unit(episode, *episode_sums) for episode, episode_sums in zip(episodes, sums, strict=True)]
    return units, {"start": weights_digest(before), "trained": weights_digest(after)}


def _make_unit(episode: TaskEpisode, entropy: float, kl: float) -> Unit:
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


def _sum_entropy_and_kl(
    before: nn.Module, after: nn.Module, episodes: Sequence[TaskEpisode]
) -> list[tuple[float, float]]:
    """Return, for each episode, the entropy and KL(after || before), summed over its sampled tokens, in nats.

    With a large vocabulary, the logits of a batch do not fit into memory. Therefore episodes are scored one at a time,
    and only at positions that predict a sampled token.
    """
    import torch

    device = next(after.parameters()).device
    sums: list[tuple[float, float]] = []
    for episode in episodes:
        ids = torch.tensor([episode.prompt_ids + episode.ids], device=device)
        positions = (torch.tensor(episode.sampled).nonzero().squeeze(1) + len(episode.prompt_ids) - 1).to(device)
        with torch.inference_mode():
            logprobs_after, logprobs_before = (
                torch.log_softmax(_logits(model, ids, positions), -1) for model in (after, before)
            )
            probs = logprobs_after.exp()
            entropy, kl = -(probs * logprobs_after).sum(), (probs * (logprobs_after - logprobs_before)).sum()
            sums.append((float(entropy), float(kl)))
    return sums


def _logits(model: Any, ids: Tensor, positions: Tensor) -> Tensor:
    """Return the logits of a single sequence at the given positions, with shape (n, V)."""
    return model(input_ids=ids, use_cache=False, logits_to_keep=positions).logits[0].float()


# ---- episodes

logger = logging.getLogger(__name__)
SCHEMAS = [tool["function"] for tool in TOOLS]
# The limit on calls ends episodes that only repeat themselves.
MAX_CALLS = 24
# "Let me look. <tool_call>{...}</tool_call>" -> "{...}"; not "<tool_call>{...}" without the closing tag
_CALL = re.compile(r"<tool_call>(.*)</tool_call>", re.DOTALL)


@cache
def _shared_runner() -> TestRunner:
    """Return the test runner of this process, which caches results: the same tests on the same files run only once."""
    return RememberingRunner()


def _read_call(text: str) -> tuple[str, Mapping[str, Any]] | None:
    """Return the tool name and the arguments of the call in a turn's text, or None if no call can be parsed."""
    match = _CALL.search(text)
    try:
        call: Any = json.loads(match[1]) if match else None
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments")
    return (call["name"], arguments) if isinstance(arguments, dict) else None


# The text of a turn that is searched for in the template's output.
_MARKER = "said here"


def _text_between_turns(tokenizer: Any, tool: str, answer: str) -> str:
    """Return the text that the model's chat template puts between a turn with a call and the next assistant turn.

    The text contains the result of the call. Raises UnsupportedModelError if the template does not write the turn
    exactly once.
    """
    messages = [
        {"role": "user", "content": "-"},
        {"role": "assistant", "content": _MARKER},
        {"role": "tool", "name": tool, "content": answer},
    ]
    text = tokenizer.apply_chat_template(messages, tools=list(TOOLS), add_generation_prompt=True, tokenize=False)
    before, end, after = text.partition(_MARKER + tokenizer.eos_token)
    if not end or _MARKER in before:
        got = "a template that omits the turn" if not end else "a template that writes the turn twice"
        raise UnsupportedModelError(explain("chat template", got=got, expected="a turn's text, then its end token"))
    return after


class TaskEpisode:
    """An episode on one task. It ends when the task is submitted, or after a turn whose call cannot be parsed."""

    def __init__(self, tokenizer: Any, seed: int, random_seed: str, *, difficulty: Difficulty = "easy") -> None:
        task = generate_task(seed, difficulty=difficulty)
        self.seed, self._tokenizer = seed, tokenizer
        self.draw = random.Random(random_seed)  # noqa: S311 (sampling, no secret)
        self.workspace = Workspace(task, runner=_shared_runner(), max_calls=MAX_CALLS)
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
        called = _read_call(text)
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
        answer = self._encode(_text_between_turns(self._tokenizer, name, outcome.text))
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
    max_tokens: int,
    num_parallel: int | None = None,
    temperature: float = 1.0,
) -> None:
    """Play all episodes by sampling from the model; an episode ends after `max_tokens` tokens at the latest.

    `num_parallel` episodes run at the same time. By default, all episodes run in parallel on a GPU, whose memory holds
    their key-value caches, and 48 on a CPU.
    """
    from composer_replication.trainer.objective.distributed import eval_mode

    room, ends = max_tokens + max(len(episode.prompt_ids) for episode in episodes), [tokenizer.eos_token_id]
    num_parallel = num_parallel or (len(episodes) if next(model.parameters()).is_cuda else 48)
    with eval_mode(model):
        sampler = _choose_sampler(model, room)
        sampler(model, ends=ends, places=num_parallel, room=room, most_new=max_tokens, temperature=temperature).run(
            episodes
        )


def _choose_sampler(model: Any, room: int) -> Any:
    """Return the sampler class: with CUDA graphs on a GPU if the model supports them, otherwise with plain batches."""
    import torch

    from composer_replication.trainer.objective.distributed import has_adapter
    from composer_replication.trainer.rollouts.generation.row_cache import why_not_kept
    from composer_replication.trainer.rollouts.generation.talks import RecordedTalking, Talking

    if model.device.type == "cuda":
        with torch.no_grad():
            reason = why_not_kept(model, room)
        if reason is None:
            return RecordedTalking
        logger.warning("sampling without CUDA graphs: %s", reason)
    if has_adapter(model):
        fix = "Merge it into the weights first (`crf export RUN --to DIR`), or train without one."
        raise UnsupportedModelError(
            explain("model", got="an adapter", expected="a model without an adapter (on a CPU)", fix=fix)
        )
    return Talking


def rollouts(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
    """Generate rollouts for TRL (the option `train.grpo.rollouts`).

    They are faster than TRL's own rollouts with the workspace's tools. A row of the dataset names its task by seed and
    difficulty. The random seed of a rollout is derived from the run's seed, the step and the rollout's position.
    """
    import torch

    tokenizer, max_tokens, step = trainer.processing_class, trainer.max_completion_length, trainer.state.global_step
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
    play_all(
        model, tokenizer, episodes, max_tokens=max_tokens, num_parallel=len(episodes), temperature=trainer.temperature
    )
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
    # The alarm watches this metric under TRL's name. It is summed over all processes, so that they decide alike.
    counts = [sum(figures["calls"]), float(len(episodes))]
    num_calls, num_episodes = trainer.sum_over(torch.tensor(counts, device=trainer.accelerator.device)).tolist()
    metrics["tools/call_frequency"].append(num_calls / num_episodes)
    return {
        "prompt_ids": [episode.prompt_ids for episode in episodes],
        "completion_ids": [episode.ids[:max_tokens] for episode in episodes],
        # 0 for the tokens of tool results, which the model did not write.
        "env_mask": [episode.sampled[:max_tokens] for episode in episodes],
        "logprobs": None,
        "messages": [episode.messages for episode in episodes],
        "tools": [SCHEMAS for _ in episodes],
        "files_worth": [reward.value for reward in rewards],
    }


# Weak keys let a finished trainer be freed.
_rows: WeakKeyDictionary[Any, dict[str, Mapping[str, Any]]] = WeakKeyDictionary()


def _rows_by_prompt(trainer: Any) -> dict[str, Mapping[str, Any]]:
    """Map each prompt to its row of the dataset.

    TRL passes only prompts to a rollout function, and each prompt belongs to one task.
    """
    if trainer not in _rows:
        _rows[trainer] = {row["prompt"][-1]["content"]: row for row in trainer.train_dataset}
    return _rows[trainer]


def files_worth(files_worth: Sequence[float], **_columns: Any) -> list[float]:
    """Return the rewards: 1 if all tests pass, otherwise half the fraction of initially failing tests that now pass."""
    return list(files_worth)
