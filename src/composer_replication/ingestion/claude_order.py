"""Records of a Claude Code log put where they belong: one of several copies, and each behind the record it follows.

A log is written in the order of its links. Where a file is not, a record was copied or moved; the records around it are
well, and what they name says where it stood.
"""

from __future__ import annotations

from collections import Counter

from composer_replication.ingestion.claude_record import Entry
from composer_replication.ingestion.source import IngestReport


def without_copies(entries: list[Entry], file: str, report: IngestReport) -> list[Entry]:
    """Every uuid once: of several records with one name that which fits its neighbours best keeps it.

    Copies of its message are left out and counted; another message under a name that is taken gets a name of its own.
    """
    number_of = Counter(entry.uuid for entry in entries)
    if len(number_of) == len(entries):
        return entries
    first = {entry.uuid: at for at, entry in reversed(list(enumerate(entries)))}
    places: dict[str, list[int]] = {}
    for at, entry in enumerate(entries):
        if number_of[entry.uuid] > 1:
            places.setdefault(entry.uuid, []).append(at)
    left_out: set[int] = set()
    for same in places.values():
        holder = entries[max(same, key=lambda at: (_fit(entries, at, first), -at))]
        for at in same:
            if (other := entries[at]) is not holder:
                report.skip("duplicate uuid", file, other.line)
                if not _has_own_message(other, holder):
                    left_out.add(at)
    return [entry for at, entry in enumerate(entries) if at not in left_out]


def _has_own_message(entry: Entry, holder: Entry) -> bool:
    """Whether damage to a name must not cost this message; it is renamed then."""
    node = entry.node
    if node is None or not node.is_message:
        return False
    if holder.node is not None and holder.node.message == node.message:
        return False
    entry.uuid = f"line-{entry.line}"
    node.rename(entry.uuid)
    return True


def _fit(entries: list[Entry], at: int, first: dict[str, int]) -> int:
    """How well a record fits its place: what it follows stands earlier, just before it, its child just behind it."""
    entry = entries[at]
    follows = entry.follows
    before, behind = _neighbour(entries, at, -1), _neighbour(entries, at, 1)
    fit = int(follows is None or first.get(follows, at) < at)
    if before is not None and before.uuid == follows:
        fit += 2
    if behind is not None and behind.follows == entry.uuid:
        fit += 4
    return fit


def _neighbour(entries: list[Entry], at: int, step: int) -> Entry | None:
    """The next other record of the same side, not many records away: sidechains may lie between."""
    one = entries[at]
    for place in range(at + step, at + 40 * step, step):
        if not 0 <= place < len(entries):
            return None
        other = entries[place]
        if other.is_sidechain == one.is_sidechain and other.uuid != one.uuid:
            return other
    return None


def behind_their_parents(entries: list[Entry]) -> list[Entry]:
    """The records in file order, but those that were moved, and what hangs from them, behind what they follow.

    A link to a later record that does not tell of a move is left alone: it is a wrong link, not a wrong place.
    """
    place_of = {entry.uuid: at for at, entry in enumerate(entries)}
    moved = _moved(entries, place_of)
    if not moved:
        return entries
    placed: list[Entry] = []
    waiting: dict[str, list[Entry]] = {}
    held: set[str] = set()
    for at, entry in enumerate(entries):
        follows = entry.follows
        if follows is not None and (follows in held or (at in moved and place_of[follows] > at)):
            waiting.setdefault(follows, []).append(entry)
            held.add(entry.uuid)
            continue
        ready = [entry]
        while ready:
            next_one = ready.pop()
            placed.append(next_one)
            held.discard(next_one.uuid)
            ready.extend(reversed(waiting.pop(next_one.uuid, ())))
    # Links that go round in a circle let nobody go first.
    return placed + [entry for entry in entries if entry.uuid in held]


def _moved(entries: list[Entry], place_of: dict[str, int]) -> set[int]:
    """Places of records whose link to a later record says that one of the two was moved."""
    forward = {
        at: place_of[name] for at, entry in enumerate(entries) if place_of.get(name := entry.follows or "", at) > at
    }
    if not forward:
        return set()
    names = {entries[at].uuid for at in forward}
    first_child: dict[str, int] = {}
    for at, entry in enumerate(entries):
        if entry.follows in names:
            first_child.setdefault(entry.follows, at)
    moved: set[int] = set()
    moved_down: set[int] = set()
    for at, parent_at in forward.items():
        before = _before(entries, at, moved)
        if before is not None and entries[parent_at].follows == before.uuid:
            moved_down.add(parent_at)  # it fits here; others may hang from it, too
        was_moved_up = first_child.get(entries[at].uuid, len(entries)) > parent_at
        if was_moved_up or parent_at in moved_down:
            moved.add(at)
    return moved


def _before(entries: list[Entry], at: int, moved: set[int]) -> Entry | None:
    side = entries[at].is_sidechain
    around = range(at - 1, max(at - 40, -1), -1)
    return next((entries[each] for each in around if entries[each].is_sidechain == side and each not in moved), None)
