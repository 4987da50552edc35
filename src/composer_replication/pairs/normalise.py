"""Pairs in, pairs worth training on out, and every drop counted under the operator that made it."""

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


# data-juicer's four default operators in plain Python, by its names, with its parameters and its defaults.
#
# A filter makes a number of a text and says in which range it has to lie; the deduplicator keeps the first of texts
# that are the same but for what it leaves out.


def native_judge(step: OperatorStep) -> Judge:
    """A judge for one pass over the pairs."""
    return native_operator(step).judge()


# The same steps run by data-juicer itself: its operators called one by one, in this process.
#
# Its executor is not used: it writes a job folder, logs and caches, and takes a hundred times as long. Two things
# that an executor would get wrong here are ours as well: each call has its own statistics (operators of one kind
# share a name for theirs, so the one on `rejected` would be handed the numbers of `chosen`), and the text of a whole
# pair is made by us. Importing data-juicer replaces the handlers of loguru's logger.


def data_juicer_judge(step: OperatorStep) -> Judge:
    """A judge for one pass over the pairs; MissingExtraError without data-juicer."""
    operator = _operator(step)
    return _deduplicator(operator, step) if step.operator == "document_deduplicator" else _filter(operator, step)


_BACKENDS: dict[str, Callable[[OperatorStep], Judge]] = {"native": native_judge, "data_juicer": data_juicer_judge}
_FIELDS = frozenset({"state_id", "state_messages", "chosen", "rejected", "n_teachers_agreeing"})


@dataclass(slots=True)
class NormalizedDPOPair:
    """A pair with its answers as messages; `metadata` holds what else the pair carried, and what it went through."""

    state_id: str
    state_messages: list[Message]
    chosen_messages: list[Message]
    rejected_messages: list[Message]
    n_teachers_agreeing: int
    metadata: dict[str, Any]


class DJNormalizer:
    """Runs the operators of a data-juicer recipe over pairs, in order; `skip_dj` passes every pair through.

    `counts` is about the last call of `normalize`: "kept", and under each operator what it dropped. `DEFAULT_RECIPE` is
    the recipe that runs without a `recipe_path`.
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
        self._judge_of = _BACKENDS[backend]
        self._recipe = (
            Recipe((), "") if skip_dj else read_recipe(self.DEFAULT_RECIPE if recipe_path is None else recipe_path)
        )
        self._judges()  # what is wrong in the recipe is said now, and not after the teachers were paid
        provenance = {"backend": backend, "recipe_sha256": self._recipe.sha256}
        self._mark: dict[str, Any] = {"skipped": True} if skip_dj else {"normalizer": provenance}

    def normalize(self, pairs: Iterable[DPOPair]) -> list[NormalizedDPOPair]:
        """The pairs that every operator keeps, in their order."""
        judges = self._judges()
        self.counts = dict.fromkeys([KEPT, *(step.reason for step, _ in judges)], 0)
        normalized_pairs: list[NormalizedDPOPair] = []
        for number, raw_pair in enumerate(pairs):
            pair = check_pair(raw_pair, number)
            reason = next((step.reason for step, keeps in judges if not keeps(pair_text(pair, step.text_key))), KEPT)
            self.counts[reason] += 1
            if reason == KEPT:
                normalized_pairs.append(self._normalized(pair))
        return normalized_pairs

    def _judges(self) -> list[tuple[OperatorStep, Judge]]:
        return [(step, self._judge_of(step)) for step in self._recipe.steps]

    def _normalized(self, pair: Mapping[str, Any]) -> NormalizedDPOPair:
        carried = {key: value for key, value in pair.items() if key not in _FIELDS}
        return NormalizedDPOPair(
            state_id=pair["state_id"],
            state_messages=list(pair["state_messages"]),
            chosen_messages=[{"role": "assistant", "content": pair["chosen"]}],
            rejected_messages=[{"role": "assistant", "content": pair["rejected"]}],
            n_teachers_agreeing=pair["n_teachers_agreeing"],
            metadata=carried | self._mark,
        )


# Recipes in data-juicer's format: a YAML file with `process`, a list of operators with their parameters.

_MAX_BYTES = 1 << 16  # a recipe is a page; a parser in Python takes seconds for a megabyte
_SAYS_WHAT = frozenset({"process", "text_keys"})
# These say where data-juicer's executor reads and writes and how many processes it starts. Nothing here does that.
_SAYS_WHERE = frozenset({"project_name", "dataset_path", "export_path", "np", "executor_type", "work_dir"})


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorStep:
    """One operator of a recipe on one text of a pair; `reason` is what its drops are counted under."""

    operator: str
    text_key: str
    parameters: Mapping[str, Any]
    reason: str
    where: str


@dataclass(frozen=True, slots=True)
class Recipe:
    """The steps in their order, and the hash of the file they were read from."""

    steps: tuple[OperatorStep, ...]
    sha256: str


def read_recipe(path: str | os.PathLike[str]) -> Recipe:
    """A recipe file; ArtefactNotFoundError (a FileNotFoundError) if there is none, InputError if it is no recipe."""
    where = f"recipe {os.fspath(path)}"
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise ArtefactNotFoundError(f"{where}: no such file. Leave recipe_path out for the shipped one") from None
    except OSError as error:
        raise InputError(f"{where} cannot be read: {error.strerror}") from error
    if len(data) > _MAX_BYTES:
        raise InputError(explain(where, got=f"more than {_MAX_BYTES} bytes", expected="a page of YAML"))
    return Recipe(steps_of(_parse(data, where), where), hashlib.sha256(data).hexdigest())


def steps_of(recipe: object, where: str) -> tuple[OperatorStep, ...]:
    """The steps of a recipe that is already parsed."""
    fields = _mapping(recipe, where)
    for key in fields:
        if key not in _SAYS_WHAT | _SAYS_WHERE:
            refuse(where, key, _SAYS_WHAT | _SAYS_WHERE)
    process = fields.get("process")
    if not isinstance(process, list) or not process:
        raise InputError(explain(f"{where}, 'process'", got=_shown(process), expected="a list of operators"))
    usual = _usual_text_key(fields.get("text_keys"), where)
    steps: list[OperatorStep] = []
    for number, item in enumerate(cast("list[object]", process)):
        location = f"{where}, operator {number + 1}"
        entry = _mapping(item, location)
        if len(entry) != 1:
            raise InputError(explain(location, got=f"keys {sorted(entry)}", expected="one name with its parameters"))
        ((name, parameters),) = entry.items()
        settings = {} if parameters is None else _mapping(parameters, f"{location} ({name})")
        key = _text_key(settings.pop("text_key", usual), f"{location} ({name})")
        same = sum(step.operator == name and step.text_key == key for step in steps)
        reason = f"{name}({key})" + (f"#{same + 1}" if same else "")
        steps.append(
            OperatorStep(operator=name, text_key=key, parameters=settings, reason=reason, where=f"{location} ({name})")
        )
    return tuple(steps)


def refuse(where: str, name: str, known: Iterable[str], fix: str = "") -> NoReturn:
    """An InputError for a name nobody knows, with the one that was probably meant."""
    choices = sorted(known)
    near = difflib.get_close_matches(name, choices, n=1)
    fix = " ".join(part for part in (f"Did you mean {near[0]!r}?" if near else "", fix) if part)
    raise InputError(explain(where, got=repr(name), expected=f"one of {', '.join(choices)}", fix=fix))


def _parse(data: bytes, where: str) -> object:
    yaml = require("yaml", extra="replaysim")
    try:
        tree = yaml.compose(data, Loader=yaml.SafeLoader)
        _check_tree(yaml, tree, where)
        return yaml.safe_load(data)
    except yaml.YAMLError as error:
        raise InputError(f"{where}: not valid YAML: {error}") from None
    except RecursionError:
        raise InputError(explain(where, got="deeper nesting", expected="a list of operators")) from None
    except InputError:
        raise
    except ValueError as error:  # a date or a number that Python cannot hold
        raise InputError(f"{where}: {error}") from None


def _check_tree(yaml: Any, root: Any, where: str) -> None:
    """YAML keeps the last of two equal keys without a word; here that is an error."""
    level, seen_ids = [root], set[int]()
    while level:
        node = level.pop()
        if id(node) in seen_ids:  # a node may be named again and again, and even inside itself
            continue
        seen_ids.add(id(node))
        if isinstance(node, yaml.MappingNode):
            keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            twice = next((key for key, number in keys.items() if number > 1), None)
            if twice is not None:
                raise InputError(explain(where, got=f"{twice!r} twice", expected="each key once"))
            level.extend(value for _, value in node.value)
        elif isinstance(node, yaml.SequenceNode):
            level.extend(node.value)


def _mapping(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in cast("dict[object, object]", value)):
        raise InputError(explain(where, got=_shown(value), expected="names with values (`name: value`)"))
    return dict(cast("dict[str, Any]", value))


def _usual_text_key(text_keys: object, where: str) -> str | None:
    """data-juicer's `text_keys`: a name or a list of names, of which operators take the first."""
    if isinstance(text_keys, list) and len(cast("list[object]", text_keys)) == 1:
        text_keys = cast("list[object]", text_keys)[0]
    return None if text_keys is None else _text_key(text_keys, f"{where}, 'text_keys'")


def _text_key(text_key: object, where: str) -> str:
    if text_key is None:
        fix = "Filter chosen and rejected one by one: an operator takes one text."
        raise InputError(
            explain(f"{where}, 'text_key'", got="none", expected=f"one of {', '.join(TEXT_KEYS)}", fix=fix)
        )
    if not isinstance(text_key, str) or text_key not in TEXT_KEYS:
        refuse(f"{where}, 'text_key'", str(text_key), TEXT_KEYS)
    return text_key


def _shown(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


# The characters that special_characters_filter counts: what is neither letter nor sign of a script.
#
# Special is every ASCII punctuation mark, digit and blank, every emoji that is one code point, and a list of further
# signs that also holds a few letters. So the digits and operators of a calculation count in full: see
# docs/decisions/0007-pair-filters.md for what that does to a limit.

# Every code point beyond ASCII that data-juicer 1.6.1 (with emoji 2.2.0) counts as special, found by asking its filter
# about each; `make test-replaysim` asks again.
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


def _class(spans: list[str]) -> str:
    """`A1-AB D7` as the inside of a regular expression's character class."""
    return "".join("-".join(f"\\U{int(end, 16):08X}" for end in span.split("-")) for span in spans)


# `re` has a table for the first 65,536 characters and walks through a list for all others. So those are asked about in
# a class of their own, behind one look whether there is such a character at all: twice as fast.
_SPANS = _BEYOND_ASCII.split()
_FIRST_PLANE = re.escape(string.punctuation + string.digits + string.whitespace) + _class(
    [span for span in _SPANS if int(span.split("-")[0], 16) < 0x10000]
)
_BEYOND = _class([span for span in _SPANS if int(span.split("-")[0], 16) >= 0x10000])
_ANY_BEYOND = r"\U00010000-\U0010FFFF"
ORDINARY = rf"(?:[^{_FIRST_PLANE}{_ANY_BEYOND}]|(?=[{_ANY_BEYOND}])[^{_BEYOND}])"
"""The pattern of one character that is not special."""


# From the first ordinary character of a word to its end: one match a word, and no place is looked at twice.
_WORD = re.compile(rf"{ORDINARY}[^ \n\t]*")
# data-juicer's pattern runs in the `regex` package, which knows digits that this Python may be too old for, and which
# does not take the four ASCII separators for blanks.
_NEWER_DIGITS = (
    "\U00010d40-\U00010d49\U000116d0-\U000116e3\U00011bf0-\U00011bf9\U00011de0-\U00011de9\U00011f50-\U00011f59"
    "\U00016130-\U00016139\U00016d70-\U00016d79\U0001ccf0-\U0001ccf9\U0001e4f0-\U0001e4f9\U0001e5f1-\U0001e5fa"
)
_NO_CHARACTER = re.compile(rf"[^\S\x1c-\x1f]+|[\d{re.escape(string.punctuation)}{_NEWER_DIGITS}]+")
Judge = Callable[[str], bool]
"""Whether a text is kept. It may remember what it has seen, so each pass over the pairs has its own."""


@dataclass(frozen=True, kw_only=True)
class RangeFilter:
    """The parameters every filter takes.

    A limit of None is no limit. `reversed_range` keeps what lies outside; a limit that belongs to the range then
    belongs to the outside.
    """

    min_closed_interval: bool = True
    max_closed_interval: bool = True
    reversed_range: bool = False

    def is_kept(self, value: float, low: float | None, high: float | None) -> bool:
        """Whether a number is in the range, or outside where the range is reversed."""
        low_belongs = self.min_closed_interval != self.reversed_range
        high_belongs = self.max_closed_interval != self.reversed_range
        is_inside = (low is None or value > low or (low_belongs and value == low)) and (
            high is None or value < high or (high_belongs and value == high)
        )
        return is_inside != self.reversed_range


@dataclass(frozen=True, kw_only=True)
class TextLengthFilter(RangeFilter):
    """Keeps a text of `min_len` to `max_len` characters (code points)."""

    min_len: float | None = 10
    max_len: float | None = sys.maxsize

    def judge(self) -> Judge:
        return lambda text: self.is_kept(len(text), self.min_len, self.max_len)


@dataclass(frozen=True, kw_only=True)
class WordsNumFilter(RangeFilter):
    """Keeps a text of `min_num` to `max_num` words; `lang` names a model that only `tokenization` would use.

    Words are divided by blanks, newlines and tabs, and by nothing else: a no-break space or a carriage return is inside
    a word. What is made of special characters alone is no word.
    """

    lang: str = "en"
    tokenization: bool = False
    min_num: float | None = 10
    max_num: float | None = sys.maxsize

    def __post_init__(self) -> None:
        if self.tokenization:
            fix = 'Words by a SentencePiece model are data-juicer\'s own: DJNormalizer(..., backend="data_juicer").'
            raise InputError(explain("words_num_filter, tokenization", got="true", expected="false", fix=fix))

    def judge(self) -> Judge:
        return lambda text: self.is_kept(count_words(text), self.min_num, self.max_num)


def count_words(text: str) -> int:
    """Words of a text, those of special characters alone left out."""
    return sum(1 for _ in _WORD.finditer(text))


@dataclass(frozen=True, kw_only=True)
class SpecialCharactersFilter(RangeFilter):
    """Keeps a text whose share of special characters is `min_ratio` to `max_ratio`."""

    min_ratio: float | None = 0.0
    max_ratio: float | None = 0.25

    def judge(self) -> Judge:
        return lambda text: self.is_kept(special_ratio(text), self.min_ratio, self.max_ratio)


@dataclass(frozen=True, kw_only=True)
class DocumentDeduplicator:
    """Keeps the first text of each key; `ignore_non_character` leaves out blanks, digits and ASCII punctuation."""

    lowercase: bool = False
    ignore_non_character: bool = False

    def key(self, text: str) -> bytes:
        """Equal for texts that count as the same."""
        if self.lowercase:
            text = text.lower()
        if self.ignore_non_character:
            text = _NO_CHARACTER.sub("", text)
        # data-juicer takes MD5, for which texts can be made that collide. A lone surrogate is no reason to stop.
        return hashlib.blake2b(text.strip().encode("utf-8", "surrogatepass"), digest_size=16).digest()

    def judge(self) -> Judge:
        seen_keys: set[bytes] = set()

        def is_new(text: str) -> bool:
            before = len(seen_keys)
            seen_keys.add(self.key(text))
            return len(seen_keys) > before

        return is_new


Native = TextLengthFilter | WordsNumFilter | SpecialCharactersFilter | DocumentDeduplicator
NATIVE: dict[str, type[Native]] = {
    "text_length_filter": TextLengthFilter,
    "words_num_filter": WordsNumFilter,
    "special_characters_filter": SpecialCharactersFilter,
    "document_deduplicator": DocumentDeduplicator,
}
# How data-juicer spreads an operator over processes and machines; what is kept does not depend on it.
WITHOUT_EFFECT = frozenset(
    {
        *("accelerator", "adaptive_batching", "auto_op_parallelism", "batch_mode", "batch_size", "num_proc", "turbo"),
        *("cpu_required", "gpu_required", "mem_required", "memory", "num_cpus", "num_gpus"),
        *("ray_execution_mode", "runtime_env"),
    }
)


def native_operator(step: OperatorStep) -> Native:
    """The operator of a step; InputError for a name or a parameter that is not known."""
    operator_class = NATIVE.get(step.operator)
    if operator_class is None:
        fix = 'data-juicer\'s other filters run with DJNormalizer(..., backend="data_juicer").'
        refuse(step.where, step.operator, NATIVE, fix)
    fields = {field.name: field.default for field in dataclasses.fields(operator_class)}
    parameters: dict[str, Any] = {}
    for name, value in step.parameters.items():
        if name in fields:
            parameters[name] = _checked(value, fields[name], f"{step.where}, {name!r}")
        elif name not in WITHOUT_EFFECT:
            refuse(step.where, name, {*fields, "text_key"})
    return operator_class(**parameters)


def _checked(value: object, default: object, where: str) -> object:
    """A value of the kind its default has; limits are numbers, or null for none."""
    if isinstance(default, bool | str):
        if type(value) is not type(default):
            expected = "true or false" if isinstance(default, bool) else "text"
            raise InputError(explain(where, got=repr(value), expected=expected))
    elif value is not None and (type(value) not in (int, float) or math.isnan(float(str(value)))):
        raise InputError(explain(where, got=repr(value), expected="a number, or null for no limit"))
    return value


_SPECIAL = re.compile(rf"[{_FIRST_PLANE}]+|(?=[{_ANY_BEYOND}])[{_BEYOND}]+")


def special_ratio(text: str) -> float:
    """Special characters to all characters; 0 for an empty text."""
    return (len(text) - len(_SPECIAL.sub("", text))) / len(text) if text else 0.0


# The texts of a pair that a recipe may look at.

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


EXTRA = "replaysim"
# Filters on text alone, without a model or a list that would have to be downloaded.
RUNNABLE = frozenset(
    {
        *("alphanumeric_filter", "average_line_length_filter", "character_repetition_filter"),
        *("maximum_line_length_filter", "special_characters_filter", "text_length_filter", "word_repetition_filter"),
        *("words_num_filter", "document_deduplicator"),
    }
)
# Without these two, importing data-juicer fails, or runs `pip install` inside the user's environment.
_UNDECLARED = ("aiohttp", "ray")


def _operator(step: OperatorStep) -> Any:
    for package in ("data_juicer", *_UNDECLARED):
        if not available(package):
            require(package, extra=EXTRA)
    if step.operator not in RUNNABLE:
        refuse(step.where, step.operator, RUNNABLE)
    operators = require("data_juicer.ops.base_op", extra=EXTRA).OPERATORS
    require("data_juicer.ops", extra=EXTRA)  # fills the registry
    operator_class = operators.modules[step.operator]
    own_parameters = {
        name for name in inspect.signature(operator_class.__init__).parameters if name not in ("self", "args", "kwargs")
    }
    known_parameters = own_parameters | set(cast("Mapping[str, object]", operator_class._BASE_PARAMS))
    for name in step.parameters:
        if name not in known_parameters:  # data-juicer itself would ignore it
            refuse(step.where, name, known_parameters)
    try:
        return operator_class(text_key=step.text_key, **step.parameters)
    except (TypeError, ValueError) as error:
        raise InputError(f"{step.where}: data-juicer refuses these parameters: {error}") from error


def _filter(operator: Any, step: OperatorStep) -> Judge:
    statistics = require("data_juicer.utils.constant", extra=EXTRA).Fields.stats

    def is_kept(text: str) -> bool:
        batch = {step.text_key: [text], statistics: [{}]}
        (decision,) = operator.process_batched(operator.compute_stats_batched(batch))
        return bool(decision)

    return is_kept


def _deduplicator(operator: Any, step: OperatorStep) -> Judge:
    hash_name = require("data_juicer.utils.constant", extra=EXTRA).HashKeys.hash
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
