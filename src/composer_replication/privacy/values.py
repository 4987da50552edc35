"""Find the value that belongs to a secret's name.

The value may be quoted or bare, in a table cell or a tag, after a type annotation, in a call, or in a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from composer_replication.privacy.entropy import is_public_id
from composer_replication.privacy.plausible import (
    is_bare_password,
    is_credential,
    is_directory,
    is_generated,
    is_handle,
    is_identifier,
    is_literal_secret,
    is_login,
    is_odd,
    is_passphrase,
    is_path,
    is_phrase_of,
    is_plausible,
    is_random_value,
    is_stated_password,
    is_unknown,
    names_a_handle,
    strip_sentence_end,
)
from composer_replication.privacy.rules import Span, has_digit, is_strong, word_set
from composer_replication.privacy.secret_names import PASSWORD_WORDS, Strength, name_strength

WIDE_SIGNS = "\uff1a\uff1d"  # the full-width colon and equals sign in Chinese text
# Between name and value: a closing quote or bracket, then a sign. `"password": "hunter2"` -> `": `, `PASS := x1` ->
# ` := `, and the YAML block of `password: |\n  hunter2` -> `: |\n  `.
_SIGN = re.compile(
    r"(?P<close>\\*[\"'`]?[\])]?\*{0,2})(?:\.{2,60})?\s{0,3}(?P<sign>=>|:=|\+=|\?=|==|!=|<-|::|[:=\uff1a"
    r"\uff1d])(?!=)\*{0,2}[ \t]*"
    r"(?P<here><<[-~]?\\*[\"']?\w{1,20}\\*[\"']?[ \t]*(?:\\n|\n)[ \t]*)?"
    r"(?:(?:\\n|\n)[ \t]*(?=\\*[\"']))?"
    r"(?:!(?:!?[a-z]+)?[ \t]+|&\w{1,20}[ \t]+)?(?:[|>][+-]?[ \t]*(?:\\n|\n)[ \t]*(?:\d{1,6}[→\t][ \t]*)?)?"
    r"(?:\[-|\{\+)?(?:(?:str|bytes|f|b|r|u|Some|String::from|new String)(?=\\*[\"'(])\(?)?"
)
# The fallback for an empty variable: `os.getenv("TOKEN") or "hunter2"` -> `") or `, `token || 'hunter2'` -> ` || `.
_FALLBACK = re.compile(
    r"(?P<close>(?:[:?] ?)?\\*[\"'`]?[\])]{0,2})\s{0,3}(?P<sign>\|\||\?\?|\?:|or\b)\s{0,3}(?=\\*[\"'`])"
)
# The end of an opening tag: `<password>hunter2</password>` -> `>`.
_TAG = re.compile(r"(?P<close>)(?P<sign>>)(?=[^\0<>\s@:\"'`])")
# The sibling field in `{"name": "DB_PASSWORD", "value": "hunter2"}` -> `", "value": `.
_VALUE_FIELD = re.compile(
    r"(?P<close>\\*[\"'`]?)(?P<sign>(?::\s?\{)?[\s,;]{0,6}(?:\\n|\n)?(?:\s{0,8}\d{1,6}[→\t])?[\s-]*\\*[\"']?(?:value|Value|default)\\*[\"']?\s?[:=]\s*)"
)
# A cell in a Markdown table: `| password | hunter2 |` -> ` | `.
_CELL = re.compile(r"(?P<close>\*{0,2}`?)[ \t]{0,40}(?P<sign>\|)[ \t]{0,40}(?=[^\0\s|])")
# Nothing but a blank: `requirepass hunter2` -> ` `; not ` -v`, which is another option.
_SPACE = re.compile(r"(?P<close>\\*[\"'`]?\]?)(?P<sign>[ \t]+(?:\d{1,2}[ \t]+)?|\\t)(?=[^\0\s=:\-&|>(){}\[\],;])")
# A name of words joined by signs: `X-Api-Key`, `access_token`; not `hunter-42`.
_NAME = re.compile(r"(?:[A-Za-z]{1,16}+[_-])++[A-Za-z]{1,16}+")
# `settings.token`; not `hunter2`.
_WORD_OF_CODE = re.compile(r"[A-Za-z_.]+")
# What a test runner prints after "PASS:": `TestLogin/empty`, `auth::rejects-bad-login`; not `hunter2`.
_TEST_NAME = re.compile(r"[Tt]est\w*+(?:[/.:]+[\w-]++)*+|\w++(?:(?:/|::)[\w.-]++)++")
# The end of a value in a URL: `a1b2c3&page=2` -> `&`.
_ADDRESS_PART = re.compile(r"[?&;#]")
# A psql variable: `PASSWORD :'reporting_pw'` -> ` :'reporting_pw'`.
_PSQL_VARIABLE = re.compile(r"\s+:'\w+'")
_TEMPLATE_LEAD = 80
# The text before a name that is itself a value: `type="`.
_IS_VALUE = re.compile(r"=\\*[\"']?\Z")
# A literal passed on after a name: `("password", "hunter2")` -> `", `, `getByLabel('Password').fill('hunter2')` ->
# `').fill(`, PHP's own notation `s:8:"password";s:7:"hunter2";` -> `";s:7:`, and the answer to a prompt in expect,
# `"assword:"; send("hunter2")` -> `:"; send(`.
_CALL = re.compile(
    r"(?P<close>\]?\\*[\"'`]?)(?:\)\.(?:type|fill|sendKeys|send_keys))?\s?"
    r"(?P<sign>[,(]|\s|;s:\d{1,5}:|(?::\s?\\*[\"'`])\)?;?\s{0,4}(?:send|sendline|write|type)\w{0,10}\("
    r"?|\sFOR\s[^\0\n=;]{1,80}=|\s<<<)\s{0,12}(?=\\*[\"'`])"
)


def value_after(text: str, start: int, end: int, strength: Strength) -> Span | None:
    """Return the span of the value that follows a name, or None."""
    if text[start - 1 : start] not in ("<", ":") and (match := match_typed(text, end)):
        return _literal(text, start, match, strength)
    if (literal := _generated_value(text, end)) is not None:
        return Span(*literal, _kind_of(strength))
    if match := _SIGN.match(text, end):
        return (
            _value_at(text, start, match, strength)
            or _in_code(text, start, end, strength)
            or _value_in_sentence(text, start, end, strength)
        )
    if match := _VALUE_FIELD.match(text, end):
        return _value_at(text, start, match, strength)
    if match := _FALLBACK.match(text, end) or _CALL.match(text, end):
        span = _value_at(text, start, match, strength)
        if span and text[start - 1] == ":" and match["sign"].isspace():  # a map in Clojure: `{:password "hunter2"}`
            return span
        return span if span and _is_argument(text[span.start : span.end], strength, text[start - 1 : start]) else None
    if (match := match_handed(text, end)) and (span := _value_at(text, start, match, strength)):
        return span if is_passed_secret(text[span.start : span.end]) else None
    if text[end] == ">" and (match := _TAG.match(text, end)):
        return _value_at(text, start, match, strength)
    if match := _CELL.match(text, end):
        return _value_at(text, start, match, strength, spaced=True)
    if (match := _SPACE.match(text, end)) and not _IS_VALUE.search(text, max(0, start - 6), start):
        flag = text[max(0, start - 2) : start].endswith("-")
        if (span := _value_at(text, start, match, strength, spaced=not flag)) is not None:
            return span
    return _value_in_sentence(text, start, end, strength)


def _literal(text: str, start: int, match: re.Match[str], strength: Strength) -> Span | None:
    """Return the literal after a type or in a call, or None.

    Calls also receive strings that are not secrets, so a literal in a call must look like a secret by itself.
    """
    span = _value_at(text, start, match, strength)
    around = text[match.end("sign") : match.end()]
    if span and "[" in around and is_identifier(text[span.start : span.end]):  # a list of names in code
        return None
    called = "(" in around
    return span if span and (not called or is_passed_secret(text[span.start : span.end])) else None


def is_passed_secret(value: str) -> bool:
    """Return whether a literal that is passed as an argument looks like a secret by itself."""
    return is_literal_secret(value) or is_unknown(value)


def _in_code(text: str, start: int, end: int, strength: Strength) -> Span | None:
    """Return the literal inside a cast or a call that follows an assignment, or None."""
    if match := _match_wrapped(text, end):
        return _literal(text, start, match, strength)
    return None


def _is_argument(value: str, strength: Strength, before: str) -> bool:
    """Return whether an argument is a secret. It must not contain spaces, because messages and labels are arguments,
    too.

    After a command-line option, a passphrase counts as well.
    """
    if before == "-" and strength == Strength.PASSWORD and is_passphrase(value):
        return True
    if is_path(value) or (is_identifier(value) and not has_digit(value)):
        return False
    return " " not in value and (
        has_digit(value) or (strength == Strength.PASSWORD and not value.isalpha() and is_unknown(value))
    )


def _value_at(text: str, start: int, match: re.Match[str], strength: Strength, *, spaced: bool = False) -> Span | None:
    """Return the value after an assignment or another sign, unless it is a name, a folder, a test or a word in code."""
    name = text[start : match.start()]
    if _PSQL_VARIABLE.match(text, match.start()):
        return None
    if "lookup(" in text[max(0, start - _TEMPLATE_LEAD) : start].rpartition("\n")[2]:
        return None  # `lookup('hashi_vault', 'secret=kv/db:password')`
    if match.re is _CELL and text.rfind("{{", max(0, start - _TEMPLATE_LEAD), start) > text.rfind("\n", 0, start):
        return None  # a template filter: `{{ .Values.password | quote }}`
    bounds = _quoted(text, match.end())
    extent = (*bounds, True) if bounds else _bare(text, start, match, spaced)
    if extent is None:
        return None
    begin, end, literal = extent
    begin = _skip_scheme(text, begin, end)
    value = text[begin:end]
    # The message for an unset variable: `${TOKEN:?not set}`.
    if value.startswith("?") and text[start - 2 : start] == "${":
        return None
    if bounds and strength == Strength.PASSWORD and is_phrase_of(name, value):
        return Span(begin, end, "PASSWORD")
    if (
        not value
        or (
            spaced
            and not is_bare_password(bare := value.rstrip("!?*:;,._"))
            and not (match.re is _CELL and strength == Strength.PASSWORD and is_unknown(bare))
        )
        or is_directory(name, value)
    ):
        return None
    if text[begin - 1] == "`" and _WORD_OF_CODE.fullmatch(value):  # code quoted in a sentence
        return None
    if name.upper() == "PASS" and match["sign"] == ":" and _TEST_NAME.fullmatch(value):
        return None
    if DIGITS.fullmatch(value) and name.lower() in NUMBER_NAMES:
        return Span(begin, end, "PASSWORD")
    return (
        Span(begin, end, _kind_of(strength))
        if _is_plausible_under_name(name, value, strength) and is_plausible(value, strength, literal)
        else None
    )


def _bare(text: str, start: int, match: re.Match[str], spaced: bool) -> tuple[int, int, bool] | None:
    """Return the bounds of an unquoted value, and whether the value is known to be text rather than code."""
    # A comparison, or an expression in braces: no literal follows.
    if match["sign"] in ("==", "!=") or (match.re is _VALUE_FIELD and text.startswith("{", match.end())):
        return None
    name, begin = text[start : match.start()], match.end()
    env = _is_env(text, start, match)
    end = _bare_end(text, start, begin, env)
    if names_a_handle(name):  # in a URL, which continues after the value
        end = begin + len(_ADDRESS_PART.split(text[begin:end], maxsplit=1)[0])
    literal = env or spaced or text[start - 1 : start] in ("-", "?", "&") or match.re in (_TAG, _VALUE_FIELD)
    here = match.re is _SIGN and match["here"] is not None
    literal = literal or here
    value = text[begin:end]
    if not literal and (is_strong(value) or is_unknown(value)) and not is_identifier(value):
        is_assigned = match["sign"] in WIDE_SIGNS or _is_setting(text, start, match)
        is_assigned = is_assigned or (match["sign"] == ":" and is_credential(name, value))
        literal = is_assigned
    return begin, end, literal


def _is_plausible_under_name(name: str, value: str, strength: Strength) -> bool:
    """Return whether a value is plausible for its name.

    For a name that only weakly indicates a secret, the value must look like a key or a login. Header names and session
    ids are excluded.
    """
    if strength == Strength.WEAK and not (
        is_random_value(value) or is_handle(name, value) or is_credential(name, value) or is_login(name, value)
    ):
        return False
    if strength == Strength.TOKEN and not has_digit(value) and name_strength(value) >= Strength.TOKEN:
        return _NAME.fullmatch(value) is None  # the name of a field or a header
    if strength == Strength.WEAK and name.lower().endswith("id") and is_public_id(value):  # `--key-id`
        return False
    return not (names_a_handle(name) and is_public_id(value))  # ids of agent sessions are public


def _is_setting(text: str, start: int, match: re.Match[str]) -> bool:
    """Return whether a name and value look like Go, PHP or makefiles: `{Password:hunter2}` or `PASS := hunter2`."""
    name = text[start : match.start()]
    if match["sign"] == "=" and text[match.start() : match.start() + 2].isspace():  # aligned in columns
        return True
    if match["sign"] == "=>" and (match["close"].endswith("]") or name.isupper()):  # an array printed by PHP
        return True
    printed = match["sign"] == ":" and match.end() - match.start() == 1 and text[start - 1 : start] in (" ", "{")
    return printed or (match["sign"] in (":=", "?=") and name.upper() == name)


def is_assigned_name(text: str, end: int) -> bool:
    """Return whether an assignment, a default or a type follows the name that ends at `end`."""
    return (_SIGN.match(text, end) or _FALLBACK.match(text, end) or match_typed(text, end)) is not None


def is_passed_along(text: str, end: int) -> bool:
    """Return whether the name that ends at `end` is followed by a literal in a call."""
    return _CALL.match(text, end) is not None


# A small grammar of declarations for all languages. It is tried only after the name of a secret, and only within one
# line.

_MAX_DECLARATION_CHARS = 200  # between a name and its literal
_QUOTE = r"\\*[\"'`]"
# The parts of a type: a name with members and generics, an array, a pointer, a lifetime, a union of two types.
_TYPE_NAME = r"[A-Za-z_][\w.]*+(?:::[\w.]++)*+"
_BRACKETS = r"\[[^\0\n=\]]{0,60}(?:\[[^\0\n=\]]{0,40}\][^\0\n=\]]{0,40})?\](?:(?:const|mut)\s)?"
_GENERIC = r"<[^\0\n=>]{0,60}(?:<[^\0\n=>]{0,40}>[^\0\n=>]{0,20})?>"
_PARENTHESES = r"\([^\0\n()]{0,40}\)"
_ATOM = (
    rf"(?:[&*?]{{0,2}}+(?:'[a-z]{{1,12}}\s)?(?:(?:mut|const|dyn|final|unsafe)\s)?(?:{_TYPE_NAME}|{_BRACKETS}"
    rf"(?:{_TYPE_NAME}(?:\s{_TYPE_NAME})?)?)(?:{_BRACKETS}|{_GENERIC}|{_PARENTHESES}|[*?!&]|\s?\*)*+)"
)
# `Annotated[str, Field(min_length=3)]`: its arguments may contain signs.
_ANNOTATED = r"(?:\w+\.)?Annotated\[[^\0\n\"'`]{0,120}\]"
_TYPE = rf"(?:{_ANNOTATED}|{_ATOM}(?: ?\| ?{_ATOM}| {_ATOM}){{0,3}})"
_ASSIGNED = r"[ \t]{0,3}(?P<sign>:=|=)(?![=>])"
# A cast, a prefix of the literal, or calls around it: `(char *)`, `b`, `@`, `[]byte(`, `Field(default=`, `lambda: `.
_CALLEE = (
    r"(?:new\s)?(?:&|\[\]|::)?[A-Za-z_$][\w$]*+(?:(?:\.|::|->|\\)[A-Za-z_$][\w$]*+)*+!?(?:<[\w, ]{1,30}>)?\(\s{0,8}"
)
_KEYWORD = r"(?:[A-Za-z_]\w{0,30}\s?[=:]\s?)?(?:lambda:\s?|\(\)\s?=>\s?)?"
_PREFIX = r"(?:\([A-Za-z_][\w\s]{0,30}[*&]{0,2}\)\s?|\bstring\(\d{1,6}\)\s)?(?:\[\]\w{1,12}\{|\[|\(\s{0,8})?"
_STRING_PREFIX = r"(?:@|[bBrRfFuUNLQ]{1,2}|u8)?"
_CALLS_AND_QUOTE = (
    rf"\s{{0,8}}(?:\\\s{{0,8}})?{_PREFIX}(?:{_CALLEE}{_KEYWORD}){{0,3}}{_KEYWORD}{_STRING_PREFIX}(?={_QUOTE})"
)
# `password: Optional[str] = "hunter2"` -> `: Optional[str] = `, `char token[] = "hunter2"` -> `[] = `; not ` = 5`.
_TYPED = re.compile(
    rf"(?P<close>)(?:[?!]?[ \t]?:{{1,2}}[ \t]{{0,2}}{_TYPE}|[ \t]{{1,3}}(?:[Aa][Ss] )?{_TYPE}|\[[^\0\n\]]{{0,20}}\]"
    rf"|\s?\{{\s?(?:get|set|init)[^\0\n{{}}\"']{{0,40}}\}}){_ASSIGNED}{_CALLS_AND_QUOTE}"
)
# `secret = SecretStr("hunter2")` -> ` = SecretStr(`, `token := []byte("hunter2")` -> ` := []byte(`.
_IN_CALL = re.compile(
    rf"(?P<close>\\*[\"'`]?[\])]{{0,2}})\s{{0,3}}(?P<sign>=>|:=|\+=|\?=|\?\?=|\|\|=|[:=])(?!=){_CALLS_AND_QUOTE}"
)
# Code that passes the literal on: `password{"hunter2"}` -> `{`, `password.equals("hunter2")` -> `.equals(`,
# `expect(password).toBe('hunter2')` -> `).toBe(`.
_BY_METHOD = re.compile(
    rf"(?P<close>\\*[\"'`]?\]?)(?P<sign>"
    rf"\{{|\)?(?:\s{{0,9}}\.\w{{2,30}}\(\){{0,1}}){{0,2}}\s{{0,9}}\.\w{{2,30}}\(\s?)(?={_QUOTE})"
)

# The arguments of a call that logs in or signs. The first in `"ada", Some("hunter2"))` -> `ada`, the second
# `Some("hunter2"))` -> `hunter2`.
_ARGUMENT = re.compile(
    rf"\s{{0,40}}(?:\d{{1,6}}[→:|\t]\s{{0,40}})?(?:{_CALLEE})?{_KEYWORD}{_STRING_PREFIX}(?:(?P<quote>{_QUOTE})(?P<value>(?:(?!(?P=quote))[^\0"
    rf"\n]){{0,200}})(?P=quote)"
    r"|[^\0\n\"'`(),]{0,80}(?:\([^\0\n\"'`()]{0,60}\))?)\){0,2}\s{0,3}(?P<more>,)?"
)
_MAX_ARGUMENTS = 5
# `"`, `'` or the backquote in Go and JavaScript.
_ANY_QUOTE = re.compile("[\"'`]")
_TYPE_STARTS = frozenset(": \t?!{[")


def arguments(text: str, begin: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield each literal among the arguments that begin at `begin`, as the index of the argument and the literal's
    bounds.
    """
    for index in range(_MAX_ARGUMENTS):
        match = _ARGUMENT.match(text, begin, begin + 2 * _MAX_DECLARATION_CHARS)
        if match is None:
            return
        if match["value"]:
            yield index, match.span("value")
        if match["more"] is None:
            return
        begin = match.end()


def match_typed(text: str, end: int) -> re.Match[str] | None:
    """Match the type and the equals sign after a name that ends at `end`, up to the opening quote of the literal."""
    if text[end] not in _TYPE_STARTS:
        return None
    newline = text.find("\n", end, end + _MAX_DECLARATION_CHARS)
    sign = text.find("=", end, newline if newline >= 0 else end + _MAX_DECLARATION_CHARS)
    if sign < 0 or not _ANY_QUOTE.search(text, sign, sign + _MAX_DECLARATION_CHARS):
        return None
    return _TYPED.match(text, end, end + _MAX_DECLARATION_CHARS)


def _match_wrapped(text: str, end: int) -> re.Match[str] | None:
    """Match an assignment followed by the beginning of a cast, a call or a list, up to the literal inside."""
    return _IN_CALL.match(text, end, end + _MAX_DECLARATION_CHARS)


def match_handed(text: str, end: int) -> re.Match[str] | None:
    """Match a method call on the name that ends at `end`, or braces after the name, up to the literal inside."""
    return _BY_METHOD.match(text, end, end + _MAX_DECLARATION_CHARS) if text[end] not in " :=" else None


# The beginning and the end of values.

# A quote, with its backslashes in nested JSON: `\\"` -> `\\"`, `'`.
_OPENING_QUOTE = re.compile(r"\\*[\"'`]")
# An unquoted value: `hunter2 # old` -> `hunter2`, `it's4me` -> `it's4me`; a backslash before n, r, t or u ends it.
_BARE = re.compile(r"(?:[^\0\s\"'`\\<>]++|\\(?![nrtu\"'\\/`])|(?<=[A-Za-z0-9!@#$%^&*])['](?=[A-Za-z0-9!@#$%^&*]))+")
# `Bearer a1b2c3` -> `Bearer `, `GenieKey a1b2c3`; not `bearer-token`.
_SCHEMES = re.compile(
    r"(?i:(?:bearer|basic|token|apikey|api-key|digest|key|negotiate|splunk|geniekey|sso-key|aws4-hmac-sha256)(?:"
    r"[ \t]+|\s*=\s*))"
)
# Two pairs of a URL: `hunter2&user=ada`; not `hunter&2`.
_NEXT_PAIR = re.compile(r"[^\0&\s]+&[\w.-]+=")
# The start of the next setting: `hunter2;Database=crm` -> `;`, `hunter2,user=ada` -> `,`, `hunter2&&make` -> `&&`; not
# `a;b`.
_NEXT_NAME = re.compile(r";(?=\s*[A-Za-z][\w .-]{0,40}=)|,(?=[A-Za-z_][\w.-]{0,40}[=:])|&&|\|\|")
_OPENERS = {")": "(", "]": "[", "}": "{"}
# `export DB_HOST=localhost`, `PORT=8080`; not `host: localhost`.
_ENV_LINE = re.compile(r"(?:export |declare -x |set )?[A-Za-z_]\w*=")
# The text before a generated password: `password: k[9` -> `: `, `PASSWORD=k[9` -> `=`, `"password" => "k[9` ->
# `" => `, `<password><![CDATA[k[9` -> `><![CDATA[`, `requirepass k[9` -> ` `.
_GENERATED_SIGN = re.compile(
    r"\\*[\"'`]?\]?(?:[ \t]{0,20}(?:=>|:=|[:=])[ \t]{0,20}|[ \t]{0,40}\|[ \t]{1,20}|>(?:<!\[CDATA\[)?|[ \t]{1,40})"
)
# Printable ASCII without blanks: `k[9}Q(w-T,2xB rest` -> `k[9}Q(w-T,2xB`.
_GENERATED_WORD = re.compile(r"[!-~]+")
# The next pair, or the end of a tag or an escaped string: `k[9}Q;port=5432` -> `;`, `k[9}Q&user=ada` -> `&`,
# `k[9}Q\\nHOST=db` -> `\\n`, `k[9}Q</password>` -> `</`.
_GENERATED_ENDS = re.compile(
    r"(?:[;,&]|\\+[nrt])(?=(?:[a-z]{3}|[A-Z]{3}|[A-Z][a-z]{2})[\w.-]{0,40}[=:])|\]\]>|</|\\+n\Z|\\+[\"'](?=[,:}\])]|\Z)"
)
# A closing quote: `",`, `"`; not `"x`, a quote inside a value.
_QUOTES_END = re.compile(r"\\*[\"'`](?:[\s,;:)}\]>/]|\Z|\\)")
_AFTER_GENERATED = "\"'`,;)]}>"
_MAX_GENERATED_CHARS = 200
# Longer secrets have delimiters (PEM, JWT) and separate rules. The limit keeps every search below linear.
_MAX_VALUE_CHARS = 4000
_MAX_BARE_CHARS = 2000
_MAX_LEAD_CHARS = 80


def _bare_word(text: str, begin: int) -> str:
    """Return the unquoted word at `begin`. A quote between two letters belongs to the word."""
    match = _BARE.match(text, begin, begin + _MAX_BARE_CHARS)
    return _generated_word(text, begin) or (match[0] if match else "")


def _quoted(text: str, begin: int) -> tuple[int, int] | None:
    """Return the bounds of the quoted text at `begin`, or None. Escaped quotes do not end the text."""
    quote = _OPENING_QUOTE.match(text, begin)
    if quote is None:
        return None
    mark, begin = quote[0], quote.end()
    if text.startswith(mark * 2, begin) and len(mark) == 1:  # triple quotes
        mark, begin = mark * 3, begin + 2
    nul = text.find("\0", begin, begin + _MAX_VALUE_CHARS)  # the border between strings that are scanned together
    limit = nul if nul >= 0 else min(len(text), begin + _MAX_VALUE_CHARS)
    end = text.find(mark, begin, limit)
    while len(mark) == 1 and end > begin and text[end - 1] == "\\" and text[end - 2] != "\\":
        end = text.find(mark, end + 1, limit)
    newline = text.find("\n", begin, limit)
    if end < 0 or (0 <= newline < end and mark != "`" and not text.startswith("-----BEGIN", begin)):
        end = begin + len(_bare_word(text, begin))
    return begin, end


def _generated_value(text: str, end: int) -> tuple[int, int] | None:
    """Return the bounds of a generated password after a sign or a space at `end`, or None.

    Such a password may contain brackets, quotes and commas. Without quotes around it, it ends at the next space or at
    the next name with a value.
    """
    sign = _GENERATED_SIGN.match(text, end)
    if sign is None:
        return None
    begin = sign.end()
    if (bounds := _quoted(text, begin)) and _QUOTES_END.match(text, bounds[1]):
        return bounds if is_generated(text[slice(*bounds)]) else None
    value = _generated_word(text, begin).rstrip(_AFTER_GENERATED)
    return (begin, begin + len(value)) if value else None


def _generated_word(text: str, begin: int) -> str:
    """Return the word at `begin` if it looks like the output of a password generator, otherwise an empty string."""
    word = _GENERATED_WORD.match(text, begin, begin + _MAX_GENERATED_CHARS)
    value = _GENERATED_ENDS.split(word[0], maxsplit=1)[0] if word else ""
    return value if is_generated(value.rstrip(_AFTER_GENERATED)) else ""


def _is_env(text: str, start: int, match: re.Match[str]) -> bool:
    """Return whether the match is `NAME=value` without spaces, as in shells and dotenv files."""
    name = text[start : match.start()]
    return match["sign"] == "=" and match.end() - match.start() == 1 and name.upper() == name


def _bare_end(text: str, start: int, begin: int, env: bool) -> int:
    """Return the end of the unquoted value that begins at `begin` and whose name begins at `start`."""
    value = _bare_word(text, begin)
    end = begin + len(value)
    if env and text[end : end + 1] == " " and _in_dump(text, start):
        newline = text.find("\n", begin, begin + _MAX_VALUE_CHARS)
        return newline if newline >= 0 else min(len(text), begin + _MAX_VALUE_CHARS)
    before = text[start - 1 : start]
    if before in ("?", "&") or _NEXT_PAIR.match(value):
        value = value.split("&", 1)[0]
    value = _NEXT_NAME.split(value, maxsplit=1)[0]
    value = _up_to_closing_bracket(value, text[max(text.rfind("\n", 0, start) + 1, start - _MAX_LEAD_CHARS) : start])
    return begin + len(value.rstrip(",;)}]:." if not env else ";"))


def _up_to_closing_bracket(value: str, lead: str) -> str:
    """Return the part of a bare value before the bracket that closes one in `lead`, the line's earlier text."""
    if ")" not in value and "]" not in value and "}" not in value:
        return value
    opened: list[str] = []
    num_before = 0  # brackets left open by `lead`
    for index, sign in enumerate(lead + value):
        if sign in "([{":
            opened.append(sign)
        elif (opener := _OPENERS.get(sign)) and opener in opened:
            depth = len(opened) - 1 - opened[::-1].index(opener)
            if index >= len(lead) and depth < num_before:
                return value[: index - len(lead)]
            del opened[depth:]
        if index == len(lead) - 1:
            num_before = len(opened)
    return value


def _in_dump(text: str, start: int) -> bool:
    """Return whether a neighboring line is `NAME=value` too. In such a list, values extend to the end of the line."""
    line_start = text.rfind("\n", max(0, start - _MAX_LEAD_CHARS), start) + 1
    if start - line_start > _MAX_LEAD_CHARS or text[line_start:start].strip() not in ("", "export", "declare -x"):
        return False
    previous = text[text.rfind("\n", max(0, line_start - _MAX_VALUE_CHARS), max(0, line_start - 1)) + 1 : line_start]
    newline = text.find("\n", start, start + _MAX_VALUE_CHARS)
    following = text[newline + 1 : newline + 80] if newline >= 0 else ""
    return bool(_ENV_LINE.match(previous) or _ENV_LINE.match(following))


def _skip_scheme(text: str, begin: int, end: int) -> int:
    """Return the position after an authorization scheme such as `Bearer`."""
    scheme = _SCHEMES.match(text, begin, end)
    return scheme.end() if scheme else begin


# Values in sentences, with words between name and value, and keys written as bytes or groups.

_FILLERS = (
    r"(?:['\u2019]?s)?(?:\s?\([^\0\n()]{1,30}\))?"
    r"(?:\s{1,4}(?:[^\W_][\w.'@-]{0,24}|\[\w{1,20}\]|[\"'][^\0\s\"']{1,120}[\"'])){0,6}?"
)
_SPEECH_QUOTES = r"[\"'`(*«„“]{0,4} ?"
# `the password for the box is hunter2` -> ` for the box is `, `the token, it's hunter2` -> `, it's `; not
# `s expire weekly`.
_SPEECH = re.compile(
    rf"(?i:{_FILLERS}"
    r"(?:\s{1,2}(?:is|was|are|be|to|as|with|from|equals|type|enter|lautet|ist|est|es|e|è|é|är|er|on|je|ay|ni|dir|este"
    r"|jest|adalah|ialah|là|=|[?\u203a»]|->|→|—|-):?|,?\s(?:it|this)(?:['\u2019]s|\sis)|\s?:|[?\u203a»]"
    r"|\s\((?=currently|now))\s{0,12}(?:set to\s|now\s|just\s|currently\s|it['\u2019]s\s)*)"
    rf"(?<=[\s(]){_SPEECH_QUOTES}"
)
# A colon after more words: `a password is generated for ada: hunter2` -> ` is generated for ada: `.
_SPEECH_WITH_COLON = re.compile(rf"(?i:{_FILLERS}\s?:\s{{1,12}}){_SPEECH_QUOTES}")
# The next line has a different name: `\nuser: ada`, `\n  db host = x`; not `\nhunter2`.
_NEW_FIELD = re.compile(r"\n[ \t]*[\w.-]+(?: [\w.-]+){0,2}\s?[:=]")
# `the token has expired. RequestId: `; not `the token is `.
_OF_ID = re.compile(r"[Ii][Dd]\s?:?\s*\Z")
# ` for this box: `, ` für den Server: `; not ` is `.
_FOR_WHAT = re.compile(r"\s(?:for|of|to|on|für|von|pour|de|para|per|voor|til|för)\s")
# A PIN: `4821`; not `12`, too short.
DIGITS = re.compile(r"\d{3,8}")
NUMBER_NAMES = frozenset(("pin", "cvv", "cvc", "otp", "pincode", "cvv2"))
# A key as a list of bytes: `key = [0x1f, 0x8b, 0x08, 0x00, 0x3c, 0x7d, 0xe2, 0x51]` ->
# `0x1f, 0x8b, 0x08, 0x00, 0x3c, 0x7d, 0xe2, 0x51`.
_BYTES = re.compile(
    r"[^\0\n=]{0,30}[=:]\s{0,3}[\w .:\[\]\"',(]{0,40}[\[{(]\s{0,9}"
    r"((?:(?:0x[0-9a-fA-F]{1,2}+|\d{1,3}+),\s{0,9}+){7,}(?:0x[0-9a-fA-F]{1,2}|\d{1,3}))"
)
# `0x1f`, `31`.
_NUMBERS = re.compile(r"\w+")
# The setup key of an authenticator app: `key: abcd efgh ijkl mnop` -> `abcd efgh ijkl mnop`; not `: abcd efgh`.
_GROUPS = re.compile(r"\s?[:=]\s{0,3}((?:[a-zA-Z2-7]{4} ){3,15}[a-zA-Z2-7]{4})(?![A-Za-z])")

# Links between a name and its value in a sentence: words for "is", or a sign.
_LINKS = word_set(
    "is was are be to as equals becomes now it's that's is: -> lautet ist war wird est était c'est es era son è é"
    " ora são foi eh är var er blir on oli je byl jest był to este sunt adalah ialah yaitu là ni yra buvo olan oldu"
    " bude będzie nu это есть є είναι és van lett ir ay ser será sono devient هي هو היא הוא है হলো คือ wurde"
)
_CHANGED_TO = word_set("na auf à til naar till în en su")  # before a value in quotes
_ENGLISH = frozenset(("is", "was", "it's", "that's"))  # only English words are known well enough
_SIGNS = (":", "=", "->", "→", "\uff1a")
# `hunter2, and` -> `hunter2,`.
_WORD = re.compile(r"[^\0\s]{1,120}")
_OPENING = "\"'`«„“「(*:=<\uff1a>_"
_QUOTING = frozenset("\"'`«„“「")
_CLOSING = frozenset("\"'`»”“」")
_TRAILING = ".,;:!?)*_\"'`»”」"
# A value alone on the next line: `The password is:\n    **hunter2**` -> `hunter2`; not `\nhunter2 is old`.
_NEXT_LINE = re.compile(r"(?:\r?\n[ \t>|]*){1,2}[\"'`*]{0,3}(?P<value>[^\0\s]{5,60}?)[\"'`*]{0,3}[ \t\r]*(?![^\0\n])")
# `482159`; not `4821`, which may be a port or a year.
DIGITS_ALONE = re.compile(r"\d{6,12}")
_MAX_SENTENCE_CHARS, _MAX_FILLER_WORDS, _MAX_WORDS_TO_ODD_VALUE = 200, 14, 4
# What may follow a value at the end of its statement: the end of the line, a bracket, a remark, or text in another
# script. `",`, ` # old one`, `, rotate it`; not ` is old`.
_REST = re.compile(
    r"[\"'`»”」*.,;!)\]}]{0,4}(?:[ \t\r]*|[ \t]+(?:#|//|\(|--|<!--)[^\0\n]*|[,;][ \t][^\0\n]*"
    r"|[ \t]?[\u060c\u3002\uff0c\u0964][^\0\n]*|[ \t]*[\u0370-\uffff][^\0\n]*)"
)


def _value_in_sentence(text: str, start: int, end: int, strength: Strength) -> Span | None:
    """Return the value in a sentence such as `the password for the database is ...`, or None.

    Only values that do not look like ordinary words count.
    """
    if text[end] not in ":,'\u2019" and not text[end].isspace():
        return None
    for pattern in (_SPEECH, _SPEECH_WITH_COLON) if strength == Strength.PASSWORD else (_SPEECH,):
        match = pattern.match(text, end)
        if match is not None and (_NEW_FIELD.search(match[0]) or _OF_ID.search(match[0]) or "ingerprint" in match[0]):
            return None
        if match is not None and (value := _value_in_sentence_at(text, start, end, match, strength)):
            return Span(match.end(), match.end() + len(value), _kind_of(strength))
    return None


def _value_in_sentence_at(text: str, start: int, end: int, match: re.Match[str], strength: Strength) -> str:
    begin = match.end()
    value = strip_sentence_end(_bare_word(text, begin), ".,;:!?)*_»”")
    may_be_digits = strength == Strength.PASSWORD or text[start:end].lower() in NUMBER_NAMES
    if may_be_digits and DIGITS.fullmatch(value) and len(value) >= 4:  # a one-time code
        return value
    if strength == Strength.PASSWORD:
        if text[begin - 1] in "\"'" and (bounds := _quoted(text, begin - 1)) and is_passphrase(text[slice(*bounds)]):
            return text[slice(*bounds)]
        if (
            is_passphrase(value)
            or (is_unknown(value) and is_odd(value) and "=" not in match[0])
            or (_is_last_word_of_label(text, begin, value, match) and value.lower() not in PASSWORD_WORDS)
        ):
            return value
    if (
        not is_stated_password(value)
        or is_public_id(value)
        or (strength == Strength.WEAK and not is_random_value(value))
    ):
        return ""
    if strength < Strength.PASSWORD and is_identifier(value):
        return ""
    return value if is_plausible(value, strength, True) else ""


def _is_last_word_of_label(text: str, begin: int, value: str, match: re.Match[str]) -> bool:
    """Return whether a long unknown word follows a label such as `the password for this box: ` and ends the line."""
    last = begin + len(value)
    ends = text[last : last + 1] in ("", "\n", "\0")
    return ends and _FOR_WHAT.match(match[0]) is not None and match[0].rstrip().endswith(":") and is_unknown(value)


def find_spoken_value(text: str, end: int, *, direct: bool) -> Span | None:
    """Return the span of the first unknown word after a secret's name, or None.

    The word must follow a sign, a word for "is" or a quote: `the password is hunter2`. With `direct`, a word that
    directly follows the name and ends the statement counts as well.
    """
    stop = min(
        at if at >= 0 else end + _MAX_SENTENCE_CHARS
        for at in (text.find("\n", end, end + _MAX_SENTENCE_CHARS), text.find("\\n", end, end + _MAX_SENTENCE_CHARS))
    )
    sign, linked, opened, changed = False, "", False, False
    for number, match in enumerate(_WORD.finditer(text, end, stop)):
        word = match[0]
        lead = word[: len(word) - len(word.lstrip(_OPENING))]
        sign = sign or (number == 0 and lead.startswith(_SIGNS))
        quoted_here = opened or (lead and lead[-1] in _QUOTING)
        led = sign or linked or quoted_here
        if led or (direct and not number):
            core = strip_sentence_end(word[len(lead) :].rstrip("\"'`»”」"), _TRAILING)
            begin = match.start() + len(lead)
            if led and '"' not in core and (is_stated_password(core) or (linked and is_passphrase(core))):
                return Span(begin, begin + len(core), "PASSWORD")
            closed = quoted_here and text[begin + len(core) : begin + len(core) + 2].strip()[:1] in _CLOSING
            if is_unknown(core) and (
                linked in _ENGLISH
                or (linked and is_odd(core))
                or (closed and (linked or changed))
                or _ends_statement(text, begin + len(core), stop)
            ):
                return Span(begin, begin + len(core), "PASSWORD")
            if sign and DIGITS_ALONE.fullmatch(core) and _ends_statement(text, begin + len(core), stop):
                return Span(begin, begin + len(core), "PASSWORD")
            if sign and core:
                return None
        elif not direct and number < _MAX_WORDS_TO_ODD_VALUE and _is_in_no_language(_without_quotes(word)):
            begin = match.start() + word.find(_without_quotes(word))
            return Span(begin, begin + len(_without_quotes(word)), "PASSWORD")
        opened = not _without_quotes(word) and word[-1] in _QUOTING
        bare = word.strip("*_\"'`()[],").lower()
        sign, linked, changed = bare.endswith(_SIGNS), bare if bare in _LINKS else "", bare in _CHANGED_TO
        if number > _MAX_FILLER_WORDS:
            return None
    return _on_next_line(text, stop) if sign or linked else None


def _is_in_no_language(core: str) -> bool:
    """Return whether a value is no word of any language: unknown and oddly spelled, or short words with hyphens."""
    return (is_unknown(core) and (has_digit(core) or is_odd(core))) or (is_passphrase(core) and "-" in core)


def _without_quotes(word: str) -> str:
    """Return a word without the quotes and signs around it."""
    return word.strip(_OPENING + _TRAILING)


def _ends_statement(text: str, at: int, stop: int) -> bool:
    """Return whether a statement ends after the value. Labels and messages would continue."""
    return _REST.fullmatch(text, at, stop) is not None


def _on_next_line(text: str, newline: int) -> Span | None:
    match = _NEXT_LINE.match(text, newline)
    if match is None or _NEW_FIELD.match(text, newline):
        return None
    core = strip_sentence_end(match["value"], _TRAILING)
    return (
        Span(match.start("value"), match.start("value") + len(core), "PASSWORD")
        if is_stated_password(core) or is_unknown(core)
        else None
    )


def bytes_or_groups(text: str, end: int, strength: Strength) -> Span | None:
    """Return the span of a key written as a list of bytes, or in the groups of four that authenticator apps show."""
    match = _GROUPS.match(text, end) if text[end] in " :=" else None
    if match is None and (strength >= Strength.TOKEN or text.find("0x", end, end + 60) >= 0):
        match = _BYTES.match(text, end)
    if match is None or not has_digit(match[1]) or len(set(_NUMBERS.findall(match[1]))) == 1:  # for example only zeros
        return None
    return Span(*match.span(1), "SECRET")


def _kind_of(strength: Strength) -> str:
    """Return the kind under which to redact a value whose name has this strength."""
    return {Strength.PASSWORD: "PASSWORD", Strength.TOKEN: "SECRET"}.get(strength, "KEY_VALUE")
