"""The last look before text leaves the machine: at requests to teachers and at exports, as they are about to go out.

`crf ingest` takes secrets out. What is sent may still hold one: the run was made by older rules, or elsewhere, a
variable was set since, a state was made by hand, a teacher wrote it. So what goes out is read back from its own bytes
and looked at again, with the rules of `privacy`. A find names the place, the kind and an id of the text, never the
value.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

import orjson

from composer_replication.errors import InputError, RunError, explain
from composer_replication.privacy import Scrubber, secret_looking_environment
from composer_replication.runs import RunDir

_MAX_KNOWN = 1 << 17
_MAX_TOLD = 10
_ID_BYTES = 6


@dataclass(frozen=True)
class Find:
    """A text that looks as if it held a secret: where, and how many of which kind."""

    place: str
    kinds: Mapping[str, int]
    digest: bytes = field(repr=False)

    @property
    def id(self) -> str:
        """What `--allow` takes: of the whole text, and slow to make, for a text may be little more than a password."""
        return _slow_hash(self.digest)

    def __str__(self) -> str:
        return f"{self.place}: {_listed(self.kinds)} (id {self.id})"


class LastGate:
    """Looks at what goes out. Texts are known by their digest: one that stands in every state is looked at once.

    `environment` is where known values come from, as at ingest; `allowed` are ids of texts that somebody has looked at.
    """

    is_open = False

    def __init__(self, environment: Mapping[str, str], *, allowed: Iterable[str] = ()) -> None:
        values = secret_looking_environment(environment)
        self._texts, self._ids = Scrubber(env_values=values), Scrubber(env_values=values, entropy=False)
        self._allowed = frozenset(allowed)
        self._known: dict[bytes, Mapping[str, int]] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def in_request(self, body: bytes, place: str) -> list[Find]:
        """What is found in the bytes of a request to a chat-completions endpoint."""
        if self.is_open:
            return []
        data: Any = orjson.loads(body)
        parts = [("parameters", {key: value for key, value in data.items() if key not in ("messages", "tools")}, False)]
        parts += [("tools", data.get("tools"), True)]
        for number, message in enumerate(data["messages"], start=1):
            parts.append((f"message {number} ({message.get('role')})", message, True))
        return [
            find
            for name, part, is_text in parts
            if part and (find := self.look(part, f"{place}, {name}", is_text=is_text)) is not None
        ]

    def look(self, part: Any, place: str, *, is_text: bool = True) -> Find | None:
        """What is found in one part of something that goes out: plain JSON data.

        `is_text=False` is for what a person typed into a setting, where a random word is a name.
        """
        if self.is_open:
            return None
        digest = hashlib.sha256(bytes_of(part)).digest()
        kinds = self._known.get(digest)
        if kinds is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            kinds = self._known[digest] = self._kinds(part, is_text)
        if not kinds:
            return None
        find = Find(place, kinds, digest)
        return None if self._allowed and find.id in self._allowed else find

    def _kinds(self, part: Any, is_text: bool) -> Mapping[str, int]:
        try:
            view = _view_of(part)
            kinds = self._found_in(view, is_text)
            if not kinds and view.joined:  # a secret may lie across the pieces; glued words are random, and no find
                names = self._ids.scope()
                for text in view.joined:
                    names.text(text)
                return names.report.counts
            return kinds
        except RecursionError:  # nested too deeply to be walked
            texts = (self._texts if is_text else self._ids).scope()
            texts.text(_flat_text(part))
            return texts.report.counts

    def _found_in(self, view: _OutgoingView, is_text: bool) -> Mapping[str, int]:
        texts, names = self._texts.scope(), self._ids.scope()
        (texts if is_text else names).value(view.value)
        names.value(view.shown)
        for identity in view.ids:
            names.text(identity)
        return Counter(texts.report.counts) + Counter(names.report.counts)


@lru_cache(maxsize=4096)
def _slow_hash(digest: bytes) -> str:
    return hashlib.scrypt(digest, salt=b"composer_replication find", n=2**14, r=8, p=1, dklen=_ID_BYTES).hex()


def _listed(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} x{number}" for kind, number in sorted(kinds.items()))


# What the last gate looks at in a part of something that goes out: plain JSON data, with what its shape would hide.
#
# Names say what fields hold, so a part is looked at as data, not as text. But data hides some things: ids are random by
# nature; arguments are text that means data, in which a name may stand twice; the texts of a message may be one text in
# pieces; a schema names a field in one place and shows its values in another; and what is nested very deeply cannot be
# walked at all.

# Ids are random and most of them mean nothing: only rules that know a kind of key look at them, as at ingest.
_IDS = {"id", "parent_id", "state_id", "tool_call_id", "source_call_id", "call_id", "turn_id", "session_id"}


_AS_GIVEN = frozenset(("arguments", "parameters"))  # a tool's own fields, whatever they are called
_SHOWN_VALUES = frozenset(("enum", "const", "examples", "example", "default"))
_NUMBERS = (int, float)


@dataclass
class _OutgoingView:
    """A part without ids and numbers; its ids; texts that stand there in pieces; values that a schema shows."""

    value: Any = None
    ids: list[str] = field(default_factory=list[str])
    joined: list[str] = field(default_factory=list[str])
    shown: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


def _view_of(part: Any) -> _OutgoingView:
    """RecursionError where a part is nested too deeply; `flat_text` is for that one."""
    view = _OutgoingView()
    view.value = _seen(part, view)
    return view


def bytes_of(part: Any) -> bytes:
    """What tells a part from another one."""
    try:
        return orjson.dumps(part)
    except orjson.JSONEncodeError:  # nested too deeply
        return _flat_text(part).encode("utf-8", "surrogatepass")


def _flat_text(part: Any) -> str:
    """All names and values of a part, a line each, however deeply they are nested."""
    lines, pending = list[str](), [("", part)]
    while pending:
        name, value = pending.pop()
        if isinstance(value, dict):
            pending += [(str(key), child) for key, child in cast("dict[Any, Any]", value).items()]
        elif isinstance(value, list):
            pending += [(name, child) for child in cast("list[Any]", value)]
        else:
            lines.append(f"{json.dumps(name)}: {value if isinstance(value, str) else json.dumps(value)}")
    return "\n".join(lines)


def _seen(value: Any, view: _OutgoingView) -> Any:
    if isinstance(value, list):
        items = cast("list[Any]", value)
        texts = [text for block in items if isinstance(block, dict) and isinstance(text := block.get("text"), str)]
        if len(texts) > 1:
            view.joined.append("".join(texts))
        return [_seen(child, view) for child in items]
    if not isinstance(value, dict):
        return value
    return dict(_fields(cast("dict[str, Any]", value), view))


def _fields(record: dict[str, Any], view: _OutgoingView) -> Iterator[tuple[str, Any]]:
    for key, value in record.items():
        if key in _IDS and isinstance(value, str):
            view.ids.append(value)
        elif key in _AS_GIVEN:
            arguments = arguments_as_data(value)
            view.shown += _shown_values(arguments)
            yield key, arguments
        elif not ((key == "logprobs" or key.endswith("_token_ids")) and _is_numbers(value)):
            yield key, _seen(value, view)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(number, _NUMBERS) for number in cast("list[Any]", value))


def arguments_as_data(arguments: Any) -> Any:
    """Return arguments that are written as JSON text as what they mean, where a name that is written twice has both
    values; anything else unchanged."""
    if not isinstance(arguments, str):
        return arguments
    try:
        orjson.loads(arguments)
        return json.loads(arguments, object_pairs_hook=_with_all_values)
    except (orjson.JSONDecodeError, ValueError, RecursionError):
        return arguments


def _with_all_values(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) == len(pairs):
        return record
    values: dict[str, list[Any]] = {}
    for name, value in pairs:
        values.setdefault(name, []).append(value)
    return {name: several[0] if len(several) == 1 else several for name, several in values.items()}


def _shown_values(schema: Any) -> Iterator[dict[str, Any]]:
    """Of every property of a JSON schema that shows values: its name, with them."""
    if isinstance(schema, list):
        for inner_schema in cast("list[Any]", schema):
            yield from _shown_values(inner_schema)
    elif isinstance(schema, dict):
        record = cast("dict[str, Any]", schema)
        properties: Any = record.get("properties")
        for name, property_schema in properties.items() if isinstance(properties, dict) else ():
            values = list(_values_in(property_schema))
            if values:
                yield {name: values}
        for inner_schema in record.values():
            yield from _shown_values(inner_schema)


def _values_in(schema: Any) -> Iterator[Any]:
    """The values that a property's schema shows, also in its alternatives and items; those of inner properties not."""
    if isinstance(schema, list):
        for inner_schema in cast("list[Any]", schema):
            yield from _values_in(inner_schema)
    elif isinstance(schema, dict):
        for key, value in cast("dict[str, Any]", schema).items():
            if key in _SHOWN_VALUES:
                yield from cast("list[Any]", value) if isinstance(value, list) else (value,)
            elif key != "properties":
                yield from _values_in(value)


class OpenGate(LastGate):
    """Lets everything through: somebody has said `--no-scrub` here."""

    is_open = True

    def __init__(self) -> None:
        super().__init__({})


def gate_of(
    run: RunDir,
    environment: Mapping[str, str],
    *,
    no_scrub: bool,
    allowed: Iterable[str] = (),
    given: LastGate | None = None,
) -> LastGate:
    """The gate for what is made from a run; one that was ingested with `--no-scrub` needs the flag once more.

    A gate that is `given` is the one, but lets nothing of such a run through unless it is the open one.
    """
    if no_scrub or (given is not None and given.is_open):
        return given or OpenGate()
    if run.meta("conversations").settings.get("scrubbed") is not True:
        fix = (
            "`crf ingest PATH... -o NEW_RUN` without --no-scrub takes the secrets out; or "
            "type --no-scrub here as well (in Python: the gate OpenGate()): "
            "everything goes out as the logs hold it"
        )
        raise RunError(explain(str(run.root), got="a run made with --no-scrub", expected="a scrubbed one", fix=fix))
    return given or LastGate(environment, allowed=allowed)


def refusal(what: str, finds: Sequence[Find]) -> InputError:
    """The error for something that does not go out: every kind, the first places, and what to do about them."""
    kinds: Counter[str] = Counter()
    for find in finds:
        kinds.update(find.kinds)
    more = len(finds) - _MAX_TOLD
    locations = [f"  {find}" for find in finds[:_MAX_TOLD]] + ([f"  and {more:,} more"] if more > 0 else [])
    steps = (
        "`crf ingest PATH... -o RUN --reread` takes out what the rules and this environment know by now",
        "`crf forget SESSION --run RUN` leaves a session out",
        "`--allow ID` lets a text through that holds no secret (may be repeated)",
        "`--no-scrub`, typed here, lets everything through",
    )
    number = (
        f"{len(finds):,} text{'s that look as if they' if len(finds) > 1 else ' that looks as if it'} held a secret"
    )
    got = f"{number} ({_listed(kinds)})"
    fix = "\n".join(["The places:", *locations, "What to do:", *(f"  {step}" for step in steps)])
    return InputError(explain(what, got=got, expected="none; nothing of it went out", fix=fix))


_IDS |= {"trajectory_id", "conversation_id", "timestamp"}


_JSON_SCALAR = re.compile(r'"(?:[^"\\]|\\.)*+"|(?<![\w.-])-?\d++(?![\w.])')  # `"a \"b\""`, `4821`


def rewritten(text: str, data: Any, clean: Any) -> str:
    """Return JSON text in which the strings and numbers that differ between `data` and `clean` are replaced."""
    changes = dict(_changes(data, clean))

    def replaced(match: re.Match[str]) -> str:
        new = changes.get(json.loads(match[0]))
        return match[0] if new is None else json.dumps(new, ensure_ascii=text.isascii())

    return _JSON_SCALAR.sub(replaced, text)


def _changes(data: Any, clean: Any) -> Iterator[tuple[str | int, str]]:
    if isinstance(data, str | int) and isinstance(clean, str):
        if data != clean:
            yield data, clean
    elif isinstance(data, dict) and isinstance(clean, dict):
        for (old_name, old), (new_name, new) in zip(data.items(), clean.items(), strict=True):
            yield from _changes(old_name, new_name)
            yield from _changes(old, new)
    elif isinstance(data, list) and isinstance(clean, list):
        for old, new in zip(data, clean, strict=True):
            yield from _changes(old, new)
