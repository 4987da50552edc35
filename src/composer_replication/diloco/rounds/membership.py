"""A replica's membership in a run: joining it, catching up with the others, advancing, and leaving.

`Membership` does the work between two rounds; `_Retention` deletes what no replica can need any more.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from composer_replication.diloco.payload import ErrorFeedback
from composer_replication.diloco.rounds.claims import Heart, agree_on_run, refuse_if_replaced, take_rank
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
from composer_replication.diloco.rounds.reading import Goodbye, pack_goodbye, read_commit, read_departures, step_of
from composer_replication.diloco.rounds.records import Layout, RoundOutcome, digest, next_base, pack
from composer_replication.diloco.rounds.round import Round, RoundResult
from composer_replication.diloco.rounds.settings import RoundSettings, RunPosition
from composer_replication.diloco.rounds.shards import RoundVector
from composer_replication.diloco.store import ObjectStore, StoreError
from composer_replication.errors import explain

STATELESS = "stateless"
FRAGMENT = "StreamingDiLoCoFragment_"
_MAX_VOIDS = 3


@dataclass
class Membership:
    """The state of one replica between rounds, and what it does there."""

    objects: ObjectStore
    traffic: Traffic
    settings: RoundSettings
    generation: int
    position: RunPosition
    functions: StateFns
    pool: ThreadPoolExecutor
    lease_s: float
    takeover: bool
    state_every: int
    keep_rounds: int
    follower: Follower | None = None
    healing: int = 0  # rounds to take part in without weight, because training did not start from the global weights
    _skips_round: bool = False  # whether to skip the current round: see `is_over`
    _voids: int = 0
    _compared: int = -1  # the last step at which weights were compared
    _num_tensors: dict[str, int] = field(default_factory=dict)
    _heart: Heart | None = None
    _early_goodbye: Goodbye | None = None  # the goodbye that was written when a round could not be held
    layout: Layout = field(init=False)

    def __post_init__(self) -> None:
        self.layout = Layout(self.generation)
        self._state = GlobalState(self.layout, self.settings, self.functions)
        self._comparisons = Comparisons(self._state, self.lease_s)
        self._retention = _Retention(self.layout, self.keep_rounds)

    @property
    def store(self) -> PatientStore:
        return PatientStore(self.objects, self.traffic, patience_s=self.settings.timeout_s)

    @property
    def num_fragments(self) -> int:
        return max(1, sum(key.startswith(FRAGMENT) for key in self.functions))

    def num_tensors(self) -> int | None:
        """Return how many tensors the round of this step averages; None if no function is registered for it."""
        key = f"{FRAGMENT}{self.position.step % self.num_fragments}"
        # The call copies the weights, so the number is cached.
        if key in self.functions and key not in self._num_tensors:
            self._num_tensors[key] = len(self.functions[key][1]()["original_parameters"])
        return self._num_tensors.get(key)

    @property
    def is_over(self) -> bool:
        """Whether the current round must not be held, because the run has ended.

        Either the run has all its commits; or this replica has just caught up with replicas that have all finished, and
        its training loop could not yet see at which step that was. A loop that continues all the same takes part in the
        next round.
        """
        return self._skips_round or (self.position.commits is not None and self.position.step >= self.position.commits)

    def end_after(self, commits: int) -> None:
        """Set how many commits the run needs; no round is held after them."""
        self.position = replace(self.position, commits=commits)

    def join(self, *, training: bool = False) -> None:
        """Agree on the settings of the run, claim the rank, and load the weights; only once."""
        if self._heart is not None:
            return
        store = self.store
        self._agree(store)
        rank = self.position.rank
        claim = take_rank(store, self.layout, rank, lease_s=self.lease_s, takeover=self.takeover)
        self._heart = Heart(self.objects, self.layout, rank, claim, self.lease_s)
        self.position = replace(self.position, claim=claim, base=STATELESS)
        replaced = False
        if self.functions:
            self.position, replaced = self._state.begin(store, self.position)
        replaced |= self._catch_up(store, margin=0)
        if replaced:
            self._weights_were_replaced(training=training)
        self._announce_return(store)

    def begin_round(self) -> None:
        """Prepare a round: check the claim, publish a state if one is due, and catch up if the others are ahead."""
        step = self.position.step
        if self._heart is None:
            self.join(training=True)
        else:
            self._begin_another()
        self._skips_round = self.position.step > step and self._others_have_finished(self.store)

    def _begin_another(self) -> None:
        store = self.store
        # This process continues all the same, so the others should wait for it again.
        if self._early_goodbye is not None:
            store.delete([self.layout.goodbye(*self._me())])
            self._early_goodbye = None
        refuse_if_replaced(store, self.layout, self.position.rank, self.position.claim)
        # A first member publishes its digest before it offers anything to the next round.
        self._compare_as_due(store)
        # If only one commit is ahead, this round takes that commit, and the next one is held with the others.
        if self._catch_up(store, margin=1):
            self._weights_were_replaced(training=True)
            self._compare_as_due(store)
        if self._is_first():
            if self.functions and self._state.is_due(store, self.position, self.state_every):
                self._state.publish(store, self.position)
            self._retention.sweep(store, self.position.step, self._state.readable(store))

    def end_round(self, ended: RoundResult) -> bool:
        """Advance if the round was committed, and return whether it was.

        A replica that was not among its members announces that it is back.
        """
        if ended.result == "void":
            self._after_void(ended)
        if ended.result != "commit" or ended.outcome is None:
            return False
        self._advance(ended.outcome)
        self.healing, self._voids = max(0, self.healing - 1), 0
        if self._me() not in {member.id[:2] for member in ended.outcome.members}:
            self._announce_return(self.store)
        return True

    def heal(self) -> None:
        """Load a newer state: the round of this replica is over, and its mean is gone or belongs to another history."""
        store = self.store
        if self.functions:
            self.position = self._state.wait_for_newer(store, self.position)
            self._comparisons.agreed = self.position.step
        self._catch_up(store, margin=0)
        # The outer loop restores the fragment of its current round by itself.
        self._weights_were_replaced(training=False)
        self.healing = 0 if self.num_fragments == 1 else self.healing
        self._announce_return(store)

    def agree_on_weights(self) -> None:
        """Finish the comparisons at the end of a run, and load the first member's weights if mine differ by a bit."""
        store = self.store
        # Compare what is open before a digest of my weights is written, as before a round.
        self._look(store, training=False)
        self._compare(store)
        self._finish_comparisons()

    def hold(self, round: Round) -> RoundResult:
        """Take part in a round. If it cannot be held, write a goodbye before the error is raised again.

        Nobody knows whether this process will be closed. Its offer stays, because it may be sealed, and counts in this
        round like that of a process that died; in later rounds nobody waits for this process in vain.
        """
        try:
            return round.run()
        except RoundTimeout as error:
            self._early_goodbye = Goodbye(isinstance(error, QuorumLeft), self.position.step)
            with contextlib.suppress(StoreError):
                self._write_goodbye(PatientStore(self.objects, self.traffic, patience_s=1.0), self._early_goodbye)
            raise

    def leave(self, *, failed: bool = False) -> None:
        """Write a goodbye. The first member also publishes the last state, for replicas that come later.

        A process that failed, or has fewer commits than the run needs, has not finished: it may be started again.
        """
        if self._heart is None:
            return
        try:
            if failed:
                self._comparisons.abandon(self.position)
            else:
                self._finish_comparisons()
        finally:
            store = self.store
            if self.functions and self._is_first():
                self._state.publish(store, self.position)
            self._heart.stop()
            needed = self.position.commits or 0
            goodbye = self._early_goodbye or Goodbye(not failed and self.position.step >= needed, self.position.step)
            self._write_goodbye(store, goodbye)
            self._heart = None

    def _write_goodbye(self, store: PatientStore, goodbye: Goodbye) -> None:
        key = self.layout.goodbye(*self._me())
        store.put(key, pack_goodbye(self.layout.address(key), goodbye))

    def _compare_as_due(self, store: PatientStore) -> None:
        """Compare weights at the steps of states, and finish comparisons that are still open."""
        self._look(store, training=True)
        if self.position.step % self.state_every == 0:
            self._compare(store)
            self._look(store, training=True)

    def _look(self, store: PatientStore, *, training: bool) -> None:
        follows = self.follower is not None
        self._take(store, self._comparisons.look(store, self.position, follows=follows), training=training)

    def _compare(self, store: PatientStore) -> None:
        """Publish a digest of my weights as the first member, or begin to compare mine with the first member's."""
        position = self.position
        if not self.functions or self._heart is None or position.last is None or self._compared == position.step:
            return
        self._compared = position.step
        if self._is_first():
            self._comparisons.publish_digest(store, position)
        else:
            # Then the others do not wait for me either.
            late = read_commit(store, self.layout, position.step) is not None
            first = position.last.members[0].id[:2]
            self._comparisons.begin(store, position, first, wait_s=0.0 if late else self.settings.grace_s)

    def _finish_comparisons(self) -> None:
        store, follows = self.store, self.follower is not None
        self._take(store, self._comparisons.finish(store, self.position, follows=follows), training=False)

    def _take(self, store: PatientStore, loaded: RunPosition | None, *, training: bool) -> None:
        """Continue from the first member's weights in place of mine, and follow the commits since.

        Outside of training all of those commits must be followed, or StateUnreadable is raised.
        """
        if loaded is None:
            return
        step, self.position = self.position.step, loaded
        while self.position.step < step and (commit := read_commit(store, self.layout, self.position.step)) is not None:
            if not self._follow(store, commit[1]):
                break
        self._weights_were_replaced(training=training)
        if self.position.step < step and not training:
            where = f"rounds {self.position.step} to {step - 1} of generation {self.generation} at {store.uri}"
            raise StateUnreadable(
                f"{where} cannot be replayed from the weights of the first member: their means are gone"
            )

    def _announce_return(self, store: PatientStore) -> None:
        """Announce that this replica is back, so that the others wait for it."""
        key = self.layout.here(self.position.step, self.position.rank)
        store.put(key, pack("here", self.layout.address(key), {}))

    def _others_have_finished(self, store: PatientStore) -> bool:
        """Return whether all other members of the last commit have the commits that this replica needs."""
        members = () if self.position.last is None else self.position.last.members
        other_ranks = {member.id.rank for member in members} - {self.position.rank}
        departures = read_departures(store, self.layout)
        return bool(other_ranks) and other_ranks <= departures.finished_for(self.position.commits)

    def _me(self) -> tuple[int, int]:
        return self.position.rank, self.position.claim

    def _is_first(self) -> bool:
        return self.position.last is not None and self.position.last.members[0].id[:2] == self._me()

    def _agree(self, store: PatientStore) -> None:
        """Compare the settings with the run's, or begin the run. Raises GenerationRefused if they differ."""
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
        fix = f"Give all replicas the same settings, or begin a new run with generation={self.generation + 1}."
        if clashes := sorted(name for name in mine if about.get(name) != mine[name]):
            got, expected = {name: _short(about.get(name)) for name in clashes}, {name: mine[name] for name in clashes}
            raise GenerationRefused(explain(where, got=got, expected=expected, fix=fix))
        # Without a readable run all settings would have clashed above.
        assert run is not None
        self.layout = self._state.layout = run.layout
        if store.size(self.layout.key("closed")) is not None:
            raise GenerationRefused(explain(where, got="a run that was closed", expected="an open one", fix=fix))

    def _catch_up(self, store: PatientStore, *, margin: int) -> bool:
        """Catch up to at most `margin` commits behind the others. Returns whether weights were replaced."""
        if read_commit(store, self.layout, self.position.step + margin) is None:
            return False
        replaced = False
        if self.functions and (newest := self._state.newest(store, self.position, margin=margin)) is not None:
            self.position, replaced = newest, True
            self._comparisons.agreed = newest.step
        while (commit := read_commit(store, self.layout, self.position.step + margin)) is not None:
            here = commit if not margin else read_commit(store, self.layout, self.position.step)
            if here is None or not self._follow(store, here[1]):
                # Somebody has to publish a state that is ahead of the commit that cannot be followed.
                store.put(self.layout.key("wanted", f"{self.position.rank:05d}"), b"")
                break
            replaced = bool(self.functions)
        return replaced

    def _follow(self, store: PatientStore, outcome: RoundOutcome) -> bool:
        """Apply a commit without taking part in its round. Returns whether that was possible."""
        if outcome.base != self.position.base:
            return False
        if self.functions:
            if self.follower is None:
                return False
            vector = self.vector(self.follower.blanks(self.position.step))
            round = self.new_round(store, vector, weight=0.0)
            if round.fetch_commit(outcome) != "commit":
                return False
            self.follower.apply(self.position.step, vector.tensors)
        self._advance(outcome)
        return True

    def vector(self, tensors: list) -> RoundVector:
        """Return the tensors of a round as a vector, cut into shards for the members of the last commit."""
        last = self.position.last
        parties = self.settings.world_size if last is None else len(last.members)
        return RoundVector(tensors, parties=parties, shard_elements=max(1, self.settings.shard_bytes // 4))

    def new_round(
        self, store: PatientStore, vector: RoundVector, *, weight: float, feedback: ErrorFeedback | None = None
    ) -> Round:
        """Return a round of the current step in which this replica can take part."""
        return Round(store, self.layout, self.settings, self.position, vector, weight, self.pool, feedback=feedback)

    def _advance(self, outcome: RoundOutcome) -> None:
        position = self.position
        base = next_base(position.base, position.step, outcome) if self.functions else STATELESS
        self.position = replace(position, step=position.step + 1, base=base, last=outcome, first_trial=0)

    def _weights_were_replaced(self, *, training: bool) -> None:
        """Take part without weight until training has started from the global weights again.

        What was trained from other weights must not be averaged.
        """
        if self.follower is not None:
            self.follower.restore()
            self.healing = int(training)
        else:  # each round restores one fragment
            self.healing = self.num_fragments

    def _after_void(self, ended: RoundResult) -> None:
        self.position = replace(self.position, first_trial=ended.trials)
        self._voids += 1
        if self.num_fragments == 1 or self.follower is not None:
            self.healing = max(0, self.healing - 1)
        elif self._voids >= _MAX_VOIDS:
            fix = "Pass the outer loop to manager.follow(), which restores all fragments at once."
            raise RoundError(f"round {self.position.step}: every replica was healed and none may be averaged. {fix}")


def _short(value: object) -> object:
    """Return a value that another replica wrote, short enough for a message."""
    return value if value is None or isinstance(value, int) else str(value)[:80]


# Which objects of a run are deleted: seals and outcomes never, means and offers after some rounds.

KEPT_STATES = 2
# "/00000012/" in a key; not "/12/"
_STEP = re.compile(r"/(\d{8})/")


class _Retention:
    """Deletes what no replica can need any more. Only the first member runs it, which saves requests.

    Shards of offers are deleted after `keep_rounds` commits: until then they may be needed to compute a damaged mean
    again. Means are kept as long as a replica may have to follow them: from the older of the two newest states on.
    """

    def __init__(self, layout: Layout, keep_rounds: int) -> None:
        self._layout, self._keep_rounds = layout, keep_rounds
        self._offers_from = self._means_from = -1  # -1: not looked up yet

    def sweep(self, store: PatientStore, step: int, names: Sequence[str]) -> None:
        """Delete what a replica at this step no longer needs. `names` are the readable states, newest first."""
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
        """Return the first round that still has shards: an earlier first member has deleted those before."""
        keys = store.keys(self._layout.key("d"))
        match = _STEP.search(keys[0].removeprefix(self._layout.key("d"))) if keys else None
        return int(match[1]) if match else 0
