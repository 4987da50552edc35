"""The shapes of passwords that people and generators make, told from names of code, versions, dates and files."""

from __future__ import annotations

import re
from collections.abc import Iterator

from composer_replication.privacy.named.harmless import is_uncommon
from composer_replication.privacy.named.names import Strength
from composer_replication.privacy.named.plausible import is_identifier, is_no_secret, is_plausible, is_setting, trimmed
from composer_replication.privacy.rules import Span
from composer_replication.privacy.shapes.entropy import is_public_id, looks_random

_SIGNS = re.compile(r"[!#$%^&*?~+]")
_UPPER = re.compile(r"[^\W\d_a-z]")
_LOWER = re.compile(r"[a-z]|[^\W\d_A-Z]")
_DIGIT = re.compile(r"\d")
# `D41sy_Nebel426`: digits inside of words, of which one begins with a capital.
_INSIDE = re.compile(r"(?<=[A-Za-z])\d{1,2}(?=[a-z])")
# `Luna_9962_winter`, `Zamek.Sasha.232`, `Lumi1154Tiger`, `HarborPapaya303`: words, at least one with a capital.
_NUMBERED = re.compile(
    r"(?=[^\0A-Z]{0,24}[A-Z])[A-Za-z]?[a-z]{2,11}(?:[_.-]?(?:[A-Z][a-z]{2,11}|(?<=[_.-])[a-z]{3,11}))?[_.-]?\d{3,5}(?:[_.-]?[A-Za-z][a-z]{1,11})?"
)
_NUMBER_FIRST = re.compile(r"\d{3,4}[_.~-]?[A-Z][a-z]{2,11}[_.~-][A-Z]?[a-z]{2,11}")
_WORDS = re.compile(r"(?:[A-Z]?[a-z0-9]{2,14}[_.-]?){1,3}")
_HARMLESS = re.compile(
    r"(?i)%[0-9a-f]{2}|^\d+\*|^[$%]\w*\d{0,2}$|^[*&][A-Za-z_]+\d{0,2}$|\.(?:py|js|ts|tsx|jsx|json|ya?ml|toml|txt|md|log|sh|go|rs|rb|java|sql|html|css|png|svg|jpe?g|gif|ico|pdf|csv|xml|docx?|xlsx?|zip|gz|cs|php|mp[34]|whl|deb|rpm|exe|dll|so)$"
    r"|test|spec|user|login|passw|secret|token|auth|admin|error|line|page|http|sha\d|version|release|step|issue|port|node|windows"
)
_SHORTEST_RANDOM = 12


def is_shaped(value: str) -> bool:
    """Whether a word is a password by its looks alone, where a word for one is near."""
    if not _LOWER.search(value) or not _DIGIT.search(value) or is_public_id(value) or is_identifier(value.rstrip("$")):
        return False
    if _HARMLESS.search(value) or is_setting(value) or is_no_secret(value):
        return False
    if not is_plausible(value, Strength.PASSWORD, True):
        return False
    digits = len(_DIGIT.findall(value))
    upper = _UPPER.search(value) is not None
    if _SIGNS.search(value) and digits >= 2 and (upper or _SIGNS.search(value, len(value) - 1)):
        return True
    if _NUMBERED.fullmatch(value) or _NUMBER_FIRST.fullmatch(value):
        return True
    inside = len(_INSIDE.findall(value))
    if _WORDS.fullmatch(value) and upper and ((inside and digits >= 4) or (inside > 1 and digits >= 3)):
        return True
    return upper and len(value) >= _SHORTEST_RANDOM and value.isalnum() and looks_random(value)


def is_unfamiliar(value: str) -> bool:
    """Whether a word has a part that neither code nor messages have, a capital, and a number or a sign."""
    if not is_uncommon(value) or not _UPPER.search(value) or not _LOWER.search(value) or _NAME.search(value):
        return False
    if _HARMLESS.search(value) or is_no_secret(value) or is_public_id(value):
        return False
    digits = len(_DIGIT.findall(value))
    if (not digits and not _TITLED.match(value)) or (digits == 1 and value.isalnum()):
        return False
    return is_plausible(value, Strength.PASSWORD, True)


def human_spans(text: str, flat: bytes) -> Iterator[Span]:
    """Words that nobody knows with a number and signs between them: no name is needed to tell that it is a password.

    `flat` is the text, one byte a character. It is searched as classes of characters: letters, digits, signs.
    """
    for match in _CLASSED.finditer(b" " + flat.translate(_CLASS_TABLE)):
        start, end = match.start(), match.end() - 1
        value = trimmed(text[start:end], _TRAILING)
        if (
            _SHORTEST <= len(value) <= _LONGEST
            and text[start - 1 : start] not in _BEFORE
            and text[end : end + 1] not in _BEHIND
            and not _VERSIONED.fullmatch(value)
            and not value.isalnum()
            and is_unfamiliar(value)
        ):
            yield Span(start, start + len(value), "PASSWORD")


_TITLED = re.compile(r"[A-Z][a-z]+_(?!$)|[A-Z][a-z]+[#%!&+*~^](?!$)")
# An address, a private name, a version behind a name, a name of code with members, an id with a prefix.
_NAME = re.compile(
    r"@|\.\.|^[._-]|^\d+\.\d|[A-Za-z]\d+[._]\d|^0x|^[a-z_]\w*+(?:\.[A-Za-z_]\w*+)++$|^(?:[A-Z]\w*+\.){2,}+[A-Z]\w*+$|^[a-z]+_(?![A-Za-z]+\d*$)[A-Za-z0-9]+$|\?[a-z]+$"
)
_VERSIONED = re.compile(r"[A-Z]\w*+(?:\.[A-Z]\w*+)++|[A-Za-z]+[-.]\d{1,2}[A-Za-z]{0,2}|[A-Z]+-\d[\w.-]*")
_SHORTEST, _LONGEST = 8, 40
_BEFORE, _BEHIND = frozenset("/\\@%"), frozenset("/\\([@=")
_TRAILING = ".,;:!?)*_\"'`"
_SIGN_CHARACTERS = "_.!#$%^&*?~+-"
_CLASS_TABLE = bytes(
    ord("-") if chr(code) in _SIGN_CHARACTERS else ord("0") if 48 <= code <= 57 else ord("l") if chr(code).islower()
    else ord("U") if chr(code).isupper() else 32
    for code in range(256)
)  # fmt: skip
# A word with a capital, then words and numbers with signs between them: at least one number and one sign. Nothing
# gives characters back: shorter pieces of a word end nowhere, either.
_CLASSED = re.compile(rb" Ul++(?=[U0-])(?=[Ul0]*+-)(?=[Ul-]*+0)(?:-?(?:0{1,4}(?!0)l{0,2}|U{0,3}l*))++(?![Ul0-])")
