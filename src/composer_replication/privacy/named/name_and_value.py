"""What only a name and its value say together: a session in hex, a login, a phrase, and the folder that `pwd` holds."""

from __future__ import annotations

import re

from composer_replication.privacy.named.plausible import is_answer, is_said, speaks
from composer_replication.privacy.rules import is_strong

# What signs a request or holds a login is as good as a password, and often plain hex.
_HANDLE = re.compile(r"(?i)(?:sess(?:ion)?[_-]?id|signature|\bsig|_sig|sid)$")
_HEX_HANDLE = re.compile(r"[0-9a-fA-F]{20,}")
# Whatever stands in this header is what logs in, also without a scheme and without looking random.
_CREDENTIAL_HEADER = re.compile(r"(?i)(?:^|[_-])authorization$")
_SCHEME = re.compile(r"(?i)(?:bearer|basic|token|digest|apikey|negotiate)[ \t]+")
_LOGIN_NAME = re.compile(r"(?i)(?:^|[_.-]|(?<=[a-z]))(auth|creds?|credentials?|login)$")
_LOGIN_ENDS = ("auth", "cred", "creds", "credential", "credentials", "login")
_USER_AND_PASSWORD = re.compile(r"[\w.@+-]{1,60}[:/]([^\0\s:/@]{6,100})")
_DIRECTORY = re.compile(r"(?:~|\.{1,2})?(?:/[^\0/\s]*+)++|[A-Za-z]:[\\/][^\n\0]*|\.{1,2}|~")
_MOST_WORDS = 8


def names_handle(name: str) -> bool:
    """Whether a name is that of a session or of a signature."""
    return _HANDLE.search(name) is not None


def is_handle(name: str, value: str) -> bool:
    """Plain hex under the name of a session or a signature, which looks less random than it is."""
    return names_handle(name) and _HEX_HANDLE.fullmatch(value) is not None and len(set(value)) >= 8


def is_credential(name: str, value: str) -> bool:
    """What an `Authorization` header holds."""
    bare = value[scheme.end() :] if (scheme := _SCHEME.match(value)) else value
    return _CREDENTIAL_HEADER.search(name) is not None and len(bare) >= 8 and " " not in bare and is_strong(bare)


def is_login(name: str, value: str) -> bool:
    """A password under a variable for logins (`REDISCLI_AUTH`, `LDAP_BIND_CRED`), or a user with one (`ada:...`)."""
    words = _LOGIN_NAME.search(name) if name.lower().endswith(_LOGIN_ENDS) else None
    if words is None:
        return False
    pair = _USER_AND_PASSWORD.fullmatch(value)
    if pair is not None:
        return is_said(pair[1])
    return name.upper() == name and words[1].upper() != "LOGIN" and is_answer(value)


def is_directory(name: str, value: str) -> bool:
    """`pwd` is a password in a form and a working directory in a shell: the value tells."""
    return name.lower() == "pwd" and _DIRECTORY.fullmatch(value.strip()) is not None


def is_phrase_of(name: str, value: str) -> bool:
    """Several words that a variable in capitals or a passphrase holds: no label stands there."""
    if not 1 < len(value.split()) <= _MOST_WORDS or not value.replace(" ", "").isalpha() or value != value.strip():
        return False
    return (name.isupper() and not speaks(value)) or (name.lower().endswith("phrase") and value.islower())
