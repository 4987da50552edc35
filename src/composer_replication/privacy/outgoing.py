"""Check text for secrets right before it leaves the machine, in requests to teachers and in exports.

`crf ingest` redacts secrets, but outgoing text may still hold one: the run was made by older rules or elsewhere, a
variable was set since, a state was written by hand, or a teacher wrote it. So outgoing bytes are parsed and scanned
again with the rules of `privacy`. A find reports the location, the kind and an id of the text, never the value.
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
    """A text that may hold a secret: its location, and the number of secrets by kind."""

    location: str
    kinds: Mapping[str, int]
    digest: bytes = field(repr=False)

    @property
    def id(self) -> str:
        """The id that `--allow` takes.

        It covers the whole text, and it is slow to compute because a text may be little more than a password.
        """
        return _slow_hash(self.digest)

    def __str__(self) -> str:
        return f"{self.location}: {_listed(self.kinds)} (id {self.id})"


class LastGate:
    """Scans outgoing text. Texts are cached by digest, so that one in every state is scanned once.

    `environment` supplies known values, as at ingest; `allowed` are ids of texts that somebody has reviewed.
    """

    is_open = False

    def __init__(self, environment: Mapping[str, str], *, allowed: Iterable[str] = ()) -> None:
        values = secret_looking_environment(environment)
        # Ids are random by nature, so the entropy layer must not judge them.
        self._texts, self._ids = Scrubber(env_values=values), Scrubber(env_values=values, entropy=False)
        self._allowed = frozenset(allowed)
        self._kinds_by_digest: dict[bytes, Mapping[str, int]] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def in_request(self, body: bytes, location: str) -> list[Find]:
        """Return the finds in the bytes of a request to a chat-completions endpoint."""
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
        """Return the find in one part of an outgoing document, given as plain JSON data; None if it is clean.

        `is_text=False` is for values that a person typed into a setting, where a random word is a name.
        """
        if self.is_open:
            return None
        digest = hashlib.sha256(bytes_of(part)).digest()
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
            if not kinds and view.joined:  # a secret may cross the pieces; joined words look random, but are no find
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
    # scrypt makes it costly to guess a short text from its id, which is printed and may end up in a log.
    return hashlib.scrypt(digest, salt=b"composer_replication find", n=2**14, r=8, p=1, dklen=_ID_BYTES).hex()


def _listed(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} x{number}" for kind, number in sorted(kinds.items()))


# Parts are scanned as data, not as text, because names say what fields hold. But data hides some things, which the view
# below undoes: ids are random by nature; arguments are text that is itself data, where a name may occur twice; the
# texts of a message may be one text in pieces; a schema names a field here and shows its values there; and very deep
# nesting cannot be walked at all.

# Ids are random, and most are harmless: only rules for a kind of key scan them, as at ingest.
_IDS = frozenset(
    (
        *("id", "parent_id", "state_id", "tool_call_id", "source_call_id", "call_id", "turn_id", "session_id"),
        *("trajectory_id", "conversation_id", "timestamp"),
    )
)


_FIELDS_OF_TOOLS = frozenset(("arguments", "parameters"))  # their fields are the tool's own, whatever they are called
_EXAMPLE_KEYWORDS = frozenset(("enum", "const", "examples", "example", "default"))
_NUMBERS = (int, float)


@dataclass
class _OutgoingView:
    """A part without ids and numbers, its ids, texts that it holds in pieces, and values that a schema shows."""

    value: Any = None
    ids: list[str] = field(default_factory=list[str])
    joined: list[str] = field(default_factory=list[str])
    examples: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


def _view_of(part: Any) -> _OutgoingView:
    """Return the view of a part. Raises RecursionError if it is nested too deeply; `_flat_text` handles those."""
    view = _OutgoingView()
    view.value = _without_ids(part, view)
    return view


def bytes_of(part: Any) -> bytes:
    """Return bytes that identify a part."""
    try:
        return orjson.dumps(part)
    except orjson.JSONEncodeError:  # nested too deeply
        return _flat_text(part).encode("utf-8", "surrogatepass")


def _flat_text(part: Any) -> str:
    """Return all names and values of a part, one per line, however deeply they are nested."""
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
        # A secret may be cut between the text blocks of one message.
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
    """Return arguments written as JSON text as data, and anything else unchanged.

    A name that occurs twice has both values.
    """
    if not isinstance(arguments, str):
        return arguments
    try:
        # orjson is the strict parser (json would take NaN), and json has the hook that sees repeated names.
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
    """Yield, for each property of a JSON schema that shows values, its name with them."""
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
    """Yield the values that a property's schema shows, in alternatives and items too, but not in inner properties."""
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


def gate_of(
    run: RunDir,
    environment: Mapping[str, str],
    *,
    no_scrub: bool,
    allowed: Iterable[str] = (),
    gate: LastGate | None = None,
) -> LastGate:
    """Return the gate for what is made from a run. One ingested with `--no-scrub` needs the flag again.

    A `gate` is used as it is, but lets nothing of such a run through unless it is an open one.
    """
    if no_scrub or (gate is not None and gate.is_open):
        return gate or OpenGate()
    if run.meta("conversations").settings.get("scrubbed") is not True:
        fix = (
            "Ingest again without --no-scrub (`crf ingest PATH... -o NEW_RUN`) to redact secrets, or pass --no-scrub "
            "here as well (in Python: gate=OpenGate()) to send everything as it is in the logs"
        )
        raise RunError(explain(str(run.root), got="a run made with --no-scrub", expected="a scrubbed run", fix=fix))
    return gate or LastGate(environment, allowed=allowed)


def refusal(what: str, finds: Sequence[Find]) -> InputError:
    """Return the error for refused text: every kind, the first locations, and what to do about them."""
    kinds: Counter[str] = Counter()
    for find in finds:
        kinds.update(find.kinds)
    more = len(finds) - _MAX_LISTED
    locations = [f"  {find}" for find in finds[:_MAX_LISTED]] + ([f"  and {more:,} more"] if more > 0 else [])
    steps = (
        "`crf ingest PATH... -o RUN --reread` redacts what the current rules and environment know",
        "`crf forget SESSION --run RUN` removes a session",
        "`--allow ID` lets a text through that holds no secret (repeatable)",
        "`--no-scrub` on this command lets everything through",
    )
    got = f"{len(finds):,} text{'s' if len(finds) > 1 else ''} that may hold a secret ({_listed(kinds)})"
    fix = "\n".join(["Locations:", *locations, "What to do:", *(f"  {step}" for step in steps)])
    return InputError(explain(what, got=got, expected="none; nothing was sent", fix=fix))


# `"a \\"b\\""`, `4821`; not `a4821`.
_JSON_SCALAR = re.compile(r'"(?:[^"\\]|\\.)*+"|(?<![\w.-])-?\d++(?![\w.])')


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
