"""The value behind a name: in quotes, bare, in a cell or a tag, behind a type, in a call, or in a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator

from composer_replication.privacy.entropy import is_public_id
from composer_replication.privacy.names import PASSWORD_WORDS, Strength, name_strength
from composer_replication.privacy.plausible import (
    is_credential,
    is_directory,
    is_generated,
    is_given,
    is_handle,
    is_identifier,
    is_login,
    is_odd,
    is_passphrase,
    is_path,
    is_phrase_of,
    is_plausible,
    is_random_value,
    is_said,
    is_told,
    is_unknown,
    names_handle,
    trimmed,
)
from composer_replication.privacy.rules import (
    Span,
    has_digit,
    is_strong,
    word_set,
)

WIDE_SIGNS = "\uff1a\uff1d"  # a colon and an equals sign as wide as a Chinese character
# Between name and value: a closing quote or bracket, then a sign; in code also a comma, a call or a tag.
_SIGN = re.compile(
    r"(?P<close>\\*[\"'`]?[\])]?\*{0,2})(?:\.{2,60})?\s{0,3}(?P<sign>=>|:=|\+=|\?=|==|!=|<-|::|[:=\uff1a"
    r"\uff1d])(?!=)\*{0,2}[ \t]*"
    r"(?P<here><<[-~]?\\*[\"']?\w{1,20}\\*[\"']?[ \t]*(?:\\n|\n)[ \t]*)?"
    r"(?:(?:\\n|\n)[ \t]*(?=\\*[\"']))?"
    r"(?:!(?:!?[a-z]+)?[ \t]+|&\w{1,20}[ \t]+)?(?:[|>][+-]?[ \t]*(?:\\n|\n)[ \t]*(?:\d{1,6}[→\t][ \t]*)?)?"
    r"(?:\[-|\{\+)?(?:(?:str|bytes|f|b|r|u|Some|String::from|new String)(?=\\*[\"'(])\(?)?"
)
# What is taken when the environment has nothing.
_FALLBACK = re.compile(
    r"(?P<close>(?:[:?] ?)?\\*[\"'`]?[\])]{0,2})\s{0,3}(?P<sign>\|\||\?\?|\?:|or\b)\s{0,3}(?=\\*[\"'`])"
)
_TAG = re.compile(r"(?P<close>)(?P<sign>>)(?=[^\0<>\s@:\"'`])")
_VALUE_FIELD = re.compile(
    r"(?P<close>\\*[\"'`]?)(?P<sign>(?::\s?\{)?[\s,;]{0,6}(?:\\n|\n)?(?:\s{0,8}\d{1,6}[→\t])?[\s-]*\\*[\"']?(?:value|Value|default)\\*[\"']?\s?[:=]\s*)"
)
_CELL = re.compile(r"(?P<close>\*{0,2}`?)[ \t]{0,40}(?P<sign>\|)[ \t]{0,40}(?=[^\0\s|])")
_SPACE = re.compile(r"(?P<close>\\*[\"'`]?\]?)(?P<sign>[ \t]+(?:\d{1,2}[ \t]+)?|\\t)(?=[^\0\s=:\-&|>(){}\[\],;])")
_NAME = re.compile(r"(?:[A-Za-z]{1,16}+[_-])++[A-Za-z]{1,16}+")
_WORD_OF_CODE = re.compile(r"[A-Za-z_.]+")
_TEST_NAME = re.compile(r"[Tt]est\w*+(?:[/.:]+[\w-]++)*+|\w++(?:(?:/|::)[\w.-]++)++")
_ADDRESS_PART = re.compile(r"[?&;#]")
_PSQL_VARIABLE = re.compile(r"\s+:'\w+'")  # `PASSWORD :'reporting_pw'`
_TEMPLATE_LEAD = 80
_IS_VALUE = re.compile(r"=\\*[\"']?\Z")
_CALL = re.compile(
    r"(?P<close>\]?\\*[\"'`]?)(?:\)\.(?:type|fill|sendKeys|send_keys))?\s?"
    # In PHP's own notation, behind a prompt that is answered, and for whom a password is set.
    r"(?P<sign>[,(]|\s|;s:\d{1,5}:|(?::\s?\\*[\"'`])\)?;?\s{0,4}(?:send|sendline|write|type)\w{0,10}\("
    r"?|\sFOR\s[^\0\n=;]{1,80}=|\s<<<)\s{0,12}(?=\\*[\"'`])"
)


def value_after(text: str, start: int, end: int, strength: Strength) -> Span | None:
    """The value behind a name, if it is one."""
    if text[start - 1 : start] not in ("<", ":") and (match := typed(text, end)):
        return _literal(text, start, match, strength)
    if (literal := _generated_value(text, end)) is not None:
        return Span(*literal, kind_of(strength))
    if match := _SIGN.match(text, end):
        return (
            _value_at(text, start, match, strength)
            or _in_code(text, start, end, strength)
            or spoken(text, start, end, strength)
        )
    if match := _VALUE_FIELD.match(text, end):
        return _value_at(text, start, match, strength)
    if match := _FALLBACK.match(text, end) or _CALL.match(text, end):
        span = _value_at(text, start, match, strength)
        if span and text[start - 1] == ":" and match["sign"].isspace():  # a map of Clojure
            return span
        return span if span and _is_argument(text[span.start : span.end], strength, text[start - 1 : start]) else None
    if (match := handed(text, end)) and (span := _value_at(text, start, match, strength)):
        return span if is_handed(text[span.start : span.end]) else None
    if text[end] == ">" and (match := _TAG.match(text, end)):
        return _value_at(text, start, match, strength)
    if match := _CELL.match(text, end):
        return _value_at(text, start, match, strength, spaced=True)
    if (match := _SPACE.match(text, end)) and not _IS_VALUE.search(text, max(0, start - 6), start):
        flag = text[max(0, start - 2) : start].endswith("-")
        if (span := _value_at(text, start, match, strength, spaced=not flag)) is not None:
            return span
    return spoken(text, start, end, strength)


def _literal(text: str, start: int, match: re.Match[str], strength: Strength) -> Span | None:
    """A literal behind a type or inside a call. A call gets other texts, too: there only what no word could be."""
    span = _value_at(text, start, match, strength)
    around = text[match.end("sign") : match.end()]
    if span and "[" in around and is_identifier(text[span.start : span.end]):  # a list of names of code
        return None
    called = "(" in around
    return span if span and (not called or is_handed(text[span.start : span.end])) else None


def is_handed(value: str) -> bool:
    return is_given(value) or is_unknown(value)


def _in_code(text: str, start: int, end: int, strength: Strength) -> Span | None:
    """Behind a sign: a cast or a call around the literal."""
    if match := wrapped(text, end):
        return _literal(text, start, match, strength)
    return None


def _is_argument(value: str, strength: Strength, before: str) -> bool:
    """In a call only a value without spaces: messages and labels stand there too. Behind an option: small words."""
    if before == "-" and strength == Strength.PASSWORD and is_passphrase(value):
        return True
    if is_path(value) or (is_identifier(value) and not has_digit(value)):
        return False
    return " " not in value and (
        has_digit(value) or (strength == Strength.PASSWORD and not value.isalpha() and is_unknown(value))
    )


def _value_at(text: str, start: int, match: re.Match[str], strength: Strength, *, spaced: bool = False) -> Span | None:
    """The value where a sign ends, if it is one: not a name, a folder, a test or a word of code."""
    name = text[start : match.start()]
    if _PSQL_VARIABLE.match(text, match.start()):
        return None
    if "lookup(" in text[max(0, start - _TEMPLATE_LEAD) : start].rpartition("\n")[2]:
        return None  # `lookup('hashi_vault', 'secret=kv/db:password')`
    if match.re is _CELL and text.rfind("{{", max(0, start - _TEMPLATE_LEAD), start) > text.rfind("\n", 0, start):
        return None  # a filter of a template: `{{ .Values.password | quote }}`
    bounds = quoted(text, match.end())
    extent = (*bounds, True) if bounds else _bare(text, start, match, spaced)
    if extent is None:
        return None
    begin, end, literal = extent
    begin = _skip_scheme(text, begin, end)
    value = text[begin:end]
    if value.startswith("?") and text[start - 2 : start] == "${":  # what a shell says when there is none
        return None
    if bounds and strength == Strength.PASSWORD and is_phrase_of(name, value):
        return Span(begin, end, "PASSWORD")
    if (
        not value
        or (
            spaced
            and not is_said(bare := value.rstrip("!?*:;,._"))
            and not (match.re is _CELL and strength == Strength.PASSWORD and is_unknown(bare))
        )
        or is_directory(name, value)
    ):
        return None
    if text[begin - 1] == "`" and _WORD_OF_CODE.fullmatch(value):  # code in a sentence
        return None
    if name.upper() == "PASS" and match["sign"] == ":" and _TEST_NAME.fullmatch(value):
        return None
    if DIGITS.fullmatch(value) and name.lower() in NUMBER_NAMES:
        return Span(begin, end, "PASSWORD")
    return (
        Span(begin, end, kind_of(strength))
        if _suits(name, value, strength) and is_plausible(value, strength, literal)
        else None
    )


def _bare(text: str, start: int, match: re.Match[str], spaced: bool) -> tuple[int, int, bool] | None:
    """An unquoted value, and whether it is known to be text, not code."""
    # Compared with a variable, or an expression.
    if match["sign"] in ("==", "!=") or (match.re is _VALUE_FIELD and text.startswith("{", match.end())):
        return None
    name, begin = text[start : match.start()], match.end()
    env = _is_env(text, start, match)
    end = _bare_end(text, start, begin, env)
    if names_handle(name):  # of an address, which goes on
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


def _suits(name: str, value: str, strength: Strength) -> bool:
    """Whether a value is one for this name: random behind a weak one, and neither a header nor the id of a session."""
    if strength == Strength.WEAK and not (
        is_random_value(value) or is_handle(name, value) or is_credential(name, value) or is_login(name, value)
    ):
        return False
    if strength == Strength.TOKEN and not has_digit(value) and name_strength(value) >= Strength.TOKEN:
        return _NAME.fullmatch(value) is None  # the name of a field or a header
    if strength == Strength.WEAK and name.lower().endswith("id") and is_public_id(value):  # `--key-id`
        return False
    return not (names_handle(name) and is_public_id(value))  # the sessions of agents have uuids for names


def _is_setting(text: str, start: int, match: re.Match[str]) -> bool:
    """`Password:...` without a blank among other such pairs, as Go prints them, and `NAME := ...` of a makefile."""
    name = text[start : match.start()]
    if match["sign"] == "=" and text[match.start() : match.start() + 2].isspace():  # in columns
        return True
    if match["sign"] == "=>" and (match["close"].endswith("]") or name.isupper()):  # as PHP prints an array
        return True
    printed = match["sign"] == ":" and match.end() - match.start() == 1 and text[start - 1 : start] in (" ", "{")
    return printed or (match["sign"] in (":=", "?=") and name.upper() == name)


def stands_as_name(text: str, end: int) -> bool:
    """Whether a sign, a default or a type follows what ends at `end`."""
    return (_SIGN.match(text, end) or _FALLBACK.match(text, end) or typed(text, end)) is not None


def is_called(text: str, end: int) -> bool:
    """Whether a literal is handed over behind what ends at `end`."""
    return _CALL.match(text, end) is not None


# What stands between a name and its value in code: a type, a cast, a call around the literal, a default behind it.
#
# `password: Optional[str] = "..."`, `var token string = "..."`, `char token[] = "..."`, `secret = SecretStr("...")`.
# One small grammar for all languages, read only behind a name that means a secret, and never further than one line.

_LONGEST = 200  # between a name and the literal
_QUOTE = r"\\*[\"'`]"
# The parts of a type: a name with members and generics, an array, a pointer, a lifetime, a bar between two types.
_DECLARATIONS_NAME = r"[A-Za-z_][\w.]*+(?:::[\w.]++)*+"
_BRACKETS = r"\[[^\0\n=\]]{0,60}(?:\[[^\0\n=\]]{0,40}\][^\0\n=\]]{0,40})?\](?:(?:const|mut)\s)?"
_GENERIC = r"<[^\0\n=>]{0,60}(?:<[^\0\n=>]{0,40}>[^\0\n=>]{0,20})?>"
_ROUND = r"\([^\0\n()]{0,40}\)"
_ATOM = (
    rf"(?:[&*?]{{0,2}}+(?:'[a-z]{{1,12}}\s)?(?:(?:mut|const|dyn|final|unsafe)\s)?(?:{_DECLARATIONS_NAME}|{_BRACKETS}"
    rf"(?:{_DECLARATIONS_NAME}(?:\s{_DECLARATIONS_NAME})?)?)(?:{_BRACKETS}|{_GENERIC}|{_ROUND}|[*?!&]|\s?\*)*+)"
)
# `Annotated[str, Field(min_length=3)]`: its arguments may hold signs of their own.
_ANNOTATED = r"(?:\w+\.)?Annotated\[[^\0\n\"'`]{0,120}\]"
_TYPE = rf"(?:{_ANNOTATED}|{_ATOM}(?: ?\| ?{_ATOM}| {_ATOM}){{0,3}})"
_ASSIGNED = r"[ \t]{0,3}(?P<sign>:=|=)(?![=>])"
# A cast, a prefix of the literal, or calls around it: `(char *)`, `b`, `@`, `[]byte(`, `Field(default=`, `lambda: `.
_CALLEE = (
    r"(?:new\s)?(?:&|\[\]|::)?[A-Za-z_$][\w$]*+(?:(?:\.|::|->|\\)[A-Za-z_$][\w$]*+)*+!?(?:<[\w, ]{1,30}>)?\(\s{0,8}"
)
_KEYWORD = r"(?:[A-Za-z_]\w{0,30}\s?[=:]\s?)?(?:lambda:\s?|\(\)\s?=>\s?)?"
_PREFIX = r"(?:\([A-Za-z_][\w\s]{0,30}[*&]{0,2}\)\s?|\bstring\(\d{1,6}\)\s)?(?:\[\]\w{1,12}\{|\[|\(\s{0,8})?"
_LETTERS = r"(?:@|[bBrRfFuUNLQ]{1,2}|u8)?"
_WRAPPED = rf"\s{{0,8}}(?:\\\s{{0,8}})?{_PREFIX}(?:{_CALLEE}{_KEYWORD}){{0,3}}{_KEYWORD}{_LETTERS}(?={_QUOTE})"
TYPED = re.compile(
    rf"(?P<close>)(?:[?!]?[ \t]?:{{1,2}}[ \t]{{0,2}}{_TYPE}|[ \t]{{1,3}}(?:[Aa][Ss] )?{_TYPE}|\[[^\0\n\]]{{0,20}}\]"
    rf"|\s?\{{\s?(?:get|set|init)[^\0\n{{}}\"']{{0,40}}\}}){_ASSIGNED}{_WRAPPED}"
)
WRAPPED = re.compile(
    rf"(?P<close>\\*[\"'`]?[\])]{{0,2}})\s{{0,3}}(?P<sign>=>|:=|\+=|\?=|\?\?=|\|\|=|[:=])(?!=){_WRAPPED}"
)
# `password{"..."}`, `.equals("...")`, `").send_keys("...")`, `password).toBe('...')`: code that hands the literal over.
HANDED = re.compile(
    rf"(?P<close>\\*[\"'`]?\]?)(?P<sign>"
    rf"\{{|\)?(?:\s{{0,9}}\.\w{{2,30}}\(\){{0,1}}){{0,2}}\s{{0,9}}\.\w{{2,30}}\(\s?)(?={_QUOTE})"
)

# The arguments of a call that logs in or signs: `basic_auth("ada", Some("..."))`, `jwt.encode(payload, "...")`.
_ARGUMENT = re.compile(
    rf"\s{{0,40}}(?:\d{{1,6}}[→:|\t]\s{{0,40}})?(?:{_CALLEE})?{_KEYWORD}{_LETTERS}(?:(?P<quote>{_QUOTE})(?P<value>(?:(?!(?P=quote))[^\0"
    rf"\n]){{0,200}})(?P=quote)"
    r"|[^\0\n\"'`(),]{0,80}(?:\([^\0\n\"'`()]{0,60}\))?)\){0,2}\s{0,3}(?P<more>,)?"
)
_MOST_ARGUMENTS = 5
_A_QUOTE = re.compile("[\"'`]")
_BEFORE_TYPE = frozenset(": \t?!{[")


def arguments(text: str, begin: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """The literals among the arguments that begin at `begin`: which argument it is, and where it stands."""
    for index in range(_MOST_ARGUMENTS):
        match = _ARGUMENT.match(text, begin, begin + 2 * _LONGEST)
        if match is None:
            return
        if match["value"]:
            yield index, match.span("value")
        if match["more"] is None:
            return
        begin = match.end()


def typed(text: str, end: int) -> re.Match[str] | None:
    """A type and a sign behind a name that ends at `end`, up to the quote of its literal."""
    if text[end] not in _BEFORE_TYPE:
        return None
    newline = text.find("\n", end, end + _LONGEST)
    sign = text.find("=", end, newline if newline >= 0 else end + _LONGEST)
    if sign < 0 or not _A_QUOTE.search(text, sign, sign + _LONGEST):
        return None
    return TYPED.match(text, end, end + _LONGEST)


def wrapped(text: str, end: int) -> re.Match[str] | None:
    """A sign, then a cast, a call or a list around the literal."""
    return WRAPPED.match(text, end, end + _LONGEST)


def handed(text: str, end: int) -> re.Match[str] | None:
    """A method of the name, or braces, with the literal in them."""
    return HANDED.match(text, end, end + _LONGEST) if text[end] not in " :=" else None


# Where the value behind a name begins and ends: quoted, bare, to the end of its line, or up to the next name.

_EXTENTS_QUOTE = re.compile(r"\\*[\"'`]")
_BARE = re.compile(r"(?:[^\0\s\"'`\\<>]++|\\(?![nrtu\"'\\/`])|(?<=[A-Za-z0-9!@#$%^&*])['](?=[A-Za-z0-9!@#$%^&*]))+")
_SCHEMES = re.compile(
    r"(?i:(?:bearer|basic|token|apikey|api-key|digest|key|negotiate|splunk|geniekey|sso-key|aws4-hmac-sha256)(?:"
    r"[ \t]+|\s*=\s*))"
)
_NEXT_PAIR = re.compile(r"[^\0&\s]+&[\w.-]+=")
_NEXT_NAME = re.compile(r";(?=\s*[A-Za-z][\w .-]{0,40}=)|,(?=[A-Za-z_][\w.-]{0,40}[=:])|&&|\|\|")
_OPENERS = {")": "(", "]": "[", "}": "{"}
_ENV_LINE = re.compile(r"(?:export |declare -x |set )?[A-Za-z_]\w*=")
# `password: `, `PASSWORD=`, `"password" => `, `<password><![CDATA[`, `requirepass `, up to the value.
_DATA_SIGN = re.compile(
    r"\\*[\"'`]?\]?(?:[ \t]{0,20}(?:=>|:=|[:=])[ \t]{0,20}|[ \t]{0,40}\|[ \t]{1,20}|>(?:<!\[CDATA\[)?|[ \t]{1,40})"
)
_DATA_WORD = re.compile(r"[!-~]+")
# The next pair (`;port=`, `&user=`, `\\nDB_HOST=`), or the end of a tag or of a string with escapes.
_DATA_ENDS = re.compile(
    r"(?:[;,&]|\\+[nrt])(?=(?:[a-z]{3}|[A-Z]{3}|[A-Z][a-z]{2})[\w.-]{0,40}[=:])|\]\]>|</|\\+n\Z|\\+[\"'](?=[,:}\])]|\Z)"
)
_QUOTES_END = re.compile(r"\\*[\"'`](?:[\s,;:)}\]>/]|\Z|\\)")  # a quote that closes: `"...",`
_BEHIND_DATA = "\"'`,;)]}>"
_LONGEST_GENERATED = 200
# No secret without a frame of its own is longer, and every search below stops there.
_EXTENTS_LONGEST = 4000
_LONGEST_BARE = 2000
_LONGEST_LEAD = 80


def _bare_word(text: str, begin: int) -> str:
    """The unquoted word at `begin`; a quote between letters belongs to it."""
    match = _BARE.match(text, begin, begin + _LONGEST_BARE)
    return _generated_word(text, begin) or (match[0] if match else "")


def quoted(text: str, begin: int) -> tuple[int, int] | None:
    """Begin and end of what stands in quotes at `begin`; an escaped quote inside does not end it."""
    quote = _EXTENTS_QUOTE.match(text, begin)
    if quote is None:
        return None
    mark, begin = quote[0], quote.end()
    if text.startswith(mark * 2, begin) and len(mark) == 1:  # three of them
        mark, begin = mark * 3, begin + 2
    nul = text.find("\0", begin, begin + _EXTENTS_LONGEST)  # the border between two strings scanned together
    limit = nul if nul >= 0 else min(len(text), begin + _EXTENTS_LONGEST)
    end = text.find(mark, begin, limit)
    while len(mark) == 1 and end > begin and text[end - 1] == "\\" and text[end - 2] != "\\":
        end = text.find(mark, end + 1, limit)
    newline = text.find("\n", begin, limit)
    if end < 0 or (0 <= newline < end and mark != "`" and not text.startswith("-----BEGIN", begin)):
        end = begin + len(_bare_word(text, begin))
    return begin, end


def _generated_value(text: str, end: int) -> tuple[int, int] | None:
    """Begin and end of the password of a generator behind a sign or a blank at `end`, in quotes or bare.

    Brackets, quotes and commas are its own: a bare one goes on to the next blank or to the next name with a value.
    """
    sign = _DATA_SIGN.match(text, end)
    if sign is None:
        return None
    begin = sign.end()
    if (bounds := quoted(text, begin)) and _QUOTES_END.match(text, bounds[1]):
        return bounds if is_generated(text[slice(*bounds)]) else None
    value = _generated_word(text, begin).rstrip(_BEHIND_DATA)
    return (begin, begin + len(value)) if value else None


def _generated_word(text: str, begin: int) -> str:
    """The word at `begin` if a generator of passwords made it, otherwise nothing."""
    word = _DATA_WORD.match(text, begin, begin + _LONGEST_GENERATED)
    value = _DATA_ENDS.split(word[0], maxsplit=1)[0] if word else ""
    return value if is_generated(value.rstrip(_BEHIND_DATA)) else ""


def _is_env(text: str, start: int, match: re.Match[str]) -> bool:
    """`NAME=value` with no space: a shell or a dotenv line, where an unquoted word is a literal."""
    name = text[start : match.start()]
    return match["sign"] == "=" and match.end() - match.start() == 1 and name.upper() == name


def _bare_end(text: str, start: int, begin: int, env: bool) -> int:
    """Where an unquoted value ends that begins at `begin` and whose name begins at `start`."""
    value = _bare_word(text, begin)
    end = begin + len(value)
    if env and text[end : end + 1] == " " and _in_dump(text, start):
        newline = text.find("\n", begin, begin + _EXTENTS_LONGEST)
        return newline if newline >= 0 else min(len(text), begin + _EXTENTS_LONGEST)
    before = text[start - 1 : start]
    if before in ("?", "&") or _NEXT_PAIR.match(value):
        value = value.split("&", 1)[0]
    value = _NEXT_NAME.split(value, maxsplit=1)[0]
    value = _up_to_closing(value, text[max(text.rfind("\n", 0, start) + 1, start - _LONGEST_LEAD) : start])
    return begin + len(value.rstrip(",;)}]:." if not env else ";"))


def _up_to_closing(value: str, lead: str) -> str:
    """Return a bare value up to the bracket that closes one of `lead`, the line before it: `call(token=token)["a"]`."""
    if ")" not in value and "]" not in value and "}" not in value:
        return value
    opened: list[str] = []
    num_before = 0  # brackets that `lead` leaves open
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
    """Whether the lines around are `NAME=value` too: then a value goes on to the end of its line."""
    line_start = text.rfind("\n", max(0, start - _LONGEST_LEAD), start) + 1
    if start - line_start > _LONGEST_LEAD or text[line_start:start].strip() not in ("", "export", "declare -x"):
        return False
    previous = text[text.rfind("\n", max(0, line_start - _EXTENTS_LONGEST), max(0, line_start - 1)) + 1 : line_start]
    newline = text.find("\n", start, start + _EXTENTS_LONGEST)
    following = text[newline + 1 : newline + 80] if newline >= 0 else ""
    return bool(_ENV_LINE.match(previous) or _ENV_LINE.match(following))


def _skip_scheme(text: str, begin: int, end: int) -> int:
    """Past `Bearer` and its like."""
    scheme = _SCHEMES.match(text, begin, end)
    return scheme.end() if scheme else begin


# Values that a sentence or a list of bytes holds after a name: without a plain sign between them.

_FILLERS = (
    r"(?:['\u2019]?s)?(?:\s?\([^\0\n()]{1,30}\))?"
    r"(?:\s{1,4}(?:[^\W_][\w.'@-]{0,24}|\[\w{1,20}\]|[\"'][^\0\s\"']{1,120}[\"'])){0,6}?"
)
_QUOTES = r"[\"'`(*«„“]{0,4} ?"
_SPEECH = re.compile(
    rf"(?i:{_FILLERS}"
    r"(?:\s{1,2}(?:is|was|are|be|to|as|with|from|equals|type|enter|lautet|ist|est|es|e|è|é|är|er|on|je|ay|ni|dir|este"
    r"|jest|adalah|ialah|là|=|[?\u203a»]|->|→|—|-):?|,?\s(?:it|this)(?:['\u2019]s|\sis)|\s?:|[?\u203a»]"
    r"|\s\((?=currently|now))\s{0,12}(?:set to\s|now\s|just\s|currently\s|it['\u2019]s\s)*)"
    rf"(?<=[\s(]){_QUOTES}"
)
_SAID_AT_LAST = re.compile(rf"(?i:{_FILLERS}\s?:\s{{1,12}}){_QUOTES}")  # `a password is generated for ada: ...`
_NEW_FIELD = re.compile(r"\n[ \t]*[\w.-]+(?: [\w.-]+){0,2}\s?[:=]")  # the next line has a name of its own
_OF_ID = re.compile(r"[Ii][Dd]\s?:?\s*\Z")  # `the token has expired. RequestId: `
_FOR = re.compile(r"\s(?:for|of|to|on|für|von|pour|de|para|per|voor|til|för)\s")
DIGITS = re.compile(r"\d{3,8}")
NUMBER_NAMES = frozenset(("pin", "cvv", "cvc", "otp", "pincode", "cvv2"))
_BYTES = re.compile(
    r"[^\0\n=]{0,30}[=:]\s{0,3}[\w .:\[\]\"',(]{0,40}[\[{(]\s{0,9}"
    r"((?:(?:0x[0-9a-fA-F]{1,2}+|\d{1,3}+),\s{0,9}+){7,}(?:0x[0-9a-fA-F]{1,2}|\d{1,3}))"
)
_NUMBERS = re.compile(r"\w+")
_GROUPS = re.compile(r"\s?[:=]\s{0,3}((?:[a-zA-Z2-7]{4} ){3,15}[a-zA-Z2-7]{4})(?![A-Za-z])")

# What stands between a name and its value in a sentence: words for `is`, or a sign.
_LINKS = word_set(
    "is was are be to as equals becomes now it's that's is: -> lautet ist war wird est était c'est es era son è é"
    " ora são foi eh är var er blir on oli je byl jest był to este sunt adalah ialah yaitu là ni yra buvo olan oldu"
    " bude będzie nu это есть є είναι és van lett ir ay ser será sono devient هي هو היא הוא है হলো คือ wurde"
)
_CHANGED_TO = word_set("na auf à til naar till în en su")  # before a value in quotes
_ENGLISH = frozenset(("is", "was", "it's", "that's"))  # of no other language all words are known
_SIGNS = (":", "=", "->", "→", "\uff1a")
_WORD = re.compile(r"[^\0\s]{1,120}")
_OPENING = "\"'`«„“「(*:=<\uff1a>_"
_QUOTING = frozenset("\"'`«„“「")
_CLOSING = frozenset("\"'`»”“」")
_TRAILING = ".,;:!?)*_\"'`»”」"
_NEXT_LINE = re.compile(r"(?:\r?\n[ \t>|]*){1,2}[\"'`*]{0,3}(?P<value>[^\0\s]{5,60}?)[\"'`*]{0,3}[ \t\r]*(?![^\0\n])")
DIGITS_ALONE = re.compile(r"\d{6,12}")
_REACH, _MOST_FILLERS, _NEAREST = 200, 14, 4
# Behind a value: the end of the line, a bracket or a remark.
_REST = re.compile(
    r"[\"'`»”」*.,;!)\]}]{0,4}(?:[ \t\r]*|[ \t]+(?:#|//|\(|--|<!--)[^\0\n]*|[,;][ \t][^\0\n]*"
    r"|[ \t]?[\u060c\u3002\uff0c\u0964][^\0\n]*|[ \t]*[\u0370-\uffff][^\0\n]*)"  # or another script goes on
)


def spoken(text: str, start: int, end: int, strength: Strength) -> Span | None:
    """`the password for the database is ...`: only a value that no word could be."""
    if text[end] not in ":,'\u2019" and not text[end].isspace():
        return None
    for pattern in (_SPEECH, _SAID_AT_LAST) if strength == Strength.PASSWORD else (_SPEECH,):
        match = pattern.match(text, end)
        if match is not None and (_NEW_FIELD.search(match[0]) or _OF_ID.search(match[0]) or "ingerprint" in match[0]):
            return None
        if match is not None and (value := _said_value(text, start, end, match, strength)):
            return Span(match.end(), match.end() + len(value), kind_of(strength))
    return None


def _said_value(text: str, start: int, end: int, match: re.Match[str], strength: Strength) -> str:
    begin = match.end()
    value = trimmed(_bare_word(text, begin), ".,;:!?)*_»”")
    counted = strength == Strength.PASSWORD or text[start:end].lower() in NUMBER_NAMES
    if counted and DIGITS.fullmatch(value) and len(value) >= 4:  # one that is used once
        return value
    if strength == Strength.PASSWORD:
        if text[begin - 1] in "\"'" and (bounds := quoted(text, begin - 1)) and is_passphrase(text[slice(*bounds)]):
            return text[slice(*bounds)]
        if (
            is_passphrase(value)
            or (is_unknown(value) and is_odd(value) and "=" not in match[0])
            or (_is_plain_said(text, begin, value, match) and value.lower() not in PASSWORD_WORDS)
        ):
            return value
    if not is_told(value) or is_public_id(value) or (strength == Strength.WEAK and not is_random_value(value)):
        return ""
    if strength < Strength.PASSWORD and is_identifier(value):
        return ""
    return value if is_plausible(value, strength, True) else ""


def _is_plain_said(text: str, begin: int, value: str, match: re.Match[str]) -> bool:
    """`the password for this box: ...`, where a line ends with a long word that is no other word one says there."""
    last = begin + len(value)
    ends = text[last : last + 1] in ("", "\n", "\0")
    return ends and _FOR.match(match[0]) is not None and match[0].rstrip().endswith(":") and is_unknown(value)


def told_behind(text: str, end: int, *, direct: bool) -> Span | None:
    """The first word behind a name that a sign, a word for `is` or a quote leads to and that nobody knows.

    `direct`: also one that nothing leads to, directly behind the name and at the end of what is said.
    """
    stop = min(
        at if at >= 0 else end + _REACH
        for at in (text.find("\n", end, end + _REACH), text.find("\\n", end, end + _REACH))
    )
    sign, linked, opened, changed = False, "", False, False
    for number, match in enumerate(_WORD.finditer(text, end, stop)):
        word = match[0]
        lead = word[: len(word) - len(word.lstrip(_OPENING))]
        sign = sign or (number == 0 and lead.startswith(_SIGNS))
        quoted_here = opened or (lead and lead[-1] in _QUOTING)
        led = sign or linked or quoted_here
        if led or (direct and not number):
            core = trimmed(word[len(lead) :].rstrip("\"'`»”」"), _TRAILING)
            begin = match.start() + len(lead)
            if led and '"' not in core and (is_told(core) or (linked and is_passphrase(core))):
                return Span(begin, begin + len(core), "PASSWORD")
            closed = quoted_here and text[begin + len(core) : begin + len(core) + 2].strip()[:1] in _CLOSING
            if is_unknown(core) and (
                linked in _ENGLISH
                or (linked and is_odd(core))
                or (closed and (linked or changed))
                or _ends(text, begin + len(core), stop)
            ):
                return Span(begin, begin + len(core), "PASSWORD")
            if sign and DIGITS_ALONE.fullmatch(core) and _ends(text, begin + len(core), stop):
                return Span(begin, begin + len(core), "PASSWORD")
            if sign and core:
                return None
        elif not direct and number < _NEAREST and is_other(_core_of(word)):
            begin = match.start() + word.find(_core_of(word))
            return Span(begin, begin + len(_core_of(word)), "PASSWORD")
        opened = not _core_of(word) and word[-1] in _QUOTING
        bare = word.strip("*_\"'`()[],").lower()
        sign, linked, changed = bare.endswith(_SIGNS), bare if bare in _LINKS else "", bare in _CHANGED_TO
        if number > _MOST_FILLERS:
            return None
    return _on_next_line(text, stop) if sign or linked else None


def is_other(core: str) -> bool:
    """Whether no language has such a word: nobody knows it and it has a number, or small words stand in a row."""
    return (is_unknown(core) and (has_digit(core) or is_odd(core))) or (is_passphrase(core) and "-" in core)


def _core_of(word: str) -> str:
    """A word without the quotes and signs around it."""
    return word.strip(_OPENING + _TRAILING)


def _ends(text: str, at: int, stop: int) -> bool:
    """Whether nothing is said behind a value: a label or a message goes on."""
    return _REST.fullmatch(text, at, stop) is not None


def _on_next_line(text: str, newline: int) -> Span | None:
    alone = _NEXT_LINE.match(text, newline)
    if alone is None or _NEW_FIELD.match(text, newline):
        return None
    core = trimmed(alone["value"], _TRAILING)
    return (
        Span(alone.start("value"), alone.start("value") + len(core), "PASSWORD")
        if is_told(core) or is_unknown(core)
        else None
    )


def counted(text: str, end: int, strength: Strength) -> Span | None:
    """A key as a list of bytes, or in groups of four as apps show it."""
    match = _GROUPS.match(text, end) if text[end] in " :=" else None
    if match is None and (strength >= Strength.TOKEN or text.find("0x", end, end + 60) >= 0):
        match = _BYTES.match(text, end)
    if match is None or not has_digit(match[1]) or len(set(_NUMBERS.findall(match[1]))) == 1:  # zeros
        return None
    return Span(*match.span(1), "SECRET")


def kind_of(strength: Strength) -> str:
    """What a value behind a name of this strength is called."""
    return {Strength.PASSWORD: "PASSWORD", Strength.TOKEN: "SECRET"}.get(strength, "KEY_VALUE")
