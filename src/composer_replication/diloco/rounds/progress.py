"""Read the progress of a run from its store, without downloading tensors."""

from __future__ import annotations

from dataclasses import dataclass

from composer_replication.diloco.rounds.claims import find_run
from composer_replication.diloco.rounds.patience import GenerationRefused, PatientStore, Traffic
from composer_replication.diloco.rounds.reading import (
    RoundReader,
    published_states,
    read_commit,
    read_departures,
    step_of,
)
from composer_replication.diloco.rounds.records import Layout, RoundOutcome
from composer_replication.diloco.rounds.states import read_state
from composer_replication.diloco.store import ObjectStore
from composer_replication.errors import explain

_PATIENCE_S = 30.0


@dataclass(frozen=True)
class RoundSummary:
    """A summary of one committed round."""

    step: int
    members: tuple[int, ...]  # ranks
    healed: tuple[int, ...]  # ranks of members without weight
    seconds: float  # that its committer spent in the round
    num_bytes: int  # total size of the offers that count


@dataclass(frozen=True)
class RunProgress:
    """The progress of a run, as read from its store."""

    generation: int
    world_size: int
    step: int  # commits so far
    expected: tuple[int, ...]  # ranks that the open round waits for
    offered: tuple[int, ...]  # ranks that have offered to the open round
    departed: tuple[int, ...]  # ranks that have left
    state_step: int | None  # the step of the newest published state
    foreign: int  # the number of objects that do not belong to the protocol
    rounds: tuple[RoundSummary, ...]  # the last committed rounds, in order

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that took part in the last commit."""
        return self.rounds[-1].members if self.rounds else ()

    @property
    def stragglers(self) -> tuple[int, ...]:
        """The ranks for which the other replicas in the open round are waiting; empty if no replica has made an
        offer yet.
        """
        return tuple(sorted(set(self.expected) - set(self.offered))) if self.offered else ()

    @property
    def num_bytes(self) -> int:
        return sum(summary.num_bytes for summary in self.rounds)


def read_progress(store: ObjectStore, generation: int = 0, *, num_rounds: int = 20) -> RunProgress:
    """Return the progress of a run. Raises GenerationRefused if no run is stored under this generation."""
    patient = PatientStore(store, Traffic(), patience_s=_PATIENCE_S)
    run = find_run(patient, Layout(generation))
    if run is None:
        where = f"generation {generation} at {store.uri}"
        raise GenerationRefused(explain(where, got="no run", expected="a run that a replica has begun"))
    layout, world_size = run.layout, run.world_size
    step = _find_open_step(patient, layout)
    commits = [(at_step, read_commit(patient, layout, at_step)) for at_step in range(max(0, step - num_rounds), step)]
    rounds = tuple(_summarize_round(at_step, commit[1]) for at_step, commit in commits if commit is not None)
    last = commits[-1][1] if commits else None
    view = RoundReader(patient, layout, step, world_size, last[1] if last else None).read()
    # A name is no proof of a state, so the newest state with a readable record counts.
    states = (name for name in published_states(patient, layout) if read_state(patient, layout, name) is not None)
    state = next(states, None)
    return RunProgress(
        generation=generation,
        world_size=world_size,
        step=step,
        expected=tuple(sorted(view.expected)),
        offered=tuple(sorted({offer.id.rank for offer in view.offers})),
        departed=tuple(sorted(read_departures(patient, layout).ranks)),
        state_step=None if state is None else step_of(state),
        foreign=patient.traffic.foreign,
        rounds=rounds,
    )


def _find_open_step(store: PatientStore, layout: Layout) -> int:
    """Return the first step without a commit.

    The step is found by binary search, which works because outcomes of rounds are never deleted. A step whose commit is
    unreadable counts as committed if the next step has a commit.
    """

    def is_committed(step: int) -> bool:
        return any(read_commit(store, layout, at_step) is not None for at_step in (step, step + 1))

    # Double the upper bound until its step is not committed, then bisect.
    below, above = 0, 1
    while is_committed(above - 1):
        below, above = above, 2 * above
    while below < above:
        middle = (below + above) // 2
        if is_committed(middle):
            below = middle + 1
        else:
            above = middle
    return below


def _summarize_round(step: int, outcome: RoundOutcome) -> RoundSummary:
    ranks = tuple(member.id.rank for member in outcome.members)
    healed = tuple(member.id.rank for member in outcome.members if not member.weight)
    return RoundSummary(step, ranks, healed, outcome.seconds, outcome.num_bytes)
