"""Secrets that people say: the words for password, code, token and key in the languages that session logs hold.

`Das Passwort lautet ...`, `密码是...`, `use ... as the password`: both orders, and only a value that no word could be.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from functools import lru_cache

from composer_replication.privacy.names import PASSWORD_WORDS
from composer_replication.privacy.plausible import (
    is_answer,
    is_odd,
    is_passphrase,
    is_shaped,
    is_told,
    is_unfamiliar,
    is_unknown,
    speaks,
    trimmed,
)
from composer_replication.privacy.rules import (
    Span,
    any_of,
    has_digit,
    word_set,
)
from composer_replication.privacy.values import told_behind

# Words in plain letters, beside those for a password. `pass`, `token` and `key` are looked for by another layer.
_LOGIN_PLAIN = word_set("code codes log sign logged login creds credentials wifi")
# Words with letters of their own; only looked for in a text that has one of the letters.
_OWN = (
    "пароль пароля паролем паролю пароли парола паролата лозинка лозинку токен токена ключ ключа гасло құпиясөз",
    "密码 密碼 口令 密钥 密鑰 令牌 パスワード 暗証番号 合言葉 トークン 비밀번호 비번 암호 패스워드 토큰",
    "كلمة_المرور كلمة_مرور كلمة_السر كلمه_السر رمز_المرور رمز_عبور گذرواژه סיסמה סיסמא הסיסמה סיסמת",
    "पासवर्ड कूटशब्द পাসওয়ার্ড கடவுச்சொல் రహస్యపదం รหัสผ่าน ລະຫັດຜ່ານ ពាក្យសម្ងាត់ စကားဝှက် პაროლი գաղտնաբառ",
    "κωδικός κωδικό κωδικού κωδικού συνθηματικό κλειδί mật_khẩu hasło hasła hasłem hasłu jelszó şifre şifresi",
    "şifreniz şifrem contraseña contraseñas lösenord lösenordet lykilorð slaptažodis slaptažodį fjalëkalimi fjalëkalim",
    "schlüssel clé ključ parolă parola lösenord lozinku şifrə şifrəsi şifrəm şifrəni parolē salasõna",
    "нууц_\u04af\u0433 құпия_сөз құпиясөзі сырсөз серсүз парол рамз паролі",
    "پاس_ورڈ پاسورڈ پسورد باسورد الباسورد پټنوم تێپەڕەوشە ססמה ססמא הססמה סיסמתך",
    "संकेतशब्द પાસવર્ડ ਪਾਸਵਰਡ ಪಾಸ್‌ವರ್ಡ್ ಗುಪ್ತಪದ പാസ്‌വേഡ് രഹസ്യവാക്ക് పాస్‌వర్డ్ මුරපදය የይለፍ_ቃል የይለፍቃል",
)
_OWN_WORDS = tuple(
    dict.fromkeys(
        form.replace("_", " ") for line in _OWN for word in line.split() for form in (word, word[:1].upper() + word[1:])
    )
)
_OWN_WORD = re.compile(any_of(_OWN_WORDS))
# Of words with a single letter of their own: the longest piece in plain letters.
_HALVES = frozenset(
    max(re.findall("[a-z]+", word), key=len).encode() for word in _OWN_WORDS if re.search("[a-z]{2}", word)
)
_WORD_END = re.compile(r"[^\W\d_]{0,8}(?=[\s:=\"'\uff1a\uff1d])|[^\0-\x7f是为為はがを는은이가にの改]{0,12}")
_REST_OF_NAME = re.compile(r"(?:[_.-][A-Za-z]\w{0,20}){1,3}(?=\s?[:=])")
# What a value stands behind: a sign, a word for `is`, or nothing but a blank; and up to five words before it.
_FILLER = r"(?:[^\0\s\d\"`«「“<>=\uff1a]{1,24}[ \t]{1,2})"
_BEHIND = re.compile(
    rf"[\"']?(?:[ \t]{{1,2}}{_FILLER}{{0,5}}?)?[ \t]{{0,2}}(?P<sign>[:=\uff1a\uff1d→—\u2013-]{{1,2}}"
    r"|[是为為はがを는은이가]|改成|改为|改為|คือ)?"
    r"[ \t]{0,3}"
    r"(?:[^\W\d_]{1,8}:?[ \t]{1,2})?[\"'`«「“„*(]{0,4}[ \t]?(?P<value>[!-;=?-~]{4,100})"
)
# `use ... as the password`: with the verb a plain word counts, too.
_VERB = (
    r"use|using|take|try|set|type|enter|pick|choose|put|nimm|nehmen|verwende|benutze|utilise|utilisez|prends|mets|usa|usar|use"
    r"|utiliza|pon|usare|metti|gebruik|neem|użyj|weź|ustaw|použij|použi|zadaj|koristi|uporabi|folosește|foloseste|pune|använd"
    r"|brug|bruk|käytä|kasuta|használd|kullan|pakai|gunakan|dùng|используй|используйте|возьми|поставь|візьми|використай"
    r"|използвай|χρησιμοποίησε το|χρησιμοποίησε|استخدم|השתמש ב-|用|使用"
)
_AS = (
    r"as|als|comme|como|come|jako|kao|kot|som|sebagai|olarak|ca|kuin|kui|mint|làm|как|як|като|ως|作为|作為|ك|בתור|을\(를\)"
    r"|를|을"
)
_USED_AS = re.compile(
    rf"(?:\b(?:{_VERB})\s{{0,2}}[\"'`«「“]?(?P<value>[A-Za-z][!-&(-~]{{7,60}}?)[\"'`»」”]?\s{{0,2}}(?:{_AS})"
    r"|(?<![^\0\s])[\"'`]?(?P<first>[A-Za-z]{8,60})[\"'`]?\s(?:을\(를\)|를|을))\s{0,2}(?:[^\0\s\d]{1,12}\s{1,2}){0,2}\Z",
    re.I,
)
# The other order: `parola olarak ... kullan`, `パスワードには ... を使って`.
_AS_USED = re.compile(
    r"(?:\s?olarak\s|(?:には|に|は)\s?)[\"'`「]?(?P<value>[A-Za-z][!-~]{7,60}?)[\"'`」]?\s?(?:kullan|を使)", re.I
)
_SAID_BEFORE = re.compile(
    r"(?:^|[\s\"'`«「“(*])(?P<value>[!-&(-;=?-_a-~]{6,100}?)[\"'`»」”)*]{0,4}\s{0,2}"
    r"(?:\b(?:as|als|como|comme|come|jako|kao|kot|som|sebagai|olarak|ca|kuin|mint|is|was|ist|es|est|wi"
    r"ll be|for)\b|(?<=\s)\(|è|é|как|як|като|är|làm|作为|作為|を|로|으로|为|為|是|=)"
    r"\s{0,2}(?:[^\0\s\d\"'`]{1,20}\s{1,2}){0,3}[\"'`*(]{0,3}\Z"
)
_LINK = re.compile(
    r" (?:as|als|como|comme|come|jako|kao|kot|som|sebagai|olarak|ca|kuin|mint|is|was|ist|es|est|will be|for|è|é|как|як"
    r"|като|är|làm|ως|בתור|kui) |[(=作をは로를을为為是]|ك"
)
_LINK_AS = re.compile(rf"[ 」](?:{_AS})|ك")
_LONGEST_LINK = 70
_SHORTEST_LEAD = 10  # a value and a word
_LOOK_BACK = 90
_LONGEST_MESSAGE = 10_000  # of a text in which codes are looked for
# Plain characters, the last bytes of all others, and the first ones of signs.
_NO_LETTERS = bytes(range(0xC2)) + b"\xc2\xe2\xef\xf0\xf3"
_TRAILING = ".,;:!?)*_\"'`»」”、。\uff0cです입니다"
# A code is digits, or groups of letters and digits, and other words have codes too: the word before it tells.
_CODE = re.compile(
    r"(?i:(?:recovery|backup|verification|confirmation|security|unlock|access|login|auth\w{0,12}|2fa|m"
    r"fa|otp|one-time|pairing"
    r"|reset|activation|sms|door|gate|alarm|entry|pin|pass)[ -])\Z"
)
_CODE_WORDS = frozenset(
    b"recovery backup verification confirmation unlock fa mfa otp sms pairing activation door gate alarm pin".split()
)
_CODE_VALUES = (
    r"(?i:(?:\s\w{1,12}+){0,3}?(?:\s(?:is|are|was)|\s?[:=])\s{0,9}[\"'`*]{0,3})"
    r"(?P<value>(?:[A-Za-z0-9]{3,10}+-)*+(?=[A-Za-z-]*\d)[A-Za-z0-9]{4,12}+(?:[ ,;\n-]{1,3}+(?=[a-z-]*"
    r"+\d)[A-Za-z0-9]{4,12}+(?![\w.])){0,20}+)"
)
_LOGIN = (
    r"(?i:(?: to [^\0\s]{1,60}+)?(?: [a-z]{1,12}){0,4}?(?: are| is| with| as| using|:)?[ :(]{1,2}(?:user(?:name)? )?)"
    r"[\"'`*]{0,2}(?P<user>[\w.@+-]{1,60})[\"'`*]{0,2}\s?(?:[:/,|]|and\b|with\b)\s{0,2}(?:pass(?:word)"
    r"? )?[\"'`*]{0,2}(?P<value>[!-;=?-~]{6,100})"
)
_WORDS = frozenset(word.encode() for word in PASSWORD_WORDS | _LOGIN_PLAIN)

# Words before `as USER with VALUE`, in the languages of the words for a password.
_CONNECTING = frozenset(
    b"connect connecting connected logged login authenticating authenticated bind bound angemeldet verbunden"
    b" verbinde anmelden collegato collegata connesso conectado conectada entra entrar entre ingresa accede connexion"
    b" ingelogd inloggen zalogowany".split()
)
_AS_USER = re.compile(
    r"(?i)(?:\b(?:as|als|como|come|comme|con|com|avec|jako|mit|met|user|usuario|utente)\s)"
    r"\\*[\"'`]?[\w.@=,\\-]{2,80}\\*[\"'`]?,?\s"
    r"(?:with|using|and|mit|und|con|usando|y|com|e|avec|et|met|en|z|/|\|)\s(?:(?:the\s)?(?:password|passwort|pass|pw)\s)?"
    r"(?P<quote>\\*[\"'`«“]?)(?P<value>[!-~]{5,80}?)(?=\\*[\"'`»”]|[,;]?\s|[.,;]?\Z)"
)
_REACH_OF_LOGIN = 200

SPEECH_WHOLE_WORDS: frozenset[bytes] = _WORDS | _CODE_WORDS | _HALVES | _CONNECTING


def speech_spans(text: str, lower: bytes, active: Set[bytes]) -> Iterator[Span]:
    """What is said behind or before a word for a secret, in any language."""
    for word in sorted(active & _CONNECTING):
        yield from _connections(text, lower, word)
    for word in sorted(active & _WORDS):
        if word in _BY_WORD:
            yield from _logins(text, word)
        elif word in (b"code", b"codes"):
            if len(text) <= _LONGEST_MESSAGE and not active.isdisjoint(_CODE_WORDS):
                yield from _codes(text, lower, word)
        else:
            for at, end in _places(text, lower, word):
                yield from _around(text, at, end)
                yield from near(text, at, end)
    if not text.isascii() and _may_have_words(lower, active) and _has_letters(text):
        for match in _OWN_WORD.finditer(text):
            yield from _around(text, match.start(), match.end())
            yield from near(text, match.start(), match.end())


def has_own_word(text: str) -> bool:
    """Return whether a text has a word for a secret in letters that English does not have."""
    return not text.isascii() and _OWN_WORD.search(text) is not None


# Common words: each is searched for with all that must follow it, which starts with a literal and is fast.
_LOGIN_WORDS = {"log": "og in", "sign": "ign in", "logged": "ogged in"} | {
    word: word[1:]
    for word in sorted(
        word_set(
            "login creds credentials wifi zugangsdaten identifiants credenciales credenziali credenciais inloggegevens"
        )
    )
}
_BY_WORD = {word.encode(): re.compile(stem + _LOGIN) for word, stem in _LOGIN_WORDS.items()}
_CODE_BEHIND = re.compile(_CODE_VALUES)


def _may_have_words(lower: bytes, active: Set[bytes]) -> bool:
    """A quick look at the text as one byte a character: letters with accents stay, others are question marks there."""
    return not lower.isascii() or b"??" in lower or not active.isdisjoint(_HALVES)


def _has_letters(text: str) -> bool:
    """Whether a text has letters of its own kind: not only arrows, dashes, frames and smileys, as most have."""
    return bool(text.encode("utf-8", "replace").translate(None, _NO_LETTERS))


def _places(text: str, lower: bytes, word: bytes) -> Iterator[tuple[int, int]]:
    """Where a word stands by itself: no part of a name or of a longer word."""
    at = lower.find(word)
    while at >= 0:
        end = at + len(word)
        if rest := _REST_OF_NAME.match(text, end):
            end = rest.end()
        before, after = text[at - 1 : at], text[end : end + 1]
        if (
            not before.isalnum()
            and (before not in ("_", "-", "/", "$") or (before == "_" and after in ("=", ":")))
            and not (after.isascii() and (after.isalnum() or after in ("_", "(")))
        ):
            yield at, end
        at = lower.find(word, end)


def _codes(text: str, lower: bytes, word: bytes) -> Iterator[Span]:
    for at, end in _places(text, lower, word):
        if _CODE.search(text, max(0, at - 20), at) and (match := _CODE_BEHIND.match(text, end)):
            yield Span(*match.span("value"), "PASSWORD")


def _logins(text: str, word: bytes) -> Iterator[Span]:
    for match in _BY_WORD[word].finditer(text):
        value = trimmed(match["value"].partition("\\")[0], _TRAILING)
        if '"' not in value and is_answer(value):
            yield Span(match.start("value"), match.start("value") + len(value), "USER_PASSWORD")


def _connections(text: str, lower: bytes, word: bytes) -> Iterator[Span]:
    """Yield what follows a user on the line of a word for connecting: `connecting to db:1433 as sa with '...'`."""
    at = lower.find(word)
    while at >= 0:
        newline = text.find("\n", at, at + _REACH_OF_LOGIN)
        end = newline if newline >= 0 else min(len(text), at + _REACH_OF_LOGIN)
        match = _AS_USER.search(text, at, end)
        if match is not None:
            value = trimmed(match["value"], _TRAILING)
            if is_answer(value) and (match["quote"] or is_odd(value) or has_digit(value)):
                yield Span(match.start("value"), match.start("value") + len(value), "USER_PASSWORD")
        at = lower.find(word, end)


def _around(text: str, start: int, end: int) -> Iterator[Span]:
    ending = _WORD_END.match(text, end)
    end = ending.end() if ending else end
    span = _behind(text, end)
    if span or (span := spoken_before(text, start)) or (span := told_behind(text, end, direct=False)):
        yield span
    elif (match := _AS_USED.match(text, end)) and is_unknown(match["value"]):
        yield Span(*match.span("value"), "PASSWORD")


def _behind(text: str, end: int) -> Span | None:
    match = _BEHIND.match(text, end, end + 260)
    if match is None:
        return None
    value = trimmed(match["value"], _TRAILING)
    is_secret = (
        is_told(value)
        or (match["sign"] and (is_unknown(value) or is_passphrase(value)))
        or (is_unknown(value) and is_odd(value))
        or (match["sign"] and value.isdigit() and 4 <= len(value) <= 8)
    )
    return Span(match.start("value"), match.start("value") + len(value), "PASSWORD") if is_secret else None


def spoken_before(text: str, start: int) -> Span | None:
    """`use ... as the password`, `... is the password`: the value before a word for it that begins at `start`."""
    begin = max(0, start - _LOOK_BACK)
    lead = text[max(begin, text.rfind("\n", begin, start) + 1) : start]
    begin = start - len(lead)
    if len(lead) < _SHORTEST_LEAD or not _LINK.search(lead, max(0, len(lead) - _LONGEST_LINK)):
        return None
    match = _USED_AS.search(text, begin, start) if _LINK_AS.search(lead) else None
    if match is not None:
        group = "value" if match["value"] else "first"
        if is_unknown(match[group]) or is_told(match[group]):
            return Span(*match.span(group), "PASSWORD")
    if not has_digit(lead) and not any(sign in lead for sign in "!@#$%^&*?+~`"):
        return None
    match = _SAID_BEFORE.search(text, begin, start)
    if match is None:
        return None
    value = trimmed(match["value"].lstrip("*(\"'`"), _TRAILING)
    at = text.find(value, match.start("value"))
    is_secret = is_told(value) or (text[at - 1 : at] in ("`", '"', "'") and (is_unknown(value) or is_passphrase(value)))
    return Span(at, at + len(value), "PASSWORD") if is_secret else None


# Passwords that stand near a word for one, whatever stands between them: on its line, or on the three lines below it.
#
# What is between a name and its value differs with every program and language. So here only the value's own shape
# counts: words with a number and signs among them, words that nobody knows, or random characters; never a name of
# code, a path, a version, a date or an address.

# What a word for a password has in it.
_STEMS = (
    b"pass",
    b"pwd",
    b"pw",
    b"psk",
    b"secret",
    b"cred",
    b"auth",
    b"login",
    b"assword",
    b"vpn",
    b"benutzer",
    b"typed",
    b"logging",
    b"keystore",
)
_FOR_PASSWORDS = frozenset((b"pass", b"pwd", b"pw", b"psk", b"login", b"assword"))
WHOLE_WORDS = frozenset((b"login", b"pw", b"assword", b"vpn", b"benutzer", b"keystore"))
_ACTIVE = frozenset(form for word in _STEMS for form in (word, word + b" "))
_OTHER_WORD = re.compile(rb"pass[abd-oq-vxz]|secretar|credit|credib|author(?!iz)|pw[a-ce-z]")
_NO_PASSWORD = re.compile(rb"\n[ \t]*pass\n\Z|(?:by|com|sur|tres|com)pass.?\Z")  # a statement, and other words
# A word with a digit or a sign in it.
_SIGNS = r"\w.!@#$%^&*?~+-"
_TOKEN = re.compile(rf"(?<![{_SIGNS}])[^\W\d_]*+[\d_.!@#$%^&*?~+-][{_SIGNS}]*+")
_CHARACTER = re.compile(rf"[{_SIGNS}]")
_COLOUR_END = re.compile(r"\d{1,2}m(?<=\x1b\[\dm|\[\d\dm)")
_OF_ID = re.compile(r"(?i)(?:id|user(?:name)?)\\*[\"']?\s?[:=]?\s?\\*[\"']?\Z")  # `"_id":"`, `user "`
_BEFORE = frozenset("/\\")
_NEARBY_BEHIND = frozenset("/([@")
_SHORTEST, _LONGEST = 8, 40
_REACH = 160  # before and behind a word on its line
_BELOW = 200
_LINES_BELOW = 3
_NEARBY_TRAILING = ".,;:!?)*_\"'`"
_Window = tuple[int, int, bool]  # from, to, and whether the word is one for passwords alone


def nearby_spans(text: str, lower: bytes, active: Set[bytes]) -> Iterator[Span]:
    """Every shaped word near a word for a password."""
    if active.isdisjoint(_ACTIVE):
        return
    done = 0
    words = [word for word in _STEMS if word in active or word + b" " in active]
    for at, end, wordy in sorted(window for word in words for window in _windows(text, lower, word)):
        if end > done:
            yield from _shaped(text, max(at, done), end, wordy)
            done = end


def near(text: str, at: int, end: int) -> Iterator[Span]:
    """Shaped words near a word for a password that stands from `at` to `end`."""
    yield from _shaped(text, *_window(text, at, end), True)


def _windows(text: str, lower: bytes, word: bytes) -> Iterator[_Window]:
    at = lower.find(word)
    while at >= 0:
        end = at + len(word)
        if not _OTHER_WORD.match(lower, at) and not (
            word == b"pass" and _NO_PASSWORD.search(lower, max(0, at - 40), end + 1)
        ):
            begin, stop = _window(text, at, end)
            yield begin, stop, word in _FOR_PASSWORDS
            newline = text.find("\n", end, end + _REACH)
            end = newline if newline >= 0 else end + _REACH
        at = lower.find(word, end)


def _window(text: str, at: int, end: int) -> tuple[int, int]:
    """The line of a word and the lines below it."""
    begin = max(text.rfind("\n", max(0, at - _REACH), at) + 1, at - _REACH, 0)
    newline = text.find("\n", end, end + _REACH)
    stop = newline if newline >= 0 else min(len(text), end + _REACH)
    for _ in range(_LINES_BELOW if newline >= 0 else 0):
        following = text.find("\n", stop + 1, stop + _BELOW)
        stop = following if following >= 0 else min(len(text), stop + _BELOW)
        if following < 0:
            break
    border = text.find("\0", end, stop)
    return begin, border if border >= 0 else stop


def _shaped(text: str, begin: int, end: int, wordy: bool) -> Iterator[Span]:
    for token in _TOKEN.finditer(text, begin, end):
        start, stop = token.span()
        if colour := _COLOUR_END.match(text, start):
            start = colour.end()
        elif text.startswith("-p", start):
            start += 2
        if not _SHORTEST <= stop - start <= _LONGEST or text[stop : stop + 1] in _NEARBY_BEHIND:
            continue
        if text[start - 1 : start] in _BEFORE or (stop == end and _CHARACTER.match(text, stop)):
            continue
        if _OF_ID.search(text, max(0, start - 24), start):
            continue
        value = trimmed(text[start:stop], _NEARBY_TRAILING)
        if _looks(value, wordy):
            yield Span(start, start + len(value), "PASSWORD")


@lru_cache(maxsize=1 << 12)
def _looks(value: str, wordy: bool) -> bool:
    """Whether a word is a password by its looks; a session repeats its words."""
    return is_shaped(value) or (wordy and is_unfamiliar(value))


# Recovery codes, seed words and passphrases: plain words and groups that only what stands above or before them tells.
#
# A line that speaks of recovery codes, a seed phrase or an authenticator, and under it lines of nothing but codes or
# words; a passphrase that is the whole rest of its line; seed words as the strings of a list.

TRIGGERS = (b"codes", b"phrase", b"mnemonic", b"authenticator", b"words", b"codici")
_HEADING = re.compile(
    r"(?i)(?:recovery|backup|scratch|emergency|rescue|one-time|2fa|mfa|wiederherstellungs?|notfall)"
    r"[ _-]?(?:codes?|keys?)"
    r"|(?:recovery|seed|secret|mnemonic|backup|wallet)[ _-]?(?:phrase|words?)|mnemonic|authenticator"
    r"|these words down|words down and|(?:codici|codigos|códigos|codes) (?:di|de)"
    r" (?:recupero|recuperación|secours|récupération|backup)"
)
_MARK = r"[ \t>|]*+(?:\d{1,3}+[→\t|][ \t]*+)?(?:(?:\d{1,2}+[.):]|[-*•])[ \t]++)?(?:\[[ x]?\][ \t]++)?[\"'`]?"
_LISTS_CODE = r"(?:[A-Za-z0-9]{4,8}+(?:-[A-Za-z0-9]{4,8}+){1,5}+|\d{4}[ ]\d{4}|(?=[A-Za-z]*+\d)[A-Za-z0-9]{6,16}+)"
_CODE_LINE = re.compile(
    rf"{_MARK}(?P<value>{_LISTS_CODE}(?:[ \t,;|]++(?:\d{{1,2}}+[.):][ \t]++)?{_LISTS_CODE})*+)[\"'`,;]{{0,2}}[ \t\r]*\Z"
)
_GROUP_LINE = re.compile(rf"{_MARK}(?P<value>(?:[A-Za-z2-7]{{4}} ){{3,15}}[A-Za-z2-7]{{2,4}})[\"'`]?[ \t\r]*\Z")
_SEED = r"[a-z]{3,8}+"
_SEED_LINE = re.compile(
    rf"[ \t>|]*+(?:\d{{1,3}}→)?(?P<value>(?:\d{{1,2}}+[.):]?[ \t]++)?{_SEED}"
    rf"(?:[ \t,]++(?:\d{{1,2}}+[.):]?[ \t]++)?{_SEED})*+)[ \t,\r]*\Z"
)
_FEWEST_WORDS, _FEWEST_CODES = 11, 2
_MOST_LINES, _LONGEST_LINE = 26, 240
_WORD = re.compile(_SEED)
_OF_WORDS = frozenset((b"phrase", b"mnemonic", b"words"))
_STRINGS = re.compile(
    r"\w{0,12}\s{0,3}[:=]\s{0,3}[\[({]\s{0,9}"
    r"(?P<value>(?:[\"'][a-z]{3,8}[\"'](?:,\s{0,9}(?:\d{1,5}[:→\t|][ \t]{0,9})?)?){11,24})"
)
# `Enter passphrase for /dev/sdb1: ...`: several words and nothing else up to the end of the line.
_ANSWER = re.compile(
    r"[^\0\n:=]{0,80}(?:'[^\0\n']{0,80}')?\s?[:=][ \t]{1,4}[\"']?"
    r"(?P<value>[^\W\d_]{2,14}(?: [^\W\d_]{2,14}){2,9})[\"']?[ \t\r]*(?![^\0\n])"
)
# Twelve or twenty-four words, each with its number: what a wallet shows once.
_NUMBERED_SEED = re.compile(
    r"1[.)](?<![\d.]1[.)])[ \t]{1,3}(?P<value>[a-z]{3,8}+(?:\s{1,4}\d{1,2}[.)][ \t]{1,3}[a-z]{3,8}+){11,23})"
    r"(?![ \t]*[a-zA-Z,])"
)
# `the words are volcano galaxy tuna ...`: a sentence as long has one of the words that join others.
_STOP_WORD = r"(?:the|and|for|that|with|this|from|are|was|not|you|have|will|can|all|but|has|had|its|our|out|who)\b"
_SEED_RUN = re.compile(
    rf"(?<![a-z])(?P<value>(?:(?!{_STOP_WORD})[a-z]{{3,8}} ){{11,23}}(?!{_STOP_WORD})[a-z]{{3,8}})(?![a-z])"
)
_SEED_REACH = 400


def list_spans(text: str, lower: bytes, active: Set[bytes]) -> Iterator[Span]:
    """Every code and word under a line that says so. `active`: the triggers that occur."""
    if (
        ("12. " in text or "12) " in text)
        and (match := _NUMBERED_SEED.search(text))
        and match["value"].count("\n") in (0, 11, 23)
    ):
        yield Span(*match.span("value"), "SEED_PHRASE")
    for needle in TRIGGERS:
        at = lower.find(needle) if needle in active else -1
        under = 0
        while at >= 0:
            end = at + len(needle)
            if at >= under:
                under = yield from _under(text, at, end)
            run = _SEED_RUN.search(text, end, end + _SEED_REACH) if needle in _OF_WORDS else None
            if run and len(run["value"].split()) in (12, 15, 18, 21, 24):
                yield Span(*run.span("value"), "SEED_PHRASE")
            if needle in _OF_WORDS and (match := _STRINGS.match(text, end)):
                yield Span(match.start("value") + 1, match.end("value") - 1, "SECRET")
            match = _ANSWER.match(text, end) if lower.endswith((b"pass", b"pass "), 0, at) else None
            if match is not None and not speaks(match["value"]):
                yield Span(*match.span("value"), "PASSWORD")
            at = lower.find(needle, end)


def _under(text: str, at: int, end: int) -> Iterator[Span]:
    """Spans of the lines under a heading; returns where to go on."""
    newline = text.find("\n", end, end + _LONGEST_LINE)
    line = text.rfind("\n", max(0, at - _LONGEST_LINE), at) + 1
    if newline < 0 or not _HEADING.search(text, line, newline):
        return end
    codes: list[Span] = []
    words: list[Span] = []
    begin = newline + 1
    for _ in range(_MOST_LINES):
        stop = text.find("\n", begin, begin + _LONGEST_LINE)
        stop = stop if stop >= 0 else min(len(text), begin + _LONGEST_LINE)
        row = text[begin:stop]
        if match := _SEED_LINE.match(row):
            words.append(_moved(match, begin))
        elif match := _CODE_LINE.match(row) or _GROUP_LINE.match(row):
            codes.append(_moved(match, begin))
        elif (row.strip("> \t\r|") and (codes or words)) or (row.strip("> \t\r|") and begin != newline + 1):
            break
        begin = stop + 1
        if begin > len(text):
            break
    if sum(len(_WORD.findall(text[span.start : span.end])) for span in words) >= _FEWEST_WORDS:
        yield from words
    joined_codes = "".join(text[span.start : span.end] for span in codes)
    if has_digit(joined_codes) and (len(codes) >= _FEWEST_CODES or " " in joined_codes):
        yield from codes
    return newline


def _moved(match: re.Match[str], by: int) -> Span:
    return Span(by + match.start("value"), by + match.end("value"), "SECRET")
