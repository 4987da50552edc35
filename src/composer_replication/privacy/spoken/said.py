"""Values that a sentence or a list of bytes holds after a name: without a plain sign between them."""

from __future__ import annotations

import re

from composer_replication.privacy.named.extents import bare_word, quoted
from composer_replication.privacy.named.names import PASSWORD_WORDS, Strength
from composer_replication.privacy.named.plausible import (
    is_identifier,
    is_odd,
    is_passphrase,
    is_plausible,
    is_random_value,
    is_told,
    is_unknown,
    trimmed,
)
from composer_replication.privacy.rules import Span, has_digit, word_set
from composer_replication.privacy.shapes.entropy import is_public_id

_FILLERS = (
    r"(?:['\u2019]?s)?(?:\s?\([^\0\n()]{1,30}\))?"
    r"(?:\s{1,4}(?:[^\W_][\w.'@-]{0,24}|\[\w{1,20}\]|[\"'][^\0\s\"']{1,120}[\"'])){0,6}?"
)
_QUOTES = r"[\"'`(*«„“]{0,4} ?"
_SPEECH = re.compile(
    rf"(?i:{_FILLERS}"
    r"(?:\s{1,2}(?:is|was|are|be|to|as|with|from|equals|type|enter|lautet|ist|est|es|e|è|é|är|er|on|je|ay|ni|dir|este"
    r"|jest|adalah|ialah|là|=|[?\u203a»]|->|→|—|-):?|,?\s(?:it|this)(?:['\u2019]s|\sis)|\s?:|[?\u203a»]"
    r"|\s\((?=currently|now))\s{0,12}(?:set to\s|now\s|just\s|currently\s|it['\u2019]s\s)*)"
    rf"(?<=[\s(]){_QUOTES}"
)
_SAID_AT_LAST = re.compile(rf"(?i:{_FILLERS}\s?:\s{{1,12}}){_QUOTES}")  # `a password is generated for ada: ...`
_NEW_FIELD = re.compile(r"\n[ \t]*[\w.-]+(?: [\w.-]+){0,2}\s?[:=]")  # the next line has a name of its own
_OF_ID = re.compile(r"[Ii][Dd]\s?:?\s*\Z")  # `the token has expired. RequestId: `
_FOR = re.compile(r"\s(?:for|of|to|on|für|von|pour|de|para|per|voor|til|för)\s")
DIGITS = re.compile(r"\d{3,8}")
NUMBER_NAMES = frozenset(("pin", "cvv", "cvc", "otp", "pincode", "cvv2"))
_BYTES = re.compile(
    r"[^\0\n=]{0,30}[=:]\s{0,3}[\w .:\[\]\"',(]{0,40}[\[{(]\s{0,9}"
    r"((?:(?:0x[0-9a-fA-F]{1,2}+|\d{1,3}+),\s{0,9}+){7,}(?:0x[0-9a-fA-F]{1,2}|\d{1,3}))"
)
_NUMBERS = re.compile(r"\w+")
_GROUPS = re.compile(r"\s?[:=]\s{0,3}((?:[a-zA-Z2-7]{4} ){3,15}[a-zA-Z2-7]{4})(?![A-Za-z])")


# What stands between a name and its value in a sentence: words for `is`, or a sign.
_LINKS = word_set(
    "is was are be to as equals becomes now it's that's is: -> lautet ist war wird est était c'est es era son è é"
    " ora são foi eh är var er blir on oli je byl jest był to este sunt adalah ialah yaitu là ni yra buvo olan oldu"
    " bude będzie nu это есть є είναι és van lett ir ay ser será sono devient هي هو היא הוא है হলো คือ wurde"
)
_CHANGED_TO = word_set("na auf à til naar till în en su")  # before a value in quotes
_ENGLISH = frozenset(("is", "was", "it's", "that's"))  # of no other language all words are known
_SIGNS = (":", "=", "->", "→", "\uff1a")
_WORD = re.compile(r"[^\0\s]{1,120}")
_OPENING = "\"'`«„“「(*:=<\uff1a>_"
_QUOTING = frozenset("\"'`«„“「")
_CLOSING = frozenset("\"'`»”“」")
_TRAILING = ".,;:!?)*_\"'`»”」"
_NEXT_LINE = re.compile(r"(?:\r?\n[ \t>|]*){1,2}[\"'`*]{0,3}(?P<value>[^\0\s]{5,60}?)[\"'`*]{0,3}[ \t\r]*(?![^\0\n])")
DIGITS_ALONE = re.compile(r"\d{6,12}")
_REACH, _MOST_FILLERS, _NEAREST = 200, 14, 4
# Behind a value: the end of the line, a bracket or a remark.
_REST = re.compile(
    r"[\"'`»”」*.,;!)\]}]{0,4}(?:[ \t\r]*|[ \t]+(?:#|//|\(|--|<!--)[^\0\n]*|[,;][ \t][^\0\n]*"
    r"|[ \t]?[\u060c\u3002\uff0c\u0964][^\0\n]*|[ \t]*[\u0370-\uffff][^\0\n]*)"  # or another script goes on
)


def spoken(text: str, start: int, end: int, strength: Strength) -> Span | None:
    """`the password for the database is ...`: only a value that no word could be."""
    if text[end] not in ":,'\u2019" and not text[end].isspace():
        return None
    for pattern in (_SPEECH, _SAID_AT_LAST) if strength == Strength.PASSWORD else (_SPEECH,):
        match = pattern.match(text, end)
        if match is not None and (_NEW_FIELD.search(match[0]) or _OF_ID.search(match[0]) or "ingerprint" in match[0]):
            return None
        if match is not None and (value := _said_value(text, start, end, match, strength)):
            return Span(match.end(), match.end() + len(value), kind_of(strength))
    return None


def _said_value(text: str, start: int, end: int, match: re.Match[str], strength: Strength) -> str:
    begin = match.end()
    value = trimmed(bare_word(text, begin), ".,;:!?)*_»”")
    counted = strength == Strength.PASSWORD or text[start:end].lower() in NUMBER_NAMES
    if counted and DIGITS.fullmatch(value) and len(value) >= 4:  # one that is used once
        return value
    if strength == Strength.PASSWORD:
        if text[begin - 1] in "\"'" and (bounds := quoted(text, begin - 1)) and is_passphrase(text[slice(*bounds)]):
            return text[slice(*bounds)]
        if (
            is_passphrase(value)
            or (is_unknown(value) and is_odd(value) and "=" not in match[0])
            or (_is_plain_said(text, begin, value, match) and value.lower() not in PASSWORD_WORDS)
        ):
            return value
    if not is_told(value) or is_public_id(value) or (strength == Strength.WEAK and not is_random_value(value)):
        return ""
    if strength < Strength.PASSWORD and is_identifier(value):
        return ""
    return value if is_plausible(value, strength, True) else ""


def _is_plain_said(text: str, begin: int, value: str, match: re.Match[str]) -> bool:
    """`the password for this box: ...`, where a line ends with a long word that is no other word one says there."""
    last = begin + len(value)
    ends = text[last : last + 1] in ("", "\n", "\0")
    return ends and _FOR.match(match[0]) is not None and match[0].rstrip().endswith(":") and is_unknown(value)


def told_behind(text: str, end: int, *, direct: bool) -> Span | None:
    """The first word behind a name that a sign, a word for `is` or a quote leads to and that nobody knows.

    `direct`: also one that nothing leads to, directly behind the name and at the end of what is said.
    """
    stop = min(
        at if at >= 0 else end + _REACH
        for at in (text.find("\n", end, end + _REACH), text.find("\\n", end, end + _REACH))
    )
    sign, linked, opened, changed = False, "", False, False
    for number, match in enumerate(_WORD.finditer(text, end, stop)):
        word = match[0]
        lead = word[: len(word) - len(word.lstrip(_OPENING))]
        sign = sign or (number == 0 and lead.startswith(_SIGNS))
        quoted_here = opened or (lead and lead[-1] in _QUOTING)
        led = sign or linked or quoted_here
        if led or (direct and not number):
            core = trimmed(word[len(lead) :].rstrip("\"'`»”」"), _TRAILING)
            begin = match.start() + len(lead)
            if led and '"' not in core and (is_told(core) or (linked and is_passphrase(core))):
                return Span(begin, begin + len(core), "PASSWORD")
            closed = quoted_here and text[begin + len(core) : begin + len(core) + 2].strip()[:1] in _CLOSING
            if is_unknown(core) and (
                linked in _ENGLISH
                or (linked and is_odd(core))
                or (closed and (linked or changed))
                or _ends(text, begin + len(core), stop)
            ):
                return Span(begin, begin + len(core), "PASSWORD")
            if sign and DIGITS_ALONE.fullmatch(core) and _ends(text, begin + len(core), stop):
                return Span(begin, begin + len(core), "PASSWORD")
            if sign and core:
                return None
        elif not direct and number < _NEAREST and is_other(core_of(word)):
            begin = match.start() + word.find(core_of(word))
            return Span(begin, begin + len(core_of(word)), "PASSWORD")
        opened = not core_of(word) and word[-1] in _QUOTING
        bare = word.strip("*_\"'`()[],").lower()
        sign, linked, changed = bare.endswith(_SIGNS), bare if bare in _LINKS else "", bare in _CHANGED_TO
        if number > _MOST_FILLERS:
            return None
    return _on_next_line(text, stop) if sign or linked else None


def is_other(core: str) -> bool:
    """Whether no language has such a word: nobody knows it and it has a number, or small words stand in a row."""
    return (is_unknown(core) and (has_digit(core) or is_odd(core))) or (is_passphrase(core) and "-" in core)


def core_of(word: str) -> str:
    """A word without the quotes and signs around it."""
    return word.strip(_OPENING + _TRAILING)


def _ends(text: str, at: int, stop: int) -> bool:
    """Whether nothing is said behind a value: a label or a message goes on."""
    return _REST.fullmatch(text, at, stop) is not None


def _on_next_line(text: str, newline: int) -> Span | None:
    alone = _NEXT_LINE.match(text, newline)
    if alone is None or _NEW_FIELD.match(text, newline):
        return None
    core = trimmed(alone["value"], _TRAILING)
    return (
        Span(alone.start("value"), alone.start("value") + len(core), "PASSWORD")
        if is_told(core) or is_unknown(core)
        else None
    )


def counted(text: str, end: int, strength: Strength) -> Span | None:
    """A key as a list of bytes, or in groups of four as apps show it."""
    match = _GROUPS.match(text, end) if text[end] in " :=" else None
    if match is None and (strength >= Strength.TOKEN or text.find("0x", end, end + 60) >= 0):
        match = _BYTES.match(text, end)
    if match is None or not has_digit(match[1]) or len(set(_NUMBERS.findall(match[1]))) == 1:  # zeros
        return None
    return Span(*match.span(1), "SECRET")


def kind_of(strength: Strength) -> str:
    """What a value behind a name of this strength is called."""
    return {Strength.PASSWORD: "PASSWORD", Strength.TOKEN: "SECRET"}.get(strength, "KEY_VALUE")
