"""Decide whether a user's words correct a call, and whether they state a rule for the project.

Such words occur when users refuse a call or stop the agent. A refusal alone is blamed on the user. If the words say
what was wrong or what to do instead, the model can learn from them. A plain question, praise or a new task reveals
nothing about the call. Only English is recognized.

A sentence that may apply to the whole project is a candidate for `conventions.md`, where the user accepts or rejects
it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from composer_replication.sites.actions.shell_command import Command
from composer_replication.sites.actions.tools import command_text, tool_channel
from composer_replication.sites.rule import Verdict
from composer_replication.types import ToolCall

REFUSED, CORRECTED = "user_rejected", "user_corrected"
_CONFIDENCE = 0.9
# Longer texts, in characters, are plans or pasted content.
_MAX_LENGTH = 1200
# The end of the agent's introductory sentence, after which the user's words begin.
# "To tell you how to proceed, the user said:"; "with the following feedback: "
_REFUSAL_INTRO = re.compile(
    r"(?:the user said:|(?:provided|with|gave) (?:the following |this )?feedback:)\s*(?:<feedback>\s*)?", re.IGNORECASE
)
# The introduction ends within this number of characters.
_MAX_INTRO = 600
# "</feedback>"; "\n\nNote: The user's next message may contain a correction"
_END_OF_WORDS = re.compile(r"\s*</feedback>|\s*\n\s*\n?Note: The user's next message")
# Sentences that an agent writes in place of the user's words.
# "The user wants to clarify these questions."; "<command-name>"; not "I want to clarify this"
_FROM_AGENT = re.compile(r"The user wants to clarify|\[Request interrupted|<(?:command|local-command|bash)-")
# The whole second word of a command: "commit"; not "-m"
_SUBCOMMAND = re.compile(r"[a-z][a-z-]{1,30}")
# "No. Use the make target"; "no\nuse make"; not "use make 3.8"
_BETWEEN_SENTENCES = re.compile(r"(?<=[.!?])\s+|\n+")
# Filler at the start of a sentence: "ok, so use make" -> "ok, so "; "no, but why"; not "note that"
_FILLER = re.compile(
    r"^(?:(?:oh|ok(?:ay)?|yes|yeah|yep|hm+|um+|ugh|well|so|and|also|but|then|actually|now|sorry|please|maybe|no|nope"
    r"|lol|hey|hi|just|in general)\b[\s,.:;!-]*)+",
    re.IGNORECASE,
)
# Approval, or a request to continue: "LGTM"; "looks good, thanks"; "try again"; not "try another way"
_APPROVAL = re.compile(
    r"^\W*(?:lgtm|looks? good|good|great|nice|perfect|thanks?|thank you|cool|done|continue|go (?:ahead|on)|proceed|sure"
    r"|never ?mind|all good|fine|approved?|resume|next\b|implement the following)\b"
    r"|^\W*(?:(?:try|do it|run it|do that) again|retry|go for it|carry on)\W*\Z",
    re.IGNORECASE,
)
# Verbs for instructions about code. "we used make" is not an instruction, so the sentence has to begin with the verb.
_VERBS = (
    "add avoid call change check commit compare copy create define delete do drop exclude fetch find fix focus follow "
    "get give go ignore include keep leave look make merge move only open pass pick prefer pull push put read "
    "rebase remove rename replace reset restore revert run save search see show simplify skip split start stay stop "
    "switch take tell test try undo update use verify wait work write"
)
# "use the make target"; "you can remove it"; not "we used make"
_IMPERATIVE = re.compile(rf"^(?:you (?:can|could) )?(?:{'|'.join(_VERBS.split())})\b", re.IGNORECASE)
# A request or an objection: "don't push yet"; "let's keep the old name"; "that's too slow"; not "i don't know"
_REQUEST = re.compile(
    r"\b(?:(?<!\bi )(?:don'?t|do not)(?! (?:worry|mind))|i (?:don'?t|do not) (?:want|like|need|think|agree)|never"
    r"|should(?:n'?t)?(?! (?:work|be (?:fine|ok|okay|good|done|enough|able)))|must(?:n'?t)?|(?<!\bi )needs? to"
    r"|need (?:a|an|the)|ha(?:ve|s) to|let'?s|let us"
    r"|(?:i|we|you)(?:'d| would)? (?:just |really |rather |personally |actually )*(?:want|prefer|like|rather|need)"
    r"|would have thought|instead|rather than|please|make sure|hold on|hang on|supposed to|not (?:as|in|on|to|with"
    r"|the|a|this|that|like|yet|now|here)|no need|too (?:slow|long|much|many|big|early|broad|complex|complicated"
    r"|verbose|risky|expensive)|(?<!went )wrong|incorrect|missing|forgot|unnecessary|overkill|(?:^|\W)first\W*$)\b",
    re.IGNORECASE,
)
# A question that proposes a change.
# "couldn't we use the existing helper?"; "why not run it once?"; not "what does it do?"
_PROPOSAL = re.compile(
    r"\b(?:(?:can|could|should)(?:n'?t| not) (?:we|you|it|this|that|these|those|they)|why (?:not|don'?t)|instead"
    r"|rather than|any other way|another way|(?:a )?(?:better|simpler|cleaner) way|any chance|we (?:just )?need to)\b"
    r"|^(?:should|could) (?:we|this|these|those|that|it|all)\b.{0,200}\b(?:be|go|use|using|move|live|offer|into)\b",
    re.IGNORECASE,
)
# Words that clearly reject what the agent was doing.
# "no, use make"; "that's wrong"; not "no problem"; not "can you explain"
_PLAIN_REFUSAL = re.compile(
    r"^(?:no\b(?! (?:problem|worries|rush))|nope|don'?t|do not|stop (?!here)|wait|never(?! ?mind)|not (?:as|in|on|to"
    r"|the|a|with|like)|you (?:just |really )?(?:should|shouldn'?t|must|forgot|missed|need to|have to|were supposed)"
    r"|(?:that'?s|this is) (?:wrong|not (?:what|how|right|correct|it\b))|i (?:said|meant|told)|we don'?t (?:want|need)"
    r"|wrong\b|revert"
    r"|undo|instead)",
    re.IGNORECASE,
)
# A rule for the whole project: "never push to main"; "we always use uv"; not "push to main"
_RULE = re.compile(
    r"\b(?:don'?t|do not|never|always|avoid|prefer|whenever|wherever|unless|every time|from now on|in general"
    r"|we (?:only|always|never|usually)|first\W*$|before (?:you|we|any|each|every|commit|push|pull|merg|open)\w*"
    r"|too (?:slow|expensive|risky)|no (?:more|new)|let'?s not|convention|rather than|instead of)|^(?:only )?use\b",
    re.IGNORECASE,
)
# References to one place in the code: "this" and the like, a line number, an identifier.
# "rename this"; "use parseArgs"; "line 40"; not "always run the tests first"
_REFERS_TO_CODE = re.compile(
    r"\b(?:this|that|these|those|it|here|there|now|today|him|her|them)\b|\b[a-z]+[A-Z]\w*|\b[A-Z]\w*[a-z][A-Z]\w*|\w_\w"
    r"|\b\d{2,}\b|<[A-Z_]+\d*>",
)


class _TextSpan(NamedTuple):
    """The span of the user's words within a text."""

    start: int
    end: int


def _find_refusal_comment(text: str) -> _TextSpan | None:
    """Return the span of the user's words in a refusal, or None if it contains none."""
    match = _REFUSAL_INTRO.search(text, 0, _MAX_INTRO)
    return None if match is None else find_user_text(text, match.end())


def find_user_text(text: str, start: int = 0) -> _TextSpan | None:
    """Return the span of the user's words after `start`, without text added by the agent, or None if there are none."""
    end = _END_OF_WORDS.search(text, start)
    stop = len(text) if end is None else end.start()
    words = text[start:stop]
    if not words.strip() or _FROM_AGENT.match(words.lstrip()):
        return None
    return _TextSpan(start + len(words) - len(words.lstrip()), start + len(words.rstrip()))


def apply_correction(verdict: Verdict, text: str) -> Verdict:
    """Blame the model if the user's words in a refusal correct the call; otherwise return the verdict unchanged."""
    words = _find_refusal_comment(text) if verdict.kind == REFUSED else None
    return verdict if words is None or not is_correction(text[slice(*words)]) else correction_verdict(words)


def correction_verdict(words: _TextSpan) -> Verdict:
    """Return the verdict on a correction by a user, with the words as its evidence."""
    return Verdict(CORRECTED, "model", _CONFIDENCE, (words.start, words.end), False, "the user said what to do instead")


def is_correction(words: str, *, is_explicit: bool = False) -> bool:
    """Return whether the words correct a call, that is, contain a request, an instruction or a proposal.

    With `is_explicit`, the first sentence must reject what was done. After a stop, most messages are a new task.
    """
    if len(words) > _MAX_LENGTH or _APPROVAL.search(words) or _APPROVAL.search(_without_filler(words)):
        return False
    if is_explicit:
        first = next(_sentences(words), "")
        return not first.endswith("?") and _PLAIN_REFUSAL.search(first) is not None
    return any(map(_is_correcting_sentence, _sentences(words)))


def find_user_rule(words: str) -> str:
    """Return the first sentence that may apply to the whole project, or "" if there is none."""
    if not is_correction(words):
        return ""
    rules = (
        sentence
        for sentence in _sentences(words)
        if _RULE.search(_without_filler(sentence)) and not sentence.endswith("?")
    )
    return next((sentence for sentence in rules if not _REFERS_TO_CODE.search(sentence)), "")


def kind_of_call(call: ToolCall) -> str:
    """Return the kind of call that a user rule is about: a program with its subcommand, or a tool; "" for file tools.

    Two refused edits seldom have more in common than the tool, so a rule from one does not apply to the other.
    """
    channel = tool_channel(call.name)
    if channel != "shell":
        return "" if channel == "file" else call.name
    programs = [pair for pair in Command.of(command_text(call.name, call.arguments)).programs if pair[0] != "cd"]
    program, first_word = programs[-1] if programs else ("", "")
    return f"{program} {first_word}" if _SUBCOMMAND.fullmatch(first_word) else program


def _sentences(words: str) -> Iterator[str]:
    return (sentence for part in _BETWEEN_SENTENCES.split(words) if (sentence := part.strip()))


def _without_filler(sentence: str) -> str:
    return _FILLER.sub("", sentence)


def _is_correcting_sentence(sentence: str) -> bool:
    if sentence.endswith("?"):
        return _PROPOSAL.search(_without_filler(sentence)) is not None
    return _REQUEST.search(sentence) is not None or _IMPERATIVE.search(_without_filler(sentence)) is not None
