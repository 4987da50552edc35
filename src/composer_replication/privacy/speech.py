"""Find secrets that people state in sentences, in many languages, and codes and words announced by a heading.

There are three parts: words for password, code, token and key with a value after or before them, such as
`Das Passwort lautet ...` or `use ... as the password`; words shaped like passwords near such a word; and lists of
recovery codes, seed words and passphrases.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from functools import lru_cache

from composer_replication.privacy.plausible import (
    is_answer,
    is_odd,
    is_passphrase,
    is_shaped,
    is_stated_password,
    is_unfamiliar,
    is_unknown,
    strip_sentence_end,
    talks_about_secrets,
)
from composer_replication.privacy.rules import Span, any_of, has_digit, word_set
from composer_replication.privacy.secret_names import PASSWORD_WORDS
from composer_replication.privacy.values import find_spoken_value

# ASCII words, other than words for passwords. `assignments.py` handles `pass`, `token` and `key`.
_LOGIN_WORDS_ASCII = word_set("code codes log sign logged login creds credentials wifi")
# Words with letters beyond ASCII. Only texts with such letters are searched for them.
_NON_ASCII_FORMS = (
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
# Each form in lower case and capitalized; an underscore in the list is a blank in the word.
_NON_ASCII_WORDS = tuple(
    dict.fromkeys(
        form.replace("_", " ")
        for line in _NON_ASCII_FORMS
        for word in line.split()
        for form in (word, word[:1].upper() + word[1:])
    )
)
# Any of the words above: `пароль`, `Hasło`, `密码`; not `password`.
_NON_ASCII_WORD = re.compile(any_of(_NON_ASCII_WORDS))
# For words with a single non-ASCII letter, the longest ASCII part, such as "contrase" in contraseña.
_ASCII_PIECES = frozenset(
    max(re.findall("[a-z]+", word), key=len).encode() for word in _NON_ASCII_WORDS if re.search("[a-z]{2}", word)
)
# The ending of an inflected word, in Chinese and Japanese up to a particle: `lozinkom: x` -> `lozinkom`,
# `欄は` -> `欄`.
_WORD_END = re.compile(r"[^\W\d_]{0,8}(?=[\s:=\"'\uff1a\uff1d])|[^\0-\x7f是为為はがを는은이가にの改]{0,12}")
# `passwort_db=x` -> `_db`, `.admin-key: x` -> `.admin-key`.
_REST_OF_NAME = re.compile(r"(?:[_.-][A-Za-z]\w{0,20}){1,3}(?=\s?[:=])")
# Up to five words may separate a word for passwords from the sign or the word for "is" before its value.
_FILLER = r"(?:[^\0\s\d\"`«「“<>=\uff1a]{1,24}[ \t]{1,2})"
# `Passwort für den Server: hunter2` -> `hunter2`, `密码是hunter2` -> `hunter2`.
_AFTER_WORD = re.compile(
    rf"[\"']?(?:[ \t]{{1,2}}{_FILLER}{{0,5}}?)?[ \t]{{0,2}}(?P<sign>[:=\uff1a\uff1d→—\u2013-]{{1,2}}"
    r"|[是为為はがを는은이가]|改成|改为|改為|คือ)?"
    r"[ \t]{0,3}"
    r"(?:[^\W\d_]{1,8}:?[ \t]{1,2})?[\"'`«「“„*(]{0,4}[ \t]?(?P<value>[!-;=?-~]{4,100})"
)
# Verbs for using or setting something, in the languages of the words for passwords.
_VERB = (
    r"use|using|take|try|set|type|enter|pick|choose|put|nimm|nehmen|verwende|benutze|utilise|utilisez|prends|mets|usa|usar|use"
    r"|utiliza|pon|usare|metti|gebruik|neem|użyj|weź|ustaw|použij|použi|zadaj|koristi|uporabi|folosește|foloseste|pune|använd"
    r"|brug|bruk|käytä|kasuta|használd|kullan|pakai|gunakan|dùng|используй|используйте|возьми|поставь|візьми|використай"
    r"|използвай|χρησιμοποίησε το|χρησιμοποίησε|استخدم|השתמש ב-|用|使用"
)
# Words for "as" in the same languages.
_AS = (
    r"as|als|comme|como|come|jako|kao|kot|som|sebagai|olarak|ca|kuin|kui|mint|làm|как|як|като|ως|作为|作為|ك|בתור|을\(를\)"
    r"|를|을"
)
# With a verb a plain word counts, too. The text before the word for passwords: `use "zanzibarr" as the ` ->
# `zanzibarr`.
_USED_AS = re.compile(
    rf"(?:\b(?:{_VERB})\s{{0,2}}[\"'`«「“]?(?P<value>[A-Za-z][!-&(-~]{{7,60}}?)[\"'`»」”]?\s{{0,2}}(?:{_AS})"
    r"|(?<![^\0\s])[\"'`]?(?P<first>[A-Za-z]{8,60})[\"'`]?\s(?:을\(를\)|를|을))\s{0,2}(?:[^\0\s\d]{1,12}\s{1,2}){0,2}\Z",
    re.I,
)
# The other order, in Turkish and Japanese: `parola olarak zanzibarr kullan` -> `zanzibarr`,
# `パスワードには zanzibarr を使って` -> `zanzibarr`.
_AS_USED = re.compile(
    r"(?:\s?olarak\s|(?:には|に|は)\s?)[\"'`「]?(?P<value>[A-Za-z][!-~]{7,60}?)[\"'`」]?\s?(?:kullan|を使)", re.I
)
# The text before the word for passwords: `hunter2 is the ` -> `hunter2`, `hunter2 als ` -> `hunter2`.
_VALUE_THEN_WORD = re.compile(
    r"(?:^|[\s\"'`«「“(*])(?P<value>[!-&(-;=?-_a-~]{6,100}?)[\"'`»」”)*]{0,4}\s{0,2}"
    r"(?:\b(?:as|als|como|comme|come|jako|kao|kot|som|sebagai|olarak|ca|kuin|mint|is|was|ist|es|est|wi"
    r"ll be|for)\b|(?<=\s)\(|è|é|как|як|като|är|làm|作为|作為|を|로|으로|为|為|是|=)"
    r"\s{0,2}(?:[^\0\s\d\"'`]{1,20}\s{1,2}){0,3}[\"'`*(]{0,3}\Z"
)
# What connects a value and the word after it: `hunter2 is the `, `hunter2 (`; not `hunter2, the `.
_LINK = re.compile(
    r" (?:as|als|como|comme|come|jako|kao|kot|som|sebagai|olarak|ca|kuin|mint|is|was|ist|es|est|will be|for|è|é|как|як"
    r"|като|är|làm|ως|בתור|kui) |[(=作をは로를을为為是]|ك"
)
# ` as `, ` als `; not ` is `.
_LINK_AS = re.compile(rf"[ 」](?:{_AS})|ك")
_MAX_LINK_CHARS = 70
_MIN_LEAD_CHARS = 10  # a value and another word
_MAX_LEAD_CHARS = 90
_MAX_MESSAGE_CHARS = 10_000  # codes are searched for only in shorter texts
# UTF-8 bytes that do not begin a letter: ASCII, continuation bytes, and the first bytes of signs and emoji.
_NON_LETTER_BYTES = bytes(range(0xC2)) + b"\xc2\xe2\xef\xf0\xf3"
_TRAILING = ".,;:!?)*_\"'`»」”、。\uff0cです입니다"
# Not all codes are secret, so the word before "code" decides: `your backup `, `2FA `; not `exit `.
_CODE = re.compile(
    r"(?i:(?:recovery|backup|verification|confirmation|security|unlock|access|login|auth\w{0,12}|2fa|m"
    r"fa|otp|one-time|pairing"
    r"|reset|activation|sms|door|gate|alarm|entry|pin|pass)[ -])\Z"
)
_CODE_WORDS = frozenset(
    b"recovery backup verification confirmation unlock fa mfa otp sms pairing activation door gate alarm pin".split()
)
# One code or several: `is 482913`, `s: ab12-cd34, ef56-gh78`.
_CODE_VALUES = (
    r"(?i:(?:\s\w{1,12}+){0,3}?(?:\s(?:is|are|was)|\s?[:=])\s{0,9}[\"'`*]{0,3})"
    r"(?P<value>(?:[A-Za-z0-9]{3,10}+-)*+(?=[A-Za-z-]*\d)[A-Za-z0-9]{4,12}+(?:[ ,;\n-]{1,3}+(?=[a-z-]*"
    r"+\d)[A-Za-z0-9]{4,12}+(?![\w.])){0,20}+)"
)
# The text after the first letter of "login" and similar words: `: ada / hunter2`, ` with ada and hunter2`.
_LOGIN = (
    r"(?i:(?: to [^\0\s]{1,60}+)?(?: [a-z]{1,12}){0,4}?(?: are| is| with| as| using|:)?[ :(]{1,2}(?:user(?:name)? )?)"
    r"[\"'`*]{0,2}(?P<user>[\w.@+-]{1,60})[\"'`*]{0,2}\s?(?:[:/,|]|and\b|with\b)\s{0,2}(?:pass(?:word)"
    r"? )?[\"'`*]{0,2}(?P<value>[!-;=?-~]{6,100})"
)
_ASCII_WORDS = frozenset(word.encode() for word in PASSWORD_WORDS | _LOGIN_WORDS_ASCII)

# Words before `as USER with VALUE`, in the languages of the words for passwords.
_CONNECTING = frozenset(
    b"connect connecting connected logged login authenticating authenticated bind bound angemeldet verbunden"
    b" verbinde anmelden collegato collegata connesso conectado conectada entra entrar entre ingresa accede connexion"
    b" ingelogd inloggen zalogowany".split()
)
# `connecting to db:1433 as sa with 'hunter2'` -> `hunter2`, `als ada mit Passwort hunter2` -> `hunter2`.
_AS_USER = re.compile(
    r"(?i)(?:\b(?:as|als|como|come|comme|con|com|avec|jako|mit|met|user|usuario|utente)\s)"
    r"\\*[\"'`]?[\w.@=,\\-]{2,80}\\*[\"'`]?,?\s"
    r"(?:with|using|and|mit|und|con|usando|y|com|e|avec|et|met|en|z|/|\|)\s(?:(?:the\s)?(?:password|passwort|pass|pw)\s)?"
    r"(?P<quote>\\*[\"'`«“]?)(?P<value>[!-~]{5,80}?)(?=\\*[\"'`»”]|[,;]?\s|[.,;]?\Z)"
)
_MAX_LOGIN_CHARS = 200

SPEECH_WHOLE_WORDS: frozenset[bytes] = _ASCII_WORDS | _CODE_WORDS | _ASCII_PIECES | _CONNECTING


def speech_spans(text: str, lower: bytes, active: Set[bytes]) -> Iterator[Span]:
    """Yield the values before or after a word for a secret, in any language."""
    for word in sorted(active & _CONNECTING):
        yield from _connections(text, lower, word)
    for word in sorted(active & _ASCII_WORDS):
        if word in _LOGIN_BY_WORD:
            yield from _logins(text, word)
        elif word in (b"code", b"codes"):
            if len(text) <= _MAX_MESSAGE_CHARS and not active.isdisjoint(_CODE_WORDS):
                yield from _codes(text, lower, word)
        else:
            for at, end in _word_positions(text, lower, word):
                yield from _beside_word(text, at, end)
                yield from _shaped_spans_near(text, at, end)
    if not text.isascii() and _may_have_words(lower, active) and _has_letters(text):
        for match in _NON_ASCII_WORD.finditer(text):
            yield from _beside_word(text, match.start(), match.end())
            yield from _shaped_spans_near(text, match.start(), match.end())


def has_non_ascii_word(text: str) -> bool:
    """Return whether a text contains a non-ASCII word for a secret, such as one in another script."""
    return not text.isascii() and _NON_ASCII_WORD.search(text) is not None


# Common words are searched together with what must follow them: a pattern that starts with a literal is fast.
_LOGIN_WORDS = {"log": "og in", "sign": "ign in", "logged": "ogged in"} | {
    word: word[1:]
    for word in sorted(
        word_set(
            "login creds credentials wifi zugangsdaten identifiants credenciales credenziali credenciais inloggegevens"
        )
    )
}
# `login: ada / hunter2` -> `hunter2`, for a pattern that begins with "ogin".
_LOGIN_BY_WORD = {word.encode(): re.compile(stem + _LOGIN) for word, stem in _LOGIN_WORDS.items()}
# After "code": ` is 482913` -> `482913`, `s: ab12-cd34, ef56-gh78` -> `ab12-cd34, ef56-gh78`.
_CODE_AFTER = re.compile(_CODE_VALUES)


def _may_have_words(lower: bytes, active: Set[bytes]) -> bool:
    """Return whether a text may contain a non-ASCII word for a secret, judging by the text with one byte per character.

    This encoding preserves accented Latin letters and turns all other non-ASCII characters into question marks.
    """
    return not lower.isascii() or b"??" in lower or not active.isdisjoint(_ASCII_PIECES)


def _has_letters(text: str) -> bool:
    """Return whether a text has letters beyond ASCII. In most texts, the only other characters are arrows, dashes,
    frames and emoji.
    """
    return bool(text.encode("utf-8", "replace").translate(None, _NON_LETTER_BYTES))


def _word_positions(text: str, lower: bytes, word: bytes) -> Iterator[tuple[int, int]]:
    """Yield the positions at which the word stands alone, rather than inside a name or a longer word."""
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
    for at, end in _word_positions(text, lower, word):
        if _CODE.search(text, max(0, at - 20), at) and (match := _CODE_AFTER.match(text, end)):
            yield Span(*match.span("value"), "PASSWORD")


def _logins(text: str, word: bytes) -> Iterator[Span]:
    for match in _LOGIN_BY_WORD[word].finditer(text):
        value = strip_sentence_end(match["value"].partition("\\")[0], _TRAILING)
        if '"' not in value and is_answer(value):
            yield Span(match.start("value"), match.start("value") + len(value), "USER_PASSWORD")


def _connections(text: str, lower: bytes, word: bytes) -> Iterator[Span]:
    """Yield the password that follows a user on a line about a connection: `connecting to db:1433 as sa with '...'`."""
    at = lower.find(word)
    while at >= 0:
        newline = text.find("\n", at, at + _MAX_LOGIN_CHARS)
        end = newline if newline >= 0 else min(len(text), at + _MAX_LOGIN_CHARS)
        match = _AS_USER.search(text, at, end)
        if match is not None:
            value = strip_sentence_end(match["value"], _TRAILING)
            if is_answer(value) and (match["quote"] or is_odd(value) or has_digit(value)):
                yield Span(match.start("value"), match.start("value") + len(value), "USER_PASSWORD")
        at = lower.find(word, end)


def _beside_word(text: str, start: int, end: int) -> Iterator[Span]:
    ending = _WORD_END.match(text, end)
    end = ending.end() if ending else end
    span = _value_after_word(text, end)
    if span or (span := password_before_keyword(text, start)) or (span := find_spoken_value(text, end, direct=False)):
        yield span
    elif (match := _AS_USED.match(text, end)) and is_unknown(match["value"]):
        yield Span(*match.span("value"), "PASSWORD")


def _value_after_word(text: str, end: int) -> Span | None:
    match = _AFTER_WORD.match(text, end, end + 260)
    if match is None:
        return None
    value = strip_sentence_end(match["value"], _TRAILING)
    is_secret = (
        is_stated_password(value)
        or (match["sign"] and (is_unknown(value) or is_passphrase(value)))
        or (is_unknown(value) and is_odd(value))
        or (match["sign"] and value.isdigit() and 4 <= len(value) <= 8)
    )
    return Span(match.start("value"), match.start("value") + len(value), "PASSWORD") if is_secret else None


def password_before_keyword(text: str, start: int) -> Span | None:
    """Return the value before the word for passwords at `start`, as in `use ... as the password`, or None."""
    begin = max(0, start - _MAX_LEAD_CHARS)
    lead = text[max(begin, text.rfind("\n", begin, start) + 1) : start]
    begin = start - len(lead)
    if len(lead) < _MIN_LEAD_CHARS or not _LINK.search(lead, max(0, len(lead) - _MAX_LINK_CHARS)):
        return None
    match = _USED_AS.search(text, begin, start) if _LINK_AS.search(lead) else None
    if match is not None:
        group = "value" if match["value"] else "first"
        if is_unknown(match[group]) or is_stated_password(match[group]):
            return Span(*match.span(group), "PASSWORD")
    if not has_digit(lead) and not any(sign in lead for sign in "!@#$%^&*?+~`"):
        return None
    match = _VALUE_THEN_WORD.search(text, begin, start)
    if match is None:
        return None
    value = strip_sentence_end(match["value"].lstrip("*(\"'`"), _TRAILING)
    at = text.find(value, match.start("value"))
    is_secret = is_stated_password(value) or (
        text[at - 1 : at] in ("`", '"', "'") and (is_unknown(value) or is_passphrase(value))
    )
    return Span(at, at + len(value), "PASSWORD") if is_secret else None


# Shapes: passwords on the same line as a word for passwords, or on the three lines below it.
#
# Every program and language has a different text in between, so only the shape of the value counts: words with a number
# and signs among them, unknown words or random characters; never a name in code, a path, a version, a date or an
# address.

# Parts of the words for passwords.
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
_PASSWORD_STEMS = frozenset((b"pass", b"pwd", b"pw", b"psk", b"login", b"assword"))
NEARBY_WHOLE_WORDS = frozenset((b"login", b"pw", b"assword", b"vpn", b"benutzer", b"keystore"))
_STEM_TRIGGERS = frozenset(form for word in _STEMS for form in (word, word + b" "))
# Words that only begin like a word for passwords: `passage`, `secretary`, `author`; not `password`, not
# `authorization`.
_OTHER_WORD = re.compile(rb"pass[abd-oq-vxz]|secretar|credit|credib|author(?!iz)|pw[a-ce-z]")
# The Python statement, alone on its line, and other words: `\n    pass\n`, `bypass`, `compass`; not `the pass`.
_NO_PASSWORD = re.compile(rb"\n[ \t]*pass\n\Z|(?:by|com|sur|tres|com)pass.?\Z")
# Letters, digits and the signs that occur in passwords.
_SIGNS = r"\w.!@#$%^&*?~+-"
# A word with a digit or a sign in it: `use hunter2 now` -> `hunter2`, `Zamek.232` -> `Zamek.232`; not `password`.
_TOKEN = re.compile(rf"(?<![{_SIGNS}])[^\W\d_]*+[\d_.!@#$%^&*?~+-][{_SIGNS}]*+")
# `a`, `7`, `#`; not `/`.
_CHARACTER = re.compile(rf"[{_SIGNS}]")
# The end of a terminal color before a value: `\x1b[0mhunter2` -> `0m`, `[36mhunter2` -> `36m`.
_COLOR_END = re.compile(r"\d{1,2}m(?<=\x1b\[\dm|\[\d\dm)")
# What precedes an id or a user name: `"_id": "`, `username=`; not `"pw": "`.
_ID_LEAD = re.compile(r"(?i)(?:id|user(?:name)?)\\*[\"']?\s?[:=]?\s?\\*[\"']?\Z")
_PATH_SIGNS = frozenset("/\\")
_NOT_AFTER_SHAPED = frozenset("/([@")
_MIN_SHAPED_CHARS, _MAX_SHAPED_CHARS = 8, 40
_MAX_DISTANCE = 160  # characters before and after the word on its line
_MAX_LINE_BELOW = 200
_LINES_BELOW = 3
_SHAPED_TRAILING = ".,;:!?)*_\"'`"
_Window = tuple[int, int, bool]  # from, to, and whether the word means passwords only


def nearby_spans(text: str, lower: bytes, active: Set[bytes]) -> Iterator[Span]:
    """Yield every word with the shape of a password near a word for passwords."""
    if active.isdisjoint(_STEM_TRIGGERS):
        return
    done = 0
    words = [word for word in _STEMS if word in active or word + b" " in active]
    for at, end, wordy in sorted(window for word in words for window in _windows(text, lower, word)):
        if end > done:
            yield from _shaped(text, max(at, done), end, wordy)
            done = end


def _shaped_spans_near(text: str, at: int, end: int) -> Iterator[Span]:
    """Yield the words with the shape of a password near a word for passwords, which extends from `at` to `end`."""
    yield from _shaped(text, *_window(text, at, end), True)


def _windows(text: str, lower: bytes, word: bytes) -> Iterator[_Window]:
    at = lower.find(word)
    while at >= 0:
        end = at + len(word)
        if not _OTHER_WORD.match(lower, at) and not (
            word == b"pass" and _NO_PASSWORD.search(lower, max(0, at - 40), end + 1)
        ):
            begin, stop = _window(text, at, end)
            yield begin, stop, word in _PASSWORD_STEMS
            newline = text.find("\n", end, end + _MAX_DISTANCE)
            end = newline if newline >= 0 else end + _MAX_DISTANCE
        at = lower.find(word, end)


def _window(text: str, at: int, end: int) -> tuple[int, int]:
    """Return the bounds of a word's line, together with a few lines below it."""
    begin = max(text.rfind("\n", max(0, at - _MAX_DISTANCE), at) + 1, at - _MAX_DISTANCE, 0)
    newline = text.find("\n", end, end + _MAX_DISTANCE)
    stop = newline if newline >= 0 else min(len(text), end + _MAX_DISTANCE)
    for _ in range(_LINES_BELOW if newline >= 0 else 0):
        following = text.find("\n", stop + 1, stop + _MAX_LINE_BELOW)
        stop = following if following >= 0 else min(len(text), stop + _MAX_LINE_BELOW)
        if following < 0:
            break
    border = text.find("\0", end, stop)
    return begin, border if border >= 0 else stop


def _shaped(text: str, begin: int, end: int, wordy: bool) -> Iterator[Span]:
    for token in _TOKEN.finditer(text, begin, end):
        start, stop = token.span()
        if color := _COLOR_END.match(text, start):
            start = color.end()
        elif text.startswith("-p", start):
            start += 2
        if not _MIN_SHAPED_CHARS <= stop - start <= _MAX_SHAPED_CHARS or text[stop : stop + 1] in _NOT_AFTER_SHAPED:
            continue
        if text[start - 1 : start] in _PATH_SIGNS or (stop == end and _CHARACTER.match(text, stop)):
            continue
        if _ID_LEAD.search(text, max(0, start - 24), start):
            continue
        value = strip_sentence_end(text[start:stop], _SHAPED_TRAILING)
        if _looks_like_password(value, wordy):
            yield Span(start, start + len(value), "PASSWORD")


@lru_cache(maxsize=1 << 12)
def _looks_like_password(value: str, wordy: bool) -> bool:
    """Return whether a word looks like a password. Results are cached, because sessions repeat their words."""
    return is_shaped(value) or (wordy and is_unfamiliar(value))


# Lists: recovery codes, seed words and passphrases look like ordinary words and groups, so they count only after a
# heading or a name.

TRIGGERS = (b"codes", b"phrase", b"mnemonic", b"authenticator", b"words", b"codici")
# `Backup codes:`, `Write these words down`, `Your seed phrase`; not `exit codes`.
_HEADING = re.compile(
    r"(?i)(?:recovery|backup|scratch|emergency|rescue|one-time|2fa|mfa|wiederherstellungs?|notfall)"
    r"[ _-]?(?:codes?|keys?)"
    r"|(?:recovery|seed|secret|mnemonic|backup|wallet)[ _-]?(?:phrase|words?)|mnemonic|authenticator"
    r"|these words down|words down and|(?:codici|codigos|códigos|codes) (?:di|de)"
    r" (?:recupero|recuperación|secours|récupération|backup)"
)
_LIST_MARK = r"[ \t>|]*+(?:\d{1,3}+[→\t|][ \t]*+)?(?:(?:\d{1,2}+[.):]|[-*•])[ \t]++)?(?:\[[ x]?\][ \t]++)?[\"'`]?"
_LISTED_CODE = r"(?:[A-Za-z0-9]{4,8}+(?:-[A-Za-z0-9]{4,8}+){1,5}+|\d{4}[ ]\d{4}|(?=[A-Za-z]*+\d)[A-Za-z0-9]{6,16}+)"
# One or more codes: `1. ab12-cd34` -> `ab12-cd34`, `- 4821 9035` -> `4821 9035`; not `run the tests`.
_CODE_LINE = re.compile(
    rf"{_LIST_MARK}(?P<value>{_LISTED_CODE}(?:[ \t,;|]++(?:\d{{1,2}}+[.):][ \t]++)?{_LISTED_CODE})*+)"
    r"[\"'`,;]{0,2}[ \t\r]*\Z"
)
# The setup key of an authenticator app: `  abcd efgh ijkl mnop` -> `abcd efgh ijkl mnop`.
_GROUP_LINE = re.compile(rf"{_LIST_MARK}(?P<value>(?:[A-Za-z2-7]{{4}} ){{3,15}}[A-Za-z2-7]{{2,4}})[\"'`]?[ \t\r]*\Z")
_SEED = r"[a-z]{3,8}+"
# `1. volcano 2. galaxy 3. tuna` -> `1. volcano 2. galaxy 3. tuna`; not `volcano-42`.
_SEED_LINE = re.compile(
    rf"[ \t>|]*+(?:\d{{1,3}}→)?(?P<value>(?:\d{{1,2}}+[.):]?[ \t]++)?{_SEED}"
    rf"(?:[ \t,]++(?:\d{{1,2}}+[.):]?[ \t]++)?{_SEED})*+)[ \t,\r]*\Z"
)
_MIN_SEED_WORDS, _MIN_CODES = 11, 2
_MAX_LISTED_LINES, _MAX_LISTED_LINE_CHARS = 26, 240
# `volcano`.
_SEED_WORD = re.compile(_SEED)
_PHRASE_TRIGGERS = frozenset((b"phrase", b"mnemonic", b"words"))
# At least twelve seed words as a list of strings:
# ` = ['one', 'two', 'six', 'ten', 'sun', 'sky', 'sea', 'oak', 'ash', 'elm', 'fir', 'fig']`.
_SEED_STRINGS = re.compile(
    r"\w{0,12}\s{0,3}[:=]\s{0,3}[\[({]\s{0,9}"
    r"(?P<value>(?:[\"'][a-z]{3,8}[\"'](?:,\s{0,9}(?:\d{1,5}[:→\t|][ \t]{0,9})?)?){11,24})"
)
# Several words up to the end of the line: `Enter passphrase for /dev/sdb1: volcano galaxy tuna` ->
# `volcano galaxy tuna`.
_PASSPHRASE_REST = re.compile(
    r"[^\0\n:=]{0,80}(?:'[^\0\n']{0,80}')?\s?[:=][ \t]{1,4}[\"']?"
    r"(?P<value>[^\W\d_]{2,14}(?: [^\W\d_]{2,14}){2,9})[\"']?[ \t\r]*(?![^\0\n])"
)
# Twelve or more numbered words, as wallets show them once:
# `1. one 2. two 3. six 4. ten 5. sun 6. sky 7. sea 8. oak 9. ash 10. elm 11. fir 12. fig`.
_NUMBERED_SEED = re.compile(
    r"1[.)](?<![\d.]1[.)])[ \t]{1,3}(?P<value>[a-z]{3,8}+(?:\s{1,4}\d{1,2}[.)][ \t]{1,3}[a-z]{3,8}+){11,23})"
    r"(?![ \t]*[a-zA-Z,])"
)
# `the words are volcano galaxy tuna ...`: a sentence of this length contains a function word.
_STOP_WORD = r"(?:the|and|for|that|with|this|from|are|was|not|you|have|will|can|all|but|has|had|its|our|out|who)\b"
# Twelve or more words without a function word. A sentence of this length contains one, such as "the":
# `volcano galaxy tuna lemon orbit camel velvet ladder pepper island carbon mirror`; not
# `open the page and read all of the notes that you have in it`.
_SEED_RUN = re.compile(
    rf"(?<![a-z])(?P<value>(?:(?!{_STOP_WORD})[a-z]{{3,8}} ){{11,23}}(?!{_STOP_WORD})[a-z]{{3,8}})(?![a-z])"
)
_SEED_REACH = 400


def list_spans(text: str, lower: bytes, active: Set[bytes]) -> Iterator[Span]:
    """Yield every code or word listed under a line that announces such a list. `active` has the triggers that occur."""
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
                under = yield from _under_heading(text, at, end)
            run = _SEED_RUN.search(text, end, end + _SEED_REACH) if needle in _PHRASE_TRIGGERS else None
            if run and len(run["value"].split()) in (12, 15, 18, 21, 24):
                yield Span(*run.span("value"), "SEED_PHRASE")
            if needle in _PHRASE_TRIGGERS and (match := _SEED_STRINGS.match(text, end)):
                yield Span(match.start("value") + 1, match.end("value") - 1, "SECRET")
            match = _PASSPHRASE_REST.match(text, end) if lower.endswith((b"pass", b"pass "), 0, at) else None
            if match is not None and not talks_about_secrets(match["value"]):
                yield Span(*match.span("value"), "PASSWORD")
            at = lower.find(needle, end)


def _under_heading(text: str, at: int, end: int) -> Iterator[Span]:
    """Yield the secrets in the lines under a heading. Returns the position at which to continue the search."""
    newline = text.find("\n", end, end + _MAX_LISTED_LINE_CHARS)
    line = text.rfind("\n", max(0, at - _MAX_LISTED_LINE_CHARS), at) + 1
    if newline < 0 or not _HEADING.search(text, line, newline):
        return end
    codes: list[Span] = []
    words: list[Span] = []
    begin = newline + 1
    for _ in range(_MAX_LISTED_LINES):
        stop = text.find("\n", begin, begin + _MAX_LISTED_LINE_CHARS)
        stop = stop if stop >= 0 else min(len(text), begin + _MAX_LISTED_LINE_CHARS)
        row = text[begin:stop]
        if match := _SEED_LINE.match(row):
            words.append(_value_span(match, begin))
        elif match := _CODE_LINE.match(row) or _GROUP_LINE.match(row):
            codes.append(_value_span(match, begin))
        elif (row.strip("> \t\r|") and (codes or words)) or (row.strip("> \t\r|") and begin != newline + 1):
            break
        begin = stop + 1
        if begin > len(text):
            break
    if sum(len(_SEED_WORD.findall(text[span.start : span.end])) for span in words) >= _MIN_SEED_WORDS:
        yield from words
    joined_codes = "".join(text[span.start : span.end] for span in codes)
    if has_digit(joined_codes) and (len(codes) >= _MIN_CODES or " " in joined_codes):
        yield from codes
    return newline


def _value_span(match: re.Match[str], by: int) -> Span:
    return Span(by + match.start("value"), by + match.end("value"), "SECRET")
