"""Secrets known by the command or the file they stand in, without a name: curl -u, mysql -p, .netrc, .pgpass."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from typing import NamedTuple

from composer_replication.privacy.names import Strength
from composer_replication.privacy.plausible import is_plausible
from composer_replication.privacy.rules import Span, is_strong

_WORD = r"(?P<q>\\*[\"'])?(?P<value>(?(q)(?:(?!(?P=q))[^\0\n]){3,200}|[^\0\s\"'`\\;|&<>]{3,200}))"
_SAID = r"(?P<value>[^\0\s\"'`\\<>]{3,200})"
_S = r"\s{1,20}"  # a blank, and what a continued line has
_ARG = r"[^\0\s]{1,200}"
_QUOTE = r"\\*[\"']?"
_OPTIONS = r"\b[^\0\n|;]{0,300}?\s"  # up to the option that is meant
_ECHO = rf"(?:echo|printf){_S}(?:-\w{{1,4}}{_S})?(?:{_QUOTE}%s(?:\\\\n)?{_QUOTE}{_S})?"
_PIPE = rf"{_QUOTE}\s{{0,10}}\|\s{{0,10}}"


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
_READER = (
    r"(?:[^\0\n|;]{0,120}?[\s/])??(?:chpasswd|passwd|smbpasswd|vncpasswd|slappasswd|mkpasswd|sudo\s{1,4}(?:-\w{1,3}\s)?-\w{0,3}S|su\s|kinit|cryptsetup|secret-tool"
    r"|docker-credential|security\s|keychain|openconnect|ssh-add|pinentry|gpg[^\0\n|;]{0,60}?--passphrase-fd"
    r"|[^\0\n|;]{0,200}?(?:--(?:password|token|pass|secret|passwd|passphrase|access-token)-stdin|--passwd-on-stdin|--with-token"
    r"|--stdin|--token-stdin)|[^\0\n|;]{0,60}?\b(?:secrets?|env|vars?|pass)[ :](?:set|put|create|add|insert|store|import)\b"
    r"|vault\s{1,4}login|gh\s{1,4}auth|npm\s{1,4}login|wrangler|pass\s{1,4}insert)"
)

_PIPED = (
    _row("passwd", "PASSWORD", _ECHO, _QUOTE, r"[\w.-]{1,40}:", _WORD, _PIPE, r"(?:sudo\s{1,4})?chpasswd"),
    *(
        _row(word, "PASSWORD", _ECHO, _WORD, _PIPE, _READER, also="|")
        for word in ("passwd", "sudo", "kinit", "cryptsetup", "stdin", "login", "secret", "pass", "auth", "env", "keychain")
    ),
    *(
        _row(word, "PASSWORD", rf"\b{_READER}[^\0\n|;<]{{0,120}}?<<<\s?", _WORD, also="<<<")
        for word in ("passwd", "sudo", "kinit", "cryptsetup", "stdin", "login", "secret", "pass", "auth", "env", "keychain")
    ),
)  # fmt: skip
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
    _row("securestring", "PASSWORD", "ConvertTo-SecureString", _S, rf"(?:-String{_S})?", _WORD),
    _row("user", "USER_PASSWORD", r"ser(?:name)?:[Pp]ass(?:word)?[^\w\0]{1,6}[\w.@+-]{1,60}:", _WORD, also=":pass",
         strong=True),
)  # fmt: skip
_COMMANDS = _PIPED + _KEPT
_BY_TRIGGER: dict[bytes, list[_Command]] = {}
for _command in _COMMANDS:
    _BY_TRIGGER.setdefault(_command.trigger, []).append(_command)
TRIGGERS: tuple[bytes, ...] = tuple(_BY_TRIGGER)
_ALL_TRIGGERS = frozenset(TRIGGERS)
_HARMLESS = re.compile(r"\$\{?\w+\}?$|\$\(|\{|<|%s|\*{3}|your|pass(?:word)?$|PASSWORD$|redacted|-")
# A line of .pgpass alone, without the name of its file: host, the usual port, database, user, password.
_PGPASS = re.compile(
    r"(?m)^(?:[ \t]{0,8}\d{1,4}[→:\t])?[\w.*-]{1,80}:5432:[\w.*-]{1,60}:[\w.*-]{1,60}:(?P<value>[^\0\s:]{6,200})$"
)


def command_spans(text: str, active: Set[bytes]) -> Iterator[Span]:
    """Every secret that a command line or a login file shows. `active`: the triggers that occur."""
    for trigger in sorted(active & _ALL_TRIGGERS):  # in one order everywhere: of two kinds the first stays
        for _, kind, pattern, also, strong in _BY_TRIGGER[trigger]:
            if also in text:
                yield from _matches(pattern, text, kind, strong)
    if ":5432:" in text:
        yield from _matches(_PGPASS, text, "PASSWORD", True)


def _matches(pattern: re.Pattern[str], text: str, kind: str, strong: bool) -> Iterator[Span]:
    for match in pattern.finditer(text):
        value = match["value"]
        if (
            is_plausible(value, Strength.PASSWORD, True)
            and not _HARMLESS.match(value)
            and (not strong or is_strong(value))
        ):
            yield Span(*match.span("value"), kind)
