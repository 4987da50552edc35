"""Check text for secrets right before it leaves the machine, in requests to teachers and in exports.

`crf ingest` redacts secrets, but outgoing text may still contain some: the run may have been made with older rules or
on another machine, a variable may have been set since, or a person or a teacher may have written the text. Therefore
outgoing bytes are parsed and scanned again with the rules in `privacy`. A find reports the location, the kind and an id
of the text, never the value.
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

_MAX_CACHED = 1 << 17
_MAX_LISTED = 10
_ID_BYTES = 6


@dataclass(frozen=True)
class Find:
    """A text that may contain a secret: its location, and the number of secrets by kind."""

    location: str
    kinds: Mapping[str, int]
    digest: bytes = field(repr=False)

    @property
    def id(self) -> str:
        """The id to pass to `--allow`.

        The id is a hash of the whole text. Computing it is deliberately slow, so that nobody can guess a text that is
        little more than a password.
        """
        return _slow_hash(self.digest)

    def __str__(self) -> str:
        return f"{self.location}: {_listed(self.kinds)} (id {self.id})"


class LastGate:
    """Scans outgoing text. Results are cached by digest, so that a text shared by several states is scanned only once.

    `environment` supplies known secret values, as during ingest; `allowed` has the ids of texts that a person has
    reviewed.
    """

    is_open = False

    def __init__(self, environment: Mapping[str, str], *, allowed: Iterable[str] = ()) -> None:
        values = secret_looking_environment(environment)
        # Ids are random by design, so they are scanned without the entropy rules.
        self._texts, self._ids = Scrubber(env_values=values), Scrubber(env_values=values, entropy=False)
        self._allowed = frozenset(allowed)
        self._kinds_by_digest: dict[bytes, Mapping[str, int]] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def in_request(self, body: bytes, location: str) -> list[Find]:
        """Return the secrets found in the body of a request to a chat-completions endpoint."""
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
            if part and (find := self.look(part, f"{location}, {name}", is_text=is_text)) is not None
        ]

    def look(self, part: Any, location: str, *, is_text: bool = True) -> Find | None:
        """Return a Find if a part of an outgoing document, passed as plain JSON data, may contain a secret; otherwise
        None.

        `is_text=False` is for setting values typed by a person, in which a random word is usually a name.
        """
        if self.is_open:
            return None
        digest = hashlib.sha256(_bytes_of(part)).digest()
        kinds = self._kinds_by_digest.get(digest)
        if kinds is None:
            if len(self._kinds_by_digest) >= _MAX_CACHED:
                self._kinds_by_digest.clear()
            kinds = self._kinds_by_digest[digest] = self._kinds(part, is_text)
        if not kinds:
            return None
        find = Find(location, kinds, digest)
        return None if self._allowed and find.id in self._allowed else find

    def _kinds(self, part: Any, is_text: bool) -> Mapping[str, int]:
        try:
            view = _view_of(part)
            kinds = self._kinds_in(view, is_text)
            if (
                not kinds and view.joined
            ):  # a secret may cross the pieces; joined words may look random and do not count
                names = self._ids.scope()
                for text in view.joined:
                    names.text(text)
                return names.report.counts
            return kinds
        except RecursionError:  # nested too deeply to be walked
            texts = (self._texts if is_text else self._ids).scope()
            texts.text(_flat_text(part))
            return texts.report.counts

    def _kinds_in(self, view: _OutgoingView, is_text: bool) -> Mapping[str, int]:
        texts, names = self._texts.scope(), self._ids.scope()
        (texts if is_text else names).value(view.value)
        names.value(view.examples)
        for identity in view.ids:
            names.text(identity)
        return Counter(texts.report.counts) + Counter(names.report.counts)


@lru_cache(maxsize=4096)
def _slow_hash(digest: bytes) -> str:
    # scrypt makes it expensive to guess a short text from its id, which is printed and may end up in a log.
    return hashlib.scrypt(digest, salt=b"composer_replication find", n=2**14, r=8, p=1, dklen=_ID_BYTES).hex()


def _listed(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} x{number}" for kind, number in sorted(kinds.items()))


# Parts are scanned as data, not as text, because field names help to interpret values. But data hides some secrets, so
# the view below prepares it: ids are random by design and scanned separately; arguments are text that contains data,
# where a key may occur twice; the text parts of a message may be one text in pieces; a schema holds the name of a field
# and its example values in different places; and values nested too deeply are flattened.

# Ids are random, and most are harmless: only rules for a specific kind of key scan them, as during ingest.
_IDS = frozenset(
    (
        *("id", "parent_id", "state_id", "tool_call_id", "source_call_id", "call_id", "turn_id", "session_id"),
        *("trajectory_id", "conversation_id", "timestamp"),
    )
)


_FIELDS_OF_TOOLS = frozenset(("arguments", "parameters"))  # their fields belong to the tool, whatever their names are
_EXAMPLE_KEYWORDS = frozenset(("enum", "const", "examples", "example", "default"))
_NUMBERS = (int, float)


@dataclass
class _OutgoingView:
    """What is scanned of one part of a document: its value without ids and numbers, its ids, the texts that were
    split into pieces, and the example values in its schemas.
    """

    value: Any = None
    ids: list[str] = field(default_factory=list[str])
    joined: list[str] = field(default_factory=list[str])
    examples: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


def _view_of(part: Any) -> _OutgoingView:
    """Return the view of a part. Raises RecursionError if it is nested too deeply; use `_flat_text` instead."""
    view = _OutgoingView()
    view.value = _without_ids(part, view)
    return view


def _bytes_of(part: Any) -> bytes:
    """Return bytes that identify a part of a document, to compute its digest."""
    try:
        return orjson.dumps(part)
    except orjson.JSONEncodeError:  # nested too deeply
        return _flat_text(part).encode("utf-8", "surrogatepass")


def _flat_text(part: Any) -> str:
    """Return all names and values in a part of a document, one per line, at any nesting depth."""
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


def _without_ids(value: Any, view: _OutgoingView) -> Any:
    if isinstance(value, list):
        items = cast("list[Any]", value)
        texts = [text for block in items if isinstance(block, dict) and isinstance(text := block.get("text"), str)]
        # A secret may be split between the text blocks of a message.
        if len(texts) > 1:
            view.joined.append("".join(texts))
        return [_without_ids(child, view) for child in items]
    if not isinstance(value, dict):
        return value
    return dict(_fields(cast("dict[str, Any]", value), view))


def _fields(record: dict[str, Any], view: _OutgoingView) -> Iterator[tuple[str, Any]]:
    for key, value in record.items():
        if key in _IDS and isinstance(value, str):
            view.ids.append(value)
        elif key in _FIELDS_OF_TOOLS:
            arguments = arguments_as_data(value)
            view.examples += _example_values(arguments)
            yield key, arguments
        elif not ((key == "logprobs" or key.endswith("_token_ids")) and _is_numbers(value)):
            yield key, _without_ids(value, view)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(number, _NUMBERS) for number in cast("list[Any]", value))


def arguments_as_data(arguments: Any) -> Any:
    """Parse arguments that are JSON text; return anything else unchanged.

    For a repeated key, all values are kept.
    """
    if not isinstance(arguments, str):
        return arguments
    try:
        # orjson is the strict parser (json would accept NaN), and json has the hook that sees repeated keys.
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


def _example_values(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield {name: example values} for each property in a JSON schema that has example values."""
    if isinstance(schema, list):
        for inner_schema in cast("list[Any]", schema):
            yield from _example_values(inner_schema)
    elif isinstance(schema, dict):
        record = cast("dict[str, Any]", schema)
        properties: Any = record.get("properties")
        for name, property_schema in properties.items() if isinstance(properties, dict) else ():
            values = list(_values_in(property_schema))
            if values:
                yield {name: values}
        for inner_schema in record.values():
            yield from _example_values(inner_schema)


def _values_in(schema: Any) -> Iterator[Any]:
    """Yield the example values of a property, including those of alternatives and items but not those of nested
    properties.
    """
    if isinstance(schema, list):
        for inner_schema in cast("list[Any]", schema):
            yield from _values_in(inner_schema)
    elif isinstance(schema, dict):
        for key, value in cast("dict[str, Any]", schema).items():
            if key in _EXAMPLE_KEYWORDS:
                yield from cast("list[Any]", value) if isinstance(value, list) else (value,)
            elif key != "properties":
                yield from _values_in(value)


class OpenGate(LastGate):
    """A gate that lets everything through, for `--no-scrub`."""

    is_open = True

    def __init__(self) -> None:
        super().__init__({})


def outgoing_gate(
    run: RunDir,
    environment: Mapping[str, str],
    *,
    no_scrub: bool,
    allowed: Iterable[str] = (),
    gate: LastGate | None = None,
) -> LastGate:
    """Return the gate for data made from a run. A run ingested with `--no-scrub` requires the flag again.

    A given `gate` is used unchanged, but for such a run it must be an open gate.
    """
    if no_scrub or (gate is not None and gate.is_open):
        return gate or OpenGate()
    if run.meta("conversations").settings.get("scrubbed") is not True:
        fix = (
            "Ingest again without --no-scrub (`crf ingest PATH... -o NEW_RUN`) to redact secrets, or pass --no-scrub "
            "here as well (in Python: gate=OpenGate()) to send the logs unchanged."
        )
        raise RunError(
            explain(str(run.root), got="a run that was ingested with --no-scrub", expected="a scrubbed run", fix=fix)
        )
    return gate or LastGate(environment, allowed=allowed)


def refusal(what: str, finds: Sequence[Find]) -> InputError:
    """Return the error for rejected text: every kind, the first locations, and how to proceed."""
    kinds: Counter[str] = Counter()
    for find in finds:
        kinds.update(find.kinds)
    more = len(finds) - _MAX_LISTED
    locations = [f"  {find}" for find in finds[:_MAX_LISTED]] + ([f"  and {more:,} more"] if more > 0 else [])
    steps = (
        "`crf ingest PATH... -o RUN --reread` redacts the secrets that the current rules and environment identify",
        "`crf forget SESSION --run RUN` removes a session from the run",
        "`--allow ID` accepts a text that you have checked (repeatable)",
        "`--no-scrub` turns off this check for the command",
    )
    got = f"{len(finds):,} text{'s' if len(finds) > 1 else ''} that may contain a secret ({_listed(kinds)})"
    fix = "\n".join(["Nothing was sent. Locations:", *locations, "What to do:", *(f"  {step}" for step in steps)])
    return InputError(explain(what, got=got, expected="text without secrets", fix=fix))


# `"a \\"b\\""`, `4821`; not `a4821`.
_JSON_SCALAR = re.compile(r'"(?:[^"\\]|\\.)*+"|(?<![\w.-])-?\d++(?![\w.])')


def rewritten(text: str, data: Any, clean: Any) -> str:
    """Return the JSON text with those strings and numbers replaced that differ between `data` and `clean`."""
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
