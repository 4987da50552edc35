"""Secrets known by their name: shell, env files, JSON, YAML, TOML, flags, headers, XML, .netrc, .npmrc, plain speech.

The text is searched for key words; only behind a hit is anything parsed. Nothing here runs over a whole text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from functools import lru_cache

from composer_replication.privacy.names import MEANT, Strength, name_strength
from composer_replication.privacy.plausible import (
    is_answer,
    is_given,
    is_plausible,
    is_unfamiliar,
    names_handle,
    trimmed,
)
from composer_replication.privacy.rules import PLACEHOLDER, Span, word_set
from composer_replication.privacy.speech import spoken_before
from composer_replication.privacy.values import (
    WIDE_SIGNS,
    arguments,
    counted,
    handed,
    is_called,
    is_handed,
    stands_as_name,
    told_behind,
    typed,
    value_after,
)

# What to look for among the words of a text, and what to search the text for then. A blank ends a word: `sig ` is one
# that ends so. Short or common words count only with a sign directly behind them.
_SEARCHED: dict[bytes, tuple[bytes, ...]] = {
    word: (word,)
    for word in b"pass pwd secret token key auth cred jwt sessid dsn webhook license mnemonic seed psk connection"
    b" cookie senha contrase pincode hmac".split()
} | {
    b"sig ": (b"sig=",),
    b"signature ": (b"signature=",),
    b"sid ": (b"sid=",),
    b"session ": (b"session=", b"session_id=", b"session-id="),
    b"sessionid ": (b"sessionid=",),
    b"pat ": (b"_pat",),
    b"identified ": (b"identified by",),
    b"salt ": (b"salt",),
    b"otp": (b"otp",),
    b"code ": (b"code=",),
    b"login ": (b"_login=", b"login("),
    b"connect ": (b"connect(",),
    b"begin ": (b"begin(",),
    b"pdo ": (b"pdo(",),
    b"construct ": (b"construct(",),
    b"bind ": (b"bind(",),
    b"pin ": (b"pin",),
    b"pw ": (b"pw",),
    b"mdp ": (b"mdp",),
    b"assword": (b"assword",),
}
_SLIPS = frozenset(slip for slip in map(str.encode, MEANT) if not any(word in slip for word in _SEARCHED))
_SEARCHED |= {slip: (slip,) for slip in sorted(_SLIPS)}
# `expect "assword:"`; inside of other words it is found as `pass`.
WHOLE_WORDS = frozenset((b"assword",)) | _SLIPS
KEYWORDS: tuple[bytes, ...] = tuple(_SEARCHED)
_ORDER = {keyword: number for number, keyword in enumerate(KEYWORDS)}
# The same word over and over without a blank or a quote is machine-made; each hit would read the whole of it again.
_LARGEST_CROWD = 32
_AROUND = 320  # further than any form reads for what a name is, and how its value begins
_NOTHING: set[int] = set()  # hits without a value, by the hash of what stands around them
_MOST_MARKS = 1 << 14
_BREAK = re.compile(rb"[\s\"'`<>\\\0]")
_TAIL = re.compile(r"[A-Za-z0-9_]*+(?:[.-][A-Za-z0-9_]++)*+")
# What can stand directly behind a name that has a value.
_BEHIND_NAMES = frozenset("*|=:\"'`\\])>,( \t\n+?!{[;<.&\u2019" + WIDE_SIGNS)
_LOGIN_NAMES = frozenset((b"auth", b"cred", b"login"))
_ASKED = re.compile(
    r"[.?!]\s{1,3}(?:(?:[Ii]t|[Tt]hat)(?:['\u2019]s|\s(?:is|was|should be))|(?<=[?]\s)(?:should be|try|use))\s"
    r"[\"'`*]{0,3}(?P<value>[^\0\s\"'`*]{4,60})"
)
# A key without blanks, or in groups of four.
_A_KEY = re.compile(r"0x[0-9a-fA-F]{2},\s?0x|[^\0\s\"'`]{16}|[A-Za-z2-7]{4} [A-Za-z2-7]{4} [A-Za-z2-7]{4} ")
_SHORTEST_KEY = 16
_VALUE_REACH = 160
_COUNTED = frozenset((b"key", b"secret", b"pass", b"seed", b"token"))
_ENDS_SPEECH = frozenset(("", "\u2019", "\0"))
_BEFORE_TOLD = frozenset(" :=\t\n\"'`*,)\u2019" + WIDE_SIGNS)
_CALLED = frozenset(b"auth cred jwt hmac connection login( connect( begin( pdo( construct( bind(".split())
# A name, or a name and the beginning of a value, at the end of a line.
_CUT_OFF = re.compile(
    r"[\"'`\])]{0,3}(?::[ \t]?[\w\[\]., |]{1,40}(?==|[ \t]=))?(?:[ \t]{0,3}(?:=>|:=|[:=]|[ \t]))?[ \t]{0,3}"
    r"(?:[A-Za-z]{2,9}[ \t])?\\*[\"'`]?[^\0\s\"'`,;(){}\[\]<>\\]{0,60}[ \t]{0,2}(?:\\{0,2}\r?\n|`\n|\\{1,2}n)"
)
_CUT_SPEECH = re.compile(
    r"(?:[ \t]{1,2}[^\0\s:=]{1,24}){0,6}[ \t]{1,2}(?:is|was|ist|lautet|est|es|è|é|är|er|on|je|este|jest|adalah|là)"
    r"[ \t]{1,2}(?P<value>[!-~]{1,60})\r?\n[ \t]{0,8}(?:\d{1,6}[→:|\t][ \t]*)?[!-~]"
)
_CUT_NAME = re.compile(
    r"(?i:api|access|secret|private|signing|account|encryption|master)_?(?P<end>\r?\n|\\n)[ \t+>|]*_?\Z"
)
_RESOURCE = re.compile(r"\b[au]rn:[^\0\s\"'`<>()]{0,200}:\Z")
_KEYWORD_BEFORE = re.compile(r"([A-Za-z_]\w{0,30})\s?=\s?\w{0,2}\\*[\"'`]\Z")
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


def searched_words(active: Set[bytes]) -> list[bytes]:
    """What the text is searched for when these key words occur in it."""
    here = sorted(active & _ORDER.keys(), key=_ORDER.__getitem__)
    return [word for keyword in here for word in _SEARCHED[keyword]]


def keyword_spans(text: str, lower: bytes, active: Set[bytes], unfinished: list[int] | None = None) -> Iterator[Span]:
    """Every value that stands behind a secret-looking name.

    `lower` is the text, one byte a character, lower-cased; `active` are the key words known to occur in it. Where names
    end that have a line end where their value is goes to `unfinished`.
    """
    for word in searched_words(active):
        yield from _spans_of(text, lower, word, [] if unfinished is None else unfinished)


def _spans_of(text: str, lower: bytes, needle: bytes, unfinished: list[int]) -> Iterator[Span]:
    position, crowd = lower.find(needle), 0
    while position >= 0:
        span = _looked_at(text, position, needle, unfinished)
        if span is not None:
            yield span
        following = lower.find(needle, max(position + len(needle), span.end if span else 0))
        crowd = 0 if span or following < 0 or _BREAK.search(lower, position, following) else crowd + 1
        if crowd > _LARGEST_CROWD:
            after, crowd = _BREAK.search(lower, following), 0
            following = lower.find(needle, after.end()) if after else -1
        position = following


def _looked_at(text: str, position: int, needle: bytes, unfinished: list[int]) -> Span | None:
    """What stands behind a hit. Lines come again and again: where there was nothing, nothing is looked for twice."""
    begin = max(0, position - _AROUND)
    mark = hash((text[begin : position + _AROUND], position - begin, needle))
    if mark in _NOTHING:
        return None
    noted = len(unfinished)
    span = _at_hit(text, position, needle, unfinished)
    if span is None and len(unfinished) == noted:
        if len(_NOTHING) >= _MOST_MARKS:
            _NOTHING.clear()
        _NOTHING.add(mark)
    return span


def _at_hit(text: str, position: int, keyword: bytes, unfinished: list[int]) -> Span | None:
    # The `=` of `sig=` belongs to the sign, not to the name.
    stem_end = position + len(keyword) - keyword.endswith((b"=", b"("))
    tail = _TAIL.match(text, stem_end)
    end = tail.end() if tail else stem_end
    after = text[end : end + 1]
    if after not in _BEHIND_NAMES:
        return _said_before(text, _name_start(text, position), end) if after in _ENDS_SPEECH else None
    start = _name_start(text, position)
    if start < position and text[start - 1 : start] == "\\" and text[start] in "nrt":
        start += 1
    name = text[start:end]
    if keyword in _CALLED:
        if after and after in "( " and (span := _positional(text, end, keyword)):
            return span
    elif _says_nothing(name, text[position:end]) and (after != "(" or "." not in name):
        return None
    if after == "(":
        if name_strength(name) == Strength.PASSWORD and (span := _positional(text, end, b"jwt")):
            return Span(span.start, span.end, "PASSWORD")
        if "." in text[stem_end:end]:  # a method of it: what it is given is told by the name before it
            end = text.rfind(".", stem_end, end)
            name = text[start:end]
    strength = _strength_at(text, position, name, keyword)
    if not _is_no_name(text, start, position, name, keyword):
        _note_unfinished(text, start, end, strength, keyword, unfinished)
        if _may_have_value(text, position, start, end, strength, keyword):
            return _value_of(text, start, end, strength, keyword)
    return None


def _note_unfinished(
    text: str, start: int, end: int, strength: Strength, keyword: bytes, unfinished: list[int]
) -> None:
    """Remember a name that a line end parts from its value, or from its own first word."""
    if strength >= Strength.TOKEN or keyword == b"auth":
        if _CUT_OFF.match(text, end):
            unfinished.append(end)
        elif strength == Strength.PASSWORD and (speech := _CUT_SPEECH.match(text, end)):
            unfinished.append(speech.start("value"))
    elif strength == Strength.WEAK and keyword == b"key" and (cut := _cut_name(text, start)):
        unfinished.append(cut.start("end"))  # `api` on the line before


def _may_have_value(text: str, position: int, start: int, end: int, strength: Strength, keyword: bytes) -> bool:
    if strength <= Strength.WEAK:
        if strength == Strength.NONE and name_strength(text[position:end]) < Strength.TOKEN:
            return False
        if keyword not in _LOGIN_NAMES and not _has_key(text[end : end + _VALUE_REACH]):
            return False  # only a random value counts behind such a name, and random values are long
    elif text[start:end].lower() in ("pass", "pwd") and not _is_named(text, start, end):  # a verb, a command
        return False
    return not (text[start - 1 : start] == ":" and _RESOURCE.search(text, max(0, start - 240), start))


def _has_key(ahead: str) -> bool:
    """Whether a key may follow: a long word, bytes, or letters in groups of four. Most texts have words and no more."""
    lengths = bytes(map(len, ahead.split()))
    if max(lengths, default=0) < _SHORTEST_KEY and b"\4\4" not in lengths and "0x" not in ahead:
        return False
    return _A_KEY.search(ahead) is not None


def _value_of(text: str, start: int, end: int, strength: Strength, keyword: bytes) -> Span | None:
    """What stands behind a name, or before it."""
    span = value_after(text, start, end, max(strength, Strength.WEAK))
    if span is None and text[end] in " :=[" and keyword in _COUNTED:
        span = counted(text, end, strength)
    if span is None and strength >= Strength.TOKEN:
        span = _named_in_document(text, start, end, strength)
        if span is None and start and text[start - 1] in " `*":
            span = spoken_before(text, start)
    if span is None and strength == Strength.PASSWORD:
        if text[end] in _BEFORE_TOLD:
            return told_behind(text, end, direct=True)
        if (answer := _ASKED.match(text, end)) and is_answer(value := trimmed(answer["value"], ".,;:!?)")):
            return Span(answer.start("value"), answer.start("value") + len(value), "PASSWORD")
    return span


def _cut_name(text: str, start: int) -> re.Match[str] | None:
    if not text[max(0, start - 60) : start].rstrip(" \t+>|_").endswith(("\n", "\\n")):
        return None
    return _CUT_NAME.search(text, max(0, start - 60), start)


def _said_before(text: str, position: int, end: int) -> Span | None:
    """At the end of a text: `use ... as the password`."""
    names_secret = (
        text[position - 1 : position] in (" ", "`", "*") and name_strength(text[position:end]) >= Strength.TOKEN
    )
    return spoken_before(text, position) if names_secret else None


def _positional(text: str, end: int, keyword: bytes) -> Span | None:
    """The password among the arguments of a login, behind the user; the key of a signature wherever it stands."""
    signs = keyword in (b"jwt", b"hmac")
    for index, (begin, stop) in arguments(text, end + 1):
        keyword_match = _KEYWORD_BEFORE.search(text, max(0, begin - 40), begin)
        if keyword_match and name_strength(keyword_match[1]) < Strength.TOKEN:  # `dbname = "warehouse"`
            continue
        handed_over = (
            is_handed(text[begin:stop])
            if signs
            else is_given(text[begin:stop])
            or is_unfamiliar(text[begin:stop])
            or (index > 1 and keyword == b"connect(" and is_answer(text[begin:stop]))
        )
        if (index or signs) and handed_over and is_plausible(text[begin:stop], Strength.PASSWORD, True):
            return Span(begin, stop, "SECRET" if signs else "USER_PASSWORD")
    return None


def _name_start(text: str, position: int) -> int:
    """Where the name begins that has its key word at `position`."""
    if text[position - 1 : position] in _BEFORE_NAMES:
        return position
    head = _HEAD.match(text[max(0, position - 60) : position][::-1])
    return position - (head.end() if head else 0)


@lru_cache(maxsize=1 << 13)
def _says_nothing(name: str, word: str) -> bool:
    """Whether neither a name nor its part from the key word on can have a secret behind it: most have none."""
    names_secret = name_strength(name) != Strength.NONE or name_strength(word) >= Strength.TOKEN
    return not names_secret and not names_handle(name) and "dentified by" not in word.lower()


def _is_no_name(text: str, start: int, position: int, name: str, keyword: bytes) -> bool:
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


def _is_named(text: str, start: int, end: int) -> bool:
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


def _strength_at(text: str, position: int, name: str, keyword: bytes) -> Strength:
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


# Secrets that a document names from a distance: tags, forms, property lists, objects with a type.

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


def _named_in_document(text: str, start: int, end: int, strength: Strength) -> Span | None:
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
