"""Secrets known by the command or the file they stand in, without a name: curl -u, mysql -p, .netrc, .pgpass."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from typing import NamedTuple

from composer_replication.privacy.named.names import Strength
from composer_replication.privacy.named.plausible import is_plausible, is_unknown
from composer_replication.privacy.rules import Span, is_strong

_WORD = r"(?P<q>\\*[\"'])?(?P<value>(?(q)(?:(?!(?P=q))[^\0\n]){3,200}|[^\0\s\"'`\\;|&<>]{3,200}))"
_SAID = r"(?P<value>[^\0\s\"'`\\<>]{3,200})"
_S = r"\s{1,20}"  # a blank, and what a continued line has
_ARG = r"[^\0\s]{1,200}"
_QUOTE = r"\\*[\"']?"
# Behind echo: options, a format, what is written, and the rest of a bracket up to the pipe.
_ECHOED = (
    rf"{_S}(?:-\w{{1,4}}{_S})?(?:{_QUOTE}%s(?:\\{{1,2}}n)?{_QUOTE}{_S})?{_WORD}{_QUOTE}"
    rf"(?:\s?;\s?echo{_S}[^\0\n|;()]{{1,100}}\)?)?\s{{0,10}}\|\s{{0,10}}(?P<reader>[^\0\n|]{{1,200}})"
)


class _Command(NamedTuple):
    """`trigger`: a word that must occur; `also`: what else must, where the word is common.

    `strong`: only a value that no word could be, because the same words stand in prose and in code.
    """

    trigger: bytes
    kind: str
    pattern: re.Pattern[str]
    also: str = ""
    strong: bool = False


def _row(trigger: str, kind: str, *parts: str, also: str = "", strong: bool = False) -> _Command:
    return _Command(trigger.encode(), kind, re.compile("".join(parts)), also, strong)


# What reads a password or a token from its input.
_READER = re.compile(
    r"(?:^|[\s/|;&(\"'!])(?:(?:ch|smb|vnc|sla?p|mk)?passwd|sudo\s[^\0\n|;]{0,40}?-\w{0,3}S|su\s|kinit|"
    r"cryptsetup|secret-tool"
    r"|security\s|keychain|openconnect|ssh-add|wrangler|vault\s{1,4}login|gh\s{1,4}auth|npm\s{1,4}login)"
    r"|--(?:password|token|pass|secret|passwd|passphrase|access-token)-stdin|--passwd-on-stdin|--with-token|--stdin\b"
    r"|--passphrase-fd|\b(?:secrets?|env|vars?|pass)[ :](?:set|put|create|add|insert|store|import|versions)\b"
    r"|tee\s[^\0\n|;]{0,60}(?:pass|secret|token)"
)
_READ_WORDS = frozenset(
    word.encode()
    for word in (
        "passwd",
        "sudo",
        "kinit",
        "cryptsetup",
        "stdin",
        "login",
        "secret",
        "pass",
        "auth",
        "env",
        "keychain",
        "openconnect",
    )
)
# What is written into a file that has the name of a secret.
_STORED = (
    rf"{_S}(?:-\w{{1,4}}{_S})?(?:{_QUOTE}%s(?:\\{{1,2}}n)?{_QUOTE}{_S})?{_WORD}{_QUOTE}\s?>{{1,2}}\s?"
    r"[^\0\s;|&]{0,80}(?:pass|secret|token|passwd|\.key)"
)
_PIPED = tuple((program.encode(), re.compile(program + _ECHOED)) for program in ("echo", "printf", "yes"))
_INTO_FILE = tuple((program.encode(), re.compile(program + _STORED)) for program in ("echo", "printf"))
WHOLE_WORDS = frozenset(program for program, _ in _PIPED)
_HERE = re.compile(rf"<<<\s?{_WORD}")
_LOGIN_OF = re.compile(r"[\w.-]{1,40}:")
_LONGEST_LINE = 300
_KEPT = (
    _row("pass", "PASSWORD", "-(?:passin|passout|pass|k)", _S, "pass:", _WORD, also=" pass:"),
    _row("literal", "SECRET", "--from-literal[= ]", _QUOTE, r"[\w.-]{1,80}=", _WORD, also="from-literal", strong=True),
    _row("secret", "SECRET", r"secret set\b[^\0\n|;]{0,200}?\s(?:-b|--body)[ =]?", _WORD, also="secret set",
         strong=True),
    _row("secret", "SECRET", r"secrets set", _S, r"[\w.-]{1,80}=", _WORD, also="secrets set", strong=True),
    _row("machine", "PASSWORD", "machine", _S, _ARG, _S, rf"(?:login{_S}{_ARG}{_S})?(?:account{_S}{_ARG}{_S})?password",
         _S, _WORD, also="password"),
    _row("login", "PASSWORD", "login", _S, _ARG, _S, "password", _S, _WORD),
    _row("pgpass", "PASSWORD", r"(?<![\w.*-])[\w.*-]{1,80}:(?:\d{2,5}|\*):[\w.*-]{1,60}:[\w.*-]{1,60}:", _WORD),
    _row("auth", "USER_PASSWORD", r"uth(?:=|\w{0,10})\(\s{0,4}\\*[\"'][^\0\"'\\\n]{1,80}\\*[\"'],\s{0,4}", _WORD,
         also="(", strong=True),
    _row("login", "USER_PASSWORD", r"login\(\s{0,4}\\*[\"'][^\0\"'\\\n]{1,80}\\*[\"'],\s{0,4}", _WORD, strong=True),
    _row("auth", "PASSWORD", r"AUTH (?:(?<![^\0\n]AUTH )|(?<=[> \"']AUTH ))(?:[\w-]{1,40} )?", _WORD, also="AUTH ",
         strong=True),
    _row("ftp", "PASSWORD", r"(?m)^\s{0,8}user\s{1,3}[\w.@-]{1,60}\s{1,3}", _WORD, also="user ", strong=True),
    _row("securestring", "PASSWORD", "ConvertTo-SecureString", _S, rf"(?:-[A-Za-z]{{2,20}}{_S}){{0,3}}", _WORD),
    *(_row(trigger, "USER_PASSWORD", r"(?:onnect|PDO|onnection)\(\s{0,9}\\*[\"'][^\0\"'\n]{1,160}\\*[\"'],\s{0,"
                    "9}\\*[\"']"
           r"[^\0\"'\n]{1,60}\\*[\"'],\s{0,9}", _WORD, strong=True) for trigger in ("dbi", "pdo", "jdbc")),
    *(_row(trigger, "PASSWORD", r"(?:crypt|CRYPT)\([^\0\n,()]{1,80},\s{0,4}(?=\\*[\"'])", _WORD)
      for trigger in ("decrypt", "encrypt")),
    *(_row(trigger, "PASSWORD", r"(?m)^\\*\"[\w.-]{1,40}\\*\" \\*\"(?P<value>[^\0\n\"\\]{4,100})", strong=True)
      for trigger in ("pgbouncer", "userlist")),
    _row("auth", "PASSWORD", r"auth-user-pass>\s{1,9}[^\0\n<]{1,60}\n\s{0,9}", _SAID, also="auth-user-pass>"),
    _row("chpasswd", "PASSWORD", r"chpasswd[^\0\n]{0,40}\n(?:[ \t]{0,20}(?:expire|list|users)[^\0\n]{0,40}\n)"
         r"{0,2}\s{0,20}"
         r"[\w-]{1,40}:", _SAID, strong=True),
    _row("bind", "PASSWORD", r"bind(?:_s)?\(\s{0,4}\\*[\"'][^\0\"'\n]{1,120}\\*[\"'],\s{0,4}", _WORD, strong=True),
    _row("login", "PASSWORD", r"LOGIN [^\0\s]{1,80} ", _WORD, also="LOGIN ", strong=True),
    _row("identify", "PASSWORD", r"IDENTIFY (?:[\w-]{1,30} )?", _SAID, strong=True),
    _row("pass", "PASSWORD", r"(?m)(?:^|(?<=: )|(?<=> ))PASS (?P<value>[^\0\s\"'`\\<>/.]{6,100})$", also="P"
         "ASS ", strong=True),
    _row("superuser", "PASSWORD", r"superuser\((?:[^\0()\n]{0,120},\s{0,4})", _WORD, strong=True),
    _row("ugfzc", "PASSWORD", r"UGFzc3dvcmQ6\s{1,4}(?:C: )?(?P<value>[A-Za-z0-9+/=]{6,200})"),
    *(_row(trigger, "PASSWORD", rf"(?:{command})[^\0\n]{{0,160}}\n(?P<value>[^\0\s\"'`<>{{}}]{{6,200}})(?="
                    "\n|$)", also=also,
           strong=True)
      for trigger, command, also in (
          ("initial", "initial-password", "initial-password"), ("pass", "pass show", "pass show"),
          ("secret", "get secrets?[ /]", "get secret"), ("secret", "secrets versions access", "versions access"),
          ("secret", "get-secret-value", "get-secret-value"), ("password", "find-generic-password", "find-generic"))),
    _row("user", "USER_PASSWORD", r"ser(?:name)?:[Pp]ass(?:word)?[^\w\0@]{1,6}[\w.@+-]{1,60}:", _WORD, also=":pass",
         strong=True),
)  # fmt: skip
_BY_TRIGGER: dict[bytes, list[_Command]] = {}
for _command in _KEPT:
    _BY_TRIGGER.setdefault(_command.trigger, []).append(_command)
_ORACLE_WORDS = frozenset((b"oracle", b"sqlplus"))
TRIGGERS: tuple[bytes, ...] = (*_BY_TRIGGER, *_READ_WORDS.difference(_BY_TRIGGER), *_ORACLE_WORDS)
_ALL_TRIGGERS = frozenset(_BY_TRIGGER)
_HARMLESS = re.compile(r"\$\{?\w+\}?$|\$\(|\{|<|%s|\*{3}|your|pass(?:word)?$|PASSWORD$|redacted|-")
# A line of .pgpass alone, without the name of its file: host, the usual port, database, user, password.
_PGPASS = re.compile(
    r"(?m)^(?:[ \t]{0,8}\d{1,4}[→:\t])?[\w.*-]{1,80}:(?:5432|\*):[\w.*-]{1,60}:[\w.*-]{1,60}:(?P<value"
    r">[^\0\s:]{6,200})$"
)


# `ada@example.org:...` alone, as lists of logins have it, and `root:...@10.0.0.1`.
_ACCOUNT = re.compile(r"@[\w-]{1,60}(?:\.[\w-]{1,40}){0,3}\.[a-z]{2,6}:(?P<value>[^\0\s:/@\"'`<>\\]{6,60})(?=\s|$)")
_BESIDE_MAIL = re.compile(
    r"@[\w-]{1,60}(?:\.[\w-]{1,40}){1,3}[\"'`*]{0,3}[ \t]/[ \t][\"'`*]{0,3}(?P<value>[^\0\s\"'`*,;()/]{4,60})"
)
_ORACLE = re.compile(
    r"(?<![\w/])[\w$#]{1,40}/\\*[\"']?(?P<value>[^\0\s@\"'\\/]{3,100})\\*[\"']?@(?://|\(|[\w.-]{1,80}[:/])"
)


def command_spans(text: str, active: Set[bytes]) -> Iterator[Span]:
    """Every secret that a command line or a login file shows. `active`: the triggers that occur."""
    for trigger in sorted(active & _ALL_TRIGGERS):  # in one order everywhere: of two kinds the first stays
        for _, kind, pattern, also, strong in _BY_TRIGGER[trigger]:
            if also in text:
                yield from _matches(pattern, text, kind, strong)
    if active & _READ_WORDS or active & WHOLE_WORDS:
        yield from _read_spans(text, active)
    if ":5432:" in text:
        yield from _matches(_PGPASS, text, "PASSWORD", True)
    if "@" in text:
        yield from _matches(_ACCOUNT, text, "USER_PASSWORD", True)
        yield from _matches(_BESIDE_MAIL, text, "USER_PASSWORD", True)
    if not active.isdisjoint(_ORACLE_WORDS):
        yield from _matches(_ORACLE, text, "PASSWORD", False)


def _read_spans(text: str, active: Set[bytes]) -> Iterator[Span]:
    """What is piped into a program that reads a password, or stands behind its `<<<`."""
    for pattern in [pattern for name, pattern in _PIPED if name in active] if "|" in text else ():
        for match in pattern.finditer(text):
            if _READER.search(match["reader"]):
                begin, end = match.span("value")
                login = _LOGIN_OF.match(text, begin, end) if "chpasswd" in match["reader"] else None
                yield from _checked(text, login.end() if login else begin, end)
    for pattern in [pattern for name, pattern in _INTO_FILE if name in active] if ">" in text else ():
        for match in pattern.finditer(text):
            yield from _checked(text, *match.span("value"))
    for match in _HERE.finditer(text) if "<<<" in text else ():
        line = max(text.rfind("\n", 0, match.start()) + 1, match.start() - _LONGEST_LINE)
        if _READER.search(text[line : match.start()]) or _READER.search(
            text[match.end() : match.end() + 80].split("\n")[0]
        ):
            yield from _checked(text, *match.span("value"))


def _checked(text: str, begin: int, end: int) -> Iterator[Span]:
    value = text[begin:end]
    if is_plausible(value, Strength.PASSWORD, True) and not _HARMLESS.match(value):
        yield Span(begin, end, "PASSWORD")


def _matches(pattern: re.Pattern[str], text: str, kind: str, strong: bool) -> Iterator[Span]:
    for match in pattern.finditer(text):
        value = match["value"]
        if (
            is_plausible(value, Strength.PASSWORD, True)
            and not _HARMLESS.match(value)
            and (not strong or is_strong(value) or is_unknown(value))
        ):
            yield Span(*match.span("value"), kind)
