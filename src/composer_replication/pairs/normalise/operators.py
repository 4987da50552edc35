"""data-juicer's four default operators in plain Python, by its names, with its parameters and its defaults.

A filter makes a number of a text and says in which range it has to lie; the deduplicator keeps the first of texts that
are the same but for what it leaves out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
import string
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from composer_replication.errors import InputError, explain
from composer_replication.pairs.normalise.recipe import Step, refuse
from composer_replication.pairs.normalise.special_characters import ORDINARY, special_ratio

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


def native_operator(step: Step) -> Native:
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


def native_judge(step: Step) -> Judge:
    """A judge for one pass over the pairs."""
    return native_operator(step).judge()


def _checked(value: object, default: object, where: str) -> object:
    """A value of the kind its default has; limits are numbers, or null for none."""
    if isinstance(default, bool | str):
        if type(value) is not type(default):
            expected = "true or false" if isinstance(default, bool) else "text"
            raise InputError(explain(where, got=repr(value), expected=expected))
    elif value is not None and (type(value) not in (int, float) or math.isnan(float(str(value)))):
        raise InputError(explain(where, got=repr(value), expected="a number, or null for no limit"))
    return value
