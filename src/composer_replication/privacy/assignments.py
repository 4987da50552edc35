"""Secrets known by their name: shell, env files, JSON, YAML, TOML, flags, headers, XML, .netrc, .npmrc, plain speech.

The text is searched for key words; only behind a hit is anything parsed. Nothing here runs over a whole text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set

from composer_replication.privacy.entropy import looks_random
from composer_replication.privacy.names import Strength, name_strength
from composer_replication.privacy.rules import PLACEHOLDER, Span, has_digit, is_strong

KEYWORDS: tuple[bytes, ...] = tuple(
    b"pass pwd secret token key auth cred jwt sig sid session sessid salt otp pin dsn webhook license mnemonic seed pat"
    b" psk connection cookie pw senha identified contrase".split()
)
_ALL_KEYWORDS = frozenset(KEYWORDS)
# Short or common words count only with a sign directly behind them.
_NEEDS_SIGN = {
    b"sig": b"sig=",
    b"sid": b"sid=",
    b"session": b"session=",
    b"pat": b"_pat",
    b"identified": b"identified by",
}
_HEAD = re.compile(r"[A-Za-z0-9_]*(?:[.-][A-Za-z0-9_]+)*")  # read backwards
_TAIL = re.compile(r"[A-Za-z0-9_]*(?:[.-][A-Za-z0-9_]+)*")
_KIND_OF_KEY = re.compile(r"(?i)(?:api|access|secret|private|license|encryption|auth|signing|master|account) $")
# What can stand directly behind a name that has a value.
_BEHIND_NAMES = frozenset("*|=:\"'`\\])>,( \t\n+?!")
# Between name and value: a closing quote or bracket, then a sign; in code also a comma, a call or a tag.
_SIGN = re.compile(
    r"(?P<close>\\*[\"'`]?[\])]?\*{0,2})\s{0,3}(?P<sign>=>|:=|\+=|\?=|==|!=|[:=])(?!=)\*{0,2}[ \t]*"
    r"(?:(?:\\n|\n)[ \t]*(?=\\*[\"']))?"
    r"(?:!(?:!?[a-z]+)?[ \t]+)?(?:[|>][+-]?[ \t]*(?:\\n|\n)[ \t]*)?"
    r"(?:(?:str|bytes|f|b|r|u|Some|String::from|new String)(?=\\*[\"'(])\(?)?"
)
_CALL = re.compile(r"(?P<close>\\*[\"'`]?)\s?(?P<sign>[,(]|\s)\s{0,2}(?=\\*[\"'`])")
_TAG = re.compile(r"(?P<close>)(?P<sign>>)(?=[^<>\s@:])")
_VALUE_FIELD = re.compile(
    r"(?P<close>\\*[\"'`]?)(?P<sign>[\s,;]{0,6}(?:\\n|\n)?[\s-]*\\*[\"']?(?:value|Value|default)\\*[\"']?\s?[:=]\s*)"
)
_CELL = re.compile(r"(?P<close>\*{0,2}`?)[ \t]{0,40}(?P<sign>\|)[ \t]{0,40}(?=[^\s|])")
_SPACE = re.compile(r"(?P<close>\\*[\"'`]?)(?P<sign>[ \t]+|\\t)(?=[^\s=:\-&|>(){}\[\],;])")
_SPEECH = re.compile(
    r"(?i:s?(?:\s{1,4}[a-z0-9][a-z0-9_.'-]{0,24}){0,6}?"
    r"(?:\s{1,2}(?:is|was|are|be|to|as|equals|=|->|→|—|-):?|:)\s{1,4}(?:set to\s|now\s|just\s)?)[\"'`(*]{0,4}"
)
_QUOTE = re.compile(r"\\*[\"'`]")
_BARE = re.compile(r"(?:[^\s\"'`\\<>]|\\(?![nrtu\"'\\/`])|(?<=[A-Za-z0-9!@#$%^&*])['](?=[A-Za-z0-9!@#$%^&*])){1,2000}")
_SCHEMES = re.compile(
    r"(?i:(?:bearer|basic|token|apikey|api-key|digest|key|negotiate|aws4-hmac-sha256)(?:[ \t]+|\s*=\s*))"
)
_PLACEHOLDER_WORDS = re.compile(
    r"(?i)^#[0-9a-f]{3,8}$|^\{[^{}]*\}$|^(?:options?|flags?|arguments?|parameters?|prompt|stdin|instead|via|and|my[_-]?(?:token|secret|key|"
    r"password))$|\$\{|\{\{|\$\(|^\$\w+$|%\(|^%[sd]$|^%[A-Z_]+%$|\*{3,}|x{4,}|\.{3}|…|your[_ -]|"
    r"<[^>]*>|example|redacted|changeme|"
    r"placeholder|process\.env|os\.environ|getenv|env\.|secrets\.|^(?:none|null|nil|undefined|true|false|string|str|text|"
    r"bearer|basic|password|passwd|secret|token|required|optional|number|int|integer|boolean|bool|object|any|unknown|hidden|"
    r"input|default|empty|bytes|never|void|dummy|mock|foo|bar|todo|n/?a|yes|no|on|off|auto|inherit|self|this|key|value|"
    r"type|name|field|label|env|varchar.*|char.*|todo.*|missing|invalid|valid|expired|access|refresh|session|header|cookie)$"
)
_REFERENCE = re.compile(
    r"\$\{|\{\{|\$\(|^\$[A-Za-z_]\w*$|^%[A-Z_]+%$|\*{3,}|^<[^>]*>$|process\.env|os\.environ|getenv\("
)
_PROSE = re.compile(
    r"(?i)\b(?:is|are|the|a|an|must|should|required|your|for|to|of|and|or|not|with|please|enter|cannot|can|be|in)\b"
)


def keyword_spans(text: str, lower: bytes, active: Set[bytes]) -> Iterator[Span]:
    """Every value that stands behind a secret-looking name.

    `lower` is the text, one byte a character, lower-cased; `active` are the key words known to occur in it.
    """
    for keyword in KEYWORDS if active & _ALL_KEYWORDS else ():
        if keyword not in active:
            continue
        keyword = _NEEDS_SIGN.get(keyword, keyword)
        position = lower.find(keyword)
        while position >= 0:
            span = _at_hit(text, position, keyword)
            if span is not None:
                yield span
            position = lower.find(keyword, max(position + len(keyword), span.end if span else 0))


def _at_hit(text: str, position: int, keyword: bytes) -> Span | None:
    # The `=` of `sig=` belongs to the sign, not to the name.
    stem_end = position + len(keyword) - keyword.endswith(b"=")
    tail = _TAIL.match(text, stem_end)
    end = tail.end() if tail else stem_end
    after = text[end : end + 1]
    if after not in _BEHIND_NAMES:
        return None
    head = _HEAD.match(text[max(0, position - 60) : position][::-1])
    start = position - (head.end() if head else 0)
    if start < position and text[start - 1 : start] == "\\" and text[start] in "nrt":
        start += 1
    name = text[start:end]
    if after == ">" and text[start - 1 : start] == "<" and PLACEHOLDER.match(text, start - 1):
        return None
    strength = Strength.PASSWORD if keyword == b"identified by" else name_strength(name)
    if (
        strength == Strength.WEAK
        and name.lower() == "key"
        and _KIND_OF_KEY.search(text, max(0, position - 12), position)
    ):
        strength = Strength.TOKEN
    if name.lower() == "pass" and not _SIGN.match(text, end):  # a verb
        return None
    if strength == Strength.NONE and name_strength(text[position:end]) < Strength.TOKEN:
        return None
    return _value_after(text, start, end, max(strength, Strength.WEAK))


def _value_after(text: str, start: int, end: int, strength: Strength) -> Span | None:
    """The value behind a name, if it is one."""
    if match := _SIGN.match(text, end):
        return _value_at(text, start, match, strength) or _spoken(text, end, strength)
    if match := _VALUE_FIELD.match(text, end):
        return _value_at(text, start, match, strength)
    if match := _CALL.match(text, end):
        span = _value_at(text, start, match, strength)
        return span if span and _is_argument(text[span.start : span.end], strength) else None
    if text[end] == ">" and (match := _TAG.match(text, end)):
        return _value_at(text, start, match, strength)
    if match := _CELL.match(text, end):
        return _value_at(text, start, match, strength, spaced=True)
    if match := _SPACE.match(text, end):
        flag = text[max(0, start - 2) : start].endswith("-")
        if (span := _value_at(text, start, match, strength, spaced=not flag)) is not None:
            return span
    return _spoken(text, end, strength)


def _is_argument(value: str, strength: Strength) -> bool:
    """In a call only a value without spaces: messages and labels stand there too."""
    return " " not in value and (has_digit(value) or (strength == Strength.PASSWORD and not value.isalpha()))


def _spoken(text: str, end: int, strength: Strength) -> Span | None:
    """`the password for the database is ...`: only a value that no word could be."""
    match = _SPEECH.match(text, end)
    if match is None:
        return None
    bare = _BARE.match(text, match.end())
    value = bare[0].rstrip(".,;:!?)*_") if bare else ""
    if (
        not is_strong(value)
        or (strength == Strength.WEAK and not is_random_value(value))
        or not _plausible(value, strength, True)
    ):
        return None
    return Span(match.end(), match.end() + len(value), _kind(strength))


def _value_at(text: str, start: int, match: re.Match[str], strength: Strength, *, spaced: bool = False) -> Span | None:
    begin, literal = match.end(), False
    quote = _QUOTE.match(text, begin)
    if quote:
        begin, end = _quoted(text, quote)
        literal = True
    else:
        env = _is_env(text, start, match)
        end = _bare_end(text, start, begin, env)
        if match["sign"] in ("==", "!="):  # compared with a variable, not with a text
            return None
        literal = env or spaced or text[start - 1 : start] in ("-", "?", "&") or match.re in (_TAG, _VALUE_FIELD)
    begin = _skip_scheme(text, begin, end)
    value = text[begin:end]
    if spaced and not is_strong(value):
        return None
    if (
        not value
        or (strength == Strength.WEAK and not is_random_value(value))
        or not _plausible(value, strength, literal)
    ):
        return None
    return Span(begin, end, _kind(strength))


def _quoted(text: str, quote: re.Match[str]) -> tuple[int, int]:
    """Begin and end of what stands in quotes; an escaped quote inside does not end it."""
    mark, begin = quote[0], quote.end()
    nul = text.find("\0", begin, begin + 4000)  # the border between two strings scanned together
    limit = nul if nul >= 0 else min(len(text), begin + 4000)
    end = text.find(mark, begin, limit)
    while len(mark) == 1 and end > begin and text[end - 1] == "\\" and text[end - 2] != "\\":
        end = text.find(mark, end + 1, limit)
    newline = text.find("\n", begin, limit)
    if end < 0 or (0 <= newline < end and mark != "`" and not text.startswith("-----BEGIN", begin)):
        bare = _BARE.match(text, begin)
        end = bare.end() if bare else begin
    return begin, end


def _is_env(text: str, start: int, match: re.Match[str]) -> bool:
    """`NAME=value` with no space: a shell or a dotenv line, where an unquoted word is a literal."""
    name = text[start : match.start()]
    return match["sign"] == "=" and match.end() - match.start() == 1 and name.upper() == name


def _bare_end(text: str, start: int, begin: int, env: bool) -> int:
    bare = _BARE.match(text, begin)
    if bare is None:
        return begin
    value, end = bare[0], bare.end()
    if env and text[end : end + 1] == " " and _in_dump(text, start):
        newline = text.find("\n", begin)
        return newline if newline >= 0 else len(text)
    before = text[start - 1 : start]
    if before in ("?", "&") or re.match(r"[^&\s]+&[\w.-]+=", value):
        value = value.split("&", 1)[0]
    value = re.split(r";(?=\s*[A-Za-z][\w .-]{0,40}=)|,(?=[A-Za-z_][\w.-]{0,40}[=:])|&&|\|\|", value, maxsplit=1)[0]
    return begin + len(value.rstrip(",;)}]:." if not env else ";"))


def _in_dump(text: str, start: int) -> bool:
    """Whether the lines around are `NAME=value` too: then a value goes on to the end of its line."""
    line_start = text.rfind("\n", 0, start) + 1
    if text[line_start:start].strip() not in ("", "export"):
        return False
    previous = text[text.rfind("\n", 0, max(0, line_start - 1)) + 1 : line_start]
    newline = text.find("\n", start, start + 4000)
    following = text[newline + 1 : newline + 80] if newline >= 0 else ""
    shape = re.compile(r"[A-Za-z_]\w*=")
    return bool(shape.match(previous) or shape.match(following))


def _skip_scheme(text: str, begin: int, end: int) -> int:
    scheme = _SCHEMES.match(text, begin, end)
    return scheme.end() if scheme else begin


def _kind(strength: Strength) -> str:
    return {Strength.PASSWORD: "PASSWORD", Strength.TOKEN: "SECRET"}.get(strength, "KEY_VALUE")


def is_random_value(value: str) -> bool:
    """Whether a value under a name that says little (`key`, `auth`) is a key by its looks."""
    core = value.strip("\"'")
    return 16 <= len(core) <= 2000 and " " not in core and has_digit(core) and "://" not in core and looks_random(core)


def _plausible(value: str, strength: Strength, literal: bool) -> bool:
    """Whether a value could be a secret: not a placeholder, a variable, a type, a call, a path or a sentence."""
    if (
        len(value) < (4 if strength == Strength.PASSWORD else 6)
        or PLACEHOLDER.search(value)
        or _PLACEHOLDER_WORDS.search(value, 0, 200)
    ):
        return False
    if len(set(value)) < 3 or not any(map(str.isalnum, value)) or value.startswith(("//", "/*", "./", "../", "~/")):
        return False
    if " " in value:
        return (
            strength >= Strength.TOKEN
            and literal
            and not _PROSE.search(value)
            and len(value) < 200
            and value[-1] not in ".:?"
        )
    if literal:
        return (
            strength == Strength.PASSWORD
            or has_digit(value)
            or len(value) >= 20
            or (value.upper() != value and not value.isalpha())
        )
    if re.fullmatch(r"[A-Za-z_$][\w$]*(?:[.?!:]+[A-Za-z_$][\w$]*)*[!?]?|\d+(?:\.\d+)?[a-zA-Z%]{0,2}|.*[(\[{].*", value):
        return has_digit(value) and "(" not in value and "[" not in value and len(value) >= 8 and _mixed(value)
    return True


def _mixed(value: str) -> bool:
    """A bare identifier with digits is a password when it is no name: Xk39fQ2z, not step2 or sha256."""
    plain = "." not in value and "_" not in value
    return (plain and looks_random(value)) or bool(re.search(r"\d[A-Za-z]+\d|[a-z]\d+[A-Z]", value))


def is_reference(value: str) -> bool:
    """Whether a value only points to a secret: a variable, a template, a mask."""
    return _REFERENCE.search(value) is not None
