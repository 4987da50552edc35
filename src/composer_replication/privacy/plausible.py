"""Decide whether a value could be a secret rather than a placeholder, a variable, code, a path or prose.

The tests make different assumptions: `is_plausible` judges a value after a secret's name, `is_bare_password` and
`is_unknown` judge words in running text, and `is_shaped` and `is_unfamiliar` judge words without an introducing name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from composer_replication.privacy.entropy import fraction_of_class_changes, is_public_id, looks_random
from composer_replication.privacy.rules import PLACEHOLDER, PSEUDONYM, Span, has_digit, is_strong
from composer_replication.privacy.secret_names import PASSWORD_WORDS, Strength, is_uncommon, is_word, name_strength

# Substrings that only occur in placeholders, templates and vault references: `${DB_PASSWORD}`, `<your password>`,
# `op://vault/db/password`, `secrets.DB_PASSWORD`; not `hunter2`.
_PLACEHOLDER_PART = re.compile(
    r"(?i)[$%]\(|[$%#]\{"
    r"|\{\{|\*{3,}|x{4,}|\.{3}|…|your[_ -]|<[^\0>]*>|example|redacted|change[-_ ]?(?:me|this)"
    r"|replace[-_ ]?(?:me|this|with)|fill[-_ ]?me|insert[-_ ](?:your|here)|placeholder|process\.env"
    r"|os\.environ|getenv|env\.|secrets\.|\A(?:op|ref\+[a-z]+|vault|keyring|ssm|secretsmanager|gcpsm|awssm|azurekv|bws|doppler)://"
    r"|\A(?:vault:|arn:|@Microsoft\.KeyVault)|\bkv/data/|\A!(?:secret|vault|env|include)"
    r"|\A\(\?|\\[sSwWdD][+*{]"  # a regular expression: `(?i)password\s*=`
)
# Whole values that stand in for a secret or name its type: `[token]`, `$PASSWORD`, `Optional`, `none`,
# `wrong-password`, `varchar(64)`; not `hunter2`.
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
    r"|[A-Za-z]+:|[a-z_]{2,12}:(?:password|passwd|secret|token|key)"  # `kw:password`, one of several names
    r"|missing|invalid|valid|expired|access|refresh|session|header|cookie"
)
#
_MAX_PLAUSIBLE_CHARS = 400  # the rest of a long value does not change the result
_MAX_COMPARED_CHARS = 200  # of a value that is compared with placeholders
# `${TOKEN}`, `$TOKEN`, `%TOKEN%`, `****`, `<token>`; not `hunter2`.
_REFERENCE = re.compile(
    r"\$\{|\{\{|\$\(|^\$[A-Za-z_]\w*$|^%[A-Z_]+%$|\*{3,}|^<[^\0>]*>$|process\.env|os\.environ|getenv\("
)
# Words that are common in sentences and rare in passphrases: `Enter the password`; not `volcano galaxy tuna`.
_PROSE = re.compile(
    r"(?i)\b(?:is|are|the|a|an|must|should|required|your|for|to|of|and|or|not|with|please|enter|cannot|can|be|in)\b"
)
# A name, perhaps with members, or a number with a unit: `config.apiKey`, `self?.token`, `Auth::user`, `30s`; not
# `k9!x`.
_EXPRESSION = re.compile(
    r"[@:$]{0,2}+[A-Za-z_$][\w$]*+(?:(?:[?!]?\.|:{1,2}|\?)[A-Za-z_$][\w$]*+)*+[!?]?|[A-Za-z]++-[a-z]++|[A-Z][a-z]++-[A-Z][A-Za-z]++"
    r"|\d++(?:\.\d++)?[a-zA-Z%]{0,2}"
)
# What precedes a bracket in code: a name, a sign or another bracket: `get`, `rows[`, `a =`; not `k#`.
_BEFORE_CODE_BRACKET = re.compile(r"(?:\A|[A-Za-z_]\w*|[\])}(\[{=,:+|&!<>*/ -])\Z")
_MAX_GENERATED_CHARS = 128
# A generated password; most generators make 16 characters or more: `k[9}Q(w-T,2xB`; not `hunter2`.
_GENERATED = re.compile(r"(?=[^\0a-z]*[a-z])(?=[^\0A-Z]*[A-Z])[!-~]{12,128}")
# 99% of 2,000 passwords from each generator have more; tests/unit/scrub/test_scrub_data_lines.py samples them.
_MIN_CHANGES = 0.33
# `k9word-Q` -> `word`.
_FOUR_LETTERS = re.compile(r"[A-Za-z]{4,}")
# Part of a regular expression: `[^\\w0-9A-F]`, `[a-z]+`; not `[x]`.
_CHARACTER_CLASS = re.compile(r"\[\^?[^\0\s\[\]]{0,40}(?:0-9|a-[a-z]|A-[A-Z])")
# The words in `readFile` -> `read`, `readFile` -> `File`.
_CAMEL = re.compile(r"[A-Z][a-z]{3,}|[a-z]{4,}|[A-Z]{4,}")
# A template or the name of a variable in a template: `{{.Env.POSTHOG_API_KEY}}`, `${X}`.
_TEMPLATE = re.compile(r"\A(?:\{\{|[$%#]\{|[$%]\()|[A-Z]{3,}_[A-Z]{3,}")
_OPENER_OF = {")": "(", "]": "[", "}": "{"}
_BRACKET_SIGNS = frozenset("([{")
# What follows a package name in a lock file: `npm:^2.14.0`, `workspace:*`, `>=1.2`; not `hunter2`.
_DEPENDENCY = re.compile(
    r"(?:[a-z]{2,12}:)?[\^~<>=v ]*\d++(?:\.\d++)++[\w.+-]*+|(?:workspace|file|link|portal|patch):[^\0\s]*+"
)
# `src/auth/token.py`; not `hunter2.x`.
_FILE = re.compile(r"(?:[\w.-]++/)++[\w-]++\.[a-z]{1,5}")
# A path, perhaps with a name before it: `/var/run/secrets`, `db:/etc/db/pass`; not `/x9`.
_AT_PATH = re.compile(r"(?:[\w.-]++:(?=/))?+(?:/[\w.-]++){2,}+")
# `don't`, `qu'utilise`; not `it's4me`.
_ELISION = re.compile(r"[A-Za-z]+'[a-z]{1,10}")
# Latin, Greek or Cyrillic: `a`, `ß`, `я`; not `密`.
_EUROPEAN_LETTER = re.compile(r"[A-Za-zÀ-ɏͰ-ϿЀ-ӿ]")
# `get(`, `rows[`.
_CALL_OR_INDEX = re.compile(r"[(\[]")
# A name with members, or camel case in which words may have a number: `config.apiKey2`, `Type1Handler`; not `Xk39fQ2z`.
_IDENTIFIER = re.compile(
    r"[A-Za-z_$][\w$]*+(?:[?!]?\.[A-Za-z_$][\w$]*+)++|[A-Za-z][a-z]++\d{0,2}+(?:[A-Z][a-z]{2,20}+\d{0,2}+)++"
)
# `package.module.Name`; not `a.b`.
_DOTTED_NAME = re.compile(r"(?:[A-Za-z_]++\.){2,}+[A-Za-z_]++")
# `auth/tokens/v2`, `token[:id]`; not `hunter2`.
_FOLDERS = re.compile(r"(?:[\w.-]++/)+[\w.-]*+|[a-z]++\[:[a-z]++\]")
# `AB12-CD34-EF56-GH78`; not `ABCD-EFGH`.
_LICENCE = re.compile(r"(?=[A-Z-]*\d)(?:[A-Z0-9]{4,8}-){3,7}[A-Z0-9]{4,8}")
# The name of a cache entry with the hash of its content: `cache-key-0123456789abcdef0123456789abcdef`.
_HASHED_NAME = re.compile(r"(?:[A-Za-z][A-Za-z0-9_.]{0,20}+-)++[0-9a-f]{32,64}")
# A fingerprint: `1f:8b:08:00:3c:7d:e2:51`.
_PAIRS_OF_HEX = re.compile(r"(?:[0-9A-Fa-f]{2}:){7,}[0-9A-Fa-f]{2}")
# Text that occurs next to a secret's name but is not secret: an algorithm, an address, a date, a version, a path, a
# pattern. `sha256`, `hmac-512`, `ada@example.org`, `2024-05-01`, `v1.2.3`, `src/auth`, `us-east-1`, `CVE-2024-1234`;
# not `hunter2`.
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
# Names in code and numbered words, which are also passed to calls: `access_token`, `userName2`, `db-1`; not
# `hunter-2x`.
_CODE_WORD = re.compile(
    r"(?:[a-z]++[_.-])*+[a-z]++\d{0,2}|(?:[A-Z]++_)*+[A-Z]++\d?|(?:[a-z]++[_-])++\d{1,2}|[a-z]++(?:[A-Z][a-z]++)*+\d?"
    r"|(?:[a-z][\w-]*+\.)++[a-z]{2,6}|#[^\0]*+"
)


def is_generated(value: str) -> bool:
    """Return whether a value looks like the output of a password generator: letters, digits and signs alternate,
    without words or code.
    """
    return len(value) <= _MAX_GENERATED_CHARS and _is_generated(value)


@lru_cache(maxsize=1 << 12)
def _is_generated(value: str) -> bool:
    if not _GENERATED.fullmatch(value) or value.isalnum() or _CHARACTER_CLASS.search(value):
        return False
    if _TEMPLATE.search(value):
        return False
    if fraction_of_class_changes(value) < _MIN_CHANGES:
        return False
    return not any(is_word(part) for letters in _FOUR_LETTERS.findall(value) for part in _CAMEL.findall(letters))


def is_random_value(value: str) -> bool:
    """Return whether the value of a name that only weakly indicates a secret (`key`, `auth`) looks like a key."""
    core = value.strip("\"'")
    if _LICENCE.fullmatch(core):
        return True
    if _HASHED_NAME.fullmatch(core) or _PAIRS_OF_HEX.fullmatch(core):
        return False
    return 16 <= len(core) <= 2000 and " " not in core and has_digit(core) and "://" not in core and looks_random(core)


def is_identifier(value: str) -> bool:
    """Return whether a bare word is a name in code. A name that merely contains digits, such as `step2`, still
    counts as a name.
    """
    return _IDENTIFIER.fullmatch(value, 0, _MAX_COMPARED_CHARS) is not None


def is_no_secret(value: str) -> bool:
    """Return whether a word is an algorithm, an address, a date, a version, a path or a pattern."""
    return _NO_SECRET.fullmatch(value, 0, _MAX_COMPARED_CHARS) is not None


def is_bare_password(value: str) -> bool:
    """Return whether a word next to a secret's name in running text is the secret rather than a word, an address or
    a date.
    """
    return is_generated(value) or (
        is_strong(value)
        and not value.startswith(("-", ".", ":", "_"))
        and not _is_setting(value)
        and not _NO_SECRET.fullmatch(value, 0, _MAX_COMPARED_CHARS)
        and (value.endswith("$") or not is_identifier(value))
        and is_plausible(value, Strength.PASSWORD, True)
        and name_strength(value) == Strength.NONE
    )


# `SummerRain2024!`, `Harbor.papaya.42`, `myDog77`; not `summer2024`.
_WORDS_AND_NUMBER = re.compile(
    r"(?:[A-Z][a-z]{2,12}){1,3}\d{2,4}[!*#$%&@?]?|[A-Z][a-z]{2,12}(?:[._-][A-Za-z]{3,12}){1,3}[._-]\d{2,4}"
    r"|[a-z]{2,12}[A-Z][a-z]{2,12}\d{2,4}[!*#$%&@?]?"
)
# `volcano-galaxy-tuna`; not `volcano-galaxy`.
_LOWER_PHRASE = re.compile(r"[a-z]{3,12}(?:[-._][a-z]{3,12}){2,6}")
# `-`, `.`, `_` or a blank.
_PHRASE_CUT = re.compile(r"[-._ ]")
# `volcano galaxy tuna`; not `volcano galaxy`.
_LOWER_WORDS = re.compile(r"[a-z]{3,12}(?: [a-z]{3,12}){2,7}")
SENTENCE_END = "!*#$%&@?"  # after a digit these signs belong to the password


def is_stated_password(value: str) -> bool:
    """Return whether a word after a sign such as `:` or a word for "is" is the secret.

    In this position, words followed by a number count, too: `SummerRain2024`.
    """
    return is_bare_password(value) or (
        _WORDS_AND_NUMBER.fullmatch(value) is not None and is_plausible(value, Strength.PASSWORD, True)
    )


def talks_about_secrets(value: str) -> bool:
    """Return whether several words are a label or a message about a secret rather than a passphrase."""
    return _PROSE.search(value) is not None or any(
        name_strength(word) > Strength.NONE or word.lower() in PASSWORD_WORDS for word in value.split()
    )


def is_passphrase(value: str) -> bool:
    """Return whether a value consists of three or more lower-case words, all joined by the same sign or by spaces."""
    if len(value) < 14 or not (_LOWER_PHRASE.fullmatch(value) or _LOWER_WORDS.fullmatch(value)):
        return False
    if any(name_strength(word) for word in _PHRASE_CUT.split(value)):  # members in code, and words about passwords
        return False
    return "." not in value or is_uncommon(value)


# A setting with its value, whatever its name begins with, or the name of a variable: `status=200`,
# `PasswordAgeDays=30`, `ETHERSCAN_KEY`; not `hunter2`.
_SETTING = re.compile(
    r"[A-Za-z_]{3,40}=[\w.]{1,12}|[A-Z][A-Z0-9]*+(?:_[A-Z0-9]++)*_(?:KEY|TOKEN|SECRET|PASS|PASSWORD|PWD|ID)"
)


def _is_setting(value: str) -> bool:
    """Return whether a word is a setting, including its value, or the name of a variable."""
    return _SETTING.fullmatch(value) is not None


def is_unknown(value: str) -> bool:
    """Return whether a value contains an unknown word and is not a name in code, a file or an address."""
    return (
        is_uncommon(value)
        and not value.startswith(_NO_PASSWORD_STARTS)
        and not _BRACKETS.search(value)
        and not is_no_secret(value)
        and not _is_setting(value)
        and is_plausible(value, Strength.PASSWORD, True)
        and name_strength(value) < Strength.TOKEN
    )


def is_answer(value: str) -> bool:
    """Return whether a word is the reply to a request for a password: an unknown word or a passphrase."""
    return is_stated_password(value) or is_unknown(value) or is_passphrase(value)


def is_odd(value: str) -> bool:
    """Return whether a word would be unusual in a sentence: it has a sign or a capital in the middle, or a number at
    the end.
    """
    return _ODD_SPELLING.search(value) is not None


# `kestrel_7`, `myDog`, `hunter22`; not `hunter2`.
_ODD_SPELLING = re.compile(r"[^\W\d_][_#$!%&*+~^.=][^\W_]|[a-z][A-Z]|[^\W\d_]\d\d")
_NO_PASSWORD_STARTS = ("-", ".", ":", "_", "/", "@", "\\", "#")
# `get(x)`, `a=b`, `redis://host`, `C:\\x`; not `hunter2!`.
_BRACKETS = re.compile(r"[()\[\]{}<>=\"]|://|\\")


def strip_sentence_end(value: str, trailing: str) -> str:
    """Return the value without the punctuation of the sentence it ends. Punctuation after a digit is kept, as in
    `hunter2!`.
    """
    bare = value.rstrip(trailing)
    rest = value[len(bare) :]
    return bare + rest[0] if rest[:1] and rest[0] in SENTENCE_END and any(map(str.isdigit, bare)) else bare


def is_literal_secret(value: str) -> bool:
    """Return whether a literal in code next to a secret's name is the secret rather than a word, an address or a
    pattern.
    """
    if " " in value or _NO_SECRET.fullmatch(value, 0, _MAX_COMPARED_CHARS):
        return False
    if not is_strong(value):
        return False
    if _CODE_WORD.fullmatch(value, 0, _MAX_COMPARED_CHARS) and not looks_random(value):
        return False
    return name_strength(value) == Strength.NONE or looks_random(value)


def is_path(value: str) -> bool:
    """Return whether a value is a path, an address without its scheme, or a pattern in brackets."""
    return _FOLDERS.fullmatch(value, 0, _MAX_COMPARED_CHARS) is not None


@lru_cache(maxsize=1 << 12)
def is_plausible(value: str, strength: Strength, literal: bool) -> bool:
    """Return whether a value could be a secret. With `literal`, the value is known to be text rather than code."""
    if is_generated(value):  # such a value may contain `<`, `${` or `...` by chance
        return PLACEHOLDER.search(value) is None
    if (
        len(value) < (4 if strength == Strength.PASSWORD else 6)
        or PLACEHOLDER.search(value)
        or PSEUDONYM.fullmatch(value)
        or _PLACEHOLDER_WHOLE.fullmatch(value, 0, _MAX_COMPARED_CHARS)
        or _PLACEHOLDER_PART.search(value, 0, _MAX_COMPARED_CHARS)
        or value.lower() in PASSWORD_WORDS
        or value.startswith(":?")
    ):
        return False
    length, value = len(value), value[:_MAX_PLAUSIBLE_CHARS]
    if len(set(value)) < 3 or not any(map(str.isalnum, value)) or value.startswith(("//", "/*", "./", "../", "~/")):
        return False
    if not has_digit(value) and (
        _DEPENDENCY.fullmatch(value) or _ELISION.fullmatch(value) or _FILE.fullmatch(value) or _AT_PATH.fullmatch(value)
    ):
        return False
    # A word in another language.
    if not has_digit(value) and not value.isascii() and not (literal and is_uncommon(value)):
        return False
    if not value.isascii() and not _EUROPEAN_LETTER.search(value):
        return False
    if strength < Strength.PASSWORD and _DEPENDENCY.fullmatch(value):
        return False
    if " " in value:
        return strength >= Strength.TOKEN and literal and length < 200 and _is_phrase(value)
    if literal:
        if strength < Strength.PASSWORD and _DOTTED_NAME.fullmatch(value):
            return False
        return (
            strength == Strength.PASSWORD
            or has_digit(value)
            or (is_uncommon(value) and not value.istitle())  # a title is a label
            or is_passphrase(value)
        )
    if _EXPRESSION.fullmatch(value) or _has_brackets_of_code(value):
        is_name = strength < Strength.PASSWORD and is_identifier(value)
        return (
            has_digit(value)
            and not is_name
            and not _CALL_OR_INDEX.search(value)
            and len(value) >= 8
            and _has_scattered_digits(value)
        )
    return True


def _has_brackets_of_code(value: str) -> bool:
    """Return whether all brackets in a value belong to code: `get(x1)`, `rows[0`, but not `k[9}Q(` or `x)2`.

    A bracket still open at the end counts as code, since a bare value ends before its closing bracket.
    """
    opened: list[str] = []
    for index, sign in enumerate(value):
        if sign in "([{":
            if not opened and not _BEFORE_CODE_BRACKET.search(value, max(0, index - 60), index):
                return False
            opened.append(sign)
        elif sign in _OPENER_OF and (not opened or opened.pop() != _OPENER_OF[sign]):
            return False
    return not _BRACKET_SIGNS.isdisjoint(value)


def _is_phrase(value: str) -> bool:
    """Return whether several words are a secret rather than a label, because they contain digits or signs or are all
    in lower case.
    """
    if _PROSE.search(value) or value[-1] in ".:?":
        return False
    return (
        has_digit(value)
        or any(sign in value for sign in "!@#$%^&*+=~")
        or (value.islower() and value.count(" ") > 1)
        or sum(map(is_uncommon, value.split())) > 1
    )


def _has_scattered_digits(value: str) -> bool:
    """Return whether the digits in a bare identifier are scattered as in a password (`Xk39fQ2z`) and not as in
    `step2` or `sha256`.
    """
    plain = "." not in value and "_" not in value
    return (plain and looks_random(value)) or bool(re.search(r"\d[A-Za-z]+\d|[a-z]\d+[A-Z]", value))


def is_reference(value: str) -> bool:
    """Return whether a value only refers to a secret, as a variable, a template or a mask does."""
    return _REFERENCE.search(value) is not None


# Names of session ids and request signatures. Their values are as good as a password, and often plain hex:
# `session_id`, `X-Signature`, `sid`; not `session`.
_HANDLE = re.compile(r"(?i)(?:sess(?:ion)?[_-]?id|signature|\bsig|_sig|sid)$")
# `0123456789abcdef0123`; not `0123abcd`.
_HEX_HANDLE = re.compile(r"[0-9a-fA-F]{20,}")
# The value of this header grants access even without a scheme and without looking random: `Proxy-Authorization`; not
# `authorize`.
_CREDENTIAL_HEADER = re.compile(r"(?i)(?:^|[_-])authorization$")
# `Bearer a1b2c3` -> `Bearer `.
_SCHEME = re.compile(r"(?i)(?:bearer|basic|token|digest|apikey|negotiate)[ \t]+")
# `REDISCLI_AUTH` -> `AUTH`, `ldap.login` -> `login`; not `author`.
_LOGIN_NAME = re.compile(r"(?i)(?:^|[_.-]|(?<=[a-z]))(auth|creds?|credentials?|login)$")
_LOGIN_SUFFIXES = ("auth", "cred", "creds", "credential", "credentials", "login")
# `ada:hunter2` -> `hunter2`.
_USER_AND_PASSWORD = re.compile(r"[\w.@+-]{1,60}[:/]([^\0\s:/@]{6,100})")
# `~/src/app`, `/home/ada`, `C:\\Users`, `..`; not `hunter2`.
_DIRECTORY = re.compile(r"(?:~|\.{1,2})?(?:/[^\0/\s]*+)++|[A-Za-z]:[\\/][^\n\0]*|\.{1,2}|~")
_MAX_PHRASE_WORDS = 8


def names_a_handle(name: str) -> bool:
    """Return whether a name refers to a handle, which is the id of a session or a signature."""
    return _HANDLE.search(name) is not None


def is_handle(name: str, value: str) -> bool:
    """Return whether a value is the id of a session or a signature: plain hex under such a name, even if it does not
    look random.
    """
    return names_a_handle(name) and _HEX_HANDLE.fullmatch(value) is not None and len(set(value)) >= 8


def is_credential(name: str, value: str) -> bool:
    """Return whether a value is what an `Authorization` header contains."""
    bare = value[scheme.end() :] if (scheme := _SCHEME.match(value)) else value
    return _CREDENTIAL_HEADER.search(name) is not None and len(bare) >= 8 and " " not in bare and is_strong(bare)


def is_login(name: str, value: str) -> bool:
    """Return whether a value is the password in a variable for logins, such as `REDISCLI_AUTH` or `LDAP_BIND_CRED`.

    A pair of user and password (`ada:hunter2`) counts for any name that refers to a login.
    """
    words = _LOGIN_NAME.search(name) if name.lower().endswith(_LOGIN_SUFFIXES) else None
    if words is None:
        return False
    pair = _USER_AND_PASSWORD.fullmatch(value)
    if pair is not None:
        return is_bare_password(pair[1])
    return name.upper() == name and words[1].upper() != "LOGIN" and is_answer(value)


def is_directory(name: str, value: str) -> bool:
    """Return whether `pwd` stands for the working directory, as in a shell, and not for a password, as in a form."""
    return name.lower() == "pwd" and _DIRECTORY.fullmatch(value.strip()) is not None


def is_phrase_of(name: str, value: str) -> bool:
    """Return whether several words are a passphrase, because their name is a variable in capitals or ends in
    "phrase".
    """
    if (
        not 1 < len(value.split()) <= _MAX_PHRASE_WORDS
        or not value.replace(" ", "").isalpha()
        or value != value.strip()
    ):
        return False
    return (name.isupper() and not talks_about_secrets(value)) or (name.lower().endswith("phrase") and value.islower())


# Shapes of passwords made by people and generators, as opposed to names in code, versions, dates and files.

# `!`, `?`; not `.`.
_SIGNS = re.compile(r"[!#$%^&*?~+]")
# `Q`; not `q`.
_UPPER = re.compile(r"[^\W\d_a-z]")
# `q`; not `Q`.
_LOWER = re.compile(r"[a-z]|[^\W\d_A-Z]")
# `7`; not `q`.
_DIGIT = re.compile(r"\d")
# Digits inside a word: `D41sy_Nebel426` -> `41`; not `Nebel426`.
_DIGITS_INSIDE = re.compile(r"(?<=[A-Za-z])\d{1,2}(?=[a-z])")
# Words with a number, at least one capitalized: `Luna_9962_winter`, `Zamek.Sasha.232`, `Lumi1154Tiger`; not `luna9962`.
_WORDS_WITH_NUMBER = re.compile(
    r"(?=[^\0A-Z]{0,24}[A-Z])[A-Za-z]?[a-z]{2,11}(?:[_.-]?(?:[A-Z][a-z]{2,11}|(?<=[_.-])[a-z]{3,11}))?[_.-]?\d{3,5}(?:[_.-]?[A-Za-z][a-z]{1,11})?"
)
# `4821-Kestrel-otter`; not `4821`.
_NUMBER_FIRST = re.compile(r"\d{3,4}[_.~-]?[A-Z][a-z]{2,11}[_.~-][A-Z]?[a-z]{2,11}")
# `D41sy_Nebel426`, `Otter`; not `OTTER`.
_CAPITALIZED_WORDS = re.compile(r"(?:[A-Z]?[a-z0-9]{2,14}[_.-]?){1,3}")
# URL escapes, variables, file names and words of code: `%2Fhome`, `$HOME`, `notes2.md`, `windows10`; not `Zamek.232`.
_NO_SHAPED_PASSWORD = re.compile(
    r"(?i)%[0-9a-f]{2}|^\d+\*|^[$%]\w*\d{0,2}$|^[*&][A-Za-z_]+\d{0,2}$|\.(?:py|js|ts|tsx|jsx|json|ya?ml|toml|txt|md|log|sh|go|rs|rb|java|sql|html|css|png|svg|jpe?g|gif|ico|pdf|csv|xml|docx?|xlsx?|zip|gz|cs|php|mp[34]|whl|deb|rpm|exe|dll|so)$"
    r"|test|spec|user|login|passw|secret|token|auth|admin|error|line|page|http|sha\d|version|release|step|issue|port|node|windows"
)
_MIN_RANDOM_CHARS = 12


def is_shaped(value: str) -> bool:
    """Return whether a value has the shape of a password. Call this only for values near a word for passwords."""
    if not _LOWER.search(value) or not _DIGIT.search(value) or is_public_id(value) or is_identifier(value.rstrip("$")):
        return False
    if _NO_SHAPED_PASSWORD.search(value) or _is_setting(value) or is_no_secret(value):
        return False
    if not is_plausible(value, Strength.PASSWORD, True):
        return False
    digits = len(_DIGIT.findall(value))
    upper = _UPPER.search(value) is not None
    if _SIGNS.search(value) and digits >= 2 and (upper or _SIGNS.search(value, len(value) - 1)):
        return True
    if _WORDS_WITH_NUMBER.fullmatch(value) or _NUMBER_FIRST.fullmatch(value):
        return True
    inside = len(_DIGITS_INSIDE.findall(value))
    if _CAPITALIZED_WORDS.fullmatch(value) and upper and ((inside and digits >= 4) or (inside > 1 and digits >= 3)):
        return True
    return upper and len(value) >= _MIN_RANDOM_CHARS and value.isalnum() and looks_random(value)


def is_unfamiliar(value: str) -> bool:
    """Return whether a value contains a part that is unknown in code and messages, a capital letter, and a digit or
    a sign.
    """
    if not is_uncommon(value) or not _UPPER.search(value) or not _LOWER.search(value) or _CODE_OR_VERSION.search(value):
        return False
    if _NO_SHAPED_PASSWORD.search(value) or is_no_secret(value) or is_public_id(value):
        return False
    digits = len(_DIGIT.findall(value))
    if (not digits and not _TITLED_WORD.match(value)) or (digits == 1 and value.isalnum()):
        return False
    return is_plausible(value, Strength.PASSWORD, True)


def unknown_word_spans(text: str, flat: bytes) -> Iterator[Span]:
    """Yield unknown words that also contain digits and signs: passwords that are recognized without a name.

    `flat` is the text with one byte per character. The search reduces each character to its class: letter, digit or
    sign.
    """
    for match in _UNKNOWN_WORD.finditer(b" " + flat.translate(_CLASS_TABLE)):
        start, end = match.start(), match.end() - 1
        value = strip_sentence_end(text[start:end], _TRAILING)
        if (
            _MIN_WORD_CHARS <= len(value) <= _MAX_WORD_CHARS
            and text[start - 1 : start] not in _NOT_BEFORE
            and text[end : end + 1] not in _NOT_AFTER
            and not _CODE_OR_RELEASE.fullmatch(value)
            and not value.isalnum()
            and is_unfamiliar(value)
        ):
            yield Span(start, start + len(value), "PASSWORD")


# `Zamek_x`, `Zamek#x`; not `Zamek_`.
_TITLED_WORD = re.compile(r"[A-Z][a-z]+_(?!$)|[A-Z][a-z]+[#%!&+*~^](?!$)")
# An address, a private name, a version, a name with members or an id with a prefix: `ada@host`, `_x`, `lib2.0`,
# `a.b.c`, `req_8f2a`; not `Zamek#232`.
_CODE_OR_VERSION = re.compile(
    r"@|\.\.|^[._-]|^\d+\.\d|[A-Za-z]\d+[._]\d|^0x|^[a-z_]\w*+(?:\.[A-Za-z_]\w*+)++$|^(?:[A-Z]\w*+\.){2,}+[A-Z]\w*+$|^[a-z]+_(?![A-Za-z]+\d*$)[A-Za-z0-9]+$|\?[a-z]+$"
)
# `Foo.Bar`, `Debian-12`, `UTF-8`, `ABC-123`; not `Zamek-x`.
_CODE_OR_RELEASE = re.compile(r"[A-Z]\w*+(?:\.[A-Z]\w*+)++|[A-Za-z]+[-.]\d{1,2}[A-Za-z]{0,2}|[A-Z]+-\d[\w.-]*")
_MIN_WORD_CHARS, _MAX_WORD_CHARS = 8, 40
_NOT_BEFORE, _NOT_AFTER = frozenset("/\\@%"), frozenset("/\\([@=")
_TRAILING = ".,;:!?)*_\"'`"
_SIGN_CHARACTERS = "_.!#$%^&*?~+-"
# One byte per class: `-` a sign, `0` a digit, `l` a lower-case letter, `U` a capital, a blank anything else.
_CLASS_TABLE = bytes(
    ord("-") if chr(code) in _SIGN_CHARACTERS else ord("0") if 48 <= code <= 57 else ord("l") if chr(code).islower()
    else ord("U") if chr(code).isupper() else 32
    for code in range(256)
)  # fmt: skip
# A word with a capital, then words and numbers with signs in between; at least one number and one sign. The class
# string for "Zamek#Sasha.232" is ` Ullll-Ullll-000 `. A plain word does not match: not ` Ullll `. Possessive: a shorter
# part of a word cannot match either.
_UNKNOWN_WORD = re.compile(rb" Ul++(?=[U0-])(?=[Ul0]*+-)(?=[Ul-]*+0)(?:-?(?:0{1,4}(?!0)l{0,2}|U{0,3}l*))++(?![Ul0-])")
