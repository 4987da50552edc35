"""The name that a key word was found in: where it begins, how much it says there, and whether it is one at all."""

from __future__ import annotations

import re
from functools import lru_cache

from composer_replication.privacy.named.declarations import handed, typed
from composer_replication.privacy.named.name_and_value import names_handle
from composer_replication.privacy.named.names import Strength, name_strength
from composer_replication.privacy.named.values import is_called, stands_as_name
from composer_replication.privacy.rules import PLACEHOLDER

_HEAD = re.compile(r"[A-Za-z0-9_]*+(?:[.-][A-Za-z0-9_]++)*+")  # read backwards
_BEFORE_NAMES = frozenset(" \n\t\"'`([{<=:,;/*\0")
_KIND_OF_KEY = re.compile(r"(?i)(?:api|access|secret|private|license|encryption|auth|signing|master|account) $")
_IS = re.compile(r"\s(?:is|was)\s")
_LISTED = re.compile(
    r"(?i:user|login|account|username|admin|as)\b[^\0\n]{0,30}[,;/|]\s\Z|\b(?:new|old) \Z"
    r"|(?i:\buser(?:name)?)[ :=]{1,2}[^\0\s]{1,40}\s\Z"
)  # `user ada, pass ...`
_OF_WIFI = re.compile(r"(?i)\b(?:wi-?fi|wlan|ssid)\b[^\0\n=]{0,50}\Z")
# `--password-stdin`, `--vault-password-file`: what follows is no password; and the keys that everybody may know.
_NO_VALUE = re.compile(r"(?i)[_-](?:stdin|fd|prompt)$")
_SIGNED_BY = re.compile(r"using [A-Z]{3,6} \Z")


def name_start(text: str, position: int) -> int:
    """Where the name begins that has its key word at `position`."""
    if text[position - 1 : position] in _BEFORE_NAMES:
        return position
    head = _HEAD.match(text[max(0, position - 60) : position][::-1])
    return position - (head.end() if head else 0)


@lru_cache(maxsize=1 << 13)
def says_nothing(name: str, word: str) -> bool:
    """Whether neither a name nor its part from the key word on can have a secret behind it: most have none."""
    known = name_strength(name) != Strength.NONE or name_strength(word) >= Strength.TOKEN
    return not known and not names_handle(name) and "dentified by" not in word.lower()


def is_no_name(text: str, start: int, position: int, name: str, keyword: bytes) -> bool:
    """A placeholder, a public key, an option that reads from elsewhere, a code that is no login."""
    before = text[start - 1 : start]
    if keyword == b"code=" and before not in ("?", "&"):  # the rest of names with a code say more
        return True
    if before == "<" and PLACEHOLDER.match(text, start - 1):
        return True
    return _NO_VALUE.search(name) is not None or (keyword == b"key" and _is_public(text, position))


def _is_public(text: str, position: int) -> bool:
    """`public key`, and the key that made a signature, which gpg names by its fingerprint."""
    lead = text[max(0, position - 14) : position]
    return lead.rstrip(" _-").lower().endswith("public") or _SIGNED_BY.search(lead) is not None


def is_named(text: str, start: int, end: int) -> bool:
    """Whether a word that is also a verb stands as a name: an option, a tag, a key in quotes, or before a sign."""
    before = text[start - 1 : start]
    if text[end] in ".{[":
        return handed(text, end) is not None or typed(text, end) is not None
    keyed = before in ("'", '"', "`", "#") and text[end] in "'\"`\\" and is_called(text, end)
    return (
        before in ("-", "<")
        or keyed
        or _LISTED.search(text, max(0, start - 44), start) is not None
        or _IS.match(text, end) is not None
        or stands_as_name(text, end)
    )


def strength_at(text: str, position: int, name: str, keyword: bytes) -> Strength:
    """How much a name says, where the words before it may say more."""
    if keyword == b"identified by":
        return Strength.PASSWORD if "`" not in text[position : position + len(keyword) + 3] else Strength.NONE
    strength = name_strength(name)
    if strength == Strength.NONE and names_handle(name):
        return Strength.WEAK
    apart = strength == Strength.WEAK and name.lower() == "key"  # `api key`, in two words
    if apart and _OF_WIFI.search(text, max(0, position - 60), position):
        return Strength.PASSWORD
    return Strength.TOKEN if apart and _KIND_OF_KEY.search(text, max(0, position - 12), position) else strength
