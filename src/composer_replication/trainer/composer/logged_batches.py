"""Logged traces beside rollouts, for channels 2 and 3: which batch comes next, and what it holds.

The order is new each time round, the same in every run, and known after a restart.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from composer_replication.batch.tree_batch import CHANNELS, TreeBatch, pack_batches
from composer_replication.errors import InputError, StaleArtefactError, explain
from composer_replication.optional import require
from composer_replication.trainer.objective.fingerprint import fingerprint_of, weights_digest
from composer_replication.trainer.presets import NO_PAIR, ChannelSettings
from composer_replication.trainer.sessions.reference import ReferenceLogprobs, reference_logprobs_of_batches

if TYPE_CHECKING:
    from composer_replication.trainer.sessions.dataset import LoggedSessions


Collator = Callable[[Sequence[Any]], dict[str, Tensor]]
LoggedBatch = dict[str, Tensor] | TreeBatch
_HAS_OWN = object()  # a user's collator brings reference log-probs in its batches
_, SDPO, REPLAY = CHANNELS
NO_SITE = (
    "channel sdpo_jsd cannot run on logged traces: alpha_sdpo is {:g}, and they contain no error site with a hint;"
    " it still runs on rollouts"
)
_FIRST_KEY = {SDPO: "sdpo_student_index", REPLAY: "dpo_chosen_input_ids"}


class LoggedStore:
    """Traces with a collator, or sessions that are trees already; drawn in an order of their own."""

    def __init__(
        self,
        *,
        traces: Sequence[Any] | None,
        collator: Collator | None,
        sessions: LoggedSessions | None,
        batch_size: int,
        seed: int,
        process: int = 0,
        num_processes: int = 1,
    ) -> None:
        if (traces is None) == (sessions is None) or (traces is None) != (collator is None):
            got = [
                name for name, value in (("trace_dataset", traces), ("data_collator", collator)) if value is not None
            ]
            got += ["logged_sessions"] if sessions is not None else []
            expected = "trace_dataset with data_collator, or logged_sessions"
            raise InputError(explain("logged traces", got=got, expected=expected))
        if batch_size < 1:
            raise InputError(explain("logged_batch_size", got=batch_size, expected="1 or more"))
        self._traces, self._collator, self._sessions, self._batch_size = traces, collator, sessions, batch_size
        size = len(traces) if traces is not None else len(sessions or ())
        self.sampler = CyclingSampler(size, seed=seed, process=process, num_processes=num_processes)

    @property
    def digest(self) -> str:
        """Of what is drawn from."""
        if self._sessions is not None:
            return self._sessions.digest
        return digest_of(self._traces or ())

    def next_batch(self, device: torch.device) -> LoggedBatch:
        """The next traces as one batch with nothing in channel 1, which is the rollouts'."""
        numbers = self.sampler.draw(self._batch_size)
        if self._sessions is not None:
            return pack_batches([self._sessions.items[number].batch(device) for number in numbers])
        assert self._traces is not None
        assert self._collator is not None
        batch = self._collator([self._traces[number] for number in numbers])
        batch.pop("rewards", None)
        batch["response_mask"] = torch.zeros_like(batch["response_mask"])
        return {name: value.to(device) for name, value in batch.items()}


def prompts_of_traces(rows: Any) -> Any:
    """Return what GRPO trains on where the rows of `train_dataset` are TraceExamples.

    A row's prompt is its own, or the messages before the agent's first turn. A `Dataset` keeps its columns; of a list,
    which TRL does not take, the other keys become columns without `turns` and `dpo_pairs`. InputError where a row has
    no `turns`, or neither a prompt nor a turn before the agent's.
    """
    if rows is None or not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
        raise _no_traces(f"a train_dataset of {type(rows).__name__}")
    prompts = list[Any]()
    for number in range(len(rows)):
        row = rows[number]
        if not isinstance(row, Mapping) or row.get("turns") is None:
            keys = sorted(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
            raise _no_traces(f"row {number} of train_dataset with {keys}")
        prompts.append(row["prompt"] if row.get("prompt") is not None else _prompt_of(row))
        if not prompts[-1]:
            raise _no_traces(f"row {number} of train_dataset with neither a prompt nor a turn before the agent's")
    if hasattr(rows, "add_column"):
        if "prompt" in rows.column_names and None not in rows["prompt"]:
            return rows
        return rows.remove_columns([name for name in rows.column_names if name == "prompt"]).add_column(
            "prompt", prompts
        )
    columns = [{key: value for key, value in row.items() if key not in ("turns", "dpo_pairs")} for row in rows]
    pairs = zip(columns, prompts, strict=True)
    return require("datasets", extra="train").Dataset.from_list([{**row, "prompt": prompt} for row, prompt in pairs])


def _prompt_of(row: Mapping[str, Any]) -> list[dict[str, str]]:
    before = itertools.takewhile(lambda turn: turn.get("role") != "assistant", row["turns"])
    return [{"role": turn["role"], "content": turn.get("content") or ""} for turn in before]


def _no_traces(got: str) -> InputError:
    fix = (
        "GRPO makes its batches from prompts and never calls a data_collator on them; this one makes batches of logged "
        "traces. Pass the traces as trace_dataset, or rows that are TraceExamples as train_dataset."
    )
    return InputError(explain("traces for data_collator", got=got, expected="rows with turns", fix=fix))


class _UsableChannels(NamedTuple):
    """The settings with weights for channels that have data, and the names of those that the logged data feed.

    `skipped` has a sentence for every channel with a weight and no data; `is_empty` says that there are logged data,
    and that no channel has a use for them.
    """

    settings: ChannelSettings
    logged: frozenset[str]
    skipped: Mapping[str, str]
    is_empty: bool


def usable_channels(
    settings: ChannelSettings, traces: Sequence[Any] | None, collator: Collator | None, sessions: LoggedSessions | None
) -> _UsableChannels:
    """Return what the logged data are enough for: channel 3 is switched off if there are no pairs.

    Channel 2 has the rollouts besides, so its weight stays. Malformed traces raise what their collator raises.
    """
    weights = {SDPO: settings.alpha_sdpo, REPLAY: settings.beta_replay}
    active_channels = {name for name, weight in weights.items() if weight > 0}
    if traces is None and collator is None and sessions is None:
        logged, active_channels = frozenset[str](), active_channels - {SDPO}
    elif traces is None and collator is None and sessions is not None:
        logged = frozenset(name for name in active_channels if sessions.channels[name])
    elif traces is not None and collator is not None and sessions is None:
        logged = _channels_in(traces, collator, active_channels)
    else:  # half of what is needed, or twice: `LoggedStore` refuses it
        logged = frozenset(active_channels)
    has_data = not (traces is None and sessions is None)
    skipped = {SDPO: NO_SITE.format(weights[SDPO])} if SDPO in active_channels - logged else {}
    if REPLAY in active_channels - logged:
        skipped[REPLAY] = NO_PAIR.format(weights[REPLAY])
        settings = replace(settings, beta_replay=0.0)
    return _UsableChannels(settings, logged, skipped, is_empty=has_data and bool(active_channels) and not logged)


def _channels_in(traces: Sequence[Any], collator: Collator, channels: Set[str]) -> frozenset[str]:
    """Return which of the channels some trace has an item of. What the collator counts is not counted here."""
    owners: tuple[Any, ...] = (collator, getattr(collator, "renderer", None))
    counters: list[Counter[str]] = [owner.counts for owner in owners if hasattr(owner, "counts")]
    before, present = [dict(counter) for counter in counters], set[str]()
    for trace in traces:
        if channels <= present:
            break
        batch = collator([trace])
        present.update(name for name in channels if len(batch.get(_FIRST_KEY[name], ())))
    for counter, counts in zip(counters, before, strict=True):
        counter.clear()
        counter.update(counts)
    return frozenset(present)


def with_what_is_needed(
    model: nn.Module, settings: ChannelSettings, traces: Any, collator: Any, sessions: LoggedSessions | None
) -> LoggedSessions | None:
    """The sessions without a target of channel 1; pairs, of sessions or traces, get their reference log-probs."""
    if not (settings.alpha_sdpo > 0 or settings.beta_replay > 0):
        got = "logged traces, with both weights 0"
        raise InputError(explain("alpha_sdpo, beta_replay", got=got, expected="one above 0, or no traces"))
    needs_reference = settings.beta_replay > 0 and settings.dpo_variant == "dpo"
    if sessions is not None:
        sessions = sessions.without_responses()
        if needs_reference and not sessions.has_references:
            sessions = sessions.with_references(model)
        sessions.check_references(model)
    elif needs_reference and traces is not None and _needs_references(collator, model):
        device = next(model.parameters()).device
        collator.reference = None
        batches = [(list(collator.pairs([trace])), partial(_batch_of, collator, trace, device)) for trace in traces]
        collator.reference = reference_logprobs_of_batches(model, collator.renderer, batches)
    return sessions


def _needs_references(collator: Any, model: nn.Module) -> bool:
    """Whether there are none, or those of these weights in another precision than the steps compute in."""
    reference = getattr(collator, "reference", _HAS_OWN)
    if not isinstance(reference, ReferenceLogprobs):
        return reference is None
    used = fingerprint_of(model, collator.renderer)
    return reference.fingerprint.differences(used) == ["precision"]


def _batch_of(collator: Any, trace: Any, device: torch.device) -> dict[str, Tensor]:
    """The batch of one trace, which is not counted."""
    before = collator.counts.copy()
    batch = collator([trace])
    collator.counts.clear()
    collator.counts.update(before)
    return {name: value.to(device) for name, value in batch.items()}


def digest_of(rows: Iterable[Any]) -> str:
    """Of a data set's rows as text: a run goes on with the same ones or not at all."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr(row).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


class CyclingSampler:
    """Numbers 0 to size - 1 without end. Every process draws the same order and takes its own share of each draw."""

    def __init__(self, size: int, *, seed: int, process: int = 0, num_processes: int = 1) -> None:
        if size < 1:
            raise InputError(explain("logged items", got=size, expected="at least one"))
        self._size, self._seed, self._process, self._num_processes = size, seed, process, num_processes
        self._drawn = 0
        self._order: tuple[int, list[int]] = (-1, [])

    def draw(self, count: int) -> list[int]:
        """The next `count` of this process; all processes together take num_processes times as many."""
        first = self._drawn + self._process * count
        self._drawn += count * self._num_processes
        return [self._at(position) for position in range(first, first + count)]

    def _at(self, position: int) -> int:
        time_round, index = divmod(position, self._size)
        if self._order[0] != time_round:
            order = list(range(self._size))
            random.Random(f"{self._seed}:{time_round}").shuffle(order)  # noqa: S311 (an order, not a secret)
            self._order = time_round, order
        return self._order[1][index]

    def state(self) -> dict[str, Any]:
        return {"size": self._size, "seed": self._seed, "drawn": self._drawn}

    def load_state(self, tree: dict[str, Any]) -> None:
        if (tree["size"], tree["seed"]) != (self._size, self._seed):
            got, expected = f"{self._size} items, seed {self._seed}", f"{tree['size']} items, seed {tree['seed']}"
            fix = "Resume with the logged sessions the run began with."
            raise StaleArtefactError(explain("logged items", got=got, expected=expected, fix=fix))
        self._drawn = tree["drawn"]


# What a GRPO run needs to go on as if nothing had happened, besides weights, optimiser and random numbers.
#
# The rollouts that wait for their micro-step and the place among them, the channels' schedules and teacher,
# environments that have a state, the alarm, figures not yet logged.


def run_geometry(trainer: Any) -> dict[str, Any]:
    """What a saved rollout buffer depends on: it holds sites, and logged batches are drawn beside it, or not."""
    logged = trainer.channels.logged
    is_stream = not hasattr(trainer.train_dataset, "__len__")
    return {
        "sites": trainer.wants_sites,
        "logged": None if logged is None else logged.digest,
        "prompts": None if is_stream else digest_of(trainer.train_dataset),
    }


def run_state(trainer: Any) -> dict[str, Any]:
    sampling, start = trainer.sampling, trainer.sampling.start_model
    return {
        "micro_step": trainer._step,
        "rollouts": trainer._buffered_inputs,
        "channels": trainer.channels.state(),
        "entropy": [trainer.entropy_coef, trainer._last_world_entropy] if trainer._entropy_bonus_enabled else None,
        "metrics": {mode: dict(values) for mode, values in trainer._metrics.items()},
        "figures": trainer.figures.state(),
        "site_counts": dict(sampling.site_counts),
        "num_rollouts": sampling.num_rollouts,
        "known_hints": dict(sampling.known_hints),
        "alarm": trainer.alarm.state(),
        "start_digest": None if start is None else weights_digest(start),
        "environments": _environment_states(trainer),
    }


def load_run_state(trainer: Any, tree: dict[str, Any]) -> None:
    """The inverse of `run_state`."""
    sampling, start, buffer = trainer.sampling, trainer.sampling.start_model, tree["rollouts"]
    trainer._step = tree["micro_step"]
    device = trainer.accelerator.device
    trainer._buffered_inputs = None if buffer is None else [_on_device(batch, device) for batch in buffer]
    trainer.channels.load_state(tree["channels"], trainer.state.max_steps)
    if tree["entropy"] is not None:
        trainer.entropy_coef, trainer._last_world_entropy = tree["entropy"]
    for mode, values in tree["metrics"].items():
        trainer._metrics[mode].update({name: list(series) for name, series in values.items()})
    trainer.figures.load_state(tree["figures"])
    sampling.site_counts, sampling.num_rollouts = Counter(tree["site_counts"]), tree["num_rollouts"]
    sampling.known_hints = dict(tree.get("known_hints", {}))  # an earlier version has none
    trainer.alarm.load_state(tree["alarm"])
    # An earlier version kept a digest of some values, under another name: it is not compared.
    if start is not None and "start_digest" in tree and tree["start_digest"] != weights_digest(start):
        fix = "Make the trainer with the model the run began with; the checkpoint's weights are loaded into it."
        raise StaleArtefactError(explain("start weights of k1", got="others", expected="the run's", fix=fix))
    _load_environment_states(trainer, tree["environments"])


def _environment_states(trainer: Any) -> list[list[Any]]:
    """Of each pool of environments: `_state()` of those that have one gives plain values."""
    pools: dict[Any, list[Any]] = getattr(trainer, "_environment_pool", {})
    return [
        [environment._state() if hasattr(environment, "_state") else None for environment in pool]
        for pool in pools.values()
    ]


def _load_environment_states(trainer: Any, states: list[list[Any]]) -> None:
    """Into as many environments as there were; `_load_state(...)` takes back what `_state()` gave."""
    pools: dict[Any, list[Any]] = getattr(trainer, "_environment_pool", {})
    for (name, pool), saved in zip(pools.items(), states, strict=True):
        pool.extend(trainer.environment_factories[name]() for _ in range(len(saved) - len(pool)))
        for environment, state in zip(pool, saved, strict=False):
            if state is not None:
                environment._load_state(state)


def _on_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
