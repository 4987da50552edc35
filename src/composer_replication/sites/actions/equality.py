"""Decide whether two actions are the same. Each action has a key, and equal keys mean the same action.

- An action with calls consists of its calls; the text around them is ignored.
- The order of calls matters, unless all of them are read-only.
- Edits of known files are compared by the resulting files, other calls by their canonical arguments
  (`_canonical_arguments`), shell commands by `shell_equality`.
- A reply without calls is compared as prose (`_text_key`), ignoring case, whitespace and Markdown.

As a fallback, the exact text decides: treating different actions as equal is worse than the opposite mistake.

The last part of the module, which begins at `MIN_SIMILARITY_OF_STATES`, finds near-duplicate states from two sessions.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import unicodedata
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Any, cast

from composer_replication.sites.actions.edits import FileChanges, apply_changes, compute_changes, edit_operations
from composer_replication.sites.actions.shell_command import is_read_only_command
from composer_replication.sites.actions.shell_equality import argv_key, command_key
from composer_replication.sites.actions.shell_lexer import literal_word
from composer_replication.sites.actions.shell_parser import nested_script
from composer_replication.sites.actions.tools import (
    command_parameter,
    default_arguments,
    is_descriptive_parameter,
    is_path_parameter,
    is_read_only_tool_call,
    normal_path,
    treats_null_as_absent,
)
from composer_replication.types import Action, Conversation, ToolCall, Turn

_WORKDIR = ("workdir", "cwd", "working_directory", "working_dir", "directory", "dir_path")

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionContext:
    """What is known about the state in which an action takes place.

    `tools` are JSON schemas by tool name, `files` whole files by normalized path. `may_have_left_cwd` is set if an
    earlier `cd` may have changed the shell's folder.
    """

    cwd: str | None = None
    tools: Mapping[str, Schema] = field(default_factory=dict[str, Schema])
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    may_have_left_cwd: bool = False

    @property
    def shell_folder(self) -> str | None:
        """The folder in which a command starts, or None if it is unknown."""
        return None if self.may_have_left_cwd else self.cwd


def same_action(a: Action, b: Action, context: ActionContext | None = None) -> bool:
    """Return whether two actions have the same effect in this context."""
    return action_key(a, context) == action_key(b, context)


def action_key(action: Action, context: ActionContext | None = None) -> str:
    """Return a text that is equal for two actions if and only if they count as the same in this context."""
    context = context if context is not None else ActionContext()
    if not action.calls:
        return _to_json(["text", *_text_key(action.text)])
    steps = _action_steps(action.calls, context)
    # Calls that only read do not affect each other, so their order does not matter.
    if all(is_read_only_call(call) for call in action.calls):
        steps.sort()
    return _to_json(["calls", *steps])


def action_kind(action: Action) -> str:
    """Return the tool name, several names joined by `+`, or `text` for a reply without calls."""
    return "+".join(sorted({call.name for call in action.calls})) or "text"


def _action_steps(calls: tuple[ToolCall, ...], context: ActionContext) -> list[str]:
    """Return one text per call, or one per series of edits if the resulting files are known."""
    files = {normal_path(path, context.cwd): text for path, text in context.files.items()}
    steps: list[str] = []
    changed: FileChanges = {}  # made by the edits since the last call of another kind
    for call in calls:
        call_changes = _changes_by_edit(call, context, files)
        if call_changes is not None:
            changed |= call_changes
            apply_changes(files, call_changes)
            continue
        if changed:
            steps.append(_changes_key(changed))
            changed = {}
        steps.append(_to_json(_call_key(call, context)))
        if not is_read_only_call(call):
            files.clear()  # the call may have changed any file
    return [*steps, _changes_key(changed)] if changed else steps


def _changes_by_edit(call: ToolCall, context: ActionContext, files: dict[str, str]) -> FileChanges | None:
    """Return the files that an edit changes, or None if the call is not an edit or the files are unknown."""
    operations = None if _is_unknown_tool(call.name, context) else edit_operations(call, context.cwd)
    return compute_changes(operations, files) if operations is not None else None


def _changes_key(changes: FileChanges) -> str:
    """Return the key for changed files: their paths and hashes."""
    digests = {
        path: None if text is None else hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        for path, text in changes.items()
    }
    return _to_json(["files", digests])


def _call_key(call: ToolCall, context: ActionContext) -> object:
    """Return the key for a call whose effect on files is unknown."""
    if call.raw_arguments is not None:
        return ["raw", call.name, call.raw_arguments.strip()]
    if _is_unknown_tool(call.name, context):
        return ["unknown", call.name, _canonical_value(call.arguments)]
    operations = edit_operations(call, context.cwd)
    if operations is not None and len(operations) == 1:
        # A single operation has the same effect in every tool. For several operations, some tools apply all or none.
        return ["edit", type(operations[0]).__name__, astuple(operations[0])]
    arguments = _canonical_arguments(call.name, call.arguments, context.tools.get(call.name), context.cwd)
    key = command_parameter(call.name, call.arguments)
    if key is not None:
        arguments[key] = _shell_key(call.arguments[key], _command_folder(arguments, context))
    return ["call", call.name, arguments]


def _command_folder(arguments: Mapping[str, object], context: ActionContext) -> str | None:
    """Return the folder in which a command runs: the call's own parameter, or else the shell's folder."""
    workdir = next((arguments[name] for name in _WORKDIR if isinstance(arguments.get(name), str)), None)
    return str(workdir) if workdir is not None and workdir != context.cwd else context.shell_folder


def _shell_key(command: object, folder: str | None) -> object:
    """Return the key for a shell command, given as a script or, as in Codex, as a list of words."""
    if isinstance(command, str):
        return command_key(command, folder)
    words = cast("list[Any]", command)
    if not words or not all(isinstance(word, str) for word in words):
        return _canonical_value(words)
    script = nested_script(words)
    if script is not None:
        return command_key(script, folder)
    return argv_key([literal_word(word) for word in words], folder)


def is_read_only_call(call: ToolCall) -> bool:
    """Return whether a call, to any tool, is certain to change nothing."""
    if call.raw_arguments is not None:
        return False
    key = command_parameter(call.name, call.arguments)
    if key is None:
        return is_read_only_tool_call(call.name, call.arguments)
    command = call.arguments[key]
    return isinstance(command, str) and is_read_only_command(command)


def _is_unknown_tool(name: str, context: ActionContext) -> bool:
    """Return whether the tool does not exist, but a tool whose name differs only in case does. Such a call fails."""
    return name not in context.tools and any(name.lower() == tool.lower() for tool in context.tools)


def _to_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


Tools = Mapping[str, Schema] | Sequence[Mapping[str, Any]]
"""Tool name -> JSON schema of its arguments, or a list of tools in the format of the OpenAI, Anthropic or MCP API."""
_SCHEMA_KEYS = ("parameters", "input_schema", "inputSchema")
_MIN_HEX_INTEGER = 2**64
_MAX_EXACT_INTEGER = 2**53  # above this value, several integers map to the same float


def _canonical_arguments(
    tool: str, arguments: Mapping[str, Any], schema: Schema | None, cwd: str | None
) -> dict[str, object]:
    """Return the arguments of a call in canonical form, so that equivalent calls have equal arguments.

    Defaults are filled in, paths normalized, numbers compared by value and labels dropped, as far as the schema and the
    tables in `tools` allow.
    """
    described = _properties_of(schema)
    tool_defaults = {
        name: value for name, value in default_arguments(tool).items() if schema is None or name in described
    }
    call_values = {
        name: value
        for name, value in arguments.items()
        if not is_descriptive_parameter(tool, name) and not (value is None and _null_is_absent(tool, name, schema))
    }
    defaults = {**tool_defaults, **{name: entry["default"] for name, entry in described.items() if "default" in entry}}
    full = {**defaults, **call_values}
    values = {
        name: _canonical_parameter(tool, name, value, described.get(name, {}), cwd) for name, value in full.items()
    }
    if tool == "Read" and values.get("offset") == 0:
        values["offset"] = 1  # lines are numbered from 1, and Read treats 0 as the first
    return values


def _properties_of(schema: Schema | None) -> dict[str, Schema]:
    """Return the schema of each parameter. Entries that are not objects are skipped."""
    properties = schema.get("properties") if schema is not None else None
    if not isinstance(properties, Mapping):
        return {}
    entries = cast("Mapping[str, Any]", properties).items()
    return {name: cast("Schema", entry) for name, entry in entries if isinstance(entry, Mapping)}


def tool_schemas(tools: Tools | None) -> dict[str, Schema]:
    """Return the schemas by tool name. Entries in an unknown format are skipped, since a schema is optional."""
    if tools is None:
        return {}
    if isinstance(tools, Mapping):
        return {name: schema for name, schema in tools.items() if isinstance(schema, Mapping)}
    schemas: dict[str, Schema] = {}
    for tool in tools:
        inner = tool.get("function", tool) if isinstance(tool, Mapping) else {}
        body = cast("Mapping[str, Any]", inner) if isinstance(inner, Mapping) else {}
        schema = next((body[key] for key in _SCHEMA_KEYS if isinstance(body.get(key), Mapping)), None)
        if isinstance(body.get("name"), str) and schema is not None:
            schemas[body["name"]] = schema
    return schemas


def _canonical_value(value: object, schema: Schema | None = None) -> object:
    """Return a JSON value with `1.0` written as `1` and with the defaults from a schema filled in."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < _MAX_EXACT_INTEGER else value
    if isinstance(value, int) and abs(value) >= _MIN_HEX_INTEGER:
        return {"\0integer": hex(value)}  # Python refuses to print an integer with thousands of digits
    if isinstance(value, Mapping):
        described = _properties_of(schema)
        members = cast("Mapping[str, object]", value)
        filled = {name: entry["default"] for name, entry in described.items() if "default" in entry}
        return {name: _canonical_value(member, described.get(name)) for name, member in {**filled, **members}.items()}
    if isinstance(value, list | tuple):
        items = schema.get("items") if schema is not None else None
        inner = cast("Schema", items) if isinstance(items, Mapping) else None
        return [_canonical_value(element, inner) for element in cast("list[object]", value)]
    return value


def _canonical_parameter(tool: str, name: str, value: object, described: Schema, cwd: str | None) -> object:
    if is_path_parameter(tool, name, described):
        if isinstance(value, str):
            return normal_path(value, cwd)
        if isinstance(value, list) and all(isinstance(element, str) for element in cast("list[object]", value)):
            return [normal_path(path, cwd) for path in cast("list[str]", value)]
    return _canonical_value(value, described)


def _null_is_absent(tool: str, name: str, schema: Schema | None) -> bool:
    """Return whether null means a missing parameter: the parameter is optional, and its schema does not allow null."""
    if schema is None:
        return treats_null_as_absent(tool)
    described = _properties_of(schema).get(name)
    if described is None or name in _list_of_values(schema.get("required")):
        return False
    kinds = _list_of_values(described.get("type"))
    return bool(kinds) and "null" not in kinds and None not in _list_of_values(described.get("enum"))


def _list_of_values(value: object) -> list[object]:
    """Return the entries of a list in a schema. A single name counts as a one-element list."""
    if isinstance(value, str):
        return [value]
    return cast("list[object]", value) if isinstance(value, list) else []


# "```\nx = 1\n```", also without the closing fence
_FENCED_CODE = re.compile(r"(```.*?(?:```|\Z))", re.DOTALL)
# "`x`" and "``a`b``" within a line
_INLINE_CODE = re.compile(r"(``[^\n]*?``|`[^`\n]*`)")
# "**" of "**done**" and "*" of "*.py"
_ASTERISKS = re.compile(r"\*+")
# Characters that emphasis may begin with, besides letters and digits. A dot is excluded, so `*.py` is not emphasis.
_EMPHASIS_OPENERS = "\"'“(["
# Curly quotes, the ellipsis and the no-break space, with their ASCII forms
_TYPOGRAPHY = str.maketrans({"\u2019": "'", "\u2018": "'", "\u201c": '"', "\u201d": '"', "\u2026": ".", "\u00a0": " "})
# "- a" and "  * b" at the start of a line; not "- 5", which may be a negative number
_BULLET = re.compile(r"^[ \t]*[-*+•‣◦][ \t]+(?=[A-Za-z`*_])", re.MULTILINE)
# "," and "." in "Yes, done."; not the dots in "1.5" or "a.py", and not "?", since a question is a different act
_SENTENCE_PUNCTUATION = re.compile(r"(?<=[^\s.,;:!])[.,;:!]+(?=\s|$)")
# " " in "Really ?", as in French typography
_BLANKS_BEFORE_QUESTION = re.compile(r"\s+(?=\?)")
# "x1", "a_b", "getName" and "-v" keep their case; not "Done" or "don't"
_LOOKS_LIKE_CODE = re.compile(r".*[\d_./\\()\[\]{}<>=$@#%&|+*~^].*|.*[a-z][A-Z].*|-.*", re.DOTALL)
_CODE_MARK = "\0"  # replaces backticks; `_text_key` removes it from the text first


def _text_key(text: str) -> list[str]:
    """Return the key for a reply: prose and fenced code alternating, beginning with prose.

    Case, whitespace, sentence punctuation and Markdown are ignored. Possible code keeps its case: words in backticks,
    and words with a symbol, a digit or an inner capital. Fenced code is not changed.
    """
    parts = _FENCED_CODE.split(unicodedata.normalize("NFC", text.replace(_CODE_MARK, "\ufffd")))
    return [_normalize_prose(part) if index % 2 == 0 else part for index, part in enumerate(parts)]


def _normalize_prose(text: str) -> str:
    pieces = _INLINE_CODE.split(text)
    marked = [_mark_code(piece) if index % 2 else _remove_formatting(piece) for index, piece in enumerate(pieces)]
    sentence = _BLANKS_BEFORE_QUESTION.sub("", _SENTENCE_PUNCTUATION.sub("", "".join(marked)))
    return unicodedata.normalize("NFC", " ".join(map(_normalize_word, sentence.split())))


def _remove_formatting(text: str) -> str:
    return _remove_emphasis(_BULLET.sub("", text.translate(_TYPOGRAPHY)))


def _mark_code(text: str) -> str:
    """Return inline code as one word between marks. Code that contains blanks is hex-encoded, so it stays unchanged."""
    inner = text.strip("`")
    return _CODE_MARK + (inner if inner and not re.search(r"\s", inner) else inner.encode().hex()) + _CODE_MARK


def _normalize_word(word: str) -> str:
    """Return a word in lower case, unless it may be code."""
    is_code = _CODE_MARK in word or _LOOKS_LIKE_CODE.fullmatch(word.rstrip("?"))
    return word.replace(_CODE_MARK, "") if is_code else word.casefold()


def _remove_emphasis(text: str) -> str:
    """Return the text without the asterisks that mark emphasis.

    An unpaired asterisk, as in `*.py` or `2 * 3`, stays.
    """
    pieces = list[str]()
    open_at: dict[str, int] = {}  # asterisks -> the index in `pieces` of the run that may open emphasis
    cursor = 0
    for run in _ASTERISKS.finditer(text):
        pieces.append(text[cursor : run.start()])
        cursor, stars = run.end(), run.group()
        before, after = text[run.start() - 1 : run.start()], text[cursor : cursor + 1]
        # Roughly as in CommonMark: a run closes emphasis if it follows a word, and opens emphasis if it precedes one.
        closes = bool(before) and not before.isspace() and not after.isalnum()
        if closes and stars in open_at and len(stars) <= 3:
            pieces[open_at[stars]] = ""
            open_at.clear()  # emphasis does not overlap
            continue
        if (after.isalnum() or (after and after in _EMPHASIS_OPENERS)) and not before.isalnum():
            open_at[stars] = len(pieces)
        pieces.append(stars)
    return "".join([*pieces, text[cursor:]])


# Near-duplicate states: two sessions whose last request and whose messages right before a turn are similar.
#
# Texts are compared by their pairs of adjacent words. A word with a digit or a slash counts as `#`, so that identical
# messages about different files are still similar.
#
#     similarity(a, b) = pairs in both / pairs in either          multiset Jaccard similarity
#
# The similarity of two states is the minimum over their requests and their last messages. If a text has more than 128
# pairs, only those with the smallest hashes are compared (MinHash), with a standard error of 0.04.

MIN_SIMILARITY_OF_STATES = 0.7
"""Two states are near-duplicates if their similarity is at least this."""
_NUM_LAST_MESSAGES, _MAX_TEXT = 4, 4000
# Hashes per sketch; hash bits that select a counter; tolerance for rounding in MIN_SIMILARITY_OF_STATES * length.
_SKETCH_SIZE, _BUCKET_BITS, _ROUNDING = 128, 20, 1e-9
# Multiplicative (Fibonacci) hashing: 2^64 divided by the golden ratio.
_MULTIPLIER, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
Sketch = Sequence[int]
"""The smallest hashes of the word pairs in a text, in ascending order."""
State = tuple[Sketch, Sketch]
"""The sketch of the last request, and the sketch of the last messages."""


def conversation_states(conversation: Conversation) -> Iterator[tuple[str, State]]:
    """Yield the id of each model turn, with the state before it."""
    request, last = _text_sketch(()), list[Sketch]()
    for turn in conversation.turns:
        if turn.role == "assistant" and turn.origin == "model":
            yield turn.id, (request, _smallest_hashes({digest for message in last for digest in message}))
        message = _text_sketch(_turn_texts(turn))
        last = [*last, message][-_NUM_LAST_MESSAGES:]
        request = message if turn.origin == "human" else request


def _turn_texts(turn: Turn) -> Iterator[str]:
    yield turn.role
    yield turn.text
    yield from (json.dumps([call.name, dict(call.arguments)], default=str) for call in turn.calls)
    yield from (result.text for result in turn.results)


def _text_sketch(texts: Iterable[str]) -> Sketch:
    """Return a sketch of several texts in order: the smallest hashes of their pairs of neighboring words.

    Only the first `_MAX_TEXT` characters of each text are used.
    """
    words = [_mask_names(word) for text in texts for word in text[:_MAX_TEXT].split()]
    pairs = Counter(zip(["", *words], [*words, ""], strict=True)) if words else Counter[tuple[str, str]]()
    return _smallest_hashes({_hash(*pair, repetition) for pair, count in pairs.items() for repetition in range(count)})


def _sketch_similarity(a: Sketch, b: Sketch) -> float:
    """Return the estimated Jaccard similarity of two sketches.

    It is the fraction of the smallest hashes in their union that occur in both sketches.
    """
    hashes_a, hashes_b = set(a), set(b)
    smallest = sorted(hashes_a | hashes_b)[:_SKETCH_SIZE]
    return sum(digest in hashes_a and digest in hashes_b for digest in smallest) / len(smallest) if smallest else 1.0


class StateIndex:
    """An index of the states that were trained on. States that follow different requests are never compared."""

    def __init__(self) -> None:
        self._requests, self._last_messages = _SketchIndex(), _SketchIndex()
        self._numbers: dict[bytes, int] = {}
        self._request_numbers: list[int] = []
        self._similar_requests: dict[bytes, frozenset[int]] = {}

    def add(self, state: State) -> None:
        """Add a state to the index."""
        request, last = state
        key = bytes(array("I", request))
        if key not in self._numbers:
            self._numbers[key] = self._requests.add(request)
            self._similar_requests.clear()
        self._request_numbers.append(self._numbers[key])
        self._last_messages.add(last)

    def has(self, state: State) -> bool:
        """Return whether a state is a near-duplicate of one in the index."""
        request, last = state
        key = bytes(array("I", request))
        if key not in self._similar_requests:  # the same for all states that follow a request
            matches = self._requests.similar(request) if request else (self._numbers.get(key, -1),)
            self._similar_requests[key] = frozenset(matches)
        requests = self._similar_requests[key]
        matches = self._last_messages.similar(last, accepts=lambda number: self._request_numbers[number] in requests)
        return next(matches, None) is not None


class _SketchIndex:
    """An index of sketches by their rarest hashes (prefix filtering).

    Two sketches with a similarity of at least MIN_SIMILARITY_OF_STATES share at least that fraction of their hashes.
    Sort the hashes in any fixed order, and take a prefix of each sketch with a fraction 1 - MIN_SIMILARITY_OF_STATES of
    the hashes, plus one: the two prefixes must have a hash in common. Sorting the rarest hashes first avoids comparing
    sketches that share only common phrases.
    """

    def __init__(self) -> None:
        self._sketches: list[Sketch] = []
        self._bucket_counts = array("I", bytes(4 << _BUCKET_BITS))
        self._postings: array[int] | None = None

    def add(self, digests: Sketch) -> int:
        """Add a sketch and return its number."""
        for digest in digests:
            self._bucket_counts[digest >> (32 - _BUCKET_BITS)] += 1
        self._postings = None  # the order by rarity has changed
        self._sketches.append(digests)
        return len(self._sketches) - 1

    def similar(self, query: Sketch, accepts: Callable[[int], bool] = lambda _number: True) -> Iterator[int]:
        """Yield the numbers of the near-duplicates of a nonempty sketch for which `accepts` returns True."""
        for number in dict.fromkeys(self._candidates(query)):
            if accepts(number) and _sketch_similarity(query, self._sketches[number]) >= MIN_SIMILARITY_OF_STATES:
                yield number

    def _candidates(self, query: Sketch) -> Iterator[int]:
        """Yield the numbers of the sketches that share a rare hash with the query, possibly repeatedly."""
        if self._postings is None:
            # Built on the first query, since adding a sketch changes how rare the hashes are.
            postings = (
                digest << 32 | position
                for position, indexed in enumerate(self._sketches)
                for digest in self._rarest(indexed)
            )
            self._postings = array("Q", sorted(postings))
        for digest in self._rarest(query):
            # A posting is a single integer: the hash in the upper half, the number of the sketch in the lower half.
            position = bisect_left(self._postings, digest << 32)
            while position < len(self._postings) and self._postings[position] >> 32 == digest:
                yield self._postings[position] & 0xFFFFFFFF
                position += 1

    def _rarest(self, digests: Sketch) -> Sequence[int]:
        """Return the prefix of the rarest hashes: any near-duplicate must contain at least one of them."""
        prefix_length = (
            len(digests) - math.ceil(MIN_SIMILARITY_OF_STATES * len(digests) - _ROUNDING) + 1 if digests else 0
        )
        return sorted(digests, key=lambda digest: (self._bucket_counts[digest >> (32 - _BUCKET_BITS)], digest))[
            :prefix_length
        ]


def _smallest_hashes(hashes: set[int]) -> Sketch:
    return array("I", sorted(hashes)[:_SKETCH_SIZE])


def _mask_names(word: str) -> str:
    return "#" if any(character in "/\\" or character.isdigit() for character in word) else word


def _hash(first: str, second: str, repetition: int) -> int:
    """Return a 32-bit hash of the n-th occurrence of a pair of words. The hash is the same in every process."""
    combined = (_hash_word(first) * _MULTIPLIER + _hash_word(second) + repetition * 0xD1B54A32D192ED03) & _MASK
    return ((combined ^ combined >> 29) * _MULTIPLIER & _MASK) >> 32


@lru_cache(maxsize=1 << 16)
def _hash_word(word: str) -> int:
    return int.from_bytes(blake2b(word.encode("utf-8", "replace"), digest_size=8).digest(), "big")
