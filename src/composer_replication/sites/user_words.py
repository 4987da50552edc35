"""What a user said when refusing a call, or after stopping the agent: does it correct the call, does it name a rule?

A refusal is a user's doing; one whose words say what was wrong, or what to do instead, is the model's to learn from. A
bare question, an answer, praise or a new task says nothing about the call. The rules know English words. Whether a
sentence also holds elsewhere is for its user to say: here it is only named, for `conventions.md`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from composer_replication.sites.actions.shell_command import Command
from composer_replication.sites.actions.tools import channel_of, command_text
from composer_replication.sites.rule import Verdict
from composer_replication.types import ToolCall

REFUSED, CORRECTED = "user_rejected", "user_corrected"
_SURE = 0.9
_MAX_WORDS = 1200  # longer is a plan or a pasted text
_SAID = re.compile(
    r"(?:the user said:|(?:provided|with|gave) (?:the following |this )?feedback:)\s*(?:<feedback>\s*)?", re.IGNORECASE
)
_SAID_WITHIN = 600
_END = re.compile(r"\s*</feedback>|\s*\n\s*\n?Note: The user's next message")
# Sentences of an agent that stand where a user's words would.
_NOT_OWN = re.compile(r"The user wants to clarify|\[Request interrupted|<(?:command|local-command|bash)-")
_COMMAND_WORD = re.compile(r"[a-z][a-z-]{1,30}")
_BETWEEN_SENTENCES = re.compile(r"(?<=[.!?])\s+|\n+")
_FILLER = re.compile(
    r"^(?:(?:oh|ok(?:ay)?|yes|yeah|yep|hm+|um+|ugh|well|so|and|also|but|then|actually|now|sorry|please|maybe|no|nope"
    r"|lol|hey|hi|just|in general)\b[\s,.:;!-]*)+",
    re.IGNORECASE,
)
_ACCEPTS = re.compile(
    r"^\W*(?:lgtm|looks? good|good|great|nice|perfect|thanks?|thank you|cool|done|continue|go (?:ahead|on)|proceed|sure"
    r"|never ?mind|all good|fine|approved?|resume|next\b|implement the following)\b"
    r"|^\W*(?:(?:try|do it|run it|do that) again|retry|go for it|carry on)\W*\Z",
    re.IGNORECASE,
)
_VERBS = (
    "add avoid call change check commit compare copy create define delete do drop exclude fetch find fix focus follow "
    "get give go ignore include keep leave look make merge move only open pass pick prefer pull push put read "
    "rebase remove rename replace reset restore revert run save search see show simplify skip split start stay stop "
    "switch take tell test try undo update use verify wait work write"
)
_IMPERATIVE = re.compile(rf"^(?:you (?:can|could) )?(?:{'|'.join(_VERBS.split())})\b", re.IGNORECASE)
_WISH = re.compile(
    r"\b(?:(?<!\bi )(?:don'?t|do not)(?! (?:worry|mind))|i (?:don'?t|do not) (?:want|like|need|think|agree)|never"
    r"|should(?:n'?t)?(?! (?:work|be (?:fine|ok|okay|good|done|enough|able)))|must(?:n'?t)?|(?<!\bi )needs? to"
    r"|need (?:a|an|the)|ha(?:ve|s) to|let'?s|let us"
    r"|(?:i|we|you)(?:'d| would)? (?:just |really |rather |personally |actually )*(?:want|prefer|like|rather|need)"
    r"|would have thought|instead|rather than|please|make sure|hold on|hang on|supposed to|not (?:as|in|on|to|with"
    r"|the|a|this|that|like|yet|now|here)|no need|too (?:slow|long|much|many|big|early|broad|complex|complicated"
    r"|verbose|risky|expensive)|(?<!went )wrong|incorrect|missing|forgot|unnecessary|overkill|(?:^|\W)first\W*$)\b",
    re.IGNORECASE,
)
# A question that proposes the change.
_PROPOSES = re.compile(
    r"\b(?:(?:can|could|should)(?:n'?t| not) (?:we|you|it|this|that|these|those|they)|why (?:not|don'?t)|instead"
    r"|rather than|any other way|another way|(?:a )?(?:better|simpler|cleaner) way|any chance|we (?:just )?need to)\b"
    r"|^(?:should|could) (?:we|this|these|those|that|it|all)\b.{0,200}\b(?:be|go|use|using|move|live|offer|into)\b",
    re.IGNORECASE,
)
# Words that leave no doubt: they say that what was being done is not wanted.
_PLAIN = re.compile(
    r"^(?:no\b(?! (?:problem|worries|rush))|nope|don'?t|do not|stop (?!here)|wait|never(?! ?mind)|not (?:as|in|on|to"
    r"|the|a|with|like)|you (?:just |really )?(?:should|shouldn'?t|must|forgot|missed|need to|have to|were supposed)"
    r"|(?:that'?s|this is) (?:wrong|not (?:what|how|right|correct|it\b))|i (?:said|meant|told)|we don'?t (?:want|need)"
    r"|wrong\b|revert"
    r"|undo|instead)",
    re.IGNORECASE,
)
_RULE = re.compile(
    r"\b(?:don'?t|do not|never|always|avoid|prefer|whenever|wherever|unless|every time|from now on|in general"
    r"|we (?:only|always|never|usually)|first\W*$|before (?:you|we|any|each|every|commit|push|pull|merg|open)\w*"
    r"|too (?:slow|expensive|risky)|no (?:more|new)|let'?s not|convention|rather than|instead of)|^(?:only )?use\b",
    re.IGNORECASE,
)
# What is said about this very place: a pointing word, a line, a name out of the code.
_PARTICULAR = re.compile(
    r"\b(?:this|that|these|those|it|here|there|now|today|him|her|them)\b|\b[a-z]+[A-Z]\w*|\b[A-Z]\w*[a-z][A-Z]\w*|\w_\w"
    r"|\b\d{2,}\b|<[A-Z_]+\d*>",
)


class Words(NamedTuple):
    """Where the user's own words stand in a text."""

    start: int
    end: int


def words_of_refusal(text: str) -> Words | None:
    """The user's own words in a refusal; None where there are none."""
    match = _SAID.search(text, 0, _SAID_WITHIN)
    return None if match is None else own_words(text, match.end())


def own_words(text: str, start: int = 0) -> Words | None:
    """The words from `start` on, without what agents add; None where a person said nothing."""
    end = _END.search(text, start)
    stop = len(text) if end is None else end.start()
    words = text[start:stop]
    if not words.strip() or _NOT_OWN.match(words.lstrip()):
        return None
    return Words(start + len(words) - len(words.lstrip()), start + len(words.rstrip()))


def with_words(verdict: Verdict, text: str) -> Verdict:
    """The verdict on a refusal: the model's to learn from, with the words as evidence, where they correct the call."""
    words = words_of_refusal(text) if verdict.kind == REFUSED else None
    return verdict if words is None or not corrects(text[slice(*words)]) else correction_verdict(words)


def correction_verdict(words: Words) -> Verdict:
    """What a user's correction is: the words stand where the verdict's evidence does."""
    return Verdict(CORRECTED, "model", _SURE, (words.start, words.end), False, "the user said what to do instead")


def corrects(words: str, *, plainly: bool = False) -> bool:
    """Whether the words say that a call was wrong or too early, and what to do: a wish, an order, a proposal.

    With `plainly` only words that begin by turning down what was done: after a stop, most words are a new task.
    """
    if len(words) > _MAX_WORDS or _ACCEPTS.search(words) or _ACCEPTS.search(_bare(words)):
        return False
    if plainly:
        first = next(_sentences(words), "")
        return not first.endswith("?") and _PLAIN.search(first) is not None
    return any(map(_is_correction, _sentences(words)))


def convention_in(words: str) -> str:
    """The sentence that may hold elsewhere in the project; empty where none does."""
    if not corrects(words):
        return ""
    rules = (sentence for sentence in _sentences(words) if _RULE.search(_bare(sentence)) and not sentence.endswith("?"))
    return next((sentence for sentence in rules if not _PARTICULAR.search(sentence)), "")


def call_kind(call: ToolCall) -> str:
    """What a rule about this call is about: a program with its command, or the tool; empty for changes of files.

    Two refused changes have seldom more in common than the tool.
    """
    channel = channel_of(call.name)
    if channel != "shell":
        return "" if channel == "file" else call.name
    programs = [pair for pair in Command.of(command_text(call.name, call.arguments)).programs if pair[0] != "cd"]
    program, first = programs[-1] if programs else ("", "")
    return f"{program} {first}" if _COMMAND_WORD.fullmatch(first) else program


def _sentences(words: str) -> Iterator[str]:
    return (sentence for part in _BETWEEN_SENTENCES.split(words) if (sentence := part.strip()))


def _bare(sentence: str) -> str:
    return _FILLER.sub("", sentence)


def _is_correction(sentence: str) -> bool:
    if sentence.endswith("?"):
        return _PROPOSES.search(_bare(sentence)) is not None
    return _WISH.search(sentence) is not None or _IMPERATIVE.search(_bare(sentence)) is not None
