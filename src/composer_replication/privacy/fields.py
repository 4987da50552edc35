"""What the shape of a JSON object says about its fields: names, name/value pairs, blobs that are nobody's secret."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from composer_replication.privacy.assignments import is_random_value, is_reference
from composer_replication.privacy.names import Strength, name_strength
from composer_replication.privacy.rules import PLACEHOLDER, word_set

PAIR_VALUES = frozenset(("value", "Value", "default", "plaintext", "data", "stringData", "secretValue"))
_TYPE_NAMES = word_set(
    "string str text password required null none true false bearer basic number integer boolean object"
)
_NUMERIC = re.compile(r"(?i)pass|pin$|otp|secret|cvv")
_MEDIA = ("image/", "audio/", "video/", "font/", "application/pdf")


def pair_strength(value: Mapping[Any, Any]) -> Strength:
    """`{"name": "DB_PASSWORD", "value": ...}` and a Kubernetes Secret name their values in a sibling."""
    if value.get("kind") == "Secret":
        return Strength.TOKEN
    if "value" in value or "Value" in value:
        name = value.get("name") or value.get("key") or value.get("Name") or value.get("Key")
        if isinstance(name, str):
            return name_strength(name)
    return Strength.NONE


def opaque_field(value: Mapping[Any, Any]) -> str | None:
    """The field of a block that holds an image or a provider's signature: random by nature."""
    kind = value.get("type")
    if kind == "base64":
        return "data" if str(value.get("media_type", "")).startswith(_MEDIA) else None
    if kind == "thinking":
        return "signature"
    if kind in ("redacted_thinking", "reasoning"):
        return "data" if "data" in value else "encrypted_content"
    return "thoughtSignature" if "thoughtSignature" in value else None


def field_strength(name: str, inherited: Strength, pair: Strength) -> Strength:
    """What the name of a field, the object above it and its sibling say together."""
    own = name_strength(name)
    if name in PAIR_VALUES:
        return max(own, pair, inherited if inherited >= Strength.TOKEN else Strength.NONE)
    return own


def is_whole_secret(text: str, strength: Strength) -> bool:
    """Whether a string under a name of this strength goes as a whole."""
    if strength == Strength.WEAK:
        return is_random_value(text)
    if strength == Strength.NONE:
        return False
    stripped = text.strip()
    return (
        any(map(str.isalnum, stripped))
        and stripped.lower() not in _TYPE_NAMES
        and not PLACEHOLDER.search(text)
        and not is_reference(stripped)
    )


def is_secret_number(value: object, key: str, strength: Strength) -> bool:
    """A PIN or an all-digit password that JSON holds as a number."""
    return strength >= Strength.TOKEN and type(value) is int and value > 999 and _NUMERIC.search(key) is not None
