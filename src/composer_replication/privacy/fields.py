"""Interpret the structure of JSON objects: field names, name/value pairs, and blobs that are random but public."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from composer_replication.privacy.entropy import has_vendor_prefix
from composer_replication.privacy.plausible import is_credential, is_directory, is_login, is_random_value, is_reference
from composer_replication.privacy.rules import PLACEHOLDER, is_strong, word_set
from composer_replication.privacy.secret_names import Strength, name_strength

SCALARS = frozenset((int, float, bool, type(None)))  # types without text
PAIR_VALUES = frozenset(
    ("value", "Value", "default", "plaintext", "data", "stringData", "secretValue", "ParameterValue")
)
# Fields whose meaning depends on their siblings, so each field is read in the context of its object.
_PAIR_NAME_FIELDS = ("name", "key", "Name", "Key", "ParameterKey")
OPAQUE = frozenset(("data", "signature", "encrypted_content", "thoughtSignature"))
# Keys by which a browser or a form identifies the element that receives the input.
TARGETS = ("element", "selector", "locator", "prompt", "label", "question", "placeholder", "field")
_TARGETS = frozenset(TARGETS)
_MAX_LABEL_CHARS = 200
_TYPED_FIELDS = ("text", "value", "input", "keys", "stdin", "answer", "response", "chars")
# `Password field`, `#pwd`, `API key`; not `passage`.
_SECRET_LABEL = re.compile(
    r"(?i)pass(?:word|wort|phrase|code|wd)|(?<![a-z])(?:pwd|secret|token|otp|pin|api[ _-]?key)(?![a-z])"
)
NEVER_PLAIN = PAIR_VALUES | OPAQUE | {*TARGETS}
# Shorter texts are scanned, since they may contain a key.
_MIN_BLOB_CHARS = 100
# `QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo=`, also over several lines; not `ada@example.org`.
_BLOB = re.compile(r"[A-Za-z0-9_-]++={0,2}+|(?:[A-Za-z0-9+/]{16,}+={0,2}+\s{0,2}+)++")
_TYPE_NAMES = word_set(
    "string str text password required null none true false bearer basic number integer boolean object"
)
# `door_pin`, `otp`; not `pinned`.
_NUMERIC_SECRET = re.compile(r"(?i)pass|pin$|otp|secret|cvv")
_MAX_ARGUMENTS = 200
_LOGIN_COMMANDS = word_set(
    "curl wget sshpass mysql mysqldump mysqladmin redis-cli docker podman helm mongo mongosh ldapsearch htpasswd"
    " openssl gh"
)
_MEDIA = ("image/", "audio/", "video/", "font/", "application/pdf")


def pair_strength(value: Mapping[Any, Any]) -> Strength:
    """Return how strongly a sibling field says that the value is a secret, as in `{"name": "DB_PASSWORD", "value":
    ...}`.
    """
    if value.get("kind") == "Secret" or value.get("sensitive") is True:  # Kubernetes; a Terraform output
        return Strength.TOKEN
    if value.get("type") == "password" or value.get("inputType") == "password":
        return Strength.PASSWORD
    if "value" in value or "Value" in value or "ParameterValue" in value:
        name = next((sibling for key in _PAIR_NAME_FIELDS if (sibling := value.get(key))), None)
        if isinstance(name, str):
            return name_strength(name)
    return Strength.NONE


def opaque_field(value: Mapping[Any, Any]) -> str | None:
    """Return the field in a block that holds an image or a provider's signature, which are random, or None."""
    kind = value.get("type")
    if kind == "base64":
        return "data" if str(value.get("media_type", "")).startswith(_MEDIA) else None
    if kind == "thinking":
        return "signature"
    if kind in ("redacted_thinking", "reasoning"):
        return "data" if "data" in value else "encrypted_content"
    return "thoughtSignature" if "thoughtSignature" in value else None


def is_blob(text: object) -> bool:
    """Return whether the content of a field for a signature or an image is really such data: one long base64 run
    that is not a vendor's key.
    """
    if not isinstance(text, str) or len(text) < _MIN_BLOB_CHARS:
        return False
    return _BLOB.fullmatch(text) is not None and not has_vendor_prefix(text)


def typed_secret_field(value: Mapping[Any, Any]) -> str | None:
    """Return the field typed into a password input: `text` in `{"element": "Password field", "text": ...}`."""
    for target in () if _TARGETS.isdisjoint(value) else TARGETS:
        label = value.get(target)
        if (
            isinstance(label, str)
            and len(label) <= _MAX_LABEL_CHARS
            and _SECRET_LABEL.search(PLACEHOLDER.sub("", label))
        ):
            key = next((key for key in _TYPED_FIELDS if isinstance(value.get(key), str)), None)
            return key if key and _is_typed(value[key]) else None
    return None


def _is_typed(text: str) -> bool:
    """Return whether text typed into a password field is a password, that is, a single word that is plausible as a
    secret.
    """
    return len(text) >= 4 and len(text.split()) == 1 and is_whole_secret(text, Strength.PASSWORD, "")


def is_command_line(items: Sequence[Any]) -> bool:
    """Return whether a list holds the arguments of a command that may include a password, judging by its flags or
    its program.
    """
    if not 2 <= len(items) <= _MAX_ARGUMENTS or not isinstance(items[0], str):
        return False
    texts = [item for item in items if isinstance(item, str)]
    if len(texts) != len(items):
        return False
    has_secret_flag = any(text.startswith("-") and name_strength(text) >= Strength.TOKEN for text in texts[:-1])
    return has_secret_flag or texts[0].rpartition("/")[2] in _LOGIN_COMMANDS


def is_named_pair(items: Sequence[Any]) -> bool:
    """Return whether a list is a header such as `["X-Api-Key", "..."]`: a name and a value that cannot be a name."""
    if len(items) != 2 or not isinstance(items[0], str) or not isinstance(items[1], str):
        return False
    return name_strength(items[0]) >= Strength.TOKEN and " " not in items[0] and is_strong(items[1])


def field_strength(name: str, inherited: Strength, pair: Strength) -> Strength:
    """Return the combined strength of the name of a field, the enclosing object and the sibling field."""
    own_strength = name_strength(name)
    if name in PAIR_VALUES:
        return max(own_strength, pair, inherited if inherited >= Strength.TOKEN else Strength.NONE)
    return own_strength


def is_whole_secret(text: str, strength: Strength, name: str) -> bool:
    """Return whether a string under a name with this strength is redacted as a whole."""
    if strength == Strength.WEAK:
        return not PLACEHOLDER.search(text) and (
            is_random_value(text) or is_credential(name, text.strip()) or is_login(name, text.strip())
        )
    if strength == Strength.NONE:
        return False
    stripped = text.strip()
    return (
        any(map(str.isalnum, stripped))
        and stripped.lower() not in _TYPE_NAMES
        and not PLACEHOLDER.search(text)
        and not is_reference(stripped)
        and not is_directory(name, stripped)
    )


def is_secret_number(value: object, key: str, strength: Strength) -> bool:
    """Return whether a JSON number is a PIN or an all-digit password."""
    return strength >= Strength.TOKEN and type(value) is int and value > 999 and _NUMERIC_SECRET.search(key) is not None


def holds_secret(item: Any, name: str, strength: Strength) -> bool:
    """Return whether a value under a name with this strength is a secret, or a list or an object that may contain
    one.
    """
    if isinstance(item, str):
        return is_whole_secret(item, strength, name)
    # Lists under a secret name are walked; their strings are secrets, too.
    return is_secret_number(item, name, strength) or (
        strength >= Strength.TOKEN and isinstance(item, list | tuple | dict)
    )
