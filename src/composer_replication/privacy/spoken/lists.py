"""Recovery codes, seed words and passphrases: plain words and groups that only what stands above or before them tells.

A line that speaks of recovery codes, a seed phrase or an authenticator, and under it lines of nothing but codes or
words; a passphrase that is the whole rest of its line; seed words as the strings of a list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set

from composer_replication.privacy.named.plausible import speaks
from composer_replication.privacy.rules import Span, has_digit

TRIGGERS = (b"codes", b"phrase", b"mnemonic", b"authenticator", b"words", b"codici")
_HEADING = re.compile(
    r"(?i)(?:recovery|backup|scratch|emergency|rescue|one-time|2fa|mfa|wiederherstellungs?|notfall)"
    r"[ _-]?(?:codes?|keys?)"
    r"|(?:recovery|seed|secret|mnemonic|backup|wallet)[ _-]?(?:phrase|words?)|mnemonic|authenticator"
    r"|these words down|words down and|(?:codici|codigos|códigos|codes) (?:di|de)"
    r" (?:recupero|recuperación|secours|récupération|backup)"
)
_MARK = r"[ \t>|]*+(?:\d{1,3}+[→\t|][ \t]*+)?(?:(?:\d{1,2}+[.):]|[-*•])[ \t]++)?(?:\[[ x]?\][ \t]++)?[\"'`]?"
_CODE = r"(?:[A-Za-z0-9]{4,8}+(?:-[A-Za-z0-9]{4,8}+){1,5}+|\d{4}[ ]\d{4}|(?=[A-Za-z]*+\d)[A-Za-z0-9]{6,16}+)"
_CODE_LINE = re.compile(
    rf"{_MARK}(?P<value>{_CODE}(?:[ \t,;|]++(?:\d{{1,2}}+[.):][ \t]++)?{_CODE})*+)[\"'`,;]{{0,2}}[ \t\r]*\Z"
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
