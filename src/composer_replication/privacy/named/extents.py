"""Where the value behind a name begins and ends: quoted, bare, to the end of its line, or up to the next name."""

from __future__ import annotations

import re

from composer_replication.privacy.named.plausible import is_generated

_QUOTE = re.compile(r"\\*[\"'`]")
_BARE = re.compile(r"(?:[^\0\s\"'`\\<>]++|\\(?![nrtu\"'\\/`])|(?<=[A-Za-z0-9!@#$%^&*])['](?=[A-Za-z0-9!@#$%^&*]))+")
_SCHEMES = re.compile(
    r"(?i:(?:bearer|basic|token|apikey|api-key|digest|key|negotiate|splunk|geniekey|sso-key|aws4-hmac-sha256)(?:"
    r"[ \t]+|\s*=\s*))"
)
_NEXT_PAIR = re.compile(r"[^\0&\s]+&[\w.-]+=")
_NEXT_NAME = re.compile(r";(?=\s*[A-Za-z][\w .-]{0,40}=)|,(?=[A-Za-z_][\w.-]{0,40}[=:])|&&|\|\|")
_OPENERS = {")": "(", "]": "[", "}": "{"}
_ENV_LINE = re.compile(r"(?:export |declare -x |set )?[A-Za-z_]\w*=")
# `password: `, `PASSWORD=`, `"password" => `, `<password><![CDATA[`, `requirepass `, up to the value.
_DATA_SIGN = re.compile(
    r"\\*[\"'`]?\]?(?:[ \t]{0,20}(?:=>|:=|[:=])[ \t]{0,20}|[ \t]{0,40}\|[ \t]{1,20}|>(?:<!\[CDATA\[)?|[ \t]{1,40})"
)
_DATA_WORD = re.compile(r"[!-~]+")
# The next pair (`;port=`, `&user=`, `\\nDB_HOST=`), or the end of a tag or of a string with escapes.
_DATA_ENDS = re.compile(
    r"(?:[;,&]|\\+[nrt])(?=(?:[a-z]{3}|[A-Z]{3}|[A-Z][a-z]{2})[\w.-]{0,40}[=:])|\]\]>|</|\\+n\Z|\\+[\"'](?=[,:}\])]|\Z)"
)
_QUOTES_END = re.compile(r"\\*[\"'`](?:[\s,;:)}\]>/]|\Z|\\)")  # a quote that closes: `"...",`
_BEHIND_DATA = "\"'`,;)]}>"
_LONGEST_GENERATED = 200
# No secret without a frame of its own is longer, and every search below stops there.
_LONGEST = 4000
_LONGEST_BARE = 2000
_LONGEST_LEAD = 80


def bare_word(text: str, begin: int) -> str:
    """The unquoted word at `begin`; a quote between letters belongs to it."""
    match = _BARE.match(text, begin, begin + _LONGEST_BARE)
    return generated_word(text, begin) or (match[0] if match else "")


def quoted(text: str, begin: int) -> tuple[int, int] | None:
    """Begin and end of what stands in quotes at `begin`; an escaped quote inside does not end it."""
    quote = _QUOTE.match(text, begin)
    if quote is None:
        return None
    mark, begin = quote[0], quote.end()
    if text.startswith(mark * 2, begin) and len(mark) == 1:  # three of them
        mark, begin = mark * 3, begin + 2
    nul = text.find("\0", begin, begin + _LONGEST)  # the border between two strings scanned together
    limit = nul if nul >= 0 else min(len(text), begin + _LONGEST)
    end = text.find(mark, begin, limit)
    while len(mark) == 1 and end > begin and text[end - 1] == "\\" and text[end - 2] != "\\":
        end = text.find(mark, end + 1, limit)
    newline = text.find("\n", begin, limit)
    if end < 0 or (0 <= newline < end and mark != "`" and not text.startswith("-----BEGIN", begin)):
        end = begin + len(bare_word(text, begin))
    return begin, end


def generated_value(text: str, end: int) -> tuple[int, int] | None:
    """Begin and end of the password of a generator behind a sign or a blank at `end`, in quotes or bare.

    Brackets, quotes and commas are its own: a bare one goes on to the next blank or to the next name with a value.
    """
    sign = _DATA_SIGN.match(text, end)
    if sign is None:
        return None
    begin = sign.end()
    if (bounds := quoted(text, begin)) and _QUOTES_END.match(text, bounds[1]):
        return bounds if is_generated(text[slice(*bounds)]) else None
    value = generated_word(text, begin).rstrip(_BEHIND_DATA)
    return (begin, begin + len(value)) if value else None


def generated_word(text: str, begin: int) -> str:
    """The word at `begin` if a generator of passwords made it, otherwise nothing."""
    word = _DATA_WORD.match(text, begin, begin + _LONGEST_GENERATED)
    value = _DATA_ENDS.split(word[0], maxsplit=1)[0] if word else ""
    return value if is_generated(value.rstrip(_BEHIND_DATA)) else ""


def is_env(text: str, start: int, match: re.Match[str]) -> bool:
    """`NAME=value` with no space: a shell or a dotenv line, where an unquoted word is a literal."""
    name = text[start : match.start()]
    return match["sign"] == "=" and match.end() - match.start() == 1 and name.upper() == name


def bare_end(text: str, start: int, begin: int, env: bool) -> int:
    """Where an unquoted value ends that begins at `begin` and whose name begins at `start`."""
    value = bare_word(text, begin)
    end = begin + len(value)
    if env and text[end : end + 1] == " " and _in_dump(text, start):
        newline = text.find("\n", begin, begin + _LONGEST)
        return newline if newline >= 0 else min(len(text), begin + _LONGEST)
    before = text[start - 1 : start]
    if before in ("?", "&") or _NEXT_PAIR.match(value):
        value = value.split("&", 1)[0]
    value = _NEXT_NAME.split(value, maxsplit=1)[0]
    value = _up_to_closing(value, text[max(text.rfind("\n", 0, start) + 1, start - _LONGEST_LEAD) : start])
    return begin + len(value.rstrip(",;)}]:." if not env else ";"))


def _up_to_closing(value: str, lead: str) -> str:
    """Return a bare value up to the bracket that closes one of `lead`, the line before it: `call(token=token)["a"]`."""
    if ")" not in value and "]" not in value and "}" not in value:
        return value
    opened: list[str] = []
    num_before = 0  # brackets that `lead` leaves open
    for index, sign in enumerate(lead + value):
        if sign in "([{":
            opened.append(sign)
        elif (opener := _OPENERS.get(sign)) and opener in opened:
            depth = len(opened) - 1 - opened[::-1].index(opener)
            if index >= len(lead) and depth < num_before:
                return value[: index - len(lead)]
            del opened[depth:]
        if index == len(lead) - 1:
            num_before = len(opened)
    return value


def _in_dump(text: str, start: int) -> bool:
    """Whether the lines around are `NAME=value` too: then a value goes on to the end of its line."""
    line_start = text.rfind("\n", max(0, start - _LONGEST_LEAD), start) + 1
    if start - line_start > _LONGEST_LEAD or text[line_start:start].strip() not in ("", "export", "declare -x"):
        return False
    previous = text[text.rfind("\n", max(0, line_start - _LONGEST), max(0, line_start - 1)) + 1 : line_start]
    newline = text.find("\n", start, start + _LONGEST)
    following = text[newline + 1 : newline + 80] if newline >= 0 else ""
    return bool(_ENV_LINE.match(previous) or _ENV_LINE.match(following))


def skip_scheme(text: str, begin: int, end: int) -> int:
    """Past `Bearer` and its like."""
    scheme = _SCHEMES.match(text, begin, end)
    return scheme.end() if scheme else begin
