"""Secrets that a document names from a distance: tags, forms, property lists, objects with a type."""

from __future__ import annotations

import re

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
    sorted(word_set("alue VALUE laintext ontent ecretString efault text input keys stdin answer chars"))
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
