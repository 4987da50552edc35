"""Whether the value behind a secret name could be a secret: not a placeholder, a variable, code, a path or prose."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from composer_replication.privacy.entropy import is_public_id, looks_random, share_of_changes
from composer_replication.privacy.names import (
    PASSWORD_WORDS,
    Strength,
    is_uncommon,
    is_word,
    name_strength,
)
from composer_replication.privacy.rules import (
    PLACEHOLDER,
    PSEUDONYM,
    Span,
    has_digit,
    is_strong,
)

_PLACEHOLDER_PART = re.compile(
    r"(?i)[$%]\(|[$%#]\{"
    r"|\{\{|\*{3,}|x{4,}|\.{3}|…|your[_ -]|<[^\0>]*>|example|redacted|change[-_ ]?(?:me|this)"
    r"|replace[-_ ]?(?:me|this|with)|fill[-_ ]?me|insert[-_ ](?:your|here)|placeholder|process\.env"
    r"|os\.environ|getenv|env\.|secrets\.|\A(?:op|ref\+[a-z]+|vault|keyring|ssm|secretsmanager|gcpsm|awssm|azurekv|bws|doppler)://"
    r"|\A(?:vault:|arn:|@Microsoft\.KeyVault)|\bkv/data/|\A!(?:secret|vault|env|include)"
    r"|\A\(\?|\\[sSwWdD][+*{]"  # a regular expression: `(?i)password\s*=`
)
_PLACEHOLDER_WHOLE = re.compile(
    r"(?i)\[[a-z _-]+\]|0x[0-9a-f]{1,16}|\$\{?(?-i:[A-Z_]{2,}+)\}?(?:/[^\0]*)?"
    r"|#[0-9a-f]{3,8}|[0-9a-f]{7,64}\.{2,3}[0-9a-f]{7,64}|\{[^\0{}]*\}"
    r"|\$(?!(?-i:[a-z]{2,12}[A-Z][a-z]{1,12}_?\d{2,4}$))\w+|%[sd]|%[A-Z_]+%"
    r"|options?|flags?|arguments?|parameters?|pro"
    r"mpt|stdin|instead|via"
    r"|and|my[_-]?(?:token|secret|key|password)|none|null|nil|undefined|true|false|string|str|text|bea"
    r"rer|basic|password"
    r"|passwd|secret|token|required|optional|number|int|integer|boolean|bool|object|any|unknown|hidden"
    r"|input|default|empty"
    r"|(?:wrong|bad|invalid|incorrect|fake)[_-]?(?:password|passwd|pass|token|secret|key)|bytes|never|"
    r"void|dummy|mock|foo|bar|todo|n/?a|yes|no|on|off|auto|inherit|self|this|key|value|type|name|field"
    r"|label"
    r"|env|(?:n?var)?char(?:[(\[ ][^\n\0]*)?|todo[^\n\0]*"
    r"|[A-Za-z]+:|[a-z_]{2,12}:(?:password|passwd|secret|token|key)"  # `kw:password`, a name among others
    r"|missing|invalid|valid|expired|access|refresh|session|header|cookie"
)
_LOOKED_AT = 400  # the rest of a long value cannot make code or prose of it
_JUDGED = 200  # characters of a value that are compared with placeholders
_REFERENCE = re.compile(
    r"\$\{|\{\{|\$\(|^\$[A-Za-z_]\w*$|^%[A-Z_]+%$|\*{3,}|^<[^\0>]*>$|process\.env|os\.environ|getenv\("
)
_PROSE = re.compile(
    r"(?i)\b(?:is|are|the|a|an|must|should|required|your|for|to|of|and|or|not|with|please|enter|cannot|can|be|in)\b"
)
# A name, perhaps with members (`a.b`, `a?.b`, `a!.b`, `A::b`), or a number with a unit.
_CODE = re.compile(
    r"[@:$]{0,2}+[A-Za-z_$][\w$]*+(?:(?:[?!]?\.|:{1,2}|\?)[A-Za-z_$][\w$]*+)*+[!?]?|[A-Za-z]++-[a-z]++|[A-Z][a-z]++-[A-Z][A-Za-z]++"
    r"|\d++(?:\.\d++)?[a-zA-Z%]{0,2}"
)
# What stands before a bracket of code: `get`, `rows[0]`, `a =`, another bracket, or nothing.
_OPENED = re.compile(r"(?:\A|[A-Za-z_]\w*|[\])}(\[{=,:+|&!<>*/ -])\Z")
# A generated password: `k[9}Q(w-T,2`, 16 characters and more from most generators.
_LONGEST_GENERATED = 128
_GENERATED = re.compile(r"(?=[^\0a-z]*[a-z])(?=[^\0A-Z]*[A-Z])[!-~]{12,128}")
# Of 2,000 passwords of each generator 99% have more; tests/unit/scrub/test_scrub_data_lines.py draws them.
_FEWEST_CHANGES = 0.33
_FOUR_LETTERS = re.compile(r"[A-Za-z]{4,}")
_CHARACTER_CLASS = re.compile(
    r"\[\^?[^\0\s\[\]]{0,40}(?:0-9|a-[a-z]|A-[A-Z])"
)  # of a regular expression: `[^\w0-9A-F]`
_CAMEL = re.compile(r"[A-Z][a-z]{3,}|[a-z]{4,}|[A-Z]{4,}")
_TEMPLATE = re.compile(r"\A(?:\{\{|[$%#]\{|[$%]\()|[A-Z]{3,}_[A-Z]{3,}")  # `{{.Env.POSTHOG_API_KEY}}`
_CLOSERS = {")": "(", "]": "[", "}": "{"}
_BRACKET_SIGNS = frozenset("([{")
# What a lock file has behind a name: `npm:^2.14.0`, `workspace:*`, `>=1.2`.
_VERSION = re.compile(
    r"(?:[a-z]{2,12}:)?[\^~<>=v ]*\d++(?:\.\d++)++[\w.+-]*+|(?:workspace|file|link|portal|patch):[^\0\s]*+"
)
_FILE = re.compile(r"(?:[\w.-]++/)++[\w-]++\.[a-z]{1,5}")
_AT_PATH = re.compile(r"(?:[\w.-]++:(?=/))?+(?:/[\w.-]++){2,}+")  # a name and where it is kept
_SPELLED = re.compile(r"[A-Za-z]+'[a-z]{1,10}")
_LATIN = re.compile(r"[A-Za-zÀ-ɏͰ-ϿЀ-ӿ]")
_BRACKET = re.compile(r"[(\[]")
# Names of code: members, and words in camel case of which one may be numbered (`config.apiKey2`, `Type1Handler`).
_IDENTIFIER = re.compile(
    r"[A-Za-z_$][\w$]*+(?:[?!]?\.[A-Za-z_$][\w$]*+)++|[A-Za-z][a-z]++\d{0,2}+(?:[A-Z][a-z]{2,20}+\d{0,2}+)++"
)
_MODULE = re.compile(r"(?:[A-Za-z_]++\.){2,}+[A-Za-z_]++")  # `package.module.Name`
_FOLDERS = re.compile(r"(?:[\w.-]++/)+[\w.-]*+|[a-z]++\[:[a-z]++\]")
_LICENCE = re.compile(r"(?=[A-Z-]*\d)(?:[A-Z0-9]{4,8}-){3,7}[A-Z0-9]{4,8}")
_HASHED_NAME = re.compile(
    r"(?:[A-Za-z][A-Za-z0-9_.]{0,20}+-)++[0-9a-f]{32,64}"
)  # of a cache, by the hash of what is in it
_PAIRS_OF_HEX = re.compile(r"(?:[0-9A-Fa-f]{2}:){7,}[0-9A-Fa-f]{2}")  # a fingerprint
# What stands beside a secret's name and is none: an algorithm, an address, a date, a version, a path, a pattern.
_NO_SECRET = re.compile(
    r"(?i)pbkdf2[a-z0-9_-]*+|(?:rsa|hmac|ecdsa|scram|pbkdf2|hkdf|aes|sha|oauth|utf|base|curve|tls|http|ipv|bcrypt|argon|gpt|claude|qwen"
    r"|llama)[_-]?v?\d{1,4}(?:[_./-]?[a-z0-9]{1,24}+){0,5}+"
    r"|(?:[hrep]?s|md|[xvp]|ed)[_-]?v?\d{1,5}(?:[_./-][a-z0-9]{1,10}+){0,5}+|[\w.+-]{1,80}@[\w.-]{1,80}\.[a-z]{2,}"
    r"|(?:[a-z][\w-]*+\.)++(?:com|org|net|io|dev|local|py|js|ts|json|yml|yaml|toml|txt|md|rb|go|rs|sh|"
    r"pem|key|crt|lock|cfg|pdf|zip|gz|png|jpg|svg|html|css|xml|csv|log|sql|exe|dll|so)"
    r"(?::\d++)?|[a-z]++://[^\0]*+|[%@^][\w.-]*+|\d{4}-\d\d-\d\d[^\0]*+|[\d.:,%/]++|v\d++(?:\.\d++)*+["
    r"\w.-]*+|\d++\.\d++[\w.-]*+"
    r"|(?:[\w.-]++/)++[\w.-]*+|[^\0\d]*[*?+|\\]\$?|[A-Za-z_]++[:=!,;?*&]++|[a-z]++(?:[;:,][a-z]*+)++|[a-"
    r"z0-9-]{1,40}:\d{2,5}|[A-Za-z_]++(?:\|[A-Za-z_]*+)++|[a-z]++\[:[a-z]++\]"
    r"|(?:vpc|subnet|sg|i|eni|ami|vol|rtb|igw|nat|snap|eipalloc)-[0-9a-f]{8,17}|(?:us|eu|ap|sa|ca|me|af)-[a-z]{4,9}-\d"
    r"|GHSA(?:-[0-9a-z]{4}){3}|(?:CVE|CWE|RFC|ISO|JIRA|PROJ)-[\d-]++|0x[0-9a-f]++|(?:[0-9a-f]{2}:){5,}[0-9a-f]{2}|\$\{?(?-i:[A-Z_]{2,}+)\}?(?:[^\0\w][^\0]*+)?"
    r"|\d{1,2}:\d[\w.+~-]*+|(?-i:[A-Z]{2,5}\d?(?:[-+/][A-Z]{2,5}\d?)++)|(?:sha-?\d{1,3}|md5):[^\0]*+|issue-?\d++|line-?\d++|#\d++|[A-Za-z_]{1,20}#[A-Za-z_]{1,20}|&\w++;?|\d{1,4}[a-z]{1,3}|[a-z]"
    r"{1,3}\d{1,4}|\d++(?:st|nd|rd|th|px|ms|kb|mb|gb)"
)
# Names of code and words with a number, which a call gets too.
_CODE_WORD = re.compile(
    r"(?:[a-z]++[_.-])*+[a-z]++\d{0,2}|(?:[A-Z]++_)*+[A-Z]++\d?|(?:[a-z]++[_-])++\d{1,2}|[a-z]++(?:[A-Z][a-z]++)*+\d?"
    r"|(?:[a-z][\w-]*+\.)++[a-z]{2,6}|#[^\0]*+"
)


def is_generated(value: str) -> bool:
    """Return whether a generator of passwords made a value: letters, digits and signs in turn, and no word or code."""
    return len(value) <= _LONGEST_GENERATED and _is_generated(value)


@lru_cache(maxsize=1 << 12)
def _is_generated(value: str) -> bool:
    if not _GENERATED.fullmatch(value) or value.isalnum() or _CHARACTER_CLASS.search(value):
        return False
    if _TEMPLATE.search(value):
        return False
    if share_of_changes(value) < _FEWEST_CHANGES:
        return False
    return not any(is_word(part) for letters in _FOUR_LETTERS.findall(value) for part in _CAMEL.findall(letters))


def is_random_value(value: str) -> bool:
    """Whether a value under a name that says little (`key`, `auth`) is a key by its looks."""
    core = value.strip("\"'")
    if _LICENCE.fullmatch(core):
        return True
    if _HASHED_NAME.fullmatch(core) or _PAIRS_OF_HEX.fullmatch(core):
        return False
    return 16 <= len(core) <= 2000 and " " not in core and has_digit(core) and "://" not in core and looks_random(core)


def is_identifier(value: str) -> bool:
    """Whether a bare word is a name of code, which a number does not make a secret."""
    return _IDENTIFIER.fullmatch(value, 0, _JUDGED) is not None


def is_no_secret(value: str) -> bool:
    """Whether a word is an algorithm, an address, a date, a version, a path or a pattern."""
    return _NO_SECRET.fullmatch(value, 0, _JUDGED) is not None


def is_said(value: str) -> bool:
    """Whether a word that stands beside a secret's name in speech is the secret: no word, address or date."""
    return is_generated(value) or (
        is_strong(value)
        and not value.startswith(("-", ".", ":", "_"))
        and not _is_setting(value)
        and not _NO_SECRET.fullmatch(value, 0, _JUDGED)
        and (value.endswith("$") or not is_identifier(value))
        and is_plausible(value, Strength.PASSWORD, True)
        and name_strength(value) == Strength.NONE
    )


_WORDS_AND_NUMBER = re.compile(
    r"(?:[A-Z][a-z]{2,12}){1,3}\d{2,4}[!*#$%&@?]?|[A-Z][a-z]{2,12}(?:[._-][A-Za-z]{3,12}){1,3}[._-]\d{2,4}"
    r"|[a-z]{2,12}[A-Z][a-z]{2,12}\d{2,4}[!*#$%&@?]?"
)
_LOWER_PHRASE = re.compile(r"[a-z]{3,12}(?:[-._][a-z]{3,12}){2,6}")
_PHRASE_CUT = re.compile(r"[-._ ]")
_LOWER_WORDS = re.compile(r"[a-z]{3,12}(?: [a-z]{3,12}){2,7}")
SENTENCE_END = "!*#$%&@?"  # a sign behind a digit belongs to a password, not to the sentence


def is_told(value: str) -> bool:
    """As `is_said`, where a sign or a word for `is` stands between name and value: words with a number, too."""
    return is_said(value) or (
        _WORDS_AND_NUMBER.fullmatch(value) is not None and is_plausible(value, Strength.PASSWORD, True)
    )


def speaks(value: str) -> bool:
    """Whether several words are said about a secret, not one themselves: a label or a message has such words."""
    return _PROSE.search(value) is not None or any(
        name_strength(word) > Strength.NONE or word.lower() in PASSWORD_WORDS for word in value.split()
    )


def is_passphrase(value: str) -> bool:
    """Small words with the same signs or blanks between them: three at the least."""
    if len(value) < 14 or not (_LOWER_PHRASE.fullmatch(value) or _LOWER_WORDS.fullmatch(value)):
        return False
    if any(name_strength(word) for word in _PHRASE_CUT.split(value)):  # members of code, and words about passwords
        return False
    return "." not in value or is_uncommon(value)


# `status=200`, `PasswordAgeDays=30`: a setting, whatever its name begins with; `ETHERSCAN_KEY`: a variable.
_SETTING = re.compile(
    r"[A-Za-z_]{3,40}=[\w.]{1,12}|[A-Z][A-Z0-9]*+(?:_[A-Z0-9]++)*_(?:KEY|TOKEN|SECRET|PASS|PASSWORD|PWD|ID)"
)


def _is_setting(value: str) -> bool:
    """Return whether a word is a setting with its value, or the name of a variable."""
    return _SETTING.fullmatch(value) is not None


def is_unknown(value: str) -> bool:
    """Whether a value is none of the words, names of code, files and addresses that stand where passwords do."""
    return (
        is_uncommon(value)
        and not value.startswith(_NO_START)
        and not _BRACKETS.search(value)
        and not is_no_secret(value)
        and not _is_setting(value)
        and is_plausible(value, Strength.PASSWORD, True)
        and name_strength(value) < Strength.TOKEN
    )


def is_answer(value: str) -> bool:
    """Whether a word that answers a question for a password is it: whatever nobody knows, and small words in a row."""
    return is_told(value) or is_unknown(value) or is_passphrase(value)


def is_odd(value: str) -> bool:
    """Whether no sentence has such a word: a sign or a capital inside of it, or a number at its end."""
    return _ODD.search(value) is not None


_ODD = re.compile(r"[^\W\d_][_#$!%&*+~^.=][^\W_]|[a-z][A-Z]|[^\W\d_]\d\d")
_NO_START = ("-", ".", ":", "_", "/", "@", "\\", "#")
_BRACKETS = re.compile(r"[()\[\]{}<>=\"]|://|\\")


def trimmed(value: str, trailing: str) -> str:
    """Without the end of the sentence; a sign directly behind a digit stays."""
    bare = value.rstrip(trailing)
    rest = value[len(bare) :]
    return bare + rest[0] if rest[:1] and rest[0] in SENTENCE_END and any(map(str.isdigit, bare)) else bare


def is_given(value: str) -> bool:
    """Whether a literal that code hands over beside a secret's name is the secret: no word, address or pattern."""
    if " " in value or _NO_SECRET.fullmatch(value, 0, _JUDGED):
        return False
    if not is_strong(value):
        return False
    if _CODE_WORD.fullmatch(value, 0, _JUDGED) and not looks_random(value):
        return False
    return name_strength(value) == Strength.NONE or looks_random(value)


def is_path(value: str) -> bool:
    """Whether a value is made of folders: a module, an address without its scheme, a pattern in brackets."""
    return _FOLDERS.fullmatch(value, 0, _JUDGED) is not None


@lru_cache(maxsize=1 << 12)
def is_plausible(value: str, strength: Strength, literal: bool) -> bool:
    """Whether a value could be a secret; `literal` when it is known to be text, not code."""
    if is_generated(value):  # `<`, `${` and `...` stand in such a value by chance
        return PLACEHOLDER.search(value) is None
    if (
        len(value) < (4 if strength == Strength.PASSWORD else 6)
        or PLACEHOLDER.search(value)
        or PSEUDONYM.fullmatch(value)
        or _PLACEHOLDER_WHOLE.fullmatch(value, 0, _JUDGED)
        or _PLACEHOLDER_PART.search(value, 0, _JUDGED)
        or value.lower() in PASSWORD_WORDS
        or value.startswith(":?")
    ):
        return False
    length, value = len(value), value[:_LOOKED_AT]
    if len(set(value)) < 3 or not any(map(str.isalnum, value)) or value.startswith(("//", "/*", "./", "../", "~/")):
        return False
    if not has_digit(value) and (
        _VERSION.fullmatch(value) or _SPELLED.fullmatch(value) or _FILE.fullmatch(value) or _AT_PATH.fullmatch(value)
    ):
        return False
    if not has_digit(value) and not value.isascii() and not (literal and is_uncommon(value)):  # of another language
        return False
    if not value.isascii() and not _LATIN.search(value):
        return False
    if strength < Strength.PASSWORD and _VERSION.fullmatch(value):
        return False
    if " " in value:
        return strength >= Strength.TOKEN and literal and length < 200 and _is_phrase(value)
    if literal:
        if strength < Strength.PASSWORD and _MODULE.fullmatch(value):
            return False
        return (
            strength == Strength.PASSWORD
            or has_digit(value)
            or (is_uncommon(value) and not value.istitle())  # and no label
            or is_passphrase(value)
        )
    if _CODE.fullmatch(value) or _has_brackets_of_code(value):
        is_name = strength < Strength.PASSWORD and is_identifier(value)
        return has_digit(value) and not is_name and not _BRACKET.search(value) and len(value) >= 8 and _mixed(value)
    return True


def _has_brackets_of_code(value: str) -> bool:
    """Whether a value has brackets, and all of them are code's: `get(x1)`, `rows[0`, but not `k[9}Q(` or `x)2`.

    A bracket that is still open at the end is code's, too: a bare value ends before the brackets that close it.
    """
    opened: list[str] = []
    for index, sign in enumerate(value):
        if sign in "([{":
            if not opened and not _OPENED.search(value, max(0, index - 60), index):
                return False
            opened.append(sign)
        elif sign in _CLOSERS and (not opened or opened.pop() != _CLOSERS[sign]):
            return False
    return not _BRACKET_SIGNS.isdisjoint(value)


def _is_phrase(value: str) -> bool:
    """Whether several words are a secret, not a label or a message: digits or signs in them, or small words alone."""
    if _PROSE.search(value) or value[-1] in ".:?":
        return False
    return (
        has_digit(value)
        or any(sign in value for sign in "!@#$%^&*+=~")
        or (value.islower() and value.count(" ") > 1)
        or sum(map(is_uncommon, value.split())) > 1
    )


def _mixed(value: str) -> bool:
    """A bare identifier with digits is a password when it is no name: Xk39fQ2z, not step2 or sha256."""
    plain = "." not in value and "_" not in value
    return (plain and looks_random(value)) or bool(re.search(r"\d[A-Za-z]+\d|[a-z]\d+[A-Z]", value))


def is_reference(value: str) -> bool:
    """Whether a value only points to a secret: a variable, a template, a mask."""
    return _REFERENCE.search(value) is not None


# What only a name and its value say together: a session in hex, a login, a phrase, and the folder that `pwd` holds.
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


# The shapes of passwords that people and generators make, told from names of code, versions, dates and files.

_SIGNS = re.compile(r"[!#$%^&*?~+]")
_UPPER = re.compile(r"[^\W\d_a-z]")
_LOWER = re.compile(r"[a-z]|[^\W\d_A-Z]")
_DIGIT = re.compile(r"\d")
# `D41sy_Nebel426`: digits inside of words, of which one begins with a capital.
_INSIDE = re.compile(r"(?<=[A-Za-z])\d{1,2}(?=[a-z])")
# `Luna_9962_winter`, `Zamek.Sasha.232`, `Lumi1154Tiger`, `HarborPapaya303`: words, at least one with a capital.
_NUMBERED = re.compile(
    r"(?=[^\0A-Z]{0,24}[A-Z])[A-Za-z]?[a-z]{2,11}(?:[_.-]?(?:[A-Z][a-z]{2,11}|(?<=[_.-])[a-z]{3,11}))?[_.-]?\d{3,5}(?:[_.-]?[A-Za-z][a-z]{1,11})?"
)
_NUMBER_FIRST = re.compile(r"\d{3,4}[_.~-]?[A-Z][a-z]{2,11}[_.~-][A-Z]?[a-z]{2,11}")
_WORDS = re.compile(r"(?:[A-Z]?[a-z0-9]{2,14}[_.-]?){1,3}")
_HARMLESS = re.compile(
    r"(?i)%[0-9a-f]{2}|^\d+\*|^[$%]\w*\d{0,2}$|^[*&][A-Za-z_]+\d{0,2}$|\.(?:py|js|ts|tsx|jsx|json|ya?ml|toml|txt|md|log|sh|go|rs|rb|java|sql|html|css|png|svg|jpe?g|gif|ico|pdf|csv|xml|docx?|xlsx?|zip|gz|cs|php|mp[34]|whl|deb|rpm|exe|dll|so)$"
    r"|test|spec|user|login|passw|secret|token|auth|admin|error|line|page|http|sha\d|version|release|step|issue|port|node|windows"
)
_SHORTEST_RANDOM = 12


def is_shaped(value: str) -> bool:
    """Whether a word is a password by its looks alone, where a word for one is near."""
    if not _LOWER.search(value) or not _DIGIT.search(value) or is_public_id(value) or is_identifier(value.rstrip("$")):
        return False
    if _HARMLESS.search(value) or _is_setting(value) or is_no_secret(value):
        return False
    if not is_plausible(value, Strength.PASSWORD, True):
        return False
    digits = len(_DIGIT.findall(value))
    upper = _UPPER.search(value) is not None
    if _SIGNS.search(value) and digits >= 2 and (upper or _SIGNS.search(value, len(value) - 1)):
        return True
    if _NUMBERED.fullmatch(value) or _NUMBER_FIRST.fullmatch(value):
        return True
    inside = len(_INSIDE.findall(value))
    if _WORDS.fullmatch(value) and upper and ((inside and digits >= 4) or (inside > 1 and digits >= 3)):
        return True
    return upper and len(value) >= _SHORTEST_RANDOM and value.isalnum() and looks_random(value)


def is_unfamiliar(value: str) -> bool:
    """Whether a word has a part that neither code nor messages have, a capital, and a number or a sign."""
    if not is_uncommon(value) or not _UPPER.search(value) or not _LOWER.search(value) or _NAME.search(value):
        return False
    if _HARMLESS.search(value) or is_no_secret(value) or is_public_id(value):
        return False
    digits = len(_DIGIT.findall(value))
    if (not digits and not _TITLED.match(value)) or (digits == 1 and value.isalnum()):
        return False
    return is_plausible(value, Strength.PASSWORD, True)


def human_spans(text: str, flat: bytes) -> Iterator[Span]:
    """Words that nobody knows with a number and signs between them: no name is needed to tell that it is a password.

    `flat` is the text, one byte a character. It is searched as classes of characters: letters, digits, signs.
    """
    for match in _CLASSED.finditer(b" " + flat.translate(_CLASS_TABLE)):
        start, end = match.start(), match.end() - 1
        value = trimmed(text[start:end], _TRAILING)
        if (
            _SHORTEST <= len(value) <= _LONGEST
            and text[start - 1 : start] not in _BEFORE
            and text[end : end + 1] not in _BEHIND
            and not _VERSIONED.fullmatch(value)
            and not value.isalnum()
            and is_unfamiliar(value)
        ):
            yield Span(start, start + len(value), "PASSWORD")


_TITLED = re.compile(r"[A-Z][a-z]+_(?!$)|[A-Z][a-z]+[#%!&+*~^](?!$)")
# An address, a private name, a version behind a name, a name of code with members, an id with a prefix.
_NAME = re.compile(
    r"@|\.\.|^[._-]|^\d+\.\d|[A-Za-z]\d+[._]\d|^0x|^[a-z_]\w*+(?:\.[A-Za-z_]\w*+)++$|^(?:[A-Z]\w*+\.){2,}+[A-Z]\w*+$|^[a-z]+_(?![A-Za-z]+\d*$)[A-Za-z0-9]+$|\?[a-z]+$"
)
_VERSIONED = re.compile(r"[A-Z]\w*+(?:\.[A-Z]\w*+)++|[A-Za-z]+[-.]\d{1,2}[A-Za-z]{0,2}|[A-Z]+-\d[\w.-]*")
_SHORTEST, _LONGEST = 8, 40
_BEFORE, _BEHIND = frozenset("/\\@%"), frozenset("/\\([@=")
_TRAILING = ".,;:!?)*_\"'`"
_SIGN_CHARACTERS = "_.!#$%^&*?~+-"
_CLASS_TABLE = bytes(
    ord("-") if chr(code) in _SIGN_CHARACTERS else ord("0") if 48 <= code <= 57 else ord("l") if chr(code).islower()
    else ord("U") if chr(code).isupper() else 32
    for code in range(256)
)  # fmt: skip
# A word with a capital, then words and numbers with signs between them: at least one number and one sign. Nothing
# gives characters back: shorter pieces of a word end nowhere, either.
_CLASSED = re.compile(rb" Ul++(?=[U0-])(?=[Ul0]*+-)(?=[Ul-]*+0)(?:-?(?:0{1,4}(?!0)l{0,2}|U{0,3}l*))++(?![Ul0-])")
