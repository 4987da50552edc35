"""Which names say that a secret follows: of environment variables, JSON fields, flags and headers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import IntEnum
from functools import cache, lru_cache
from pathlib import Path

from composer_replication.privacy.rules import is_strong, word_set


class Strength(IntEnum):
    """How much a name says about its value."""

    NONE = 0
    WEAK = 1  # `key`, `auth`, `session`: only a random-looking value counts
    TOKEN = 2  # `token`, `api_key`, `secret`: any value that is not code, prose or a placeholder
    PASSWORD = 3  # `password`: short and wordy values too


_VERSION = re.compile(r"\d\.\d")  # of a file or a package, which is no name of a value
_SPLIT = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")
_PASSWORDS = ("password", "passwd", "passphrase", "passcode", "pwd", "passwort", "contrasena", "senha", "motdepasse",
              "keypass", "storepass", "dbpass", "userpass", "rootpass", "adminpass", "smtppass", "remotepass",
              "bindpass", "sudopass", "sshpass", "requirepass", "masterauth", "wachtwoord",
              "kennwort", "salasana", "keyphrase", "userpasswd", "bindpw", "rootpw", "storepw", "kodeord")  # fmt: skip
_TOKENS = tuple(
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
_WEAK_LAST = tuple(
    sorted(
        word_set(
            "key auth sig signature salt pin otp sid sessid sessionid session dsn webhook license cookie authorization"
            " code cert nonce seed mnemonic keys pat creds cred uri url csrf xsrf serial hmac refresh conn database"
            " state"
        )
    )
)
# Words beside `token` or `secret` that make it a count, a type, a file, a flag or a name of something.
_HARMLESS = word_set(
    "max min num count counts total limit limits usage used budget input output prompt completion cached cache"
    " creation read type types name names path file files dir length len size index idx per cost price rate width id"
    " ids field fields label hint regex pattern policy policies url uri endpoint expiry expires expiration ttl at"
    " age header headers tokenizer enabled required valid manager provider reset validator visible placeholder arn"
    " version strength list map kind format public estimate estimated remaining reasoning thinking text special stop"
    " eos bos pad unk mask vocab left window selector ref refs scope scopes role rotation store service class module"
    " error message status form"
)

# Tokens of a tokenizer, a page or a form.
_NO_TOKENS = word_set(
    "csrf xsrf public next page cancel bos eos unk pad sep cls mask image audio video start end first last task"
)

# Every name that says anything has one of these in it: most names have none, and are done with.
_STEM = re.compile(
    "pass|pwd|pw|psk|secret|token|key|cred|auth|jwt|bearer|conn|otp|cvv|cvc|pin|code|sess|senha|contrase|wachtwoord|wort"
    "|salasana|kodeord|phrase|mdp|wort|clave|parol|hasl|hesl|" + "|".join(_WEAK_LAST)
)

# What a password is called elsewhere: a label of a form, where a value could stand.
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


def _slips(word: str, *, any_letter: bool = False) -> set[str]:
    """A word as it is mistyped: two letters swapped, one written twice or left out, or (`any_letter`) another hit."""
    parts = [(word[:at], word[at:]) for at in range(len(word))]
    slips = {head + tail[1:2] + tail[0] + tail[2:] for head, tail in parts} | {
        head + tail[0] + tail for head, tail in parts
    }
    slips |= {head + tail[1:] for head, tail in parts if head and (tail[1:] or len(word) > 6)}
    if any_letter:
        slips |= {head + letter + tail[1:] for head, tail in parts[1:] for letter in "abcdefghijklmnopqrstuvwxyz"}
    return slips - {word}


# What is meant by a mistyped word: no other word is as near to one of these. Of short ones only some slips are safe.
MEANT: dict[str, str] = dict.fromkeys(_slips("password", any_letter=True), "password") | {
    slip: word
    for word in ("passphrase", "passcode", "passwort", "passwd", "credentials", "credential", "secret")
    for slip in _slips(word) - {"passwords", "passport", "secrets"}
}
MEANT |= dict.fromkeys(("psw", "pswd", "pword", "passw"), "password")
MEANT |= dict.fromkeys(("tokne", "toekn", "tooken", "tokken", "tokeen", "tokenn"), "token")
MEANT = {
    slip: word for slip, word in MEANT.items() if slip not in (*_PASSWORDS, *_TOKENS) and slip not in MEANT.values()
}

# What makes a name one of a secret wherever it stands: `passphrase_hex`, `TLSPSKValue`.
_ANYWHERE = ("password", "passwd", "passphrase", "passcode", "secret", "apikey", "psk", "mdp", "passwort", "pwd")
_CODES = frozenset(("pin", "mfacode", "otpcode", "onetimecode", "twofactorcode"))
_OTHER_KEYS = word_set("monkey turkey donkey hockey whiskey jockey mickey")
# Keys that open nothing: of a table, a map, a request.
_PLAIN_KEYS = word_set(
    "idempotency partition sort routing cache foreign primary dedup deduplication object index composite row"
)
_KINDS_OF_KEYS = word_set("api access secret private signing encryption master auth account license")


@lru_cache(maxsize=8192)
def name_strength(name: str) -> Strength:
    """What a name says about its value. A key that holds a value or a placeholder itself is no name."""
    if "<" in name or "=" in name or ": " in name or _VERSION.search(name):
        return Strength.NONE
    words: list[str] = [word.lower() for word in _SPLIT.findall(name)]
    if not _STEM.search(name.lower()) and MEANT.keys().isdisjoint(words):
        return Strength.NONE
    words = [MEANT.get(word, word) for word in words if not word.isdigit()] or [""]
    joined = "".join(words)
    last = words[-1]
    counted = last == "tokens" and not _HARMLESS.isdisjoint(words)  # input_tokens, max_tokens
    if last == "key" and words[-2:-1] and words[-2] in _PLAIN_KEYS:
        return Strength.NONE
    if last == "id" and words[-2:-1] == ["key"]:
        return Strength.WEAK
    if (
        last in _HARMLESS
        or counted
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
    if joined.endswith(_TOKENS):
        return Strength.TOKEN if not (set(words) & _NO_TOKENS) else Strength.WEAK
    if last in ("otp", "cvv", "cvc", "pincode") or joined in _CODES:
        return Strength.TOKEN
    if len(words) > 1 and any(word.endswith(_ANYWHERE) or word in PASSWORD_WORDS for word in words):
        return Strength.TOKEN
    if last == "key" and not _KINDS_OF_KEYS.isdisjoint(words):
        return Strength.TOKEN
    if last in _WEAK_LAST or last == "tokens":
        return Strength.WEAK
    if joined.endswith(("key", "auth", "sessid", "sessionid")) and last not in _OTHER_KEYS:
        return Strength.WEAK
    return Strength.NONE


_COMMON_VALUES = word_set(
    "password changeme localhost 127.0.0.1 development production undefined disabled enabled required anonymous"
    " postgres username testtest 12345678 00000000 example.com keychain osxkeychain /dev/null dumb xterm-256color"
    " database internal external standard optional template testing security sessions absolute relative filesystem"
    " environment kubernetes terraform anything something nothing everything security-token access-token"
)
# What they hold is no secret, and stands in every text.
_EVERY_SHELL = word_set(
    "HOME PWD OLDPWD SHELL LANG LANGUAGE TERM USER LOGNAME USERNAME PATH HOSTNAME EDITOR VISUAL PAGER DISPLAY TMPDIR TZ"
    " TEMP TMP SHLVL COLORTERM MAIL VIRTUAL_ENV CONDA_PREFIX MANPATH PYTHONPATH NODE_ENV USERPROFILE APPDATA COMSPEC"
    " LS_COLORS LC_ALL LC_CTYPE TERM_PROGRAM SSH_AUTH_SOCK SSH_CONNECTION SSH_CLIENT SSH_TTY XDG_RUNTIME_DIR"
)
_ENV_NAMES = re.compile(
    r"(?i)(?:^|_)(?:KEY|PAT|AUTH|CREDS?|DSN|COOKIE|PASS|LOGIN|ACCESS|CODE|PIN|SALT|SIGNATURE|SESSION|LICENSE|WEBHOOK"
    r"|CONN(?:ECTION)?(?:_STRING)?)\d*$"
)

_LOWER_WORD = re.compile(r"[a-z]{1,11}")
_ADDRESS = re.compile(r"https?://[^\0@?]*")
# A key may begin with a slash, too; a path begins with a folder that systems have, or all of it is words.
_PATH = re.compile(
    r"[~.]|[A-Z]:|/(?:usr|home|etc|var|opt|srv|tmp|run|root|mnt|media|dev|bin|sbin|lib|proc|sys|data|app|private|Users"
    r"|Volumes|Library|Applications|nix|snap|secrets|workspace|workspaces|github|builds?)(?:/|$)"
    r"|(?:/[A-Za-z][a-z_.-]{2,40}+)++/?$|[^\0]*\.[a-z]{2,5}$"
)


def secret_looking_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables whose names look secret, with values long and rare enough to search for everywhere.

    A path, a plain number or a common word under such a name (SSH_AUTH_SOCK, GIT_ASKPASS) would redact half a session.
    """
    chosen: dict[str, str] = {}
    for name, value in environ.items():
        looks_secret = (
            name_strength(name) >= Strength.TOKEN
            or _ENV_NAMES.search(name) is not None
            or ("://" in value and "@" in value)
        )
        if looks_secret and is_searchable(name, value):
            chosen[name] = value
    return chosen


def is_searchable(name: str, value: str) -> bool:
    """Whether a value may be looked for everywhere: `true`, `8080`, a folder or a locale would spoil every text."""
    value = value.strip()
    secret = name_strength(name) >= Strength.TOKEN
    shortest = 6 if secret and is_strong(value) else 8
    if name.upper() in _EVERY_SHELL or len(value) < shortest or value.lower() in _COMMON_VALUES or len(set(value)) < 4:
        return False
    if value.startswith(("/", "~/", "./", "C:\\")) and " " not in value and not re.search(r"[A-Za-z0-9+]{24,}", value):
        return secret and not _PATH.match(value)
    if _ADDRESS.fullmatch(value):  # one that lets in whoever knows it has a key for a part
        return (secret or _ENV_NAMES.search(name) is not None) and any(map(_is_key_part, value.split("/")[3:]))
    return not (value.isdigit() and len(value) < 10) and (secret or not _LOWER_WORD.fullmatch(value))


def _is_key_part(part: str) -> bool:
    return len(part) >= 8 and part.isascii() and is_strong(part)


# Which words code and messages have: what stands beside a secret's name and is made of them is no secret.
#
# Beside such a name the default is the other way round: a value is one unless it is known to be harmless. The words
# that are known were counted in packages and in message catalogs of many languages (`scripts/harmless_words.py`).

_LETTERS = re.compile(r"[^\W\d_]+")
_SEAM = re.compile(r"(?<=[a-zß-öø-ÿ])(?=[A-ZÀ-ÖØ-Þ])|(?<=[A-ZÀ-ÖØ-Þ])(?=[A-ZÀ-ÖØ-Þ][a-zß-öø-ÿ])")
_NO_LATIN = re.compile(r"[^\W\d_a-zA-ZªºÀ-ɏḀ-ỹ]")
_ENDINGS = ("s", "es", "ed", "ing", "ly", "en", "er", "n")
_SHORTEST_WORD, _SHORTEST = 4, 5
_SHORTEST_CUT = 6
_SHORTEST_JUMBLE, _FEWEST_SEAMS = 11, 3


def stem(word: str) -> str:
    """A word without the letter that most of its forms differ by."""
    return word[:-1] if len(word) >= _SHORTEST_CUT else word


@cache
def _stems() -> frozenset[str]:
    text = Path(__file__).with_name("harmless_words.txt").read_text(encoding="utf-8")
    return frozenset(text.partition("\n")[2].split())


def is_word(word: str) -> bool:
    """Whether packages or catalogs have a word or another form of it."""
    stems, lower = _stems(), word.lower()
    return stem(lower) in stems or any(lower.endswith(end) and stem(lower[: -len(end)]) in stems for end in _ENDINGS)


@lru_cache(maxsize=1 << 12)
def is_uncommon(value: str) -> bool:
    """Whether a value has a word in it that neither code nor messages have; in Latin letters only."""
    if len(value) < _SHORTEST or _NO_LATIN.search(value):
        return False
    cut = [_SEAM.split(letters) for letters in _LETTERS.findall(value)]
    parts = [part for word in cut for part in word]
    if any(len(part) >= _SHORTEST_WORD and not is_word(part) for part in parts):
        return True
    # Capitals all over it: no name of code changes so often and has so few letters between.
    length = sum(map(len, parts))
    return length >= _SHORTEST_JUMBLE and len(parts) - len(cut) >= _FEWEST_SEAMS and length < 3 * len(parts) + 2
