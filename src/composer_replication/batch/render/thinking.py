"""What becomes of a turn's thinking: whose it is, what the rules say, and how a template opens and closes a thought.

A model that thinks begins its answer with a thought. Where a turn's thought is not to be learned, its text must not
begin where the thought would: the context then ends as the template's own prompt does when thinking is switched off,
with a thought that is empty and closed (`ThoughtForm.quiet_header`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from composer_replication.batch.render.templates import ChatTemplate
from composer_replication.errors import InputError, explain
from composer_replication.types import Message, Turn

Treatment = Literal["target", "context", "left_out"]
TREATMENTS: tuple[Treatment, ...] = ("target", "context", "left_out")
Outcome = Literal["none", "target", "context", "left_out", "not_shown"]
"""What was done with a turn's thinking; `none`: it had none, `not_shown`: the template has no place for it."""

_ASKED, _SAID, _THOUGHT = "Zqask", "Zqsay", "Zqthink"
_SWITCHES = ("enable_thinking", "thinking")  # what templates call the variable that turns thinking off


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingRules:
    """What to do with the thinking of the student itself and with that of others.

    `target`: learned, and shown in history where the template shows it. `context`: shown, and not learned: the thought
    stands before the turn's own tokens. `left_out`: neither. A turn is the student's own where its ids were sampled
    (a rollout), or where its model matches one of `student_models`, patterns such as `Qwen/Qwen3-*`.
    """

    own: Treatment = "target"
    others: Treatment = "left_out"
    student_models: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("own", "others"):
            if getattr(self, name) not in TREATMENTS:
                raise InputError(explain(f"thinking: {name}", got=getattr(self, name), expected=f"one of {TREATMENTS}"))

    def is_own(self, turn: Turn) -> bool:
        return bool(turn.token_ids) or any(fnmatchcase(turn.model or "", pattern) for pattern in self.student_models)

    def treatment(self, turn: Turn) -> Treatment:
        return self.own if self.is_own(turn) else self.others

    def alike(self, *answers: Turn) -> tuple[Turn, ...]:
        """Answers to compare: all with their thinking, where each has some that is a target, or all without."""
        if all(answer.thinking.strip() and self.treatment(answer) == "target" for answer in answers):
            return answers
        return tuple(
            replace(answer, thinking="", token_ids=None, logprobs=None) if answer.thinking.strip() else answer
            for answer in answers
        )


ALL_OWN = ThinkingRules(student_models=("*",))
"""For turns that are known to be the student's, whatever model a log names."""


class ThoughtForm(NamedTuple):
    """How a template writes thoughts, found by asking it.

    `quiet_header` is the generation prompt with an empty thought closed behind it; None where the template knows no
    such thing, and a turn without a thought follows the plain header. `empty` is the block that it writes by itself on
    a finished turn without a thought. With `is_off` the plain header is the quiet one: the model is not to think.
    """

    quiet_header: str | None = None
    empty: str = ""
    is_off: bool = False


def read_thought_form(template: ChatTemplate, header: str) -> ThoughtForm:
    """Ask a template that shows thinking."""
    question: list[Message] = [{"role": "user", "content": _ASKED}]
    bare: Message = {"role": "assistant", "content": _SAID}
    question_text = template.render(question)
    opening, closing = _block(template.render([*question, {**bare, "reasoning_content": _THOUGHT}]), question_text)
    mark = closing.strip()
    if not mark or not header:
        return ThoughtForm()
    plain = template.render([*question, bare])
    empty = plain[len(question_text + header) : plain.find(_SAID)] if plain.startswith(question_text + header) else ""
    if _letters(empty) != _letters(opening.removeprefix(header) + closing):
        empty = ""
    if header.rstrip().endswith(mark):
        return ThoughtForm(header, empty, is_off=True)
    off = _header_when_off(template, question, mark)
    if off is None and opening == header:  # the prompt opens a thought: closed at once, it is empty
        off = header + closing
    return ThoughtForm(off or (header + empty if empty else None), empty)


def _block(thoughtful: str, question_text: str) -> tuple[str, str]:
    """What stands before a thought, the header with it, and what between the thought and the text."""
    if not thoughtful.startswith(question_text) or _THOUGHT not in thoughtful:
        return "", ""
    opening, _, rest = thoughtful[len(question_text) :].partition(_THOUGHT)
    closing, separator, _ = rest.partition(_SAID)
    return opening, closing if separator else ""


def _header_when_off(template: ChatTemplate, question: list[Message], mark: str) -> str | None:
    """The generation prompt of the template with thinking switched off, where that closes an empty thought."""
    for switch in _SWITCHES:
        quiet = template.with_options({switch: False})
        try:
            before, after = quiet.render(question), quiet.render(question, prompt=True)
        except InputError:
            continue
        header = after[len(before) :] if after.startswith(before) else ""
        if header.rstrip().endswith(mark):
            return header
    return None


def _letters(text: str) -> str:
    return "".join(text.split())
