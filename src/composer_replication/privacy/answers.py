"""Find secrets that one message asks for and the next message provides without naming them.

assistant: Which password does the staging database have?
user:      kestrel-otter-4821, same as last year

call:      terraform output -raw db_password
result:    k[9}Q(w-T,2xB
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from composer_replication.privacy.entropy import looks_random
from composer_replication.privacy.plausible import (
    is_generated,
    is_no_secret,
    is_odd,
    is_stated_password,
    is_unknown,
    strip_sentence_end,
)
from composer_replication.privacy.rules import PLACEHOLDER, Span, any_of, has_digit, word_set
from composer_replication.privacy.secret_names import CORRECTIONS, PASSWORD_WORDS, Strength, name_strength
from composer_replication.privacy.speech import has_non_ascii_word

_MAX_QUESTION_CHARS = 600  # a request comes at the end of a message
_MAX_ANSWER_CHARS = 240  # longer messages have context, which the other rules use
_MAX_SENTENCES = 3
# `Send it. Then go on` -> `Send it.`; the dot in `db.internal` ends nothing.
_SENTENCE = re.compile(r"(?:[^\0.!?\u3002\uff1f\uff01\n]|[.!?](?=[^\0\s]))+[.!?\u3002\uff1f\uff01]*")
# Most messages contain nothing that a secret's name begins with, and are not cut into sentences: `your password`; not
# `go on`.
_MAY_NAME = re.compile(
    any_of(
        PASSWORD_WORDS
        | word_set(
            "pass pw psk secret token key cred pin puk otp tan 2fa mfa factor code kod codice codigo seed phrase words"
        )
    )
)
# `pre-shared key` -> `pre-shared`.
_HYPHENATED_WORD = re.compile(r"[^\W\d_]++(?:[_-][^\W\d_]++)*+")
# `api key`, `pre-shared`, `12 recovery words`, `seed`; not `primary key`.
_SECRET_NAMES = re.compile(
    r"(?i)\b(?:api|access|secret|private|licen[sc]e|encryption|auth|signing|master|ssh|recovery|activation|wi-?fi)"
    r"[ -]keys?\b"
    r"|sleutel|nyckel|schlüssel|\bclé|\bclave\b|chiave|klucz|ключ|anahtar|\bpre-?shared\b|共有鍵|暗証|合鍵|\b(?:recovery|backup|seed|mnemonic)\s(?:words?|phrases?)\b|\bseed\b"
)
# `backup code`, `the PIN`, `код`; not `exit code`.
_CODE_NAMES = re.compile(
    r"(?i)\b(?:pin|puk|otp|tan|2fa|mfa|totp|second factor|(?:recovery|backup|verification|security|unlock|access|door"
    r"|gate|alarm|one-time|sms)[ -]codes?|sicherheitscode|bestätigungscode|c[oó]digo|codice|k[oó]d\w{0,4}|код\w*)\b"
    r"|验证码|驗證碼|認証コード|인증번호"
)
# `token limit`, `password policy`; not `password`.
_SETTINGS_OF_SECRETS = re.compile(
    r"(?i)\b(?:token|password|secret|key)s? (?:limit|count|budget|length|name|field|policy|rule)s?\b"
)
# In the languages of the words for a password. A question mark asks, and so does a colon at the end: `which one?`,
# `Please send it`, `Passwort:`; not `it is set`.
_REQUEST = re.compile(
    r"(?i)[?\uff1f]|[:\uff1a]\s*\Z|\b(?:need|please|send|give|tell|share|paste|provide|enter|type|bitte|brauche|gib|nenn\w*|schick\w*"
    r"|veuillez|faut|donne\w*|envoie\w*|besoin|saisis\w*|favor|dime|dame|necesito|pásame|envíame|indica|preciso|envie|informe|mande"
    r"|dimmi|dammi|mandami|inserisci|serve|geef|graag|stuur|nodig|podaj|proszę|potrzebuję|wpisz|zadej\w*|prosím|potřebuji"
    r"|lütfen|gir\w*|gönder\w*|gerek\w*|laz\u0131m|ange|skicka|behöver|oppgi|skriv|indtast|anna|syötä|mohon|tolong|masukkan"
    r"|vui lòng|nhập|пришли\w*|введи\w*|нуж[нае]\w*|укажи\w*|скажи\w*|дай\w*|надішли\w*|введіть|потріб\w*)\b"
    r"|请|請|发给|發給|告诉|告訴|提供|输入|輸入|教えて|ください|下さい|入力|送って|알려|입력|보내|주세요|أرسل|أدخل|कृपया|बताइए|שלח|הזן"
)
# Commands that print a secret without naming one in their arguments: `openssl rand -hex 32`, `gh auth token`,
# `curl -s https://host/api/login`; not `openssl version`.
_GENERATORS = re.compile(
    r"(?<![\w./-])(?:pwgen|apg|makepasswd|xkcdpass|diceware|openssl rand|gpg --gen-random|lpass show|gopass show"
    r"|pass show|op read|gh auth token|gcloud auth print|security find-|secret-tool lookup|keyring get|vault kv get"
    r"|vault read|hashcat\s[^\0\n]*--show|john\s[^\0\n]*--show"
    r"|terraform\s[^\0\n]*output -raw|random_password|initial-(?:admin-)?password"
    r"|curl\s[^\0\n|]{0,200}/(?:sessions?|login|tokens?|auth))(?![\w-])"
)
# Commands that print names, counts and hashes, whatever their arguments are called: `ls secrets`, `cd x && git log`;
# not `cat secrets`.
_LISTING = re.compile(
    r"(?:[^\0\n]*[|;&]\s*)?(?:ls|find|wc|stat|git|basename|dirname|which|test|sha\d+sum|md5sum|grep -[a-z]*[lc])"
    r"(?![\w-])"
)
# Commands and files that show a store of secrets: `sops -d db.yaml`, `cat .htpasswd`; not `cat README`.
_STORES = re.compile(
    r"(?:ansible-vault (?:view|decrypt)|sops (?:-d|decrypt|exec)|gpg (?:-d|--decrypt)|age -d|secretsmanager get-secret"
    r"|ssm get-parameter|kubectl get secrets?|vault kv get|op item get|bw get|doppler secrets"
    r"|terraform (?:output|state)|userlist\.txt|shadow|\.htpasswd|keypair\.json|id\.json|wallet)(?![\w-])"
)
# `db_password = "k[9}Q(w-T,2xB"` -> `k[9}Q(w-T,2xB`.
_LAST_OF_LINE = re.compile(r"(?:[:=][ \t]{0,20}|[ \t])[\"']?(?P<value>[!-~]{8,200}?)[\"']?,?[ \t\r]*(?:\n|\Z)")
# A key as a list of 32 to 64 bytes, such as that of a Solana wallet:
# `[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31,32]`; not `[1,2,3]`.
_KEY_BYTES = re.compile(r"\[(?:\d{1,3},\s?){31,63}\d{1,3}\]")
# Most commands have none of these words and are not read further: `cat token.txt`; not `make build`.
_MAY_PRINT = re.compile(
    any_of(
        word_set(
            "pass pw psk secret token key cred pin otp seed phrase auth vault sops gpg age terraform userlist shadow"
            " wallet id.json apg diceware rand keyring item bw doppler get-parameter hashcat john session login"
            " op lookup state output"
        )
    )
)
# `cat db_password.txt` -> `db_password`.
_COMMAND_WORD = re.compile(r"[A-Za-z_][\w-]{2,60}")
# `  12→`; not `12 `.
_NUMBERED_LINE = re.compile(r"[ \t]*\d{1,6}[→\t]")
_MAX_PRINTED_LINES = 20
# Letters of any alphabet: `Zwetschge77!`, `ЗимаБлизко2025`. Chinese and Japanese put no blank after it:
# `hunter2です` -> `hunter2`.
_CHAT_WORD = re.compile(r"[!-~\u00a1-\u2fff]{4,200}")
_OPENING_QUOTES = "\"'`«„“「(*<["
# `"k9 otter"` -> `k9 otter`, `**hunter2**` -> `hunter2`.
_QUOTED_VALUE = re.compile(r"[\"'`«„“「*]{1,3}([^\0\n]{4,200}?)[\"'`»”“」*]{1,3}")
# `zk39Qx81LmPq04Tn`; not `hunter2`.
_KEY_LIKE = re.compile(r"(?=[^\0]*\d)[A-Za-z0-9+/=_.~-]{16,200}")
# `bastion-2.internal`; not `hunter2`.
_HOST = re.compile(r"[a-z][\w-]*+\.(?:[\w-]++\.)*[a-z]{2,12}")
# `482159`, `ab12-cd34`; not `otter`.
_ONE_TIME_CODE = re.compile(r"\d{4,10}|(?=[a-z-]*\d)[a-z0-9]{3,8}(?:-[a-z0-9]{3,8}){1,7}", re.I)
# Six words or more: `volcano galaxy tuna lemon orbit camel`; not `same as before`.
_SEED_PHRASE = re.compile(r"[^\W\d_]{3,12}(?:[ ,\n]{1,2}[^\W\d_]{3,12}){5,24}")
# Three words or more: `correct horse battery`; not `ok then`.
_ANY_PHRASE = re.compile(r"\w{2,14}(?: \w{1,14}){2,7}")
# `passphrase`, `lösenfras`; not `password`.
_NAMES_PHRASE = re.compile(r"(?i)phrase|wachtzin|lösenfras|фраз|パスフレーズ|frase")
# Words after these are not values: `on db-01.internal`, `in prod-2024`.
_PREPOSITIONS = word_set(
    "on at in from under via to of with for by named called llama se repositorio repository heißt appelle host user"
    " port auf bei unter im in von aus sur dans chez en del de por"
    " su nel op w na z pod на в из под через file branch ticket issue see line version"
)


def asks_for_secret(message: str) -> bool:
    """Return whether a scrubbed message ends with a request for a secret, so that the reply may be only the secret."""
    asking = message[-_MAX_QUESTION_CHARS:]
    if asking.isascii() and not _MAY_NAME.search(asking.lower()):
        return False
    sentences = _SENTENCE.findall(PLACEHOLDER.sub("x", asking).rstrip().rstrip("`*\"'"))[-_MAX_SENTENCES:]
    return any(map(_names_secret, sentences)) and any(map(_is_request, sentences))


def asks_for_phrase(message: str) -> bool:
    """Return whether a request for a secret asks for a passphrase, which may consist of ordinary words."""
    return _NAMES_PHRASE.search(message, max(0, len(message) - _MAX_QUESTION_CHARS)) is not None


def may_contain_answer(message: str) -> bool:
    """Return whether a message is short enough to consist of only an answer."""
    return 0 < len(message.strip()) <= _MAX_ANSWER_CHARS


def prints_secret(command: str) -> bool:
    """Return whether a scrubbed command, or the arguments of a tool, names a secret that its result may contain."""
    if len(command) > _MAX_QUESTION_CHARS or not _MAY_PRINT.search(command.lower()) or _LISTING.match(command):
        return False
    if _GENERATORS.search(command) or _STORES.search(command):
        return True
    return any(name_strength(word) >= Strength.TOKEN for word in _COMMAND_WORD.findall(PLACEHOLDER.sub("x", command)))


# Timestamp and speaker at the start of a line: `[12:04] ada: hunter2` -> `[12:04] ada: `.
_CHAT_LINE = re.compile(r"(?:\[?[\d:./, T-]{4,30}\]?[ \t-]*)?(?:[^\W\d_][\w ,.-]{0,30}:[ \t])?")
_MAX_CHAT_LINES = 500  # a longer text is probably a file
_MAX_PRINTED_CHARS = 200


def chat_spans(text: str) -> Iterator[Span]:
    """Yield the secrets that answer a request such as `ada: who has the panel pw?` in a chat log with one message
    per line.
    """
    if not ("?\n" in text or "\uff1f\n" in text) or text.count("\n") > _MAX_CHAT_LINES:
        return
    begin, is_asked = 0, False
    for line in text.split("\n"):
        lead = _CHAT_LINE.match(line)
        offset = lead.end() if lead else 0
        message = line[offset:]
        if is_asked and offset and message.strip():
            yield from (
                Span(span.start + begin + offset, span.end + begin + offset, span.kind)
                for span in answer_spans(message)
            )
        if message.strip():
            is_question = bool(offset) and len(line) <= _MAX_ANSWER_CHARS and "?" in message.replace("\uff1f", "?")
            is_asked = is_question and asks_for_secret(message)
        begin += len(line) + 1


def answer_spans(text: str, *, of_phrase: bool = False) -> Iterator[Span]:
    """Yield the secret in a short reply to a request. With `of_phrase`, the secret may consist of ordinary words."""
    stripped = text.strip()
    # If a rule has already found a secret, that secret is the answer.
    if not may_contain_answer(text) or PLACEHOLDER.search(stripped):
        return
    begin = text.index(stripped)
    if len(stripped.split()) == 1:
        value = stripped.strip("\"'`").rstrip(".,")
        if _is_single(value):
            yield _span(text, value, begin)
        return
    phrase = (_SEED_PHRASE if not of_phrase else _ANY_PHRASE).fullmatch(stripped.strip("\"'`. "))
    if phrase:
        yield _span(text, phrase[0], begin)
        return
    for match in _CHAT_WORD.finditer(text):
        wrapped = _QUOTED_VALUE.match(text, match.start(), match.end())
        value = wrapped[1] if wrapped else strip_sentence_end(match[0].lstrip(_OPENING_QUOTES), ".,;:!?)*_\"'`»”」")
        if _is_stated_value(value, wrapped is not None) and (wrapped or not _follows_preposition(text, match.start())):
            yield _span(text, value, match.start())


def printed_spans(text: str) -> Iterator[Span]:
    """Yield the secrets in the output of a command that names a secret.

    These are the plausible values among the first lines, as long as each line is a single word, and generated passwords
    at the end of any line.
    """
    if "-----END" in text:  # the rule for PEM keys handles it
        return
    begin = 0
    spans: list[Span] = []
    for line in text.split("\n", _MAX_PRINTED_LINES)[:_MAX_PRINTED_LINES]:
        numbering = _NUMBERED_LINE.match(line)
        value = line[numbering.end() if numbering else 0 :].strip().strip("\"'`,")
        if " " in value or "\t" in value or len(value) > _MAX_PRINTED_CHARS:
            break
        is_name = (
            "/" in value or "=" in value or _HOST.fullmatch(value) is not None
        )  # the path of a secret, a setting, a host
        if is_name and not is_generated(value):
            break
        if PLACEHOLDER.search(value):
            pass  # already redacted
        elif is_generated(value) or is_stated_password(value) or (_KEY_LIKE.fullmatch(value) and looks_random(value)):
            spans.append(_span(text, value, begin))
        begin += len(line) + 1
    yield from spans
    for match in _LAST_OF_LINE.finditer(text):
        if is_generated(match["value"]):
            yield Span(*match.span("value"), "SECRET")
    yield from (Span(*match.span(), "PRIVATE_KEY") for match in _KEY_BYTES.finditer(text))


def _is_request(sentence: str) -> bool:
    return sentence.rstrip()[-1:] in ("?", "\uff1f") or _REQUEST.search(sentence) is not None


def _names_secret(sentence: str) -> bool:
    sentence = _SETTINGS_OF_SECRETS.sub("", sentence)
    if _SECRET_NAMES.search(sentence) or _CODE_NAMES.search(sentence) or has_non_ascii_word(sentence):
        return True
    return any(
        name_strength(word) >= Strength.TOKEN or word.lower() in PASSWORD_WORDS or word.lower() in CORRECTIONS
        for word in _HYPHENATED_WORD.findall(sentence)
    )


def _is_single(value: str) -> bool:
    """Return whether a one-word message is the secret rather than `yes`, a path or an address."""
    if PLACEHOLDER.search(value) or len(value) < 4:
        return False
    if _ONE_TIME_CODE.fullmatch(value) or is_generated(value) or is_stated_password(value) or is_unknown(value):
        return True
    return len(value) >= 16 and has_digit(value) and not is_no_secret(value) and looks_random(value)


def _is_stated_value(value: str, is_wrapped: bool) -> bool:
    if len(value) < 5 or PLACEHOLDER.search(value) or _HOST.fullmatch(value):
        return False
    if is_generated(value) or is_stated_password(value) or (is_unknown(value) and (is_wrapped or is_odd(value))):
        return True
    return _ONE_TIME_CODE.fullmatch(value) is not None and has_digit(value) and len(value) >= 6


def _follows_preposition(text: str, begin: int) -> bool:
    before = text[max(0, begin - 20) : begin].split()
    return bool(before) and before[-1].lower() in _PREPOSITIONS


def _span(text: str, value: str, begin: int) -> Span:
    start = text.index(value, begin)
    return Span(start, start + len(value), "PASSWORD")
