"""Provide logged traces for channels 2 and 3 in a GRPO run, as batches with reference log-probs.

The order is reshuffled for every pass over the data. It depends only on the seed, so a resumed run continues with the
next batch.
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
from composer_replication.trainer.objective.channels import NO_PAIR, ChannelSettings
from composer_replication.trainer.objective.fingerprint import compute_fingerprint
from composer_replication.trainer.sessions.reference import ReferenceLogprobs, reference_logprobs_of_batches

if TYPE_CHECKING:
    from composer_replication.trainer.sessions.dataset import LoggedSessions


Collator = Callable[[Sequence[Any]], dict[str, Tensor]]
LoggedBatch = dict[str, Tensor] | TreeBatch
# Marks a custom collator without the attribute `reference`: its batches already contain reference log-probs.
_HAS_OWN = object()
_, SDPO, REPLAY = CHANNELS
NO_SITE = (
    "channel sdpo_jsd cannot run on logged traces: alpha_sdpo is {:g}, and they contain no error site with a hint;"
    " it still runs on rollouts"
)
_FIRST_KEY = {SDPO: "sdpo_student_index", REPLAY: "dpo_chosen_input_ids"}


class LoggedStore:
    """A shuffled store of logged data: traces with a collator, or sessions that are already token trees."""

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
            arguments = {"trace_dataset": traces, "data_collator": collator, "logged_sessions": sessions}
            got = [name for name, value in arguments.items() if value is not None]
            expected = "trace_dataset with data_collator, or logged_sessions"
            raise InputError(explain("logged traces", got=got, expected=expected))
        if batch_size < 1:
            raise InputError(explain("logged_batch_size", got=batch_size, expected="1 or more"))
        self._traces, self._collator, self._sessions, self._batch_size = traces, collator, sessions, batch_size
        size = len(traces) if traces is not None else len(sessions or ())
        self.sampler = _CyclingSampler(size, seed=seed, process=process, num_processes=num_processes)

    @property
    def digest(self) -> str:
        """A digest of all traces or sessions."""
        if self._sessions is not None:
            return self._sessions.digest
        return digest_of(self._traces or ())

    def next_batch(self, device: torch.device) -> LoggedBatch:
        """Return the next traces as one batch. It has no targets for channel 1, which learns from rollouts."""
        numbers = self.sampler.draw(self._batch_size)
        if self._sessions is not None:
            return pack_batches([self._sessions.items[number].batch(device) for number in numbers])
        assert self._traces is not None
        assert self._collator is not None
        batch = self._collator([self._traces[number] for number in numbers])
        batch.pop("rewards", None)
        # An all-zero mask leaves channel 1 without targets.
        batch["response_mask"] = torch.zeros_like(batch["response_mask"])
        return {name: value.to(device) for name, value in batch.items()}


def prompts_of_traces(rows: Any) -> Any:
    """Return the prompts for GRPO from a `train_dataset` whose rows are TraceExamples.

    A row's prompt is its own `prompt`, or else the messages before the agent's first turn. A `datasets.Dataset` keeps
    its columns. TRL does not accept lists, so a list becomes a `Dataset` without the keys `turns` and `dpo_pairs`.

    Raises:
        InputError: A row has no `turns`, or neither a prompt nor a message before the agent's first turn.
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
        "GRPO builds its batches from prompts without a data_collator; this data_collator is for logged traces only. "
        "Pass the traces as trace_dataset, or pass a train_dataset whose rows are TraceExamples."
    )
    return InputError(explain("traces for data_collator", got=got, expected="rows with turns", fix=fix))


class _UsableChannels(NamedTuple):
    """The channels that can use the logged data.

    `settings` has weight 0 for a channel that has no data at all, `logged` names the channels that use logged data, and
    `skipped` has a message for every channel that has a weight but no logged data. `is_empty` is true if there is
    logged data, but no active channel can use it.
    """

    settings: ChannelSettings
    logged: frozenset[str]
    skipped: Mapping[str, str]
    is_empty: bool


def usable_channels(
    settings: ChannelSettings, traces: Sequence[Any] | None, collator: Collator | None, sessions: LoggedSessions | None
) -> _UsableChannels:
    """Return which channels can use the logged data. Channel 3 is switched off if there are no pairs.

    Channel 2 keeps its weight because it also runs on rollouts. Errors that the collator raises for malformed traces
    are passed on.
    """
    weights = {SDPO: settings.alpha_sdpo, REPLAY: settings.beta_replay}
    active_channels = {name for name, weight in weights.items() if weight > 0}
    if traces is None and collator is None and sessions is None:
        logged, active_channels = frozenset[str](), active_channels - {SDPO}
    elif traces is None and collator is None and sessions is not None:
        logged = frozenset(name for name in active_channels if sessions.channels[name])
    elif traces is not None and collator is not None and sessions is None:
        logged = _channels_in(traces, collator, active_channels)
    else:  # traces without a collator, or traces and sessions: `LoggedStore` raises for these
        logged = frozenset(active_channels)
    has_data = not (traces is None and sessions is None)
    skipped = {SDPO: NO_SITE.format(weights[SDPO])} if SDPO in active_channels - logged else {}
    if REPLAY in active_channels - logged:
        skipped[REPLAY] = NO_PAIR.format(weights[REPLAY])
        settings = replace(settings, beta_replay=0.0)
    return _UsableChannels(settings, logged, skipped, is_empty=has_data and bool(active_channels) and not logged)


def _channels_in(traces: Sequence[Any], collator: Collator, channels: Set[str]) -> frozenset[str]:
    """Return the channels for which at least one trace has an item, leaving the collator's counts unchanged."""
    owners: tuple[Any, ...] = (collator, getattr(collator, "renderer", None))  # both have `counts`
    counters: list[Counter[str]] = [owner.counts for owner in owners if hasattr(owner, "counts")]
    # The collator is called here only to find out what the traces contain, so its counts are restored below.
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
    """Prepare logged data for channels 2 and 3: compute reference log-probs for pairs if they are needed and missing.

    Sessions are returned with the log-probs and without targets for channel 1. For traces, the log-probs are stored in
    the collator, and None is returned.
    """
    if not (settings.alpha_sdpo > 0 or settings.beta_replay > 0):
        got = "logged traces with both weights 0"
        raise InputError(explain("alpha_sdpo, beta_replay", got=got, expected="a weight above 0, or no traces"))
    needs_reference = settings.beta_replay > 0 and settings.dpo_variant == "dpo"
    if sessions is not None:
        sessions = sessions.without_responses()
        if needs_reference and not sessions.has_references:
            sessions = sessions.with_references(model)
        sessions.check_references(model)
    elif needs_reference and traces is not None and _needs_references(collator, model):
        device = next(model.parameters()).device
        # The log-probs are computed from this collator's batches, so disable its lookup of log-probs meanwhile.
        collator.reference = None
        batches = [(list(collator.pairs([trace])), partial(_batch_of, collator, trace, device)) for trace in traces]
        collator.reference = reference_logprobs_of_batches(model, collator.renderer, batches)
    return sessions


def _needs_references(collator: Any, model: nn.Module) -> bool:
    """Return whether reference log-probs must be computed.

    This is so if the collator has none, or if they are for the same weights in another precision.
    """
    reference = getattr(collator, "reference", _HAS_OWN)
    if not isinstance(reference, ReferenceLogprobs):
        return reference is None
    used = compute_fingerprint(model, collator.renderer)
    return reference.fingerprint.differences(used) == ["precision"]


def _batch_of(collator: Any, trace: Any, device: torch.device) -> dict[str, Tensor]:
    """Return one trace as a batch, leaving the collator's counts unchanged."""
    before = collator.counts.copy()
    batch = collator([trace])
    collator.counts.clear()
    collator.counts.update(before)
    return {name: value.to(device) for name, value in batch.items()}


def digest_of(rows: Iterable[Any]) -> str:
    """Return a digest of a data set's rows, which shows on resume whether the data is the same."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr(row).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


class _CyclingSampler:
    """A sampler of the numbers 0 to size - 1 in endless passes, reshuffled for each pass.

    All processes compute the same order, and each takes a different part of every draw.
    """

    def __init__(self, size: int, *, seed: int, process: int = 0, num_processes: int = 1) -> None:
        if size < 1:
            raise InputError(explain("logged items", got=size, expected="1 or more"))
        self._size, self._seed, self._process, self._num_processes = size, seed, process, num_processes
        self._drawn = 0
        self._order: tuple[int, list[int]] = (-1, [])

    def draw(self, count: int) -> list[int]:
        """Return the next `count` numbers for this process. The other processes take as many from the same order."""
        first = self._drawn + self._process * count
        self._drawn += count * self._num_processes
        return [self._at(position) for position in range(first, first + count)]

    def _at(self, position: int) -> int:
        num_pass, index = divmod(position, self._size)
        # Seeded per pass, so that the order in any pass can be computed without the earlier passes.
        if self._order[0] != num_pass:
            order = list(range(self._size))
            random.Random(f"{self._seed}:{num_pass}").shuffle(order)  # noqa: S311 (an order, not a secret)
            self._order = num_pass, order
        return self._order[1][index]

    def state(self) -> dict[str, Any]:
        return {"size": self._size, "seed": self._seed, "drawn": self._drawn}

    def load_state(self, tree: dict[str, Any]) -> None:
        if (tree["size"], tree["seed"]) != (self._size, self._seed):
            got, expected = f"{self._size} items, seed {self._seed}", f"{tree['size']} items, seed {tree['seed']}"
            fix = "Resume with the logged sessions that the run began with."
            raise StaleArtefactError(explain("logged items", got=got, expected=expected, fix=fix))
        self._drawn = tree["drawn"]
