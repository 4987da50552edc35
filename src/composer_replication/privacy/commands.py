"""Secrets known by the command or the file they stand in, without a name: curl -u, mysql -p, .netrc, .pgpass."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set

from composer_replication.privacy.rules import PLACEHOLDER, Span, is_strong

_WORD = r"(?P<q>\\*[\"'])?(?P<value>(?(q)(?:(?!(?P=q))[^\n]){3,200}|[^\s\"'`\\;|&<>]{3,200}))"
_SAID = r"(?P<value>[^\s\"'`\\<>]{3,200})"
_COMMANDS: tuple[tuple[bytes, str, re.Pattern[str]], ...] = (
    (
        b"curl",
        "USER_PASSWORD",
        re.compile(r"curl\b[^\n|;]{0,300}?\s(?:-u|--user|--proxy-user|-U)[ =]?\\*[\"']?[^\s:\"'\\]{1,80}:" + _WORD),
    ),
    (b"wget", "USER_PASSWORD", re.compile(r"wget\b[^\n|;]{0,300}?\s--(?:http-|ftp-)?password[ =]" + _WORD)),
    (b"sshpass", "PASSWORD", re.compile(r"sshpass\s+-p\s?" + _WORD)),
    (b"mysql", "PASSWORD", re.compile(r"mysql\w*\b[^\n|;]{0,200}?\s-p" + _WORD)),
    (b"redis", "PASSWORD", re.compile(r"redis-cli\b[^\n|;]{0,200}?\s(?:-a|--pass)\s+" + _WORD)),
    (b"login", "PASSWORD", re.compile(r"login\b[^\n|;]{0,200}?\s(?:-p|--password)[ =]" + _WORD)),
    (b"mongo", "PASSWORD", re.compile(r"mongo\w*\b[^\n|;]{0,200}?\s(?:-p|--password)[ =]" + _WORD)),
    (b"ldap", "PASSWORD", re.compile(r"ldap\w+\b[^\n|;]{0,200}?\s-w\s+" + _WORD)),
    (b"htpasswd", "PASSWORD", re.compile(r"htpasswd\s+-\w*b\w*\s+\S+\s+\S+\s+" + _WORD)),
    (
        b"chpasswd",
        "PASSWORD",
        re.compile(r"echo\s+(?:-\w+\s+)?\\*[\"']?[\w.-]{1,40}:" + _WORD + r"\\*[\"']?\s*\|\s*(?:sudo\s+)?chpasswd"),
    ),
    (b"sudo", "PASSWORD", re.compile(r"echo\s+(?:-\w+\s+)?" + _WORD + r"\\*[\"']?\s*\|\s*sudo\s+-S")),
    (b"pass", "PASSWORD", re.compile(r"-(?:passin|passout|pass|k)\s+pass:" + _WORD)),
    (b"literal", "SECRET", re.compile(r"--from-literal[= ]\\*[\"']?[\w.-]{1,80}=" + _WORD)),
    (b"secret", "SECRET", re.compile(r"secret set\b[^\n|;]{0,200}?\s(?:-b|--body)[ =]?" + _WORD)),
    (
        b"machine",
        "PASSWORD",
        re.compile(r"machine\s+\S+\s+(?:login\s+\S+\s+)?(?:account\s+\S+\s+)?password\s+" + _WORD),
    ),
    (b"login", "PASSWORD", re.compile(r"login\s+\S+\s+password\s+" + _WORD)),
    (
        b"pgpass",
        "PASSWORD",
        re.compile(r"(?<![\w.*-])[\w.*-]{1,80}:(?:\d{2,5}|\*):[\w.*-]{1,60}:[\w.*-]{1,60}:" + _WORD),
    ),
    (
        b"auth",
        "USER_PASSWORD",
        re.compile(r"uth(?:=|\w{0,10})\(\s{0,4}\\*[\"'][^\"'\\\n]{1,80}\\*[\"'],\s{0,4}" + _WORD),
    ),
    (b"login", "USER_PASSWORD", re.compile(r"login\(\s{0,4}\\*[\"'][^\"'\\\n]{1,80}\\*[\"'],\s{0,4}" + _WORD)),
    (b"securestring", "PASSWORD", re.compile(r"ConvertTo-SecureString\s+(?:-String\s+)?" + _WORD)),
    (b"user", "USER_PASSWORD", re.compile(r"ser(?:name)?:[Pp]ass(?:word)?\W{1,6}[\w.@+-]{1,60}:" + _WORD)),
    (b"credentials", "USER_PASSWORD", re.compile(r"redentials(?: are| is)?\W{1,6}[\w.@+-]{1,60}\s?[:/]\s?" + _SAID)),
    (b"login", "USER_PASSWORD", re.compile(r"og ?in(?: is| with| as|:)\W{1,3}[\w.@+-]{1,60}\s?[:/]\s?" + _SAID)),
)


# What must stand in the text besides the word, because the word alone is common.
_ALSO = {
    b"sudo": "sudo -S",
    b"literal": "from-literal",
    b"secret": "secret set",
    b"user": ":pass",
    b"pass": " pass:",
    b"machine": "password",
    b"curl": "-",
    b"credentials": ":",
    b"auth": "(",
}
TRIGGERS: tuple[bytes, ...] = tuple(dict.fromkeys(trigger for trigger, _, _ in _COMMANDS))
_ALL_TRIGGERS = frozenset(TRIGGERS)
_HARMLESS = re.compile(r"\$\{?\w+\}?$|\$\(|\{|<|%s|\*{3}|your|pass(?:word)?$|PASSWORD$|redacted")


def command_spans(text: str, active: Set[bytes]) -> Iterator[Span]:
    """Every secret that a command line or a login file shows. `active`: the triggers that occur."""
    here = {trigger for trigger in active & _ALL_TRIGGERS if _ALSO.get(trigger, "") in text}
    for trigger, kind, pattern in _COMMANDS if here else ():
        if trigger not in here:
            continue
        for match in pattern.finditer(text):
            value = match["value"]
            if (
                not PLACEHOLDER.search(value)
                and not _HARMLESS.match(value)
                and (kind == "PASSWORD" or is_strong(value))
            ):
                yield Span(*match.span("value"), kind)
