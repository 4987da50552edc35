"""The texts of a pair that a recipe may look at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from composer_replication.errors import InputError, explain

TEXT_KEYS = ("chosen", "rejected", "state", "state_chosen_rejected")
"""What `text_key` may name. `state` is everything the messages hold; the last is what a pair is known by as a whole."""

# Divides the parts of a whole pair. Private-use characters: neither blank, digit nor punctuation, so that a key which
# leaves those out still tells ("ab", "c") from ("a", "bc").
_PARTED, _ESCAPE = "\ue000", "\ue001"


def pair_text(pair: Mapping[str, Any], key: str) -> str:
    """The text of a pair under one of TEXT_KEYS."""
    if key in ("chosen", "rejected"):
        return pair[key]
    if key == "state":
        return "\n".join(_leaves(pair["state_messages"]))
    return _PARTED.join(_escaped(part) for part in (*_leaves(pair["state_messages"]), pair["chosen"], pair["rejected"]))


def check_pair(pair: object, number: int) -> Mapping[str, Any]:
    """The pair, or an InputError that names what it lacks."""
    where = f"pair {number}"
    if not isinstance(pair, Mapping):
        raise InputError(explain(where, got=type(pair).__name__, expected="a DPOPair"))
    fields = cast("Mapping[str, Any]", pair)
    where = f"{where} ({fields.get('state_id')!r})"
    for key, expected_type in (("state_id", str), ("state_messages", list), ("chosen", str), ("rejected", str)):
        if not isinstance(fields.get(key), expected_type):
            raise InputError(
                explain(f"{where}, {key!r}", got=type(fields.get(key)).__name__, expected=expected_type.__name__)
            )
    if type(fields.get("n_teachers_agreeing")) is not int:
        got = repr(fields.get("n_teachers_agreeing"))
        raise InputError(explain(f"{where}, 'n_teachers_agreeing'", got=got, expected="a whole number"))
    return fields


def _escaped(part: str) -> str:
    return part.replace(_ESCAPE, _ESCAPE + _ESCAPE).replace(_PARTED, _ESCAPE + "\ue002")


def _leaves(messages: list[object]) -> Iterator[str]:
    """Keys and values of the messages, keys sorted; without recursion, for arguments may nest deeply."""
    waiting: list[object] = [*reversed(messages)]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            items_by_key = {str(key): item for key, item in cast("Mapping[object, object]", value).items()}
            for key in sorted(items_by_key, reverse=True):
                waiting += [items_by_key[key], key]
        elif isinstance(value, list | tuple):
            waiting.extend(reversed(cast("list[object]", value)))
        else:
            yield str(value)
