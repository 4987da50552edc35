"""Define the rule interface, and the rules for secrets with a structure: PEM, JWT, authorization headers, URL
credentials.

A rule runs only if one of its trigger substrings occurs, which keeps scans of clean text fast. `WordFilter` finds the
triggers in a text in one pass.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from composer_replication.optional import require


class Span(NamedTuple):
    """The position and kind of a secret in a text."""

    start: int
    end: int
    kind: str


# `a7`; not `seven`.
_DIGIT = re.compile(r"[0-9]")
_BRACKETS, _SYMBOLS = frozenset("()[]{}<>"), frozenset("!@#$%^&*?+=~|:;")
# `<PASSWORD_3>`; not `<password>`.
PLACEHOLDER = re.compile(r"<[A-Z][A-Z0-9_]*_\d+>")
# `USER_12`; not `USER_NAME`.
PSEUDONYM = re.compile(r"USER_\d+")


@dataclass(frozen=True)
class Rule:
    """A pattern for one kind of secret.

    The pattern is tried if one of the substrings in `triggers` occurs in the text, or always if there are no triggers.
    The text in `group` is redacted, and `accept` may reject a match. A subclass may find its spans in a different way.
    """

    kind: str
    pattern: re.Pattern[str] = field(repr=False)
    triggers: tuple[str, ...] = ()
    group: int = 0
    accept: Callable[[str], bool] | None = None

    def triggered(self, text: str) -> bool:
        """Return whether a trigger occurs in the text."""
        return not self.triggers or any(trigger in text for trigger in self.triggers)

    def spans(self, text: str) -> Iterator[Span]:
        """Yield every secret of this kind in the text."""
        for match in self.pattern.finditer(text):
            start, end = match.span(self.group)
            if end > start and (self.accept is None or self.accept(text[start:end])):
                yield Span(start, end, self.kind)


def word_set(words: str) -> frozenset[str]:
    """Return the set of words in a string. Long lists of words are easier to read as a string."""
    return frozenset(words.split())


def has_digit(value: str) -> bool:
    """Return whether a value has a digit, as most long random keys have and most compound words do not.

    The number of a pseudonym does not count, because a replacement must not make clean text look like a secret.
    """
    if "USER_" in value:
        value = PSEUDONYM.sub("USER", value)
    return _DIGIT.search(value) is not None


def is_strong(value: str) -> bool:
    """Return whether a bare word could be a password: at least six characters, either digits only or letters with
    digits or symbols, and neither code nor a path.
    """
    if len(value) < 6 or not _BRACKETS.isdisjoint(value) or value.startswith(("/", "./", "~/", "http")):
        return False
    if value.isdigit():
        return True
    return any(map(str.isalpha, value)) and (has_digit(value) or not _SYMBOLS.isdisjoint(value))


def _is_basic_login(value: str) -> bool:
    try:
        decoded = base64.b64decode(value + "=" * (-len(value) % 4), validate=True)
    except (binascii.Error, ValueError):
        return False
    return b":" in decoded


def _is_bearer_token(value: str) -> bool:
    # A pseudonym may be longer or shorter than the name it replaces, so the length of a path must not matter.
    long = len(value) >= 24 and "home" not in value and "Users" not in value
    return len(value) >= 8 and (has_digit(value) or long) and not value.startswith(("$", "{"))


# A placeholder for the password in the user:password@host of documentation: `your-password`, `xxxx`, `DB_PASS`; not
# `hunter2`.
_URL_PLACEHOLDER = re.compile(
    r"(?i:(?:(?:your|my|the|db|user|new|some)[_-]?)*(?:password|passwd|passw|pass|pwd|pw|secret|token)"
    r"|[x*.•_-]+)|[A-Z_]*(?:PASS|PWD|SECRET|TOKEN)[A-Z_]*"
)


def _is_url_password(value: str) -> bool:
    # host:port/path@version has the same shape as user:password@host.
    return (
        not re.match(r"\d{1,5}(?:[/?#]|$)", value)
        and not value.startswith(("$", "{", "<", "%s", "//"))
        and not _URL_PLACEHOLDER.fullmatch(value)
    )


def _is_url_token(value: str) -> bool:
    return len(value) >= 16 and has_digit(value) and not value.startswith("$")


# Cookie attributes set by servers, and common cookies unrelated to logins.
_COOKIE_ATTRIBUTES = word_set(
    "path domain expires max-age samesite version secure httponly priority lang theme locale consent"
)


def _is_cookie(value: str) -> bool:
    pairs = [pair.strip().partition("=") for pair in value.split(";")]
    return any(
        len(content) >= 6
        and has_digit(content)
        and name.lower() not in _COOKIE_ATTRIBUTES
        and not content.startswith(("$", "{"))
        for name, _, content in pairs
    )


_UUID = r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"
# Session ids may be uuids, which are otherwise public. They count under the cookie names of certain servers
# (`JSESSIONID=`), or directly after the word cookie under any name for a session (`cookies.set("auth.sid", `).
_VALUE_OF_COOKIE = (
    r"\\*[\"']?(?:\s{0,3}[=:,]\s{0,40}|\s{1,2})\\*[\"']?(?:value\\*[\"']?\s{0,3}[:=]\s{0,3}\\*[\"']?)?(" + _UUID + ")"
)
_COOKIE_NAMES = {
    "JSESSIONID": "jsessionid",
    "jsessionid": "jsessionid",
    "PHPSESSID": "phpsessid",
    "NET_SessionId": "sessionid",
}
_NEAR_WORD_COOKIE = (
    r"[^\0\n}]{0,60}?(?<![\w-])[\w.-]{0,30}(?:[sS]ess|sid|SID|[aA]uth|[lL]ogin|[tT]oken)[\w.-]{0,20}" + _VALUE_OF_COOKIE
)

_PEM_KEY = r"-----BEGIN (?:[A-Z0-9]+ ){0,4}PRIVATE KEY(?: BLOCK)?-----"
# Without an end marker (a truncated file), the key extends over all following base64 lines, including numbered or
# escaped lines.
_PEM_LINES = (
    r"(?:[^\S\n]|\\[nrt]|\n|[0-9]{1,6}[→:|\t]|[A-Za-z0-9+/=]{16,}"
    r"|[A-Z][A-Za-z-]{2,20}: [^\0\n\\]{1,80}|[A-Za-z0-9+/]{1,15}=*(?=\s|\\|$))*+"
)
_PEM = _PEM_KEY + r"(?:(?:[^\0-]|-(?!----)){0,40000}+-----END [A-Z0-9 ]{3,40}-----|" + _PEM_LINES + ")"
# The first bytes of a private key without its header: PKCS#8 for RSA, PKCS#1, EC, Ed25519 and encrypted keys.
BARE_KEY = (
    r"(?<![A-Za-z0-9+/])(?:MI[A-Za-z0-9+/]{3,5}(?:IBADANBgkqhkiG9w0BAQEFAAS|IBAAK[BC]|BOBgkqhkiG9w0BBQ0"
    r"|AgEAM[BH][A-Z]GByqGSM49|AgEBBD)"
    r"|MHcCAQEEI|MC4CAQAwBQYDK2Vw)[A-Za-z0-9+/=]{20,}" + _PEM_LINES
)
# `-----END RSA PRIVATE KEY-----`; not `-----END PUBLIC KEY-----`.
_KEY_END = re.compile(r"-----END (?:[A-Z0-9]+ ){0,4}PRIVATE KEY(?: BLOCK)?-----")
# A line of base64 at the end of a text, as logs, listings and JSON write it: `\n    12→MIIEpAIBAAKCAQEA\n` ->
# `MIIEpAIBAAKCAQEA`.
_BASE64_LINE = re.compile(
    r"(?:\A|\n|\\n)[ \t>|]{0,20}(?:\d{1,6}[→:|\t])?[ \t]{0,20}(?P<line>[A-Za-z0-9+/]{4,100}={0,2})"
    r"(?:\r?\n|\\n)[ \t>|]{0,20}(?:\d{1,6}[→:|\t])?[ \t]{0,20}\Z"
)
_MAX_KEY_LINES = 200
# Private numbers as `openssl -text` prints them: `privateExponent:` and lines like `7c:1f:ae:`.
_PRIVATE_NUMBER = (
    r"(?:rivateExponent|rime[12]|xponent[12]|oefficient|priv):[ \t]*(?:\r?\n|\\n)"
    r"((?:[ \t]*+(?:\d{1,6}+[→|\t][ \t]*+)?+(?:[0-9a-f]{2}:){3,}+(?:[0-9a-f]{2})?+(?:\r?\n|\\n)?+){1,80}+)"
)
_PUTTY = r"PuTTY-User-Key-File-\d(?:[^\0P]|P(?!uTTY-User|rivate-MAC)){0,9000}+Private-MAC: [0-9a-f]+"
_USER = r"[^\0\s:/@\"'`<>\\?#]{0,100}"
_ANY_WORD = r"[^\0\s@\"'`<>\\]{1,300}"
_LOGIN = _USER + ":(" + _ANY_WORD + "(?:@" + _ANY_WORD + r")?)@(?=[\w.\[$-])"
_LONE_USER = r"([^\0\s:/@\"'`<>\\?#]{16,300})(?::x-oauth-basic)?:?@(?=\w)"
_BEARER = r"(?:\s|%20|\+)\s?\\*[\"']?([A-Za-z0-9._~+/=-]{8,})"
_BASIC = r"(?:\s|%20)\s?([A-Za-z0-9+/_-]{8,}={0,2})"
_COOKIE = (
    r"2?\\*[\"']?\s?[:=]\s?\\*[\"']?"
    r"([A-Za-z0-9_.$-]{1,60}=[^\0\s\"'\\;<>]{1,4000}(?:;\s?[A-Za-z0-9_.$-]{1,60}=[^\0\s\"'\\;<>]{0,4000}){0,40})"
)
# Every pattern starts with a literal, in all common capitalizations, which makes the search fast.
_PHRASE_WORDS = (
    ("mnemonic", "nemonic"),
    ("mnemonic", "NEMONIC"),
    ("phrase", "hrase"),
    ("phrase", "HRASE"),
    ("seed", "eed(?: words?)?"),
    ("seed", "EED(?:_WORDS)?"),
    ("words", "words(?= ?[:=])"),  # many lines have this word before ordinary words
    ("bip", "BIP-?39(?: (?:seed|words?|phrase))?"),
)
# A phrase may be wrapped, even inside a word.
_PHRASE_BREAK = r"[a-z]{0,8} ?\\?(?:\r?\n|\\n)[ \t+>]{0,40}+(?:\d{1,6}+[→:|\t][ \t]*+)?(?:[a-z]{1,2} )?"
_PHRASE = (
    r"[^\0a-z\n]{1,12}(?:is|are)?[^\0a-z\n]{0,6}"
    rf"((?:[a-z]{{3,8}} {{1,4}}+|{_PHRASE_BREAK}){{11,24}}[a-z]{{1,8}})"
)
# Triggers are looked up among the lower-cased words in a text, so they consist of letters. The comment above a rule
# shows an example, such as `Bearer zk39Qx81`.
STRUCTURE_RULES: tuple[Rule, ...] = (
    # `-----BEGIN RSA PRIVATE KEY-----` to its end, or as far as lines of base64 follow.
    Rule("PRIVATE_KEY", re.compile(_PEM), ("private",)),
    # `PuTTY-User-Key-File-2: ssh-rsa` to `Private-MAC: 0123abcd`.
    Rule("PRIVATE_KEY", re.compile(_PUTTY), ("putty",)),
    # The block of `privateExponent:` and lines such as `7c:1f:ae:`, as openssl prints a key.
    Rule(
        "PRIVATE_KEY",
        re.compile(_PRIVATE_NUMBER),
        ("privateexponent ", "prime ", "exponent ", "coefficient ", "priv "),
        1,
    ),
    # `eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln`.
    Rule(
        "JWT", re.compile(r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt]))eyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*){2,4}"), ("eyj",)
    ),
    # `Authorization: Bearer zk39Qx81` -> `zk39Qx81`; not `Bearer $TOKEN`.
    *(
        Rule("BEARER_TOKEN", re.compile(word + _BEARER), ("bearer",), 1, _is_bearer_token)
        for word in ("earer", "EARER")
    ),
    # `Authorization: Basic YWRhOmh1bnRlcjI=` -> `YWRhOmh1bnRlcjI=`, since it decodes to a pair with a colon.
    *(Rule("BASIC_AUTH", re.compile(word + _BASIC), ("basic",), 1, _is_basic_login) for word in ("asic", "ASIC")),
    # `Cookie: auth=zk39Qx81; theme=dark`; not `Set-Cookie: theme=dark`.
    *(Rule("COOKIE", re.compile(word + _COOKIE), ("cookie",), 1, _is_cookie) for word in ("ookie", "OOKIE")),
    # `JSESSIONID=123e4567-e89b-12d3-a456-426614174000`.
    *(Rule("COOKIE", re.compile(name + _VALUE_OF_COOKIE), (trigger,), 1) for name, trigger in _COOKIE_NAMES.items()),
    # `cookies.set("auth.sid", "123e4567-e89b-12d3-a456-426614174000")`.
    *(Rule("COOKIE", re.compile(word + _NEAR_WORD_COOKIE), ("cookie",), 1) for word in ("ookie", "OOKIE")),
    # `1. volcano 2. galaxy ...`, twelve to twenty-four words, each with its number.
    Rule(
        "SEED_PHRASE",
        re.compile(r"1[.)] ?([a-z]{3,8}\s{1,4}(?:\d{1,2}[.)] ?[a-z]{3,8}\s{1,4}){10,22}\d{1,2}[.)] ?[a-z]{3,8})"),
        ("recovery", "mnemonic", "seed", "wallet"),
        1,
    ),
    # A key of Solana: `[12, 244, ...]` with 64 bytes.
    Rule("PRIVATE_KEY", re.compile(r"\[(?:\d{1,3},\s?){63}\d{1,3}\]"), ("solana", "keypair")),
    # `seed phrase: volcano galaxy tuna ...` with twelve words or more.
    *(Rule("SEED_PHRASE", re.compile(word + _PHRASE), (trigger,), 1) for trigger, word in _PHRASE_WORDS),
)
_SCHEME_SIGNS = ("://", ":\\/\\/", "%3A%2F%2F")
# One pattern per spelling of the separator, so that every search starts with a literal: the password in
# `postgres://ada:hunter2@db` is "hunter2", and `https://zk39Qx81LmPq04Tn@host` contains a token.
URL_RULES: tuple[Rule, ...] = tuple(
    Rule(kind, re.compile(re.escape(sign) + pattern), (sign,), 1, accept)
    for sign in _SCHEME_SIGNS[:2]
    for kind, pattern, accept in (("URL_PASSWORD", _LOGIN, _is_url_password), ("URL_TOKEN", _LONE_USER, _is_url_token))
)
_BY_TRIGGER = tuple((trigger.encode(), rule) for rule in STRUCTURE_RULES for trigger in rule.triggers)
TRIGGERS: tuple[bytes, ...] = tuple(dict.fromkeys(trigger for trigger, _ in _BY_TRIGGER))
_STRUCTURE_TRIGGERS = frozenset(TRIGGERS)


def _headless_keys(text: str) -> Iterator[Span]:
    """Yield private keys whose beginning is not in the text: the base64 lines directly before the end marker, with
    the marker.
    """
    for end in _KEY_END.finditer(text):
        begin = end.start()
        for _ in range(_MAX_KEY_LINES):
            line = _BASE64_LINE.search(text, max(0, begin - 160), begin)
            if line is None:
                break
            begin = line.start("line")
        if begin < end.start():
            yield Span(begin, end.end(), "PRIVATE_KEY")


def structure_spans(text: str, active: Set[bytes]) -> Iterator[Span]:
    """Yield every secret with a recognizable structure. `active` has the triggers that occur."""
    if here := active & _STRUCTURE_TRIGGERS:
        for rule in dict.fromkeys([rule for trigger, rule in _BY_TRIGGER if trigger in here]):
            yield from rule.spans(text)
    if b"private" in active and "-----END " in text:
        yield from _headless_keys(text)
    if "@" in text:
        for rule in URL_RULES:
            if rule.triggers[0] in text:
                yield from rule.spans(text)


_CACHE_SIZE = 1 << 17
# Lower-case letters stay, capitals are lower-cased, and all other characters separate words. Triggers consist of
# letters, optionally followed by the end of a word.
_LETTERS_ONLY = bytes(code if 97 <= code <= 122 else code + 32 if 65 <= code <= 90 else 32 for code in range(256))
_ESCAPE_LETTERS = frozenset((b"n", b"r", b"t"))  # a JSON escape may precede a word without a blank: `\nPASSWORD`
_MAX_WORD_CHARS = 64  # longer strings are not words and would only fill the cache


def any_of(words: Iterable[str]) -> str:
    """Return a regular expression that matches any of many words. It reads each character only once, unlike a plain
    alternation.
    """
    by_first: dict[str, list[str]] = {}
    for word in words:
        by_first.setdefault(word[:1], []).append(word[1:])
    if not by_first or "" in by_first:  # a word ends here, so longer words need not be matched
        return ""
    branches = [re.escape(first) + any_of(rest) for first, rest in sorted(by_first.items())]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


class WordFilter:
    """Finds the trigger words in a text in one pass.

    A text is split into words. Sessions repeat their words, so almost all results come from a cache and only new words
    are searched. The cache holds only words of letters, never a whole secret with digits.
    """

    def __init__(self, triggers: Iterable[bytes], whole: Iterable[bytes] = ()) -> None:
        """Compile the triggers. `triggers` may occur anywhere in a word; `whole` has whole words."""
        self._triggers = tuple(dict.fromkeys(triggers))
        # `pa(?:ss|t)` for the words pass and pat; `(?!)` matches nothing.
        self._any = re.compile(any_of(trigger.decode() for trigger in self._triggers).encode() or b"(?!)")
        self._whole = frozenset(whole)
        self._words_without_trigger: set[bytes] = set()
        self._triggers_by_word: dict[bytes, tuple[bytes, ...]] = {}

    def active(self, flat: bytes) -> set[bytes]:
        """Return the triggers that occur in a text, which must be encoded in Latin-1, with one byte per character."""
        triggers_by_word = self._triggers_by_word
        words = set(flat.translate(_LETTERS_ONLY).split()) - self._words_without_trigger
        cached_words = triggers_by_word.keys() & words  # set operations, since texts have millions of such words
        triggers: set[bytes] = set().union(*map(triggers_by_word.__getitem__, cached_words))
        return triggers | self._learn(list(words - cached_words)) if len(cached_words) < len(words) else triggers

    def _learn(self, words: list[bytes]) -> set[bytes]:
        """Search all new words at once and cache the result for each word; return the triggers that they contain."""
        joined = b" " + b" ".join(words) + b" "
        triggers_by_word: dict[bytes, tuple[bytes, ...]] = {}
        end = 0
        while match := self._any.search(joined, end):
            start, end = joined.rfind(b" ", 0, match.start() + 1) + 1, joined.find(b" ", match.start() + 1)
            word = joined[start:end]
            triggers_by_word[word] = tuple([trigger for trigger in self._triggers if trigger in word + b" "])
        escaped = {word: word[1:] for word in words if word[:1] in _ESCAPE_LETTERS and word[1:] in self._whole}
        for word, whole in (escaped | {word: word for word in self._whole.intersection(words)}).items():
            triggers_by_word[word] = (*triggers_by_word.get(word, ()), whole)
        if len(self._words_without_trigger) + len(self._triggers_by_word) >= _CACHE_SIZE:
            self._words_without_trigger.clear()
            self._triggers_by_word.clear()
        self._triggers_by_word.update(
            (word, hits) for word, hits in triggers_by_word.items() if len(word) <= _MAX_WORD_CHARS
        )
        self._words_without_trigger.update(
            [word for word in words if len(word) <= _MAX_WORD_CHARS and word not in triggers_by_word]
        )
        return set(chain.from_iterable(triggers_by_word.values()))


# Matches nothing, since the kingfisher scanner finds the spans: not `password`.
_NEVER = re.compile(r"(?!)")


@dataclass(frozen=True)
class _KingfisherRule(Rule):
    """All rules of the kingfisher catalog as a single rule, which runs offline and in this process."""

    scanner: Any = field(default=None, repr=False)

    def spans(self, text: str) -> Iterator[Span]:
        # Offsets count bytes in kingfisher's own decoding of the input, so the value is searched for instead.
        for finding in self.scanner.scan(text):
            value = finding.secret
            if len(value) < 6 or PLACEHOLDER.search(value):
                continue
            start = text.find(value)
            while start >= 0:
                yield Span(start, start + len(value), self.kind)
                start = text.find(value, start + len(value))


def kingfisher_rule(*, confidence: str = "medium") -> Rule:
    """Return a rule for `Scrubber(extra_rules=[...])` with the kingfisher rule catalog. Requires `kingfisher_sdk`."""
    sdk = require("kingfisher_sdk", extra="privacy")
    scanner = sdk.Scanner(sdk.Rules(confidence=confidence))
    return _KingfisherRule("KINGFISHER", _NEVER, scanner=scanner)
