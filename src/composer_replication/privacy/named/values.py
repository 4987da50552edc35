"""The value behind a name: in quotes, bare, in a cell or a tag, behind a type, in a call, or in a sentence."""

from __future__ import annotations

import re

from composer_replication.privacy.named.declarations import handed, typed, wrapped
from composer_replication.privacy.named.extents import (
    bare_end,
    generated_value,
    is_env,
    quoted,
    skip_scheme,
)
from composer_replication.privacy.named.names import Strength, name_strength
from composer_replication.privacy.named.plausible import (
    is_credential,
    is_directory,
    is_given,
    is_handle,
    is_identifier,
    is_login,
    is_passphrase,
    is_path,
    is_phrase_of,
    is_plausible,
    is_random_value,
    is_said,
    is_unknown,
    names_handle,
)
from composer_replication.privacy.rules import Span, has_digit, is_strong
from composer_replication.privacy.shapes.entropy import is_public_id
from composer_replication.privacy.spoken.said import DIGITS, NUMBER_NAMES, kind_of, spoken

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
    if (literal := generated_value(text, end)) is not None:
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
    begin = skip_scheme(text, begin, end)
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
    env = is_env(text, start, match)
    end = bare_end(text, start, begin, env)
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
