"""A replica's place in a run: joining it, catching up with the others, advancing, leaving."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from composer_replication.diloco.rounds.claims import (
    Heart,
    agree_on_run,
    refuse_if_replaced,
    take_rank,
)
from composer_replication.diloco.rounds.comparing import Comparisons
from composer_replication.diloco.rounds.heal import Follower, GlobalState, StateFns
from composer_replication.diloco.rounds.patience import (
    GenerationRefused,
    PatientStore,
    QuorumLeft,
    RoundError,
    RoundTimeout,
    StateUnreadable,
    Traffic,
)
from composer_replication.diloco.rounds.reading import (
    Goodbye,
    pack_goodbye,
    ranks_that_left,
    read_commit,
    step_of,
)
from composer_replication.diloco.rounds.records import (
    Layout,
    RoundOutcome,
    digest,
    next_base,
    pack,
)
from composer_replication.diloco.rounds.running import (
    Ended,
    RoundSettings,
    RunningRound,
    RunPosition,
)
from composer_replication.diloco.rounds.vectors import RoundVector
from composer_replication.diloco.store import ObjectStore, StoreError
from composer_replication.errors import explain

STATELESS = "stateless"
FRAGMENT = "StreamingDiLoCoFragment_"
_MOST_VOIDS = 3


@dataclass
class Membership:
    objects: ObjectStore
    traffic: Traffic
    settings: RoundSettings
    generation: int
    place: RunPosition
    functions: StateFns
    pool: ThreadPoolExecutor
    lease_s: float
    takeover: bool
    state_every: int
    keep_rounds: int
    follower: Follower | None = None
    healing: int = 0  # rounds still to go without weight: training did not begin from the global weights
    _passes: bool = False  # this round is not held: see `is_over`
    _voids: int = 0
    _compared: int = -1  # the last step at which weights were compared
    _num_tensors: dict[str, int] = field(default_factory=dict)
    _heart: Heart | None = None
    _gave_up: Goodbye | None = None  # said when a round could not be held
    layout: Layout = field(init=False)

    def __post_init__(self) -> None:
        self.layout = Layout(self.generation)
        self._state = GlobalState(self.layout, self.settings, self.functions)
        self._comparisons = Comparisons(self._state, self.lease_s)
        self._retention = Retention(self.layout, self.keep_rounds)

    @property
    def store(self) -> PatientStore:
        return PatientStore(self.objects, self.traffic, patience_s=self.settings.timeout_s)

    @property
    def num_fragments(self) -> int:
        return max(1, sum(key.startswith(FRAGMENT) for key in self.functions))

    def num_tensors(self) -> int | None:
        """How many tensors the round of this step averages; None where nobody said."""
        key = f"{FRAGMENT}{self.place.step % self.num_fragments}"
        if key in self.functions and key not in self._num_tensors:  # asking copies the weights: once
            self._num_tensors[key] = len(self.functions[key][1]()["original_parameters"])
        return self._num_tensors.get(key)

    @property
    def is_over(self) -> bool:
        """Whether the round that was begun must not be held, because the run has ended.

        The run has all its commits; or this replica has just caught up with replicas that have all finished, and its
        training loop has not yet had a chance to see at which step that was. A loop that goes on all the same takes
        part in the next round.
        """
        return self._passes or (self.place.commits is not None and self.place.step >= self.place.commits)

    def end_after(self, commits: int) -> None:
        """Note how many commits the run needs; no round is held after them."""
        self.place = replace(self.place, commits=commits)

    def join(self, *, training: bool = False) -> None:
        """Once: the run's settings, a claim on my rank, and the weights that the run has by now."""
        if self._heart is not None:
            return
        store = self.store
        self._agree(store)
        rank = self.place.rank
        claim = take_rank(store, self.layout, rank, lease_s=self.lease_s, takeover=self.takeover)
        self._heart = Heart(self.objects, self.layout, rank, claim, self.lease_s)
        self.place = replace(self.place, claim=claim, base=STATELESS)
        replaced = False
        if self.functions:
            self.place, replaced = self._state.begin(store, self.place)
        replaced |= self._catch_up(store, margin=0)
        if replaced:
            self._weights_were_replaced(training=training)
        self._say_here(store)

    def begin_round(self) -> None:
        """Before the tensors of a round: am I still who I was, is a state due, am I behind?"""
        step = self.place.step
        if self._heart is None:
            self.join(training=True)
        else:
            self._begin_another()
        self._passes = self.place.step > step and self._others_have_finished(self.store)

    def _begin_another(self) -> None:
        store = self.store
        if self._gave_up is not None:  # and goes on all the same: the others may wait for this process again
            store.delete([self.layout.left(*self._me())])
            self._gave_up = None
        refuse_if_replaced(store, self.layout, self.place.rank, self.place.claim)
        self._compare_as_due(store)  # a first member says what its weights are before it goes on
        # One commit behind: this round is late, takes that commit and is with the others in the next.
        if self._catch_up(store, margin=1):
            self._weights_were_replaced(training=True)
            self._compare_as_due(store)
        if self._is_first():
            if self.functions and self._state.is_due(store, self.place, self.state_every):
                self._state.publish(store, self.place)
            self._retention.sweep(store, self.place.step, self._state.readable(store))

    def end_round(self, ended: Ended) -> bool:
        """Advance with a commit; a replica that was not among its members says that it is back."""
        if ended.result == "void":
            self._after_a_void(ended)
        if ended.result != "commit" or ended.outcome is None:
            return False
        self._advance(ended.outcome)
        self.healing, self._voids = max(0, self.healing - 1), 0
        if self._me() not in {member.id[:2] for member in ended.outcome.members}:
            self._say_here(self.store)
        return True

    def heal(self) -> None:
        """My round is over, and what it left is gone or comes from another history: load a newer state."""
        store = self.store
        if self.functions:
            self.place = self._state.wait_for_newer(store, self.place)
            self._comparisons.agreed = self.place.step
        self._catch_up(store, margin=0)
        # The outer loop restores the fragment of the round that it is in.
        self._weights_were_replaced(training=False)
        self.healing = 0 if self.num_fragments == 1 else self.healing
        self._say_here(store)

    def agree_on_weights(self) -> None:
        """At the end: those of the first member, where mine are others by a bit; and what is still to be compared."""
        store = self.store
        self._look(store, training=False)  # first, as before a round: so that what I say or compare is agreed on so far
        self._compare(store)
        self._finish_comparisons()

    def hold(self, round: RunningRound) -> Ended:
        """Take part in a round. Where that cannot be held, say goodbye before the error is raised again.

        Nobody knows whether this process will be closed. Its offer stays, for somebody may have sealed it, and counts
        in this round as that of any process that died; in the rounds after it nobody waits for this process in vain.
        """
        try:
            return round.run()
        except RoundTimeout as error:
            self._gave_up = Goodbye(isinstance(error, QuorumLeft), self.place.step)
            with contextlib.suppress(StoreError):
                self._say_goodbye(PatientStore(self.objects, self.traffic, patience_s=1.0), self._gave_up)
            raise

    def leave(self, *, failed: bool = False) -> None:
        """Say goodbye; the first member publishes the last state, for those who come later.

        A process that failed, or that has fewer commits than the run needs, has not finished: it may be started again.
        """
        if self._heart is None:
            return
        try:
            if failed:
                self._comparisons.abandon(self.place)
            else:
                self._finish_comparisons()
        finally:
            store = self.store
            if self.functions and self._is_first():
                self._state.publish(store, self.place)
            self._heart.stop()
            needed = self.place.commits or 0
            goodbye = self._gave_up or Goodbye(not failed and self.place.step >= needed, self.place.step)
            self._say_goodbye(store, goodbye)
            self._heart = None

    def _say_goodbye(self, store: PatientStore, goodbye: Goodbye) -> None:
        key = self.layout.left(*self._me())
        store.put(key, pack_goodbye(self.layout.address(key), goodbye))

    def _compare_as_due(self, store: PatientStore) -> None:
        """At the steps of states; and what could not be compared before."""
        self._look(store, training=True)
        if self.place.step % self.state_every == 0:
            self._compare(store)
            self._look(store, training=True)

    def _look(self, store: PatientStore, *, training: bool) -> None:
        follows = self.follower is not None
        self._take(store, self._comparisons.look(store, self.place, follows=follows), training=training)

    def _compare(self, store: PatientStore) -> None:
        position = self.place
        if not self.functions or self._heart is None or position.last is None or self._compared == position.step:
            return
        self._compared = position.step
        if self._is_first():
            self._comparisons.say(store, position)
        else:
            late = read_commit(store, self.layout, position.step) is not None  # the others do not wait for me either
            first = position.last.members[0].id[:2]
            self._comparisons.begin(store, position, first, wait_s=0.0 if late else self.settings.grace_s)

    def _finish_comparisons(self) -> None:
        store, follows = self.store, self.follower is not None
        self._take(store, self._comparisons.finish(store, self.place, follows=follows), training=False)

    def _take(self, store: PatientStore, loaded: RunPosition | None, *, training: bool) -> None:
        """Weights of the first member in the place of mine, and the commits since: at the end all of them."""
        if loaded is None:
            return
        step, self.place = self.place.step, loaded
        while self.place.step < step and (commit := read_commit(store, self.layout, self.place.step)) is not None:
            if not self._follow(store, commit[1]):
                break
        self._weights_were_replaced(training=training)
        if self.place.step < step and not training:
            where = f"rounds {self.place.step} to {step - 1} of generation {self.generation} at {store.uri}"
            raise StateUnreadable(f"{where} cannot be followed any more from the weights of the first member")

    def _say_here(self, store: PatientStore) -> None:
        """Say that this replica is back, so that the others wait for it."""
        key = self.layout.here(self.place.step, self.place.rank)
        store.put(key, pack("here", self.layout.address(key), {}))

    def _others_have_finished(self, store: PatientStore) -> bool:
        """Return whether all other members of the last commit have finished, with all the commits that I need."""
        members = () if self.place.last is None else self.place.last.members
        other_ranks = {member.id.rank for member in members} - {self.place.rank}
        return bool(other_ranks) and other_ranks <= ranks_that_left(store, self.layout).finished_for(self.place.commits)

    def _me(self) -> tuple[int, int]:
        return self.place.rank, self.place.claim

    def _is_first(self) -> bool:
        return self.place.last is not None and self.place.last.members[0].id[:2] == self._me()

    def _agree(self, store: PatientStore) -> None:
        """The first replica writes what the run is; every other one compares."""
        settings = self.settings
        mine = {
            "world_size": settings.world_size,
            "payload": settings.payload,
            "mean_payload": settings.mean_payload,
            "shard_bytes": settings.shard_bytes,
            "tensors": digest(self._state.saved().outline().spec),
        }
        where = f"generation {self.generation} at {store.uri}"
        run = agree_on_run(store, self.layout, mine)
        about = {} if run is None else run.settings
        fix = f"Give all replicas the same settings, or begin another run with generation={self.generation + 1}."
        if clashes := sorted(name for name in mine if about.get(name) != mine[name]):
            got, expected = {name: _short(about.get(name)) for name in clashes}, {name: mine[name] for name in clashes}
            raise GenerationRefused(explain(where, got=got, expected=expected, fix=fix))
        assert run is not None  # or its settings would be others
        self.layout = self._state.layout = run.layout
        if store.size(self.layout.key("closed")) is not None:
            raise GenerationRefused(explain(where, got="a run that was closed", expected="an open one", fix=fix))

    def _catch_up(self, store: PatientStore, *, margin: int) -> bool:
        """Load and follow until at most `margin` commits are ahead; whether weights were replaced."""
        if read_commit(store, self.layout, self.place.step + margin) is None:
            return False
        replaced = False
        if self.functions and (newest := self._state.newest(store, self.place, margin=margin)) is not None:
            self.place, replaced = newest, True
            self._comparisons.agreed = newest.step
        while (commit := read_commit(store, self.layout, self.place.step + margin)) is not None:
            here = commit if not margin else read_commit(store, self.layout, self.place.step)
            if here is None or not self._follow(store, here[1]):
                store.put(self.layout.key("wanted", f"{self.place.rank:05d}"), b"")
                break
            replaced = bool(self.functions)
        return replaced

    def _follow(self, store: PatientStore, outcome: RoundOutcome) -> bool:
        """Apply a commit without a round of my own."""
        if outcome.base != self.place.base:
            return False
        if self.functions:
            if self.follower is None:
                return False
            vector = self.vector(self.follower.blanks(self.place.step))
            round = self.running(store, vector, weight=0.0)
            if round.take(outcome) != "commit":
                return False
            self.follower.apply(self.place.step, vector.tensors)
        self._advance(outcome)
        return True

    def vector(self, tensors: list) -> RoundVector:
        last = self.place.last
        parties = self.settings.world_size if last is None else len(last.members)
        return RoundVector(tensors, parties=parties, shard_elements=max(1, self.settings.shard_bytes // 4))

    def running(self, store: PatientStore, vector: RoundVector, *, weight: float) -> RunningRound:
        return RunningRound(store, self.layout, self.settings, self.place, vector, weight, self.pool)

    def _advance(self, outcome: RoundOutcome) -> None:
        position = self.place
        base = next_base(position.base, position.step, outcome) if self.functions else STATELESS
        self.place = replace(position, step=position.step + 1, base=base, last=outcome, first_trial=0)

    def _weights_were_replaced(self, *, training: bool) -> None:
        """What was trained from other weights has no weight until training has begun from the global ones."""
        if self.follower is not None:
            self.follower.restore()
            self.healing = int(training)
        else:  # each round restores one fragment
            self.healing = self.num_fragments

    def _after_a_void(self, ended: Ended) -> None:
        self.place = replace(self.place, first_trial=ended.trials)
        self._voids += 1
        if self.num_fragments == 1 or self.follower is not None:
            self.healing = max(0, self.healing - 1)
        elif self._voids >= _MOST_VOIDS:
            fix = "Give the outer loop to manager.follow(), which restores all fragments at once."
            raise RoundError(f"round {self.place.step}: every replica was healed and none may be averaged. {fix}")


def _short(value: object) -> object:
    """A value that somebody else wrote, for a message."""
    return value if value is None or isinstance(value, int) else str(value)[:80]


# What is kept of a run, by rule: every seal and outcome; the means since the state before the last; few offers.

KEPT_STATES = 2
_STEP = re.compile(r"/(\d{8})/")


class Retention:
    """Deletes what nobody can need any more. Run by the first member, so that not everybody lists and deletes.

    The shards of offers go after `keep_rounds` commits: they are needed to compute a damaged mean again. The means stay
    as long as a replica may have to follow them: from the older of the two newest states on.
    """

    def __init__(self, layout: Layout, keep_rounds: int) -> None:
        self._layout, self._keep_rounds = layout, keep_rounds
        self._offers_from = self._means_from = -1  # not looked at yet

    def sweep(self, store: PatientStore, step: int, names: Sequence[str]) -> None:
        """Delete what a replica at this step leaves behind. `names` are the states that can be read, newest first."""
        for name in names[KEPT_STATES:]:
            store.delete([self._layout.key("states", name), *store.keys(self._layout.key("statedata", name))])
        kept_names = names[:KEPT_STATES]
        if self._offers_from < 0:
            self._offers_from = self._oldest(store)
            self._means_from = max(0, self._offers_from - 1)
        offers_until = step - self._keep_rounds
        means_until = min(offers_until, step_of(kept_names[-1])) if kept_names else offers_until - self._keep_rounds
        for old in range(self._offers_from, offers_until):
            store.delete(store.keys(self._layout.shards(old)))
        for old in range(self._means_from, means_until):
            store.delete(store.keys(self._layout.round(old, "mean")))
        self._offers_from = max(self._offers_from, offers_until)
        self._means_from = max(self._means_from, means_until)

    def _oldest(self, store: PatientStore) -> int:
        """The first round of which there are shards: what was before, an earlier first member has swept."""
        keys = store.keys(self._layout.key("d"))
        match = _STEP.search(keys[0].removeprefix(self._layout.key("d"))) if keys else None
        return int(match[1]) if match else 0
