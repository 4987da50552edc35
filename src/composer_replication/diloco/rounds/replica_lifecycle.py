"""Manage a replica's membership in a run: joining, catching up with the other replicas, advancing to the next round,
and leaving.

`Membership` does what is needed between two rounds. `_Retention` deletes objects that no replica needs any more.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from composer_replication.diloco.payload import ErrorFeedback
from composer_replication.diloco.rounds.claims import Heartbeat, agree_on_run, claim_rank, refuse_if_replaced
from composer_replication.diloco.rounds.comparing import Comparisons
from composer_replication.diloco.rounds.patience import (
    GenerationRefused,
    PatientStore,
    QuorumLeft,
    RoundError,
    RoundTimeout,
    StateUnreadable,
    Traffic,
)
from composer_replication.diloco.rounds.reading import Goodbye, read_commit, read_departures, step_of
from composer_replication.diloco.rounds.records import Layout, RoundOutcome, digest, pack
from composer_replication.diloco.rounds.round import Round, RoundResult
from composer_replication.diloco.rounds.settings import RoundSettings, RunPosition
from composer_replication.diloco.rounds.shards import RoundVector
from composer_replication.diloco.rounds.states import GlobalState, StateFns
from composer_replication.diloco.store import ObjectStore, StoreError
from composer_replication.errors import explain

STATELESS = "stateless"
FRAGMENT = "StreamingDiLoCoFragment_"
_MAX_VOIDS = 3


class Follower(Protocol):
    """The methods of an outer loop that a manager uses to apply commits between two rounds."""

    def blanks(self, step: int) -> list[Tensor]:
        """Return uninitialized tensors with the shapes of the tensors that are averaged in the round of this step."""
        ...

    def apply(self, step: int, means: Sequence[Tensor]) -> None:
        """Take one outer step with these means, starting from the global weights, as after a round."""
        ...

    def restore(self) -> None:
        """Copy the global weights into the model."""
        ...


@dataclass
class Membership:
    """The state of one replica between rounds, and the actions that it takes there."""

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
    healing: int = 0  # rounds to join without weight, because training did not start from the global weights
    _skips_round: bool = False  # whether to skip the current round; see `is_over`
    _num_voids: int = 0  # void rounds since the last commit
    _last_compared: int = -1  # the last step at which weights were compared
    _num_tensors: dict[str, int] = field(default_factory=dict)
    _heartbeat: Heartbeat | None = None
    _early_goodbye: Goodbye | None = None  # written when a round could not be completed
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
        """Return the number of tensors that are averaged in the round of the current step, or None if it is unknown
        because no state function is registered for them.
        """
        key = f"{FRAGMENT}{self.position.step % self.num_fragments}"
        # The state function copies the weights, so the number is cached.
        if key in self.functions and key not in self._num_tensors:
            self._num_tensors[key] = len(self.functions[key][1]()["original_parameters"])
        return self._num_tensors.get(key)

    @property
    def is_over(self) -> bool:
        """Whether to skip the current round because the run has ended.

        The run has ended if it has all its commits, or if this replica has just caught up with replicas that have all
        finished. In the latter case, the training loop of this replica has not seen the new step yet; if the loop
        continues, the replica takes part in the next round.
        """
        return self._skips_round or (self.position.commits is not None and self.position.step >= self.position.commits)

    def end_after(self, commits: int) -> None:
        """Set the number of commits after which the run ends and no more rounds are held."""
        self.position = replace(self.position, commits=commits)

    def join(self, *, training: bool = False) -> None:
        """Agree on the settings of the run, claim the rank and load the weights. Does nothing if the replica has
        already joined.
        """
        if self._heartbeat is not None:
            return
        store = self.store
        self._agree_on_settings(store)
        rank = self.position.rank
        claim = claim_rank(store, self.layout, rank, lease_s=self.lease_s, takeover=self.takeover)
        self._heartbeat = Heartbeat(self.objects, self.layout, rank, claim, self.lease_s)
        self.position = replace(self.position, claim=claim, base=STATELESS)
        replaced = False
        if self.functions:
            self.position, replaced = self._state.begin(store, self.position)
        replaced |= self._catch_up(store, margin=0)
        if replaced:
            self._on_replaced_weights(training=training)
        self._announce_return(store)

    def begin_round(self) -> None:
        """Prepare a round: join the run if needed, catch up with the others, and publish a state if one is due."""
        step = self.position.step
        if self._heartbeat is None:
            self.join(training=True)
        else:
            self._begin_next_round()
        self._skips_round = self.position.step > step and self._others_have_finished(self.store)

    def _begin_next_round(self) -> None:
        store = self.store
        # This process has continued after its goodbye, so the others should wait for it again.
        if self._early_goodbye is not None:
            store.delete([self.layout.goodbye(*self._process_id())])
            self._early_goodbye = None
        refuse_if_replaced(store, self.layout, self.position.rank, self.position.claim)
        # The first member must publish its digest before it offers anything to the next round.
        self._compare_if_due(store)
        # If the others are ahead by only one commit, this round fetches that commit.
        if self._catch_up(store, margin=1):
            self._on_replaced_weights(training=True)
            self._compare_if_due(store)
        if self._is_first_member():
            if self.functions and self._state.is_due(store, self.position, self.state_every):
                self._state.publish(store, self.position)
            self._retention.sweep(store, self.position.step, self._state.readable_names(store))

    def end_round(self, ended: RoundResult) -> bool:
        """Advance to the next step if the round was committed, and return whether it was.

        If the round was committed without this replica, announce its return to the others.
        """
        if ended.result == "void":
            self._on_void(ended)
        if ended.result != "commit" or ended.outcome is None:
            return False
        self._advance(ended.outcome)
        self.healing, self._num_voids = max(0, self.healing - 1), 0
        if self._process_id() not in {member.id[:2] for member in ended.outcome.members}:
            self._announce_return(self.store)
        return True

    def heal(self) -> None:
        """Load a newer state, because the mean of the current round no longer exists or belongs to another history
        of commits.
        """
        store = self.store
        if self.functions:
            self.position = self._state.wait_for_newer(store, self.position)
            self._comparisons.agreed = self.position.step
        self._catch_up(store, margin=0)
        # The outer loop itself restores the fragment of the current round.
        self._on_replaced_weights(training=False)
        self.healing = 0 if self.num_fragments == 1 else self.healing
        self._announce_return(store)

    def agree_on_weights(self) -> None:
        """Compare weights at the end of a run, and load the first member's weights if this replica's are not
        bit-identical.
        """
        store = self.store
        # As before a round, resolve open comparisons before a digest of my weights is written.
        self._resolve_comparisons(store, training=False)
        self._compare(store)
        self._finish_comparisons()

    def run_round(self, round: Round) -> RoundResult:
        """Take part in a round. If it times out, record that this replica has left, and re-raise the error.

        The caller may exit without calling `leave`, so this record (a goodbye) keeps the other replicas from waiting
        for this process in later rounds. The replica's offer to the current round still counts, because it may already
        be sealed.
        """
        try:
            return round.run()
        except RoundTimeout as error:
            self._early_goodbye = Goodbye(isinstance(error, QuorumLeft), self.position.step)
            with contextlib.suppress(StoreError):
                self._write_goodbye(PatientStore(self.objects, self.traffic, patience_s=1.0), self._early_goodbye)
            raise

    def leave(self, *, failed: bool = False) -> None:
        """Record that this replica has left the run (a goodbye). The first member also publishes the last state, for
        replicas that join later.

        If the process failed, or has fewer commits than the run needs, the goodbye marks it as unfinished, because it
        may be restarted.
        """
        if self._heartbeat is None:
            return
        try:
            if failed:
                self._comparisons.abandon(self.position)
            else:
                self._finish_comparisons()
        finally:
            store = self.store
            if self.functions and self._is_first_member():
                self._state.publish(store, self.position)
            self._heartbeat.stop()
            needed = self.position.commits or 0
            goodbye = self._early_goodbye or Goodbye(not failed and self.position.step >= needed, self.position.step)
            self._write_goodbye(store, goodbye)
            self._heartbeat = None

    def _write_goodbye(self, store: PatientStore, goodbye: Goodbye) -> None:
        key = self.layout.goodbye(*self._process_id())
        store.put(key, pack("goodbye", self.layout.address(key), goodbye._asdict()))

    def _compare_if_due(self, store: PatientStore) -> None:
        """Resolve open comparisons of weights, and compare weights now if a state is published at this step."""
        self._resolve_comparisons(store, training=True)
        if self.position.step % self.state_every == 0:
            self._compare(store)
            self._resolve_comparisons(store, training=True)

    def _resolve_comparisons(self, store: PatientStore, *, training: bool) -> None:
        follows = self.follower is not None
        self._continue_from(store, self._comparisons.resolve(store, self.position, follows=follows), training=training)

    def _compare(self, store: PatientStore) -> None:
        """If this replica is the first member, publish a digest of its weights; otherwise, begin to compare its
        weights with the first member's digest.
        """
        position = self.position
        if (
            not self.functions
            or self._heartbeat is None
            or position.last is None
            or self._last_compared == position.step
        ):
            return
        self._last_compared = position.step
        if self._is_first_member():
            self._comparisons.publish_digest(store, position)
        else:
            # If the next round is committed already, waiting would only delay this replica further.
            late = read_commit(store, self.layout, position.step) is not None
            first = position.last.members[0].id[:2]
            self._comparisons.begin(store, position, first, wait_s=0.0 if late else self.settings.grace_s)

    def _finish_comparisons(self) -> None:
        store, follows = self.store, self.follower is not None
        self._continue_from(store, self._comparisons.finish(store, self.position, follows=follows), training=False)

    def _continue_from(self, store: PatientStore, loaded: RunPosition | None, *, training: bool) -> None:
        """Continue from the first member's weights, which have replaced those of this replica, and apply all later
        commits.

        Does nothing if `loaded` is None. Raises StateUnreadable if a commit cannot be applied, unless `training` is
        true.
        """
        if loaded is None:
            return
        step, self.position = self.position.step, loaded
        while self.position.step < step and (commit := read_commit(store, self.layout, self.position.step)) is not None:
            if not self._apply_commit(store, commit[1]):
                break
        self._on_replaced_weights(training=training)
        if self.position.step < step and not training:
            where = f"rounds {self.position.step} to {step - 1} of generation {self.generation} at {store.uri}"
            raise StateUnreadable(
                f"{where} cannot be applied to the weights of the first member, because their means were deleted"
            )

    def _announce_return(self, store: PatientStore) -> None:
        """Write a record that this replica has returned, so that the others wait for it."""
        key = self.layout.here(self.position.step, self.position.rank)
        store.put(key, pack("here", self.layout.address(key), {}))

    def _others_have_finished(self, store: PatientStore) -> bool:
        """Return whether all other members of the last commit have finished with at least the number of commits that
        this replica needs.
        """
        members = () if self.position.last is None else self.position.last.members
        other_ranks = {member.id.rank for member in members} - {self.position.rank}
        departures = read_departures(store, self.layout)
        return bool(other_ranks) and other_ranks <= departures.finished_for(self.position.commits)

    def _process_id(self) -> tuple[int, int]:
        return self.position.rank, self.position.claim

    def _is_first_member(self) -> bool:
        return self.position.last is not None and self.position.last.members[0].id[:2] == self._process_id()

    def _agree_on_settings(self, store: PatientStore) -> None:
        """Start the run with this replica's settings, or compare them with those of the existing run. Raises
        GenerationRefused if they differ.
        """
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
        if differing := sorted(name for name in mine if about.get(name) != mine[name]):
            got, expected = (
                {name: _shorten(about.get(name)) for name in differing},
                {name: mine[name] for name in differing},
            )
            raise GenerationRefused(explain(where, got=got, expected=expected, fix=fix))
        # Without a readable run, all settings would have differed above.
        assert run is not None
        self.layout = self._state.layout = run.layout
        if store.size(self.layout.key("closed")) is not None:
            raise GenerationRefused(explain(where, got="a run that was closed", expected="an open run", fix=fix))

    def _catch_up(self, store: PatientStore, *, margin: int) -> bool:
        """Apply commits until this replica is at most `margin` commits behind the run. Returns whether its weights
        were replaced.
        """
        if read_commit(store, self.layout, self.position.step + margin) is None:
            return False
        replaced = False
        if self.functions and (newest := self._state.newest(store, self.position, margin=margin)) is not None:
            self.position, replaced = newest, True
            self._comparisons.agreed = newest.step
        while (commit := read_commit(store, self.layout, self.position.step + margin)) is not None:
            next_commit = commit if not margin else read_commit(store, self.layout, self.position.step)
            if next_commit is None or not self._apply_commit(store, next_commit[1]):
                # Ask for a newer state, because this commit cannot be applied.
                store.put(self.layout.key("wanted", f"{self.position.rank:05d}"), b"")
                break
            replaced = bool(self.functions)
        return replaced

    def _apply_commit(self, store: PatientStore, outcome: RoundOutcome) -> bool:
        """Apply a commit without taking part in its round. Returns False if that is not possible."""
        if outcome.base != self.position.base:
            return False
        if self.functions:
            if self.follower is None:
                return False
            vector = self.make_vector(self.follower.blanks(self.position.step))
            round = self.new_round(store, vector, weight=0.0)
            if round.fetch_commit(outcome) != "commit":
                return False
            self.follower.apply(self.position.step, vector.tensors)
        self._advance(outcome)
        return True

    def make_vector(self, tensors: list) -> RoundVector:
        """Return the tensors of a round as one vector, divided into shards among the members of the last commit."""
        last = self.position.last
        parties = self.settings.world_size if last is None else len(last.members)
        return RoundVector(tensors, parties=parties, shard_elements=max(1, self.settings.shard_bytes // 4))

    def new_round(
        self, store: PatientStore, vector: RoundVector, *, weight: float, feedback: ErrorFeedback | None = None
    ) -> Round:
        """Return a Round object with which this replica can take part in the round of the current step."""
        return Round(store, self.layout, self.settings, self.position, vector, weight, self.pool, feedback=feedback)

    def _advance(self, outcome: RoundOutcome) -> None:
        position = self.position
        base = _next_history(position.base, position.step, outcome) if self.functions else STATELESS
        self.position = replace(position, step=position.step + 1, base=base, last=outcome, first_trial=0)

    def _on_replaced_weights(self, *, training: bool) -> None:
        """Make this replica join rounds with weight zero until its training has started from the new global weights.

        Updates that were trained from other weights must not be averaged.
        """
        if self.follower is not None:
            self.follower.restore()
            self.healing = int(training)
        else:
            # Without a follower, each round restores only its own fragment.
            self.healing = self.num_fragments

    def _on_void(self, ended: RoundResult) -> None:
        self.position = replace(self.position, first_trial=ended.trials)
        self._num_voids += 1
        if self.num_fragments == 1 or self.follower is not None:
            self.healing = max(0, self.healing - 1)
        elif self._num_voids >= _MAX_VOIDS:
            fix = "Pass the outer loop to manager.follow(), which restores all fragments at once."
            raise RoundError(f"round {self.position.step}: every replica was healed and none may be averaged. {fix}")


def _next_history(base: str, step: int, outcome: RoundOutcome) -> str:
    """Return the digest of a replica's commit history after one more commit. Two replicas have the same digest
    exactly if they applied the same commits.
    """
    return digest({"before": base, "step": step, "means": outcome.means, "members": outcome.members})


def _shorten(value: object) -> object:
    """Return a value written by another replica, shortened for use in a message."""
    return value if value is None or isinstance(value, int) else str(value)[:80]


# Retention: seals and outcomes are never deleted, offers and means after some rounds.

_KEPT_STATES = 2
# "/00000012/" in a key; not "/12/"
_STEP = re.compile(r"/(\d{8})/")


class _Retention:
    """Deletes objects that no replica needs any more. Only the first member does this, which saves requests.

    The shards of offers are deleted after `keep_rounds` commits, because until then they may be needed to recompute a
    damaged mean. The two newest states are kept, and so are all means since the older of them, because a replica that
    loads this state applies the means.
    """

    def __init__(self, layout: Layout, keep_rounds: int) -> None:
        self._layout, self._keep_rounds = layout, keep_rounds
        self._offers_from = self._means_from = -1  # -1: unknown

    def sweep(self, store: PatientStore, step: int, names: Sequence[str]) -> None:
        """Delete objects that are no longer needed at this step. `names` are the names of the readable states,
        newest first.
        """
        for name in names[_KEPT_STATES:]:
            store.delete([self._layout.key("states", name), *store.keys(self._layout.key("statedata", name))])
        kept_names = names[:_KEPT_STATES]
        if self._offers_from < 0:
            self._offers_from = self._find_oldest_round(store)
            self._means_from = max(0, self._offers_from - 1)
        offers_until = step - self._keep_rounds
        means_until = min(offers_until, step_of(kept_names[-1])) if kept_names else offers_until - self._keep_rounds
        for old in range(self._offers_from, offers_until):
            store.delete(store.keys(self._layout.shards(old)))
        for old in range(self._means_from, means_until):
            store.delete(store.keys(self._layout.round(old, "mean")))
        self._offers_from = max(self._offers_from, offers_until)
        self._means_from = max(self._means_from, means_until)

    def _find_oldest_round(self, store: PatientStore) -> int:
        """Return the first round that still has shards. Those of older rounds may have been deleted by earlier first
        members.
        """
        keys = store.keys(self._layout.key("d"))
        match = _STEP.search(keys[0].removeprefix(self._layout.key("d"))) if keys else None
        return int(match[1]) if match else 0
