"""What is wrong with arguments: told by the schema where there is one, and by the words of the error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from composer_replication.hint_generator.context import HintContext
from composer_replication.types import ToolCall

_NAME = r"[`'\"]([A-Za-z_]\w{0,60})[`'\"]"
_BARE = r"([A-Za-z_]\w{0,60})(?=[.,;)]|\s*$)"
_KIND = r"(?:parameter|property|argument|field|positional argument)s?"
_MISSING = re.compile(
    rf"(?:required|missing) (?:required )?{_KIND}:? {_NAME}|must have required property {_NAME}|missing field {_NAME}"
    rf"|{_KIND} {_NAME} is (?:required|missing)|missing (?:value for )?(?:a )?required {_KIND}: {_BARE}"
    rf"|missing \d+ required \w+ arguments?: {_NAME}|(?<=and ){_NAME}\s*$",
    re.IGNORECASE | re.MULTILINE,
)
_UNEXPECTED = re.compile(
    rf"unexpected (?:keyword )?{_KIND}:? {_NAME}|unknown {_KIND}:? {_NAME}|additional {_KIND}:? {_NAME}", re.IGNORECASE
)
_TYPE = re.compile(rf"parameter {_NAME} type is expected as {_NAME}", re.IGNORECASE)
_EXPECTED = re.compile(r"\"expected\":\s*\"(\w{1,20})\"[^\[]{0,120}\"path\":\s*\[\s*\"(\w{1,60})\"")
_SHOULD_BE = re.compile(r"^(\w{1,60})\n\s+Input should be an? (?:valid )?(\w{1,20})", re.MULTILINE)
_JSON = re.compile(
    r"parse function arguments|not valid JSON|JSONDecodeError|Unexpected (?:token|end of JSON)"
    r"|Expecting (?:value|property|',')|(?:invalid|malformed) JSON|parse JSON",
    re.IGNORECASE,
)
_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict,),
}


def is_json_error(call: ToolCall | None, message: str) -> bool:
    """Whether the arguments were no JSON object at all, rather than one that does not fit."""
    if call is not None and call.raw_arguments is not None:
        return True
    return _JSON.search(message) is not None and not _named(_MISSING, message) and not _named(_UNEXPECTED, message)


def parameter_facts(call: ToolCall | None, message: str, schema: Mapping[str, Any] | None) -> HintContext:
    """Missing, unexpected and wrongly typed parameters. What the message names goes before what the schema shows."""
    facts: HintContext = {}
    missing, unexpected, wrong = _named(_MISSING, message), _named(_UNEXPECTED, message), _types(message)
    properties = schema.get("properties") if schema is not None else None
    if call is not None and call.raw_arguments is None and isinstance(properties, Mapping):
        required = schema.get("required") if schema is not None else None
        missing = missing or [name for name in required or () if name not in call.arguments]
        closed = schema is not None and schema.get("additionalProperties") is False
        unexpected = unexpected or [name for name in call.arguments if closed and name not in properties]
        wrong = wrong or [
            f"{name}: {kind}"
            for name, value in call.arguments.items()
            if (kind := _wrong_kind(value, properties.get(name))) is not None
        ]
    if missing:
        facts["missing_parameters"] = missing
    if unexpected:
        facts["unexpected_parameters"] = unexpected
    if wrong:
        facts["wrong_types"] = wrong
    return facts


def _named(pattern: re.Pattern[str], message: str) -> list[str]:
    names = (next(group for group in match.groups() if group) for match in pattern.finditer(message[:4000]))
    return list(dict.fromkeys(names))


def _types(message: str) -> list[str]:
    text = message[:4000]
    typed_names = [
        *_TYPE.findall(text),
        *_SHOULD_BE.findall(text),
        *((name, kind) for kind, name in _EXPECTED.findall(text)),
    ]
    return [f"{name}: {kind}" for name, kind in typed_names]


def _wrong_kind(value: Any, schema: Any) -> str | None:
    """The type that a value should have, if it has another."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    allowed = _KINDS.get(kind) if isinstance(kind, str) else None
    if allowed is None or value is None:
        return None
    fits = isinstance(value, allowed) and (kind == "boolean" or not isinstance(value, bool))
    return None if fits else kind
