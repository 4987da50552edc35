"""Classify names in environment variables, JSON fields, flags and headers by how strongly they indicate a secret.

The last part recognizes common words in code and messages. It uses `harmless_words.txt`, a list counted in packages and
in message catalogs in many languages by `scripts/harmless_words.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import IntEnum
from functools import cache, lru_cache
from pathlib import Path

from composer_replication.privacy.rules import is_strong, word_set


class Strength(IntEnum):
    """How strongly a name indicates that its value is a secret."""

    NONE = 0
    WEAK = 1  # `key`, `auth`, `session`: only a random-looking value counts
    TOKEN = 2  # `token`, `api_key`, `secret`: any value that is not code, prose or a placeholder
    PASSWORD = 3  # `password`: short and wordy values, too


# The version of a file or a package, which does not name a value: `token-2.1`; not `token2`.
_VERSION_PART = re.compile(r"\d\.\d")
# The words in `DBPassword2` -> `DB`, `DBPassword2` -> `Password`, `DBPassword2` -> `2`.
_NAME_WORDS = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")
_PASSWORDS = ("password", "passwd", "passphrase", "passcode", "pwd", "passwort", "contrasena", "senha", "motdepasse",
              "keypass", "storepass", "dbpass", "userpass", "rootpass", "adminpass", "smtppass", "remotepass",
              "bindpass", "sudopass", "sshpass", "requirepass", "masterauth", "wachtwoord",
              "kennwort", "salasana", "keyphrase", "userpasswd", "bindpw", "rootpw", "storepw", "kodeord")  # fmt: skip
_TOKEN_ENDS = tuple(
    sorted(
        word_set(
            "secret token apikey accesskey privatekey secretkey credential credentials authkey signingkey encryptionkey"
            " masterkey servicekey accountkey sharedkey clientkey deploykey appkey storagekey adminkey licensekey jwt"
            " bearer connectionstring secrets serverkey userkey authtoken sshkey privkey clientkeydata secretaccesskey"
            " sharedaccesskey hmackey cryptokey webhookkey integrationkey consumerkey authcode totp xapikey"
            " subscriptionkey sessiontoken sessionkey recoverykey functionskey hostkey rootkey writekey"
            " instrumentationkey jwtkey cookiekey aeskey fernetkey presharedkey sealkey unsealkey clientsecret setupkey"
            " securitykey unlockkey walletkey publishkey signkey webhooksigning networkkey localkey"
        )
    )
)
_WEAK_LAST_WORDS = tuple(
    sorted(
        word_set(
            "key auth sig signature salt pin otp sid sessid sessionid session dsn webhook license cookie authorization"
            " code cert nonce seed mnemonic keys pat creds cred uri url csrf xsrf serial hmac refresh conn database"
            " state"
        )
    )
)
# After `token` or `secret`, these words indicate a count, a type, a file, a flag or the name of something.
_HARMLESS_WORDS = word_set(
    "max min num count counts total limit limits usage used budget input output prompt completion cached cache"
    " creation read type types name names path file files dir length len size index idx per cost price rate width id"
    " ids field fields label hint regex pattern policy policies url uri endpoint expiry expires expiration ttl at"
    " age header headers tokenizer enabled required valid manager provider reset validator visible placeholder arn"
    " version strength list map kind format public estimate estimated remaining reasoning thinking text special stop"
    " eos bos pad unk mask vocab left window selector ref refs scope scopes role rotation store service class module"
    " error message status form"
)

# Tokens in a tokenizer, a page or a form.
_PUBLIC_TOKENS = word_set(
    "csrf xsrf public next page cancel bos eos unk pad sep cls mask image audio video start end first last task"
)

# Every name that indicates a secret contains one of these. Most names have none and need no further check:
# `db_password`; not `file_name`.
_STEM_OF_SECRETS = re.compile(
    "pass|pwd|pw|psk|secret|token|key|cred|auth|jwt|bearer|conn|otp|cvv|cvc|pin|code|sess|senha|contrase|wachtwoord|wort"
    "|salasana|kodeord|phrase|mdp|wort|clave|parol|hasl|hesl|" + "|".join(_WEAK_LAST_WORDS)
)

# Words for "password" in other languages: labels in forms, where a value could follow.
PASSWORD_WORDS = word_set(
    "kennwort wachtwoord wachtwoorden toegangscode wagwoord heslo hesla heslom salasana salasanan sal"
    "asanasi clave claves"
    " parola parolasi parolan parolaniz parolniz parole paroli parool parooli geslo gesla lozinka lozinku lozinke sandi"
    " sandinya laluan adgangskode adgangskoden kodeord kodeordet kodeordet nenosiri pasahitza contrasenya contrasenyes"
    " contrasinal sifre sifresi jelszava jelszavam haslo hasla jelszo losenord losenordet zugangsdate"
    "n zugangscode identifiants identifiant"
    " codice chiave schluessel jeton klucz klucza chave clef slaptazodis fjalekalimi senha senhas credenciales"
    " credenziali credenciais passord passordet passwort kodi matkhau palabra accesso aanmeldgegevens inloggegevens"
    " heslem hesel haslem parol parolu parolum parolni parolim parolingiz paroles paroliu zaporka zaporku"
    " cyfrinair pasfhocal pasvorto passwuert tunnussana iphasiwedi modpas tenimiafina slaptazodi adgangsord"
)


def _typing_slips(word: str, *, any_letter: bool = False) -> set[str]:
    """Return misspellings of a word, in which letters are swapped, doubled, omitted or (with `any_letter`) replaced."""
    parts = [(word[:at], word[at:]) for at in range(len(word))]
    slips = {head + tail[1:2] + tail[0] + tail[2:] for head, tail in parts} | {
        head + tail[0] + tail for head, tail in parts
    }
    slips |= {head + tail[1:] for head, tail in parts if head and (tail[1:] or len(word) > 6)}
    if any_letter:
        slips |= {head + letter + tail[1:] for head, tail in parts[1:] for letter in "abcdefghijklmnopqrstuvwxyz"}
    return slips - {word}


# Misspelled word -> the intended word; no other word is as close. For short words only some misspellings are
# unambiguous.
CORRECTIONS: dict[str, str] = dict.fromkeys(_typing_slips("password", any_letter=True), "password") | {
    slip: word
    for word in ("passphrase", "passcode", "passwort", "passwd", "credentials", "credential", "secret")
    for slip in _typing_slips(word) - {"passwords", "passport", "secrets"}
}
CORRECTIONS |= dict.fromkeys(("psw", "pswd", "pword", "passw"), "password")
CORRECTIONS |= dict.fromkeys(("tokne", "toekn", "tooken", "tokken", "tokeen", "tokenn"), "token")
CORRECTIONS = {
    slip: word
    for slip, word in CORRECTIONS.items()
    if slip not in (*_PASSWORDS, *_TOKEN_ENDS) and slip not in CORRECTIONS.values()
}

# These make a name secret wherever they occur in it: `passphrase_hex`, `TLSPSKValue`.
_ANYWHERE = ("password", "passwd", "passphrase", "passcode", "secret", "apikey", "psk", "mdp", "passwort", "pwd")
_CODES = frozenset(("pin", "mfacode", "otpcode", "onetimecode", "twofactorcode"))
_WORDS_ENDING_IN_KEY = word_set("monkey turkey donkey hockey whiskey jockey mickey")
# Keys in tables, maps and requests, which are not secrets.
_PLAIN_KEYS = word_set(
    "idempotency partition sort routing cache foreign primary dedup deduplication object index composite row"
)
_SECRET_KEY_KINDS = word_set("api access secret private signing encryption master auth account license")


@lru_cache(maxsize=8192)
def name_strength(name: str) -> Strength:
    """Return how strongly a name indicates a secret. A key that is itself a value or a placeholder is not a name."""
    if "<" in name or "=" in name or ": " in name or _VERSION_PART.search(name):
        return Strength.NONE
    words: list[str] = [word.lower() for word in _NAME_WORDS.findall(name)]
    if not _STEM_OF_SECRETS.search(name.lower()) and CORRECTIONS.keys().isdisjoint(words):
        return Strength.NONE
    words = [CORRECTIONS.get(word, word) for word in words if not word.isdigit()] or [""]
    joined = "".join(words)
    last = words[-1]
    is_count = last == "tokens" and not _HARMLESS_WORDS.isdisjoint(words)  # input_tokens, max_tokens
    if last == "key" and words[-2:-1] and words[-2] in _PLAIN_KEYS:
        return Strength.NONE
    if last == "id" and words[-2:-1] == ["key"]:
        return Strength.WEAK
    if (
        last in _HARMLESS_WORDS
        or is_count
        or (words[0] in ("no", "is", "has", "use", "show", "hide", "max", "min", "num") and len(words) > 1)
    ):
        return Strength.NONE
    if last == "pass" and words[-2:-1] in (["to"], ["by"], ["must"], ["com"], ["first"], ["second"], ["tests"]):
        return Strength.NONE
    if (
        joined.endswith(_PASSWORDS)
        or last in ("pass", "passe", "pw", "psk", "passwords", "passord", "passordet", "passwortes", "mdp", "assword")
        or (last == "key" and "pass" in words)
    ):
        return Strength.NONE if joined == "oldpwd" else Strength.PASSWORD
    if joined.endswith(_TOKEN_ENDS):
        return Strength.TOKEN if not (set(words) & _PUBLIC_TOKENS) else Strength.WEAK
    if last in ("otp", "cvv", "cvc", "pincode") or joined in _CODES:
        return Strength.TOKEN
    if len(words) > 1 and any(word.endswith(_ANYWHERE) or word in PASSWORD_WORDS for word in words):
        return Strength.TOKEN
    if last == "key" and not _SECRET_KEY_KINDS.isdisjoint(words):
        return Strength.TOKEN
    if last in _WEAK_LAST_WORDS or last == "tokens":
        return Strength.WEAK
    if joined.endswith(("key", "auth", "sessid", "sessionid")) and last not in _WORDS_ENDING_IN_KEY:
        return Strength.WEAK
    return Strength.NONE


_COMMON_VALUES = word_set(
    "password changeme localhost 127.0.0.1 development production undefined disabled enabled required anonymous"
    " postgres username testtest 12345678 00000000 example.com keychain osxkeychain /dev/null dumb xterm-256color"
    " database internal external standard optional template testing security sessions absolute relative filesystem"
    " environment kubernetes terraform anything something nothing everything security-token access-token"
)
# Values of these variables are not secrets and occur in every text.
_SHELL_VARIABLES = word_set(
    "HOME PWD OLDPWD SHELL LANG LANGUAGE TERM USER LOGNAME USERNAME PATH HOSTNAME EDITOR VISUAL PAGER DISPLAY TMPDIR TZ"
    " TEMP TMP SHLVL COLORTERM MAIL VIRTUAL_ENV CONDA_PREFIX MANPATH PYTHONPATH NODE_ENV USERPROFILE APPDATA COMSPEC"
    " LS_COLORS LC_ALL LC_CTYPE TERM_PROGRAM SSH_AUTH_SOCK SSH_CONNECTION SSH_CLIENT SSH_TTY XDG_RUNTIME_DIR"
)
# `NPM_AUTH`, `SLACK_WEBHOOK`, `DB_CONNECTION_STRING`; not `AUTHOR`.
_SECRET_VARIABLE = re.compile(
    r"(?i)(?:^|_)(?:KEY|PAT|AUTH|CREDS?|DSN|COOKIE|PASS|LOGIN|ACCESS|CODE|PIN|SALT|SIGNATURE|SESSION|LICENSE|WEBHOOK"
    r"|CONN(?:ECTION)?(?:_STRING)?)\d*$"
)

# `enabled`; not `hunter2`.
_SHORT_WORD = re.compile(r"[a-z]{1,11}")
# An address without a user or a query: `https://host/path`; not `https://host/?q=1`.
_ADDRESS = re.compile(r"https?://[^\0@?]*")
# A key may begin with a slash, too. A path begins with a common folder or consists of words: `/usr/lib`,
# `~/x`, `/some/folder`; not `/zk39Qx81`.
_PATH = re.compile(
    r"[~.]|[A-Z]:|/(?:usr|home|etc|var|opt|srv|tmp|run|root|mnt|media|dev|bin|sbin|lib|proc|sys|data|app|private|Users"
    r"|Volumes|Library|Applications|nix|snap|secrets|workspace|workspaces|github|builds?)(?:/|$)"
    r"|(?:/[A-Za-z][a-z_.-]{2,40}+)++/?$|[^\0]*\.[a-z]{2,5}$"
)


def secret_looking_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables whose names look secret and whose values are long and rare enough to search for.

    A path, a plain number or a common word under such a name (SSH_AUTH_SOCK, GIT_ASKPASS) would redact half a session.
    """
    chosen: dict[str, str] = {}
    for name, value in environ.items():
        looks_secret = (
            name_strength(name) >= Strength.TOKEN
            or _SECRET_VARIABLE.search(name) is not None
            or ("://" in value and "@" in value)
        )
        if looks_secret and is_searchable(name, value):
            chosen[name] = value
    return chosen


def is_searchable(name: str, value: str) -> bool:
    """Return whether a value is specific enough to search for; `true`, `8080`, a folder and a locale are not."""
    value = value.strip()
    secret = name_strength(name) >= Strength.TOKEN
    shortest = 6 if secret and is_strong(value) else 8
    if (
        name.upper() in _SHELL_VARIABLES
        or len(value) < shortest
        or value.lower() in _COMMON_VALUES
        or len(set(value)) < 4
    ):
        return False
    if value.startswith(("/", "~/", "./", "C:\\")) and " " not in value and not re.search(r"[A-Za-z0-9+]{24,}", value):
        return secret and not _PATH.match(value)
    if _ADDRESS.fullmatch(value):  # an address that grants access contains a key
        return (secret or _SECRET_VARIABLE.search(name) is not None) and any(map(_is_key_part, value.split("/")[3:]))
    return not (value.isdigit() and len(value) < 10) and (secret or not _SHORT_WORD.fullmatch(value))


def _is_key_part(part: str) -> bool:
    return len(part) >= 8 and part.isascii() and is_strong(part)


# Words in code and messages. A value next to a secret's name counts as a secret unless it consists of these words.

# `db-größe2` -> `größe`.
_LETTERS = re.compile(r"[^\W\d_]+")
# Boundaries between words in a camel-case name: `readFile`, `HTTPServer`; not `readfile`.
_WORD_SEAM = re.compile(r"(?<=[a-zß-öø-ÿ])(?=[A-ZÀ-ÖØ-Þ])|(?<=[A-ZÀ-ÖØ-Þ])(?=[A-ZÀ-ÖØ-Þ][a-zß-öø-ÿ])")
# `пароль`; not `größe`.
_NON_LATIN = re.compile(r"[^\W\d_a-zA-ZªºÀ-ɏḀ-ỹ]")
_ENDINGS = ("s", "es", "ed", "ing", "ly", "en", "er", "n")
_MIN_WORD_CHARS, _MIN_CHARS = 4, 5
_MIN_STEMMED_CHARS = 6
_MIN_JUMBLE_CHARS, _MIN_JUMBLE_SEAMS = 11, 3


def _stem(word: str) -> str:
    """Return a word without its last letter, because most inflected forms differ only in that letter."""
    return word[:-1] if len(word) >= _MIN_STEMMED_CHARS else word


@cache
def _stems() -> frozenset[str]:
    text = Path(__file__).with_name("harmless_words.txt").read_text(encoding="utf-8")
    return frozenset(text.partition("\n")[2].split())


def is_word(word: str) -> bool:
    """Return whether a word, or another form of it, occurs in packages or message catalogs."""
    stems, lower = _stems(), word.lower()
    return _stem(lower) in stems or any(lower.endswith(end) and _stem(lower[: -len(end)]) in stems for end in _ENDINGS)


@lru_cache(maxsize=1 << 12)
def is_uncommon(value: str) -> bool:
    """Return whether a value contains a word in Latin letters that occurs in neither code nor messages."""
    if len(value) < _MIN_CHARS or _NON_LATIN.search(value):
        return False
    cut = [_WORD_SEAM.split(letters) for letters in _LETTERS.findall(value)]
    parts = [part for word in cut for part in word]
    if any(len(part) >= _MIN_WORD_CHARS and not is_word(part) for part in parts):
        return True
    # Frequent capitals: no name in code changes case so often, with so few letters in between.
    length = sum(map(len, parts))
    return length >= _MIN_JUMBLE_CHARS and len(parts) - len(cut) >= _MIN_JUMBLE_SEAMS and length < 3 * len(parts) + 2
