"""Average tensors over a fixed number of processes that have nothing in common but an object store."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from composer_replication.diloco.rounds.claims import agree_on_run, claim_rank, refuse_if_replaced
from composer_replication.diloco.rounds.manager import ObjectStoreManager, RoundWork
from composer_replication.diloco.rounds.patience import PatientStore, RoundError, StaleRound, Traffic
from composer_replication.diloco.rounds.reading import Goodbye
from composer_replication.diloco.rounds.records import MAX_MAGNITUDE, Layout, OfferId, pack, parse_offer
from composer_replication.diloco.rounds.round import Round
from composer_replication.diloco.rounds.settings import RoundSettings, RunPosition
from composer_replication.diloco.rounds.shards import RoundVector, largest_magnitude
from composer_replication.diloco.store import ObjectStore, StoreError, open_store
from composer_replication.errors import InputError, NonFiniteError, explain

MockManager = ObjectStoreManager
_ImmediateWork = RoundWork

_SHARD_BYTES = 64 * 2**20
_PARALLEL = 4
_BASE = "all-reduce"  # constant, because offers count whatever weights they come from


class ObjectStoreAllReduce:
    """Averages a tensor over all `world_size` processes. If a process does not take part, the others get a
    TimeoutError.

    Each call is a round, numbered by a counter. A restarted process passes `round_id` to continue the count. A process
    is refused in a round in which its rank has already taken part, because the mean of that round includes the tensor
    of the earlier process.
    """

    def __init__(
        self,
        uri: str | ObjectStore,
        rank: int,
        world_size: int,
        *,
        round_id: int | None = None,
        timeout_s: float = 1800.0,
        poll_interval_s: float = 1.0,
    ) -> None:
        if not 0 <= rank < world_size:
            raise InputError(explain("rank", got=rank, expected=f"0 to {world_size - 1}"))
        self.objects: ObjectStore = open_store(uri) if isinstance(uri, str) else uri
        self.rank, self.world_size = rank, world_size
        self.round_id = round_id or 0
        self.timeout_s, self.poll_interval_s = timeout_s, poll_interval_s
        self.traffic = Traffic()
        self._layout = Layout(0, prefix="a")
        self._claim: int | None = None
        self._gave_up = False
        self._pool: ThreadPoolExecutor | None = None
        self._settings = RoundSettings(
            world_size=world_size,
            min_replicas=world_size,
            grace_s=min(30.0, timeout_s / 4),
            first_grace_s=timeout_s,
            timeout_s=timeout_s,
            poll_s=poll_interval_s,
            payload="fp32",
            mean_payload="fp32",
            shard_bytes=_SHARD_BYTES,
            parallel=_PARALLEL,
            excludes_outliers=False,
        )

    def allreduce(self, tensor: Tensor, *, name: str | None = None) -> Tensor:
        """Average the tensor over all processes in place, and return it. All processes must pass the same `name`."""
        if self.world_size > 1:
            self._refuse_non_finite(tensor)
            self._run_round(tensor, name or "")
        self.round_id += 1
        return tensor

    def _refuse_non_finite(self, tensor: Tensor) -> None:
        """Raise NonFiniteError for a tensor that a round would leave out of the mean, because this mean must include
        all processes.
        """
        # A comparison with NaN is false, so `not <=` also refuses NaN.
        largest = largest_magnitude(tensor.detach().flatten())
        if not largest <= MAX_MAGNITUDE:
            got = f"numbers up to {largest} from rank {self.rank}"
            raise NonFiniteError(explain(self._where(), got=got, expected=f"at most {MAX_MAGNITUDE:g}"))

    def _run_round(self, tensor: Tensor, name: str) -> None:
        store = PatientStore(self.objects, self.traffic, patience_s=self.timeout_s)
        if self._claim is None or self._pool is None:
            self._layout = self._find_run(store)
            # Here claims only distinguish the processes of a rank, so earlier processes are not waited for.
            self._claim = claim_rank(store, self._layout, self.rank, lease_s=0.0, takeover=True)
            self._pool = self._settings.make_pool()
        refuse_if_replaced(store, self._layout, self.rank, self._claim)
        goodbye = self._layout.goodbye(self.rank, self._claim)
        if self._gave_up:
            store.delete([goodbye])
            self._gave_up = False
        self._refuse_old_round(store)
        vector = RoundVector([tensor], parties=self.world_size, shard_elements=_SHARD_BYTES // 4)
        position = RunPosition(self.rank, self._claim, self.round_id, _BASE)
        round = Round(store, self._layout, self._settings, position, vector, 1.0, self._pool, name=name)
        try:
            ended = round.run()
        except RoundError:
            # So that a process that wakes up later does not wait for this one.
            self._gave_up = True
            goodbye_store = PatientStore(self.objects, self.traffic, patience_s=self.poll_interval_s)
            record = pack("goodbye", self._layout.address(goodbye), Goodbye(True, self.round_id)._asdict())
            with contextlib.suppress(StoreError):
                goodbye_store.put(goodbye, record)
            raise
        if ended.result != "commit":
            raise RoundError(explain(self._where(), got="no readable mean", expected="the mean of all processes"))
        self._delete_last_round(store)

    def _find_run(self, store: PatientStore) -> Layout:
        run = agree_on_run(store, self._layout, {"world_size": self.world_size})
        if run is None or run.world_size != self.world_size:
            got = "no readable world size" if run is None else f"a run of world size {run.world_size}"
            raise StaleRound(
                explain(self._where(), got=got, expected=f"world size {self.world_size}", fix="Use an empty folder.")
            )
        return run.layout

    def _refuse_old_round(self, store: PatientStore) -> None:
        folder = self._layout.round(self.round_id, "offer")
        offers = [parse_offer(key.removeprefix(f"{folder}/")) for key in store.keys(folder)]
        if any(isinstance(offer, OfferId) and offer[:2] == (self.rank, self._claim) for offer in offers):
            return
        if any(offer is not None and offer.rank == self.rank for offer in offers):
            fix = "Use an empty folder for a new run, or pass round_id to continue an old one."
            got = f"an offer of rank {self.rank} by another process"
            raise StaleRound(explain(self._where(), got=got, expected="no earlier offer of this rank", fix=fix))

    def _delete_last_round(self, store: PatientStore) -> None:
        """Delete this process's objects of the previous round. All processes that take part in the current round
        have finished the previous one.
        """
        if not self.round_id:
            return
        before = self.round_id - 1
        folder = self._layout.shards(before)
        own_keys = [key for key in store.keys(folder) if key.removeprefix(f"{folder}/").startswith(f"{self.rank:05d}.")]
        # Means belong to no rank; rank 0 deletes them.
        store.delete(own_keys if self.rank else [*own_keys, *store.keys(self._layout.round(before, "mean"))])

    def _where(self) -> str:
        return f"all-reduce {self.round_id} at {self.objects.uri}"
