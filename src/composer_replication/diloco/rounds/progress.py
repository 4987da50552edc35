"""How a run is doing, read from its store alone and without tensors."""

from __future__ import annotations

from dataclasses import dataclass

from composer_replication.diloco.rounds.failures import GenerationRefused
from composer_replication.diloco.rounds.patience import PatientStore, Traffic
from composer_replication.diloco.rounds.reading import (
    RoundReader,
    published_states,
    ranks_that_left,
    read_commit,
    read_record,
    step_of,
)
from composer_replication.diloco.rounds.records import MOST_RANKS, Layout, Outcome, refusing, unpack, whole
from composer_replication.diloco.store import ObjectStore
from composer_replication.errors import explain

_PATIENCE_S = 30.0


@dataclass(frozen=True)
class RoundSummary:
    """A round that was committed."""

    step: int
    members: tuple[int, ...]  # ranks
    healed: tuple[int, ...]  # members without weight
    seconds: float  # from the first offer of its committer to the commit
    num_bytes: int  # of all offers that count


@dataclass(frozen=True)
class Progress:
    """A run as its store shows it."""

    generation: int
    world_size: int
    step: int  # commits so far
    expected: tuple[int, ...]  # ranks that the open round waits for
    offered: tuple[int, ...]  # ranks whose offers are there
    left: tuple[int, ...]  # ranks that said goodbye
    state_step: int | None  # of the newest published state
    foreign: int  # objects that are none of the protocol's
    rounds: tuple[RoundSummary, ...]  # the last ones, the newest at the end

    @property
    def members(self) -> tuple[int, ...]:
        return self.rounds[-1].members if self.rounds else ()

    @property
    def stragglers(self) -> tuple[int, ...]:
        """Who the others wait for."""
        return tuple(sorted(set(self.expected) - set(self.offered))) if self.offered else ()

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.rounds)


def read_progress(store: ObjectStore, generation: int = 0, *, num_rounds: int = 20) -> Progress:
    """What `crf diloco` shows. GenerationRefused where there is no such run."""
    patient = PatientStore(store, Traffic(), patience_s=_PATIENCE_S)
    layout = Layout(generation)
    world_size = read_record(patient, layout.key("about"), _world_size)
    if world_size is None:
        where = f"generation {generation} at {store.uri}"
        raise GenerationRefused(explain(where, got="no run", expected="one that a replica has begun"))
    step = head(patient, layout)
    commits = [(each, read_commit(patient, layout, each)) for each in range(max(0, step - num_rounds), step)]
    rounds = tuple(_summary(each, commit[1]) for each, commit in commits if commit is not None)
    last = commits[-1][1] if commits else None
    seen = RoundReader(patient, layout, step, world_size, last[1] if last else None).read()
    names = published_states(patient, layout)
    return Progress(
        generation=generation,
        world_size=world_size,
        step=step,
        expected=tuple(sorted(seen.expected)),
        offered=tuple(sorted({offer.id.rank for offer in seen.offers})),
        left=tuple(sorted(ranks_that_left(patient, layout))),
        state_step=step_of(names[0]) if names else None,
        foreign=patient.traffic.foreign,
        rounds=rounds,
    )


def head(store: PatientStore, layout: Layout) -> int:
    """The first step that is not committed: outcomes are never deleted, so a search by halves finds it."""
    below, above = 0, 1
    while store.size(layout.outcome(above - 1, 0)) is not None:
        below, above = above, 2 * above
    while below < above:
        middle = (below + above) // 2
        if store.size(layout.outcome(middle, 0)) is not None:
            below = middle + 1
        else:
            above = middle
    # An attempt that ended without a commit has an outcome too.
    return below - 1 if below and read_commit(store, layout, below - 1) is None else below


def _world_size(data: bytes) -> int:
    content = unpack("about", data)
    with refusing("about"):
        return whole(content["world_size"], below=MOST_RANKS)


def _summary(step: int, outcome: Outcome) -> RoundSummary:
    ranks = tuple(member.id.rank for member in outcome.members)
    healed = tuple(member.id.rank for member in outcome.members if not member.weight)
    return RoundSummary(step, ranks, healed, outcome.seconds, outcome.num_bytes)
