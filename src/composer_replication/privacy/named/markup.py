"""Secrets that a document names from a distance: tags, forms, property lists, objects with a type, Secret manifests."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set

from composer_replication.privacy.named.names import Strength
from composer_replication.privacy.named.plausible import is_plausible
from composer_replication.privacy.rules import Span, word_set

_LEAD, _REACH = 240, 320
_NEAR = 90
# Behind a name inside a tag: `name="db.password">...`, `<Password Type="x">...`, `password</key><string>...`.
_IN_TAG = re.compile(
    r"(?:[^\0\n<>]{0,200}>|</\w{1,20}>\s{0,40}<\w{1,20}[^\0\n<>]{0,40}>)(?:\s{0,40}(?:\d{1,6}→\s{0,40})?<[Vv]alue>)?(?:<!\[CDATA\[)?\s{0,4}(?P<value>(?:[^\0\s<>\]]|\](?!\]>)){4,200})"
    r"(?=\s{0,4}(?:\]\]>)?</)"
)
_OPEN_TAG = re.compile(r"<[\w:.-]{0,40}(?:\s[^\0<>]{0,160})?\Z")
_ESCAPED_TAG = re.compile(r"&gt;(?P<value>[^\0\s<>&]{4,200})&lt;/")
# The field of a form or an object whose type or name was said before or is said behind it.
_FIELD = (
    r"(?:[vV]alue|VALUE|ParameterValue|parameter_value|plaintext|content|text|input|keys|stdin|answer|chars|secretValue"
    r"|SecretString|default)"
)
_FIELD_PARTS = tuple(
    word_set("alue VALUE laintext ontent ecretString efault text input keys stdin answer chars")
)  # the least that such a field has
_SAID_AS = re.compile(
    r"(?i)(?:expect|prompt|selector|element|field|placeholder|type|name|key|id|kind|format|inputtype|parameter_?key|label|autocomplete)\\*[\"']?\s?[:=]"
    r"\s?\\*[\"']?[\w #./\[=-]{0,60}\Z|(?:variable|output|parameter)\s\\*[\"']\w{0,60}\Z"
)
_FIELD_BEHIND = re.compile(
    rf"\\*[\"']?(?:\s?\{{)?"
    rf"[^\0{{}}<>]{{0,200}}?[\s,\"']{_FIELD}\\*[\"']?\s?[:=]\s{{0,4}}(?P<quote>\\*[\"'])?(?P<value>(?(q"
    rf"uote)(?:(?!(?P=quote))[^\0\n]){{4,200}}|(?![{{$])[^\0\s\"'<>,}}]{{4,200}}))"
)
_FIELD_BEFORE = re.compile(
    rf"[\s,{{\"'<]{_FIELD}"
    rf"\\*[\"']?\s?[:=]\s{{0,4}}(?P<quote>\\*[\"'])?(?P<value>(?(quote)(?:(?!(?P=quote))[^\0\n])"
    rf"{{4,200}}|[^\0\s\"'<>,}}]{{4,200}}))(?P=quote)?[^\0{{}}<>]{{0,160}}\Z"
)
_MANIFEST = re.compile(r"kind\\*[\"']?\s?:\s?\\*[\"']?(?:Sealed)?Secret\b")
_DATA = re.compile(r"\\*[\"']?(?:data|stringData)\\*[\"']?\s?:[ \t]{0,4}(?P<open>\{)?")
_LONGEST_MANIFEST = 6000
_PAIR = re.compile(
    r"\\*[\"']?[\w.-]{1,80}\\*[\"']?\s?:[ \t]{0,8}(?:[|>][+-]?\s{0,40})?(?P<quote>\\*[\"'])?(?P<value>"
    r"(?(quote)(?:(?!(?P=quote))[^\0\n]){3,4000}|[^\0\s\"',{}]{3,4000}))"
)
_LINE_PAIR = re.compile(r"\n(?P<indent>[ \t+→\d|-]{0,40})(?=[\w\"'.-]{1,80}\s?:)")


def named_in_document(text: str, start: int, end: int, strength: Strength) -> Span | None:
    """The value of a tag, a form or an object that has the name at `start` for its name or type."""
    if text[end : end + 1] in ("", "\0"):
        return None
    lead = text[max(0, start - _LEAD) : start]
    if text.startswith("&gt;", end) and (match := _ESCAPED_TAG.match(text, end, end + _REACH)):
        return _checked(text, *match.span("value"), strength)
    if (
        "<" in lead
        and (match := _IN_TAG.match(text, end, end + _REACH))
        and (_OPEN_TAG.search(lead) or text.startswith("</", end))
    ):
        return _checked(text, *match.span("value"), strength)
    around = text[max(0, start - _LEAD) : end + _REACH]
    if text[start - 1 : start] == " " or not any(part in around for part in _FIELD_PARTS):
        return None
    if not _SAID_AS.search(lead, max(0, len(lead) - _NEAR)):
        return None
    if (match := _FIELD_BEHIND.match(text, end, end + _REACH)) or (
        match := _FIELD_BEFORE.search(text, max(0, start - _LEAD), start)
    ):
        return _checked(text, *match.span("value"), strength)
    return None


def _checked(text: str, begin: int, end: int, strength: Strength) -> Span | None:
    kind = "PASSWORD" if strength == Strength.PASSWORD else "SECRET"
    value = text[begin:end]
    return Span(begin, end, kind) if " " not in value and is_plausible(value, strength, True) else None


def manifest_spans(text: str, active: Set[bytes]) -> Iterator[Span]:
    """Every value under `data` and `stringData` of a Kubernetes Secret."""
    if b"secret" not in active or "kind" not in text:
        return
    done = 0
    for kind in _MANIFEST.finditer(text):
        if kind.start() < done:  # within what was read already
            continue
        begin = max(text.rfind("\n---", 0, kind.start()), kind.start() - _LONGEST_MANIFEST, 0)
        border = text.find("\n---", kind.end(), kind.end() + _LONGEST_MANIFEST)
        end = border if border >= 0 else min(len(text), kind.end() + _LONGEST_MANIFEST)
        begin, done = max(begin, done), end
        for data in _DATA.finditer(text, begin, end):
            yield from _object(text, data.end(), end) if data["open"] else _block(text, data, end)


def _object(text: str, begin: int, end: int) -> Iterator[Span]:
    close = text.find("}", begin, end)
    for pair in _PAIR.finditer(text, begin, close if close >= 0 else end):
        yield from _value(pair)


def _block(text: str, data: re.Match[str], end: int) -> Iterator[Span]:
    """Lines further in than `data:`."""
    line = text.rfind("\n", 0, data.start()) + 1
    depth = data.start() - line
    position = data.end()
    while match := _LINE_PAIR.match(text, position, end):
        if len(match["indent"]) <= depth:
            return
        pair = _PAIR.match(text, match.end(), end)
        if pair is None:
            return
        yield from _value(pair)
        position = text.find("\n", pair.end(), end)
        if position < 0:
            return


def _value(pair: re.Match[str]) -> Iterator[Span]:
    if len(pair["value"]) >= 4 and is_plausible(pair["value"], Strength.PASSWORD, True):
        yield Span(*pair.span("value"), "SECRET")
