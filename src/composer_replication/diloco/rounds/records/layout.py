"""Where the objects of a run lie, and which names are the protocol's.

Everything lies below its generation: nothing of another one is listed or read.

    g000000/about, about.1, about.2        what the run is: its id, world, payload, shapes; most of the copies count
    g000000/claims/RANK/N                  the N-th process that holds a rank; g000000/beats/RANK.N says that it lives
    g000000/left/RANK.N                    it said goodbye: at which step, and whether it had finished
    g000000/r/STEP/here/RANK               it was not in the round before and is back
    g000000/r/STEP/offer/RANK.N.TRIAL      a manifest; its shards are g000000/d/STEP/RANK.N.TRIAL/SHARD
    g000000/r/STEP/seal/ATTEMPT            which offers count
    g000000/r/STEP/mean/ATTEMPT/SHARD-SHA-MARK  a shard of the mean: its checksum, and a mark of the offers it is of
    g000000/r/STEP/out/ATTEMPT             how the attempt ended; ATTEMPT.1, ATTEMPT.2, ... where that is unreadable
    g000000/genesis                        which state is the run's first; genesis.1, ... where that is unreadable
    g000000/states/STEP.RANK.N             a published state; its chunks are g000000/statedata/STEP.RANK.N/CHUNK
    g000000/sums/STEP                      a digest of the first member's weights at that step
    g000000/wanted/RANK                    somebody needs a newer state

A record holds its address: the id of its run and its own key. `wanted` is an empty mark, which costs a state that is
published early. Shards, means and chunks are tensors, with checksums in the records that name them.

Seals and outcomes are never deleted: whoever wakes up late finds that its round is over.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from composer_replication.diloco.rounds.records.kinds import OfferId

_OFFER = re.compile(r"(\d{5})\.(\d{1,9})\.(\d{1,9})")
_MEAN = re.compile(r"(\d{5})-([0-9a-f]{64})-[0-9a-f]{16}")
_MARK_CHARACTERS = 16
_STATE = re.compile(r"(\d{8})\.(\d{5})\.(\d{1,9})")
_OUTCOME = re.compile(r"(\d{1,9})(?:\.(\d{1,9}))?")  # "0", "0.1"


@dataclass(frozen=True)
class Layout:
    generation: int
    family: str = "g"  # all-reduces without a manager lie beside the runs, not among them
    run: str = ""  # the id of the run, which its first replica drew

    def address(self, key: str) -> str:
        """Return what a record at this key holds, so that a copy anywhere else is refused."""
        return f"{self.run}:{key}"

    def about(self, copy: int) -> str:
        return self.key(_slotted("about", copy))

    def key(self, *parts: str) -> str:
        return "/".join((f"{self.family}{self.generation:06d}", *parts))

    def round(self, step: int, *parts: str) -> str:
        return self.key("r", f"{step:08d}", *parts)

    def offer(self, step: int, offer: OfferId) -> str:
        return self.round(step, "offer", str(offer))

    def shards(self, step: int, *parts: str) -> str:
        return self.key("d", f"{step:08d}", *parts)

    def shard(self, step: int, offer: OfferId, shard: int) -> str:
        return self.shards(step, str(offer), f"{shard:05d}")

    def seal(self, step: int, attempt: int) -> str:
        return self.round(step, "seal", str(attempt))

    def outcome(self, step: int, attempt: int, slot: int = 0) -> str:
        return self.round(step, "out", _slotted(str(attempt), slot))

    def genesis(self, slot: int = 0) -> str:
        return self.key(_slotted("genesis", slot))

    def mean(self, step: int, attempt: int, shard: int, sha256: str, mean_of: str) -> str:
        return self.round(step, "mean", str(attempt), _mean_name(shard, sha256, mean_of))

    def here(self, step: int, rank: int) -> str:
        return self.round(step, "here", f"{rank:05d}")

    def claim(self, rank: int, *number: int) -> str:
        return self.key("claims", f"{rank:05d}", *map(str, number))

    def beat(self, rank: int, claim: int) -> str:
        return self.key("beats", f"{rank:05d}.{claim}")

    def left(self, *rank_and_claim: int) -> str:
        return self.key("left", *([f"{rank_and_claim[0]:05d}.{rank_and_claim[1]}"] if rank_and_claim else []))


def parse_offer(name: str) -> OfferId | None:
    """The offer that a name stands for; None for a foreign object."""
    match = _OFFER.fullmatch(name)
    return OfferId(*map(int, match.groups())) if match else None


def parse_mean(name: str, mean_of: str) -> tuple[int, str] | None:
    """Shard and checksum of a mean of these offers; None for a foreign object."""
    match = _MEAN.fullmatch(name)
    if match is None or name != _mean_name(int(match[1]), match[2], mean_of):
        return None
    return int(match[1]), match[2]


def _mean_name(shard: int, sha256: str, mean_of: str) -> str:
    """A commit takes the names that it finds, so no name may come about but by averaging the offers of the seal."""
    mark = hashlib.sha256(f"{mean_of} {shard} {sha256}".encode()).hexdigest()[:_MARK_CHARACTERS]
    return f"{shard:05d}-{sha256}-{mark}"


def _slotted(name: str, slot: int) -> str:
    """Return where a record goes whose first `slot` places hold something unreadable."""
    return f"{name}.{slot}" if slot else name


def parse_outcome(name: str) -> tuple[int, int] | None:
    """Return attempt and slot of an outcome; None for a foreign object."""
    match = _OUTCOME.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else None


def parse_state(name: str) -> tuple[int, int, int] | None:
    """Step, rank and claim of its publisher."""
    match = _STATE.fullmatch(name)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None
