"""Find secrets by name: in shells, env files, JSON, YAML, TOML, flags, headers, XML, .netrc, .npmrc and sentences.

The text is searched for key words, and parsing starts only at a match, so nothing here parses a whole text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from functools import lru_cache

from composer_replication.privacy.plausible import (
    is_answer,
    is_literal_secret,
    is_plausible,
    is_unfamiliar,
    names_a_handle,
    strip_sentence_end,
)
from composer_replication.privacy.rules import PLACEHOLDER, Span, word_set
from composer_replication.privacy.secret_names import CORRECTIONS, Strength, name_strength
from composer_replication.privacy.speech import password_before_keyword
from composer_replication.privacy.values import (
    WIDE_SIGNS,
    arguments,
    bytes_or_groups,
    find_spoken_value,
    is_assigned_name,
    is_passed_along,
    is_passed_secret,
    match_handed,
    match_typed,
    value_after,
)

# Key words, and what to search the text for if they occur. A trailing blank means the end of a word. Short or
# common words count only if a sign directly follows.
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
_MISTYPED = frozenset(slip for slip in map(str.encode, CORRECTIONS) if not any(word in slip for word in _SEARCHED))
_SEARCHED |= {slip: (slip,) for slip in sorted(_MISTYPED)}
# `expect "assword:"`; inside other words it is found as "pass".
WHOLE_WORDS = frozenset((b"assword",)) | _MISTYPED
KEYWORDS: tuple[bytes, ...] = tuple(_SEARCHED)
_ORDER = {keyword: number for number, keyword in enumerate(KEYWORDS)}
# The same word repeated without a blank or a quote is generated text. Each match would read all of it again.
_MAX_CROWD = 32
# The maximum length needed to recognize a name and the beginning of its value.
_HIT_CONTEXT = 320
# Hashes of a match and the text around it.
_HITS_WITHOUT_VALUE: set[int] = set()
_MAX_CACHED_HITS = 1 << 14
# A blank, a quote, a bracket, a backslash or a NUL: `a b`, `a"b`; not `a.b`.
_WORD_BREAK = re.compile(rb"[\s\"'`<>\\\0]")
# The rest of a name after its key word: `_db.url: x` -> `_db.url`.
_NAME_TAIL = re.compile(r"[A-Za-z0-9_]*+(?:[.-][A-Za-z0-9_]++)*+")
# What can directly follow a name that has a value.
_AFTER_NAMES = frozenset("*|=:\"'`\\])>,( \t\n+?!{[;<.&\u2019" + WIDE_SIGNS)
_LOGIN_NAMES = frozenset((b"auth", b"cred", b"login"))
# A sentence after the one with the name: `. It's hunter2` -> `hunter2`, `? try hunter2` -> `hunter2`.
_ANSWER = re.compile(
    r"[.?!]\s{1,3}(?:(?:[Ii]t|[Tt]hat)(?:['\u2019]s|\s(?:is|was|should be))|(?<=[?]\s)(?:should be|try|use))\s"
    r"[\"'`*]{0,3}(?P<value>[^\0\s\"'`*]{4,60})"
)
# A key without blanks, or in groups of four: `0123456789abcdef`, `abcd efgh ijkl mnop`; not `short words only`.
_LONG_KEY = re.compile(r"0x[0-9a-fA-F]{2},\s?0x|[^\0\s\"'`]{16}|[A-Za-z2-7]{4} [A-Za-z2-7]{4} [A-Za-z2-7]{4} ")
_MIN_KEY_CHARS = 16
_MAX_KEY_DISTANCE = 160
_BYTES_OR_GROUPS = frozenset((b"key", b"secret", b"pass", b"seed", b"token"))
_ENDS_SPEECH = frozenset(("", "\u2019", "\0"))
_BEFORE_SPOKEN = frozenset(" :=\t\n\"'`*,)\u2019" + WIDE_SIGNS)
_LOGIN_CALLS = frozenset(b"auth cred jwt hmac connection login( connect( begin( pdo( construct( bind(".split())
# A name, or a name and the beginning of its value, at the end of a line: ` = "zk39\n`, `: \\\n`; not
# ` = "zk39"; x = 1`.
_CUT_VALUE = re.compile(
    r"[\"'`\])]{0,3}(?::[ \t]?[\w\[\]., |]{1,40}(?==|[ \t]=))?(?:[ \t]{0,3}(?:=>|:=|[:=]|[ \t]))?[ \t]{0,3}"
    r"(?:[A-Za-z]{2,9}[ \t])?\\*[\"'`]?[^\0\s\"'`,;(){}\[\]<>\\]{0,60}[ \t]{0,2}(?:\\{0,2}\r?\n|`\n|\\{1,2}n)"
)
# The same in a sentence: ` for the box is zk39\nQx81` -> `zk39`.
_CUT_SPEECH = re.compile(
    r"(?:[ \t]{1,2}[^\0\s:=]{1,24}){0,6}[ \t]{1,2}(?:is|was|ist|lautet|est|es|è|é|är|er|on|je|este|jest|adalah|là)"
    r"[ \t]{1,2}(?P<value>[!-~]{1,60})\r?\n[ \t]{0,8}(?:\d{1,6}[→:|\t][ \t]*)?[!-~]"
)
# The first word of a name, on the line before it: `api\n  `, `SECRET\n_`; not `my\n`.
_CUT_NAME = re.compile(
    r"(?i:api|access|secret|private|signing|account|encryption|master)_?(?P<end>\r?\n|\\n)[ \t+>|]*_?\Z"
)
# The name of a cloud resource: `arn:aws:secretsmanager:eu-west-1:123:`.
_RESOURCE = re.compile(r"\b[au]rn:[^\0\s\"'`<>()]{0,200}:\Z")
# The keyword of an argument: `connect(dbname="` -> `dbname`.
_KEYWORD_BEFORE = re.compile(r"([A-Za-z_]\w{0,30})\s?=\s?\w{0,2}\\*[\"'`]\Z")
# The part of a name before its key word, read backward: `bd.ppa = x` -> `bd.ppa`.
_NAME_HEAD_REVERSED = re.compile(r"[A-Za-z0-9_]*+(?:[.-][A-Za-z0-9_]++)*+")
_BEFORE_NAMES = frozenset(" \n\t\"'`([{<=:,;/*\0")
# Makes a token of the word "key" after it: `the API `; not `the sort `.
_KIND_OF_KEY = re.compile(r"(?i)(?:api|access|secret|private|license|encryption|auth|signing|master|account) $")
# ` is `, ` was `; not ` isn't`.
_IS_OR_WAS = re.compile(r"\s(?:is|was)\s")
# A user before the word "pass": `user ada, `, `user=ada `; not `they `.
_AFTER_USER = re.compile(
    r"(?i:user|login|account|username|admin|as)\b[^\0\n]{0,30}[,;/|]\s\Z|\b(?:new|old) \Z"
    r"|(?i:\buser(?:name)?)[ :=]{1,2}[^\0\s]{1,40}\s\Z"
)
# `the wifi `, `SSID home, `; not `the sort `.
_WIFI_LEAD = re.compile(r"(?i)\b(?:wi-?fi|wlan|ssid)\b[^\0\n=]{0,50}\Z")
# What follows these is no password: `--password-stdin`, `--vault-password-fd`; not `--password`.
_NO_VALUE = re.compile(r"(?i)[_-](?:stdin|fd|prompt)$")
# A key after these words is public: `using RSA `.
_SIGNED_BY = re.compile(r"using [A-Z]{3,6} \Z")


def active_keywords(active: Set[bytes]) -> list[bytes]:
    """Return the strings to search the text for, given the key words that occur in it."""
    here = sorted(active & _ORDER.keys(), key=_ORDER.__getitem__)
    return [word for keyword in here for word in _SEARCHED[keyword]]


def keyword_spans(text: str, lower: bytes, active: Set[bytes], unfinished: list[int] | None = None) -> Iterator[Span]:
    """Yield the value of every name that looks like the name of a secret.

    `lower` is the lower-cased text with one byte per character; `active` has the key words that occur in it. For each
    name whose value is on the next line, the position of its end is appended to `unfinished`.
    """
    for word in active_keywords(active):
        yield from _spans_of(text, lower, word, [] if unfinished is None else unfinished)


def _spans_of(text: str, lower: bytes, needle: bytes, unfinished: list[int]) -> Iterator[Span]:
    position, num_adjacent = lower.find(needle), 0
    while position >= 0:
        span = _span_at_cached(text, position, needle, unfinished)
        if span is not None:
            yield span
        following = lower.find(needle, max(position + len(needle), span.end if span else 0))
        num_adjacent = (
            0 if span or following < 0 or _WORD_BREAK.search(lower, position, following) else num_adjacent + 1
        )
        if num_adjacent > _MAX_CROWD:
            after, num_adjacent = _WORD_BREAK.search(lower, following), 0
            following = lower.find(needle, after.end()) if after else -1
        position = following


def _span_at_cached(text: str, position: int, needle: bytes, unfinished: list[int]) -> Span | None:
    """Return the value at a match. A match without a value is cached together with the text around it, because lines
    repeat.
    """
    begin = max(0, position - _HIT_CONTEXT)
    hit_key = hash((text[begin : position + _HIT_CONTEXT], position - begin, needle))
    if hit_key in _HITS_WITHOUT_VALUE:
        return None
    num_unfinished = len(unfinished)
    span = _span_at(text, position, needle, unfinished)
    if span is None and len(unfinished) == num_unfinished:
        if len(_HITS_WITHOUT_VALUE) >= _MAX_CACHED_HITS:
            _HITS_WITHOUT_VALUE.clear()
        _HITS_WITHOUT_VALUE.add(hit_key)
    return span


def _span_at(text: str, position: int, keyword: bytes, unfinished: list[int]) -> Span | None:
    """Return the value for the key word at `position`, or None."""
    # The `=` in `sig=` is a sign, not part of the name.
    stem_end = position + len(keyword) - keyword.endswith((b"=", b"("))
    tail = _NAME_TAIL.match(text, stem_end)
    end = tail.end() if tail else stem_end
    after = text[end : end + 1]
    if after not in _AFTER_NAMES:
        return _value_before_end(text, _name_start(text, position), end) if after in _ENDS_SPEECH else None
    start = _name_start(text, position)
    if start < position and text[start - 1 : start] == "\\" and text[start] in "nrt":
        start += 1
    name = text[start:end]
    if keyword in _LOGIN_CALLS:
        if after and after in "( " and (span := _positional(text, end, keyword)):
            return span
    elif _says_nothing(name, text[position:end]) and (after != "(" or "." not in name):
        return None
    if after == "(":
        if name_strength(name) == Strength.PASSWORD and (span := _positional(text, end, b"jwt")):
            return Span(span.start, span.end, "PASSWORD")
        if "." in text[stem_end:end]:  # a method: the preceding name says what its argument is
            end = text.rfind(".", stem_end, end)
            name = text[start:end]
    strength = _strength_at(text, position, name, keyword)
    if not _names_no_secret(text, start, position, name, keyword):
        _note_unfinished(text, start, end, strength, keyword, unfinished)
        if _may_have_value(text, position, start, end, strength, keyword):
            return _value_of(text, start, end, strength, keyword)
    return None


def _note_unfinished(
    text: str, start: int, end: int, strength: Strength, keyword: bytes, unfinished: list[int]
) -> None:
    """Record a name if a line end separates it from its value or splits the name itself."""
    if strength >= Strength.TOKEN or keyword == b"auth":
        if _CUT_VALUE.match(text, end):
            unfinished.append(end)
        elif strength == Strength.PASSWORD and (speech := _CUT_SPEECH.match(text, end)):
            unfinished.append(speech.start("value"))
    elif strength == Strength.WEAK and keyword == b"key" and (cut := _cut_name_before(text, start)):
        unfinished.append(cut.start("end"))  # `api` on the previous line


def _may_have_value(text: str, position: int, start: int, end: int, strength: Strength, keyword: bytes) -> bool:
    if strength <= Strength.WEAK:
        if strength == Strength.NONE and name_strength(text[position:end]) < Strength.TOKEN:
            return False
        if keyword not in _LOGIN_NAMES and not _has_key(text[end : end + _MAX_KEY_DISTANCE]):
            return False  # after a weak name only random values count, and those are long
    elif text[start:end].lower() in ("pass", "pwd") and not _is_used_as_name(
        text, start, end
    ):  # otherwise a verb or a shell command
        return False
    return not (text[start - 1 : start] == ":" and _RESOURCE.search(text, max(0, start - 240), start))


def _has_key(ahead: str) -> bool:
    """Return whether the following text may contain a key: a long word, bytes, or groups of four letters. Most texts
    contain none of these.
    """
    lengths = bytes(map(len, ahead.split()))
    if max(lengths, default=0) < _MIN_KEY_CHARS and b"\4\4" not in lengths and "0x" not in ahead:
        return False
    return _LONG_KEY.search(ahead) is not None


def _value_of(text: str, start: int, end: int, strength: Strength, keyword: bytes) -> Span | None:
    """Return the value that belongs to a name, usually after it and sometimes before it, or None."""
    span = value_after(text, start, end, max(strength, Strength.WEAK))
    if span is None and text[end] in " :=[" and keyword in _BYTES_OR_GROUPS:
        span = bytes_or_groups(text, end, strength)
    if span is None and strength >= Strength.TOKEN:
        span = _document_value(text, start, end, strength)
        if span is None and start and text[start - 1] in " `*":
            span = password_before_keyword(text, start)
    if span is None and strength == Strength.PASSWORD:
        if text[end] in _BEFORE_SPOKEN:
            return find_spoken_value(text, end, direct=True)
        if (answer := _ANSWER.match(text, end)) and is_answer(value := strip_sentence_end(answer["value"], ".,;:!?)")):
            return Span(answer.start("value"), answer.start("value") + len(value), "PASSWORD")
    return span


def _cut_name_before(text: str, start: int) -> re.Match[str] | None:
    if not text[max(0, start - 60) : start].rstrip(" \t+>|_").endswith(("\n", "\\n")):
        return None
    return _CUT_NAME.search(text, max(0, start - 60), start)


def _value_before_end(text: str, position: int, end: int) -> Span | None:
    """Return the value that precedes the name at the end of a text, as in `use ... as the password`."""
    names_secret = (
        text[position - 1 : position] in (" ", "`", "*") and name_strength(text[position:end]) >= Strength.TOKEN
    )
    return password_before_keyword(text, position) if names_secret else None


def _positional(text: str, end: int, keyword: bytes) -> Span | None:
    """Return the secret among the arguments of a call: the password after the user for a login, or any key for a
    signature.
    """
    signs = keyword in (b"jwt", b"hmac")
    for index, (begin, stop) in arguments(text, end + 1):
        keyword_match = _KEYWORD_BEFORE.search(text, max(0, begin - 40), begin)
        if keyword_match and name_strength(keyword_match[1]) < Strength.TOKEN:  # `dbname = "warehouse"`
            continue
        handed_over = (
            is_passed_secret(text[begin:stop])
            if signs
            else is_literal_secret(text[begin:stop])
            or is_unfamiliar(text[begin:stop])
            or (index > 1 and keyword == b"connect(" and is_answer(text[begin:stop]))
        )
        if (index or signs) and handed_over and is_plausible(text[begin:stop], Strength.PASSWORD, True):
            return Span(begin, stop, "SECRET" if signs else "USER_PASSWORD")
    return None


def _name_start(text: str, position: int) -> int:
    """Return the start of the name that contains the key word at `position`."""
    if text[position - 1 : position] in _BEFORE_NAMES:
        return position
    head = _NAME_HEAD_REVERSED.match(text[max(0, position - 60) : position][::-1])
    return position - (head.end() if head else 0)


@lru_cache(maxsize=1 << 13)
def _says_nothing(name: str, word: str) -> bool:
    """Return whether a name gives no hint of a secret, neither as a whole nor in the part that begins with the key
    word.
    """
    names_secret = name_strength(name) != Strength.NONE or name_strength(word) >= Strength.TOKEN
    return not names_secret and not names_a_handle(name) and "dentified by" not in word.lower()


def _names_no_secret(text: str, start: int, position: int, name: str, keyword: bytes) -> bool:
    """Return whether a name with a key word is harmless: a placeholder, a public key, an option that names where to
    read the secret, or a code outside a URL query.
    """
    before = text[start - 1 : start]
    if keyword == b"code=" and before not in ("?", "&"):  # `code=` is a login code only in a URL query
        return True
    if before == "<" and PLACEHOLDER.match(text, start - 1):
        return True
    return _NO_VALUE.search(name) is not None or (keyword == b"key" and _is_public(text, position))


def _is_public(text: str, position: int) -> bool:
    """Return whether the key word at `position` belongs to a public key or to the fingerprint of a signature's key,
    as gpg prints it.
    """
    lead = text[max(0, position - 14) : position]
    return lead.rstrip(" _-").lower().endswith("public") or _SIGNED_BY.search(lead) is not None


def _is_used_as_name(text: str, start: int, end: int) -> bool:
    """Return whether a word that is also a verb serves as a name here: as an option, a tag or a quoted key, or
    before an assignment.
    """
    before = text[start - 1 : start]
    if text[end] in ".{[":
        return match_handed(text, end) is not None or match_typed(text, end) is not None
    keyed = before in ("'", '"', "`", "#") and text[end] in "'\"`\\" and is_passed_along(text, end)
    return (
        before in ("-", "<")
        or keyed
        or _AFTER_USER.search(text, max(0, start - 44), start) is not None
        or _IS_OR_WAS.match(text, end) is not None
        or is_assigned_name(text, end)
    )


def _strength_at(text: str, position: int, name: str, keyword: bytes) -> Strength:
    """Return how strongly a name, together with the words before it, indicates a secret."""
    if keyword == b"identified by":
        return Strength.PASSWORD if "`" not in text[position : position + len(keyword) + 3] else Strength.NONE
    strength = name_strength(name)
    if strength == Strength.NONE and names_a_handle(name):
        return Strength.WEAK
    is_lone_key = strength == Strength.WEAK and name.lower() == "key"  # two words: `api key`
    if is_lone_key and _WIFI_LEAD.search(text, max(0, position - 60), position):
        return Strength.PASSWORD
    return Strength.TOKEN if is_lone_key and _KIND_OF_KEY.search(text, max(0, position - 12), position) else strength


# Documents that separate the name of a secret from its value: tags, forms, property lists, objects with a type.

_DOCUMENT_LEAD, _DOCUMENT_REACH = 240, 320
_MAX_LABEL_CHARS = 90
# After a name inside a tag: `name="db.password">hunter2</entry>` -> `hunter2`, `<Password Type="x">hunter2</Password>`
# -> `hunter2`, `password</key><string>hunter2</string>` -> `hunter2`.
_IN_TAG = re.compile(
    r"(?:[^\0\n<>]{0,200}>|</\w{1,20}>\s{0,40}<\w{1,20}[^\0\n<>]{0,40}>)(?:\s{0,40}(?:\d{1,6}→\s{0,40})?<[Vv]alue>)?(?:<!\[CDATA\[)?\s{0,4}(?P<value>(?:[^\0\s<>\]]|\](?!\]>)){4,200})"
    r"(?=\s{0,4}(?:\]\]>)?</)"
)
# `<entry name="`, `<`; not `<entry>`.
_OPEN_TAG = re.compile(r"<[\w:.-]{0,40}(?:\s[^\0<>]{0,160})?\Z")
# `&lt;password&gt;hunter2&lt;/password&gt;` -> `hunter2`.
_ESCAPED_TAG = re.compile(r"&gt;(?P<value>[^\0\s<>&]{4,200})&lt;/")
# The field that holds the value in a form or an object, where a sibling field holds its name or type.
_FIELD = (
    r"(?:[vV]alue|VALUE|ParameterValue|parameter_value|plaintext|content|text|input|keys|stdin|answer|chars|secretValue"
    r"|SecretString|default)"
)
# Substrings that every such field contains. Searching for them rules out most texts.
_FIELD_PARTS = tuple(
    sorted(word_set("alue VALUE laintext ontent ecretString efault text input keys stdin answer chars"))
)
# What makes a word the name of a field: `"type": "`, `placeholder="Your `, `variable "db_`; not `"value": "`.
_NAMING_FIELD = re.compile(
    r"(?i)(?:expect|prompt|selector|element|field|placeholder|type|name|key|id|kind|format|inputtype|parameter_?key|label|autocomplete)\\*[\"']?\s?[:=]"
    r"\s?\\*[\"']?[\w #./\[=-]{0,60}\Z|(?:variable|output|parameter)\s\\*[\"']\w{0,60}\Z"
)
# `"password", "value": "hunter2"` -> `hunter2`.
_FIELD_AFTER = re.compile(
    rf"\\*[\"']?(?:\s?\{{)?"
    rf"[^\0{{}}<>]{{0,200}}?[\s,\"']{_FIELD}\\*[\"']?\s?[:=]\s{{0,4}}(?P<quote>\\*[\"'])?(?P<value>(?(q"
    rf"uote)(?:(?!(?P=quote))[^\0\n]){{4,200}}|(?![{{$])[^\0\s\"'<>,}}]{{4,200}}))"
)
# `{"value": "hunter2", "name": "` -> `hunter2`.
_FIELD_BEFORE = re.compile(
    rf"[\s,{{\"'<]{_FIELD}"
    rf"\\*[\"']?\s?[:=]\s{{0,4}}(?P<quote>\\*[\"'])?(?P<value>(?(quote)(?:(?!(?P=quote))[^\0\n])"
    rf"{{4,200}}|[^\0\s\"'<>,}}]{{4,200}}))(?P=quote)?[^\0{{}}<>]{{0,160}}\Z"
)


def _document_value(text: str, start: int, end: int, strength: Strength) -> Span | None:
    """Return the value in an XML tag, a form or a JSON object whose name or type begins at `start`, or None."""
    if text[end : end + 1] in ("", "\0"):
        return None
    lead = text[max(0, start - _DOCUMENT_LEAD) : start]
    if text.startswith("&gt;", end) and (match := _ESCAPED_TAG.match(text, end, end + _DOCUMENT_REACH)):
        return _checked(text, *match.span("value"), strength)
    if (
        "<" in lead
        and (match := _IN_TAG.match(text, end, end + _DOCUMENT_REACH))
        and (_OPEN_TAG.search(lead) or text.startswith("</", end))
    ):
        return _checked(text, *match.span("value"), strength)
    around = text[max(0, start - _DOCUMENT_LEAD) : end + _DOCUMENT_REACH]
    if text[start - 1 : start] == " " or not any(part in around for part in _FIELD_PARTS):
        return None
    if not _NAMING_FIELD.search(lead, max(0, len(lead) - _MAX_LABEL_CHARS)):
        return None
    if (match := _FIELD_AFTER.match(text, end, end + _DOCUMENT_REACH)) or (
        match := _FIELD_BEFORE.search(text, max(0, start - _DOCUMENT_LEAD), start)
    ):
        return _checked(text, *match.span("value"), strength)
    return None


def _checked(text: str, begin: int, end: int, strength: Strength) -> Span | None:
    kind = "PASSWORD" if strength == Strength.PASSWORD else "SECRET"
    value = text[begin:end]
    return Span(begin, end, kind) if " " not in value and is_plausible(value, strength, True) else None
