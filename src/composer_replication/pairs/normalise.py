"""Filter preference pairs with a data-juicer recipe, and count the pairs that each operator drops.

A recipe is a YAML file whose `process` lists operators with their parameters. There are two backends: "native"
implements data-juicer's four default operators in plain Python, and "data_juicer" calls data-juicer itself. A filter
computes a number from a text and keeps the text if the number is within a range. The deduplicator keeps the first of
several equal texts.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import inspect
import math
import os
import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, cast

from composer_replication.errors import ArtefactNotFoundError, InputError, explain
from composer_replication.optional import available, require
from composer_replication.types import DPOPair, Message

DEFAULT_RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "replaysim" / "default.yaml"
KEPT = "kept"
Backend = Literal["native", "data_juicer"]


def _native_judge(step: _OperatorStep) -> Judge:
    """Return the function that decides whether a step keeps a text, for one pass over the pairs."""
    return _native_operator(step).judge()


def _data_juicer_judge(step: _OperatorStep) -> Judge:
    """Return the function that decides with data-juicer whether a step keeps a text, for one pass over the pairs.

    The operators are called one by one in this process. data-juicer's executor would write a job folder, logs and
    caches, and take a hundred times as long. It would also share statistics: operators of the same kind store them
    under the same name, so a filter on `rejected` would see the numbers for `chosen`. Importing data-juicer replaces
    the handlers of loguru's logger.

    Raises MissingExtraError if data-juicer is not installed.
    """
    operator = _data_juicer_operator(step)
    make_judge = _data_juicer_deduplicator if step.operator == "document_deduplicator" else _data_juicer_filter
    return make_judge(operator, step)


_BACKENDS: dict[str, Callable[[_OperatorStep], Judge]] = {"native": _native_judge, "data_juicer": _data_juicer_judge}
_FIELDS = frozenset({"state_id", "state_messages", "chosen", "rejected", "n_teachers_agreeing"})


@dataclass(slots=True)
class NormalizedDPOPair:
    """A pair with its answers as messages.

    `metadata` has the pair's other fields, and records how the pair was filtered.
    """

    state_id: str
    state_messages: list[Message]
    chosen_messages: list[Message]
    rejected_messages: list[Message]
    n_teachers_agreeing: int
    metadata: dict[str, Any]


class DJNormalizer:
    """A filter for preference pairs, which runs the operators of a data-juicer recipe in order.

    With `skip_dj`, every pair is kept. Without a `recipe_path`, the built-in `DEFAULT_RECIPE` is used. After a call to
    `normalize`, `counts` has the number of pairs that were "kept", and the number dropped by each operator.
    """

    DEFAULT_RECIPE: ClassVar[Path] = DEFAULT_RECIPE

    def __init__(
        self,
        recipe_path: str | os.PathLike[str] | None = None,
        *,
        skip_dj: bool = False,
        backend: Backend = "native",
    ) -> None:
        if backend not in _BACKENDS:
            raise InputError(explain("backend", got=repr(backend), expected=" or ".join(map(repr, _BACKENDS))))
        self.counts: dict[str, int] = {}
        self._make_judge = _BACKENDS[backend]
        self._recipe = (
            _Recipe((), "") if skip_dj else read_recipe(self.DEFAULT_RECIPE if recipe_path is None else recipe_path)
        )
        # An invalid recipe must fail here, not after the teachers have been paid.
        self._judges()
        provenance = {"backend": backend, "recipe_sha256": self._recipe.sha256}
        self._provenance: dict[str, Any] = {"skipped": True} if skip_dj else {"normalizer": provenance}

    def normalize(self, pairs: Iterable[DPOPair]) -> list[NormalizedDPOPair]:
        """Return the pairs that every operator keeps, in order. Raises InputError for a malformed pair."""
        judges = self._judges()
        self.counts = dict.fromkeys([KEPT, *(step.reason for step, _ in judges)], 0)
        normalized_pairs: list[NormalizedDPOPair] = []
        for number, raw_pair in enumerate(pairs):
            pair = _check_pair(raw_pair, number)
            reason = next((step.reason for step, keeps in judges if not keeps(_pair_text(pair, step.text_key))), KEPT)
            self.counts[reason] += 1
            if reason == KEPT:
                normalized_pairs.append(self._to_normalized_pair(pair))
        return normalized_pairs

    def _judges(self) -> list[tuple[_OperatorStep, Judge]]:
        return [(step, self._make_judge(step)) for step in self._recipe.steps]

    def _to_normalized_pair(self, pair: Mapping[str, Any]) -> NormalizedDPOPair:
        carried = {key: value for key, value in pair.items() if key not in _FIELDS}
        return NormalizedDPOPair(
            state_id=pair["state_id"],
            state_messages=list(pair["state_messages"]),
            chosen_messages=[{"role": "assistant", "content": pair["chosen"]}],
            rejected_messages=[{"role": "assistant", "content": pair["rejected"]}],
            n_teachers_agreeing=pair["n_teachers_agreeing"],
            metadata=carried | self._provenance,
        )


# A recipe is about a page long, and the YAML parser in Python takes seconds for a megabyte.
_MAX_BYTES = 1 << 16
_RECIPE_KEYS = frozenset({"process", "text_keys"})
# Paths and process counts for data-juicer's executor. They are accepted but have no effect here.
_EXECUTOR_KEYS = frozenset({"project_name", "dataset_path", "export_path", "np", "executor_type", "work_dir"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _OperatorStep:
    """An operator in a recipe, applied to one text of each pair. The pairs that it drops are counted under `reason`."""

    operator: str
    text_key: str
    parameters: Mapping[str, Any]
    reason: str
    where: str


@dataclass(frozen=True, slots=True)
class _Recipe:
    """The steps of a recipe in order, and the hash of its file."""

    steps: tuple[_OperatorStep, ...]
    sha256: str


def read_recipe(path: str | os.PathLike[str]) -> _Recipe:
    """Read a recipe file.

    Raises ArtefactNotFoundError (a FileNotFoundError) if there is no such file, and InputError if it is not a recipe.
    """
    where = f"recipe {os.fspath(path)}"
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise ArtefactNotFoundError(f"{where}: no such file. Leave out recipe_path to use the shipped recipe") from None
    except OSError as error:
        raise InputError(f"{where} cannot be read: {error.strerror}") from error
    if len(data) > _MAX_BYTES:
        raise InputError(explain(where, got=f"more than {_MAX_BYTES} bytes", expected="a page of YAML"))
    return _Recipe(_parse_steps(_parse_yaml(data, where), where), hashlib.sha256(data).hexdigest())


def _parse_steps(recipe: object, where: str) -> tuple[_OperatorStep, ...]:
    """Return the steps of a parsed recipe. Raises InputError if the recipe does not follow the format."""
    fields = _require_mapping(recipe, where)
    for key in fields:
        if key not in _RECIPE_KEYS | _EXECUTOR_KEYS:
            _raise_unknown_name(where, key, _RECIPE_KEYS | _EXECUTOR_KEYS)
    process = fields.get("process")
    if not isinstance(process, list) or not process:
        raise InputError(explain(f"{where}, 'process'", got=_describe_type(process), expected="a list of operators"))
    default_key = _default_text_key(fields.get("text_keys"), where)
    steps: list[_OperatorStep] = []
    for number, item in enumerate(cast("list[object]", process)):
        location = f"{where}, operator {number + 1}"
        entry = _require_mapping(item, location)
        if len(entry) != 1:
            raise InputError(explain(location, got=f"keys {sorted(entry)}", expected="one name with its parameters"))
        ((name, parameters),) = entry.items()
        settings = {} if parameters is None else _require_mapping(parameters, f"{location} ({name})")
        key = _check_text_key(settings.pop("text_key", default_key), f"{location} ({name})")
        # Repeated steps are counted separately: text_length_filter(chosen), text_length_filter(chosen)#2
        num_equal_steps = sum(step.operator == name and step.text_key == key for step in steps)
        reason = f"{name}({key})" + (f"#{num_equal_steps + 1}" if num_equal_steps else "")
        steps.append(
            _OperatorStep(operator=name, text_key=key, parameters=settings, reason=reason, where=f"{location} ({name})")
        )
    return tuple(steps)


def _raise_unknown_name(where: str, name: str, valid_names: Iterable[str], fix: str = "") -> NoReturn:
    """Raise an InputError for an unknown name, suggesting the most similar valid name."""
    choices = sorted(valid_names)
    closest = difflib.get_close_matches(name, choices, n=1)
    fix = " ".join(part for part in (f"Did you mean {closest[0]!r}?" if closest else "", fix) if part)
    raise InputError(explain(where, got=repr(name), expected=f"one of {', '.join(choices)}", fix=fix))


def _parse_yaml(data: bytes, where: str) -> object:
    yaml = require("yaml", extra="replaysim")
    try:
        tree = yaml.compose(data, Loader=yaml.SafeLoader)
        _check_unique_keys(yaml, tree, where)
        return yaml.safe_load(data)
    except yaml.YAMLError as error:
        raise InputError(f"{where}: not valid YAML: {error}") from None
    except RecursionError:
        raise InputError(explain(where, got="deeper nesting", expected="a list of operators")) from None
    except InputError:
        raise
    except ValueError as error:  # a date or number that Python cannot represent
        raise InputError(f"{where}: {error}") from None


def _check_unique_keys(yaml: Any, root: Any, where: str) -> None:
    """Raise InputError if a mapping contains a key twice. The YAML parser would silently keep the last one."""
    level, seen_ids = [root], set[int]()
    while level:
        node = level.pop()
        # An alias (`*name`) refers to a node that was visited before, possibly to one that contains the alias.
        if id(node) in seen_ids:
            continue
        seen_ids.add(id(node))
        if isinstance(node, yaml.MappingNode):
            keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            repeated_key = next((key for key, count in keys.items() if count > 1), None)
            if repeated_key is not None:
                raise InputError(explain(where, got=f"{repeated_key!r} twice", expected="each key once"))
            level.extend(value for _, value in node.value)
        elif isinstance(node, yaml.SequenceNode):
            level.extend(node.value)


def _require_mapping(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in cast("dict[object, object]", value)):
        raise InputError(explain(where, got=_describe_type(value), expected="a mapping (`name: value`)"))
    return dict(cast("dict[str, Any]", value))


def _default_text_key(text_keys: object, where: str) -> str | None:
    """Return the text key for operators without one: the recipe's `text_keys`, a name or a list with one name."""
    if isinstance(text_keys, list) and len(cast("list[object]", text_keys)) == 1:
        text_keys = cast("list[object]", text_keys)[0]
    return None if text_keys is None else _check_text_key(text_keys, f"{where}, 'text_keys'")


def _check_text_key(text_key: object, where: str) -> str:
    if text_key is None:
        fix = "An operator takes one text: use one operator for chosen and one for rejected."
        raise InputError(
            explain(f"{where}, 'text_key'", got="none", expected=f"one of {', '.join(TEXT_KEYS)}", fix=fix)
        )
    if not isinstance(text_key, str) or text_key not in TEXT_KEYS:
        _raise_unknown_name(f"{where}, 'text_key'", str(text_key), TEXT_KEYS)
    return text_key


def _describe_type(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


# special_characters_filter counts every ASCII punctuation mark, digit and blank, every single-code-point emoji, and a
# list of other characters that includes a few letters. In a calculation, all digits and operators count;
# docs/decisions/0007-pair-filters.md explains the consequences for the limits.
#
# These are the code points beyond ASCII, in hexadecimal, that data-juicer 1.6.1 (with emoji 2.2.0) counts as special.
# Its own filter was run on every code point; `make test-replaysim` repeats that.
_BEYOND_ASCII = """
    81-85 91-93 95-99 9C-9D A1-AB AD-B4 B7-BF D7 F7-F8 131 26A 2BA-2BC 2C8 2CC 2D0 2D8 2DA 2DC 3C0 413 60C 647 66A
    66C 6E9 93E 940 947 94D 97D 9BE E51 2002-2003 2005 2008-200B 2010-2011 2013-2016 2018-201A 201C-2020 2022 2024
    2026 202F-2030 2032-2033 2039-203A 203C 203F 2043-2044 2049 20A8 20AA 20AC 2103 2122 2139 2190-2199 21A9-21AA
    21D3 2206 2208 2212 221A 221E-221F 223C 2248 2256 2264-2265 2295 22C5 231A-231B 2328 23CF 23E9-23F3 23F8-23FA
    24C2 2550 25A0 25AA-25AC 25B2 25B4 25B6-25B7 25BA-25BC 25C0 25C6 25CF 25E6 25FB-25FE 2600-2606 260E 2611
    2614-2615 2618 261B 261D 2620 2622-2623 2626 262A 262E-262F 2638-263B 2640 2642 2648-2653 265F-2661 2663
    2665-2666 2668 266B 267B 267E-267F 2692-2697 2699 269B-269C 26A0-26A1 26A7 26AA-26AB 26B0-26B1 26BD-26BE
    26C4-26C5 26C8 26CE-26CF 26D1 26D3-26D4 26E9-26EA 26F0-26F5 26F7-26FA 26FD 2702 2705 2708-270D 270F 2712-2714
    2716 271D 2721 2726 2728 2731 2733-2734 2744 2747 274C 274E 2753-2757 2763-2764 2795-2797 27A1 27A4 27A9 27B0
    27BF 2800 2934-2935 2B05-2B07 2B1B-2B1C 2B50 2B55 3000-3002 300A-300D 3010-3011 3030 303D 309C 30B7 30C3-30C4
    30F3 30FB-30FC 3297 3299 4E00 4E0A 58EB FD3E-FD3F FEFF FF01 FF08-FF09 FF0C FF0E FF11 FF1A-FF1B FF1F FF3E FF5E
    FFFC-FFFD 1F004 1F0CF 1F170-1F171 1F17E-1F17F 1F18E 1F191-1F19A 1F201-1F202 1F21A 1F22F 1F232-1F23A 1F250-1F251
    1F300-1F321 1F324-1F393 1F396-1F397 1F399-1F39B 1F39E-1F3F0 1F3F3-1F3F5 1F3F7-1F4FD 1F4FF-1F53D 1F549-1F54E
    1F550-1F567 1F56F-1F570 1F573-1F57A 1F587 1F58A-1F58D 1F590 1F595-1F596 1F5A4-1F5A5 1F5A8 1F5B1-1F5B2 1F5BC
    1F5C2-1F5C4 1F5D1-1F5D3 1F5DC-1F5DE 1F5E1 1F5E3 1F5E8 1F5EF 1F5F3 1F5FA-1F64F 1F680-1F6C5 1F6CB-1F6D2
    1F6D5-1F6D7 1F6DC-1F6E5 1F6E9 1F6EB-1F6EC 1F6F0 1F6F3-1F6FC 1F7E0-1F7EB 1F7F0 1F90C-1F93A 1F93C-1F945
    1F947-1F9FF 1FA70-1FA7C 1FA80-1FA88 1FA90-1FABD 1FABF-1FAC5 1FACE-1FADB 1FAE0-1FAE8 1FAF0-1FAF8
"""


def _character_class(spans: list[str]) -> str:
    """Convert spans such as `A1-AB` and `D7` to the inside of a character class in a regular expression."""
    return "".join("-".join(f"\\U{int(end, 16):08X}" for end in span.split("-")) for span in spans)


# `re` looks up the first 65,536 characters in a table, but searches a list for all others. A lookahead for those,
# followed by their own character class, makes matching twice as fast.
_SPANS = _BEYOND_ASCII.split()
_SPECIAL_LOW = re.escape(string.punctuation + string.digits + string.whitespace) + _character_class(
    [span for span in _SPANS if int(span.split("-")[0], 16) < 0x10000]
)
_SPECIAL_HIGH = _character_class([span for span in _SPANS if int(span.split("-")[0], 16) >= 0x10000])
_ANY_HIGH = r"\U00010000-\U0010FFFF"
_ORDINARY_CHARACTER = rf"(?:[^{_SPECIAL_LOW}{_ANY_HIGH}]|(?=[{_ANY_HIGH}])[^{_SPECIAL_HIGH}])"
"""The pattern for a character that is not special."""


# A word from its first ordinary character to its end: "(don't" -> "don't", "--a1" -> "a1"; not "--" or "1.5"
_WORD = re.compile(rf"{_ORDINARY_CHARACTER}[^ \n\t]*")
# data-juicer uses the `regex` package, which knows digits that are missing in this Python's Unicode tables, and does
# not count the four ASCII separators (\x1c to \x1f) as blanks.
_NEWER_DIGITS = (
    "\U00010d40-\U00010d49\U000116d0-\U000116e3\U00011bf0-\U00011bf9\U00011de0-\U00011de9\U00011f50-\U00011f59"
    "\U00016130-\U00016139\U00016d70-\U00016d79\U0001ccf0-\U0001ccf9\U0001e4f0-\U0001e4f9\U0001e5f1-\U0001e5fa"
)
# "a 1, b" -> " ", "1,", " ", so that "ab" is left; not a letter, an emoji or "\x1c"
_NO_CHARACTER = re.compile(rf"[^\S\x1c-\x1f]+|[\d{re.escape(string.punctuation)}{_NEWER_DIGITS}]+")
Judge = Callable[[str], bool]
"""A function that returns whether a text is kept. That of a deduplicator is stateful, so each pass creates a new one.
"""


@dataclass(frozen=True, kw_only=True)
class _RangeFilter:
    """A filter that keeps values in a range, with the parameters that all data-juicer filters share.

    A limit of None means no limit. With `reversed_range`, the values outside the range are kept. If the interval is
    closed at a limit, a value equal to the limit is kept, whether or not the range is reversed.
    """

    min_closed_interval: bool = True
    max_closed_interval: bool = True
    reversed_range: bool = False

    def is_kept(self, value: float, low: float | None, high: float | None) -> bool:
        """Return whether a value is within the range, or outside if the range is reversed."""
        includes_low = self.min_closed_interval != self.reversed_range
        includes_high = self.max_closed_interval != self.reversed_range
        is_inside = (low is None or value > low or (includes_low and value == low)) and (
            high is None or value < high or (includes_high and value == high)
        )
        return is_inside != self.reversed_range


@dataclass(frozen=True, kw_only=True)
class _TextLengthFilter(_RangeFilter):
    """A filter that keeps texts with `min_len` to `max_len` characters (code points)."""

    min_len: float | None = 10
    max_len: float | None = sys.maxsize

    def judge(self) -> Judge:
        return lambda text: self.is_kept(len(text), self.min_len, self.max_len)


@dataclass(frozen=True, kw_only=True)
class _WordsNumFilter(_RangeFilter):
    """A filter that keeps texts with `min_num` to `max_num` words.

    Words are separated by spaces, newlines and tabs only: a no-break space or a carriage return is part of a word. A
    sequence of special characters is not a word. `lang` names a model that is used only with `tokenization`.
    """

    lang: str = "en"
    tokenization: bool = False
    min_num: float | None = 10
    max_num: float | None = sys.maxsize

    def __post_init__(self) -> None:
        if self.tokenization:
            fix = 'Only data-juicer itself counts SentencePiece words: DJNormalizer(..., backend="data_juicer").'
            raise InputError(explain("words_num_filter, tokenization", got="true", expected="false", fix=fix))

    def judge(self) -> Judge:
        return lambda text: self.is_kept(_count_words(text), self.min_num, self.max_num)


def _count_words(text: str) -> int:
    """Return the number of words in a text, ignoring words that consist of special characters only."""
    return sum(1 for _ in _WORD.finditer(text))


@dataclass(frozen=True, kw_only=True)
class _SpecialCharactersFilter(_RangeFilter):
    """A filter that keeps texts in which the fraction of special characters is between `min_ratio` and `max_ratio`."""

    min_ratio: float | None = 0.0
    max_ratio: float | None = 0.25

    def judge(self) -> Judge:
        return lambda text: self.is_kept(_special_character_ratio(text), self.min_ratio, self.max_ratio)


@dataclass(frozen=True, kw_only=True)
class _DocumentDeduplicator:
    """A filter that keeps the first of several equal texts.

    Texts are compared without leading and trailing blanks, in lower case if `lowercase` is set, and without any blanks,
    digits or ASCII punctuation if `ignore_non_character` is set.
    """

    lowercase: bool = False
    ignore_non_character: bool = False

    def key(self, text: str) -> bytes:
        """Return the hash of the normalized text. Texts with equal hashes count as equal."""
        if self.lowercase:
            text = text.lower()
        if self.ignore_non_character:
            text = _NO_CHARACTER.sub("", text)
        # data-juicer uses MD5, for which collisions can be constructed. `surrogatepass` accepts a lone surrogate.
        return hashlib.blake2b(text.strip().encode("utf-8", "surrogatepass"), digest_size=16).digest()

    def judge(self) -> Judge:
        seen_keys: set[bytes] = set()

        def is_new(text: str) -> bool:
            before = len(seen_keys)
            seen_keys.add(self.key(text))
            return len(seen_keys) > before

        return is_new


_NativeOperator = _TextLengthFilter | _WordsNumFilter | _SpecialCharactersFilter | _DocumentDeduplicator
_NATIVE_OPERATORS: dict[str, type[_NativeOperator]] = {
    "text_length_filter": _TextLengthFilter,
    "words_num_filter": _WordsNumFilter,
    "special_characters_filter": _SpecialCharactersFilter,
    "document_deduplicator": _DocumentDeduplicator,
}
# Parameters for data-juicer that distribute an operator over processes and machines. They do not affect the result.
_IGNORED_PARAMETERS = frozenset(
    {
        *("accelerator", "adaptive_batching", "auto_op_parallelism", "batch_mode", "batch_size", "num_proc", "turbo"),
        *("cpu_required", "gpu_required", "mem_required", "memory", "num_cpus", "num_gpus"),
        *("ray_execution_mode", "runtime_env"),
    }
)


def _native_operator(step: _OperatorStep) -> _NativeOperator:
    """Return the operator for a step. Raises InputError for an unknown operator or an invalid parameter."""
    operator_class = _NATIVE_OPERATORS.get(step.operator)
    if operator_class is None:
        fix = 'For data-juicer\'s other filters use DJNormalizer(..., backend="data_juicer").'
        _raise_unknown_name(step.where, step.operator, _NATIVE_OPERATORS, fix)
    fields = {field.name: field.default for field in dataclasses.fields(operator_class)}
    parameters: dict[str, Any] = {}
    for name, value in step.parameters.items():
        if name in fields:
            parameters[name] = _check_value(value, fields[name], f"{step.where}, {name!r}")
        elif name not in _IGNORED_PARAMETERS:
            _raise_unknown_name(step.where, name, {*fields, "text_key"})
    return operator_class(**parameters)


def _check_value(value: object, default: object, where: str) -> object:
    """Return a parameter's value. Raises InputError if its type differs from the default's; limits may be null."""
    if isinstance(default, bool | str):
        if type(value) is not type(default):
            expected = "true or false" if isinstance(default, bool) else "text"
            raise InputError(explain(where, got=repr(value), expected=expected))
    elif value is not None and (type(value) not in (int, float) or math.isnan(float(str(value)))):
        raise InputError(explain(where, got=repr(value), expected="a number, or null for no limit"))
    return value


# "a == 1!" -> " == 1!"; not "a"
_SPECIAL = re.compile(rf"[{_SPECIAL_LOW}]+|(?=[{_ANY_HIGH}])[{_SPECIAL_HIGH}]+")


def _special_character_ratio(text: str) -> float:
    """Return the fraction of special characters in a text, which is 0 for an empty text."""
    return (len(text) - len(_SPECIAL.sub("", text))) / len(text) if text else 0.0


TEXT_KEYS = ("chosen", "rejected", "state", "state_chosen_rejected")
"""The texts of a pair that an operator can filter. `state` is all text in its messages; the last one is the whole pair.
"""

# Separates the parts of a whole pair. A private-use character is neither blank, digit nor punctuation, so even
# `ignore_non_character` keeps ("ab", "c") and ("a", "bc") apart.
_SEPARATOR, _ESCAPE = "\ue000", "\ue001"


def _pair_text(pair: Mapping[str, Any], key: str) -> str:
    """Return the text of a pair for one of `TEXT_KEYS`."""
    if key in ("chosen", "rejected"):
        return pair[key]
    if key == "state":
        return "\n".join(_text_leaves(pair["state_messages"]))
    return _SEPARATOR.join(
        _escape_separator(part) for part in (*_text_leaves(pair["state_messages"]), pair["chosen"], pair["rejected"])
    )


def _check_pair(pair: object, number: int) -> Mapping[str, Any]:
    """Return the pair unchanged. Raises InputError if a field is missing or has the wrong type."""
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


def _escape_separator(part: str) -> str:
    return part.replace(_ESCAPE, _ESCAPE + _ESCAPE).replace(_SEPARATOR, _ESCAPE + "\ue002")


def _text_leaves(messages: list[object]) -> Iterator[str]:
    """Yield all keys and values in messages, with sorted keys."""
    # A stack instead of recursion: arguments may be nested deeper than Python's recursion limit.
    pending: list[object] = [*reversed(messages)]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            items_by_key = {str(key): item for key, item in cast("Mapping[object, object]", value).items()}
            for key in sorted(items_by_key, reverse=True):
                pending += [items_by_key[key], key]
        elif isinstance(value, list | tuple):
            pending.extend(reversed(cast("list[object]", value)))
        else:
            yield str(value)


_EXTRA = "replaysim"
# data-juicer operators that need only the text, without downloading a model or a word list.
_RUNNABLE_OPERATORS = frozenset(
    {
        *("alphanumeric_filter", "average_line_length_filter", "character_repetition_filter"),
        *("maximum_line_length_filter", "special_characters_filter", "text_length_filter", "word_repetition_filter"),
        *("words_num_filter", "document_deduplicator"),
    }
)
# data-juicer needs these packages but does not declare them. Without them, its import fails, or runs `pip install` in
# the user's environment.
_UNDECLARED = ("aiohttp", "ray")


def _data_juicer_operator(step: _OperatorStep) -> Any:
    """Return the data-juicer operator for a step. Raises InputError for an unknown operator or parameter."""
    for package in ("data_juicer", *_UNDECLARED):
        if not available(package):
            require(package, extra=_EXTRA)
    if step.operator not in _RUNNABLE_OPERATORS:
        _raise_unknown_name(step.where, step.operator, _RUNNABLE_OPERATORS)
    operators = require("data_juicer.ops.base_op", extra=_EXTRA).OPERATORS
    require("data_juicer.ops", extra=_EXTRA)  # fills the registry
    operator_class = operators.modules[step.operator]
    operator_parameters = {
        name for name in inspect.signature(operator_class.__init__).parameters if name not in ("self", "args", "kwargs")
    }
    parameters = operator_parameters | set(cast("Mapping[str, object]", operator_class._BASE_PARAMS))
    for name in step.parameters:
        if name not in parameters:  # data-juicer itself would ignore it
            _raise_unknown_name(step.where, name, parameters)
    try:
        return operator_class(text_key=step.text_key, **step.parameters)
    except (TypeError, ValueError) as error:
        raise InputError(f"{step.where}: data-juicer rejects these parameters: {error}") from error


def _data_juicer_filter(operator: Any, step: _OperatorStep) -> Judge:
    """Return a function that runs a data-juicer filter on one text at a time, with fresh statistics."""
    statistics = require("data_juicer.utils.constant", extra=_EXTRA).Fields.stats

    def is_kept(text: str) -> bool:
        batch = {step.text_key: [text], statistics: [{}]}
        (decision,) = operator.process_batched(operator.compute_stats_batched(batch))
        return bool(decision)

    return is_kept


def _data_juicer_deduplicator(operator: Any, step: _OperatorStep) -> Judge:
    """Return a function that keeps the first text for each hash that data-juicer's deduplicator computes."""
    hash_name = require("data_juicer.utils.constant", extra=_EXTRA).HashKeys.hash
    seen_hashes: set[str] = set()

    def is_new(text: str) -> bool:
        before = len(seen_hashes)
        try:
            seen_hashes.add(operator.compute_hash({step.text_key: text})[hash_name])
        except UnicodeEncodeError as error:
            expected = "text that is valid Unicode"
            raise InputError(
                explain(step.where, got=f"a lone surrogate ({error.reason})", expected=expected)
            ) from error
        return len(seen_hashes) > before

    return is_new
