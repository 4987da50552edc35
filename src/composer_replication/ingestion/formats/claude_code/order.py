"""Records of a Claude Code log put where they belong: one of several copies, and each behind the record it follows.

A log is written in the order of its links. Where a file is not, a record was copied or moved; the records around it are
well, and what they name says where it stood.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice

from composer_replication.ingestion.formats.claude_code.record import Entry
from composer_replication.ingestion.reading.source import IngestReport

_BEFORE, _ITSELF, _BEHIND = range(3)


def without_copies(entries: list[Entry], file: str, report: IngestReport) -> list[Entry]:
    """Every uuid once: of several records with one name that which fits its neighbours best keeps it.

    Copies of its message are left out and counted; another message under a name that is taken gets a name of its own.
    """
    number_of = Counter(entry.uuid for entry in entries)
    if len(number_of) == len(entries):
        return entries
    first = {entry.uuid: at for at, entry in reversed(list(enumerate(entries)))}
    positions: dict[str, list[int]] = {}
    for at, entry in enumerate(entries):
        if number_of[entry.uuid] > 1:
            positions.setdefault(entry.uuid, []).append(at)
    left_out: set[int] = set()
    for same in positions.values():
        holder = entries[_best_place(entries, same, first)]
        for at in same:
            if (duplicate := entries[at]) is not holder:
                report.skip("duplicate uuid", file, duplicate.line)
                if not _has_own_message(duplicate, holder):
                    left_out.add(at)
    return [entry for at, entry in enumerate(entries) if at not in left_out]


def _best_place(entries: list[Entry], same: list[int], first: dict[str, int]) -> int:
    """The place that fits best, the first of equal ones; where messages differ, that which is nearer to its child."""
    fits = {at: _fit(entries, at, first) for at in same}
    messages = [None if (node := entries[at].node) is None else node.message for at in same]
    if all(message == messages[0] for message in messages):
        return max(same, key=lambda at: (fits[at][0], -at))
    return max(same, key=lambda at: (fits[at], -at))


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


def _fit(entries: list[Entry], at: int, first: dict[str, int]) -> tuple[int, int]:
    """How well a record fits its place: what it follows stands earlier, just before it, its child just behind it."""
    entry = entries[at]
    follows = entry.follows
    fit = int(follows is None or first.get(follows, at) < at)
    if any(before.uuid == follows for before in _neighbours(entries, at, -1)):
        fit += 2
    for distance, behind in enumerate(_neighbours(entries, at, 1)):
        if behind.follows == entry.uuid:
            return fit + 4, -distance
    return fit, 0


def _neighbours(entries: list[Entry], at: int, step: int) -> list[Entry]:
    """The next other record of the main thread, not many records away; of sidechains, which interleave, all of them."""
    one = entries[at]
    around = range(at + step, min(max(at + 40 * step, -1), len(entries)), step)
    neighbours = (entries[index] for index in around if entries[index].is_sidechain == one.is_sidechain)
    near = (entry for entry in neighbours if entry.uuid != one.uuid)
    return list(near if one.is_sidechain else islice(near, 1))


def behind_their_parents(entries: list[Entry]) -> list[Entry]:
    """The records in file order, but those that were moved where they belong, behind what they follow.

    A link to a later record that does not tell of a move is left alone: it is a wrong link, not a wrong place.
    """
    moved = _moved(entries)
    if not moved:
        return entries
    order = sorted(range(len(entries)), key=lambda at: moved.get(at, (at, _ITSELF)))
    return [entries[at] for at in order]


def _moved(entries: list[Entry]) -> dict[int, tuple[int, int]]:
    """Place of a record that was moved -> the place it belongs to: just before or just behind that of another one."""
    place_of = {entry.uuid: at for at, entry in enumerate(entries)}
    forward = {
        at: place_of[name] for at, entry in enumerate(entries) if place_of.get(name := entry.follows or "", at) > at
    }
    if not forward:
        return {}
    names = {entries[at].uuid for at in forward}
    first_child: dict[str, int] = {}
    for at, entry in enumerate(entries):
        if entry.follows in names:
            first_child.setdefault(entry.follows, at)
    moved: dict[int, tuple[int, int]] = {}
    threads = _threads(entries)
    for at, parent_at in forward.items():
        child_at = first_child.get(entries[at].uuid, len(entries))
        if parent_at in moved or not _may_follow(entries[at], entries[parent_at]):
            continue  # it was put where it belongs, or the link is wrong
        if _is_just_before(entries[parent_at].follows, entries, at, moved, threads):
            moved[parent_at] = at, _BEFORE  # the parent was moved down: it fits here
        elif child_at == len(entries):
            moved[at] = parent_at, _BEHIND
        elif child_at > parent_at:  # the record was moved up
            moved[at] = child_at, _BEFORE
    return moved


def _may_follow(entry: Entry, parent: Entry) -> bool:
    """Whether a link may be right: never to another thread, and in sidechains, which interleave, not to any message."""
    if entry.is_sidechain != parent.is_sidechain or entry.agent != parent.agent:
        return False
    node, above = entry.node, parent.node
    if not entry.is_sidechain or node is None or above is None or node.begins_turn:
        return True
    if node.kind == "assistant":
        return above.kind != "assistant" or above.message_key == node.message_key
    return not set(node.answered).isdisjoint(above.called)


def _threads(entries: list[Entry]) -> dict[str, str]:
    """Any record -> the thread it is of by its link: the main one, or a sidechain, by its first record."""
    thread_of: dict[str, str] = {}
    for entry in entries:
        thread_of[entry.uuid] = thread_of.get(entry.follows or "", entry.uuid) if entry.is_sidechain else ""
    return thread_of


def _is_just_before(
    name: str | None, entries: list[Entry], at: int, moved: dict[int, tuple[int, int]], threads: dict[str, str]
) -> bool:
    """Whether this record is the last of its thread before a place; sidechains may interleave."""
    thread = threads.get(name or "")
    around = range(at - 1, max(at - 40, -1), -1)
    names = (entries[index].uuid for index in around if index not in moved)
    return thread is not None and next((uuid for uuid in names if threads[uuid] == thread), None) == name
