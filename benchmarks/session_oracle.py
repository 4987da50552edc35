"""Compute for each turn of a conversation the context and the target that a chat template would give it.

For turn i with the messages m before it: `context` is apply_chat_template(m, add_generation_prompt=True), with an empty
block that the template writes by itself; `target` is what apply_chat_template(m + [turn]) adds to that, up to and
including the last control token. Both contain thinking only if the student wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jinja2.exceptions import TemplateError

from composer_replication.types import Conversation, Message, Turn
from oracle_messages import MessageWriter
from template_oracle import MARK, Manners, Q, Shield, Student, texts_of

_UNSEEN = "Uuu-nobody-said-this"
CANNOT_SAY = (TemplateError, TypeError, ValueError, KeyError, IndexError)


class Expected(NamedTuple):
    """The expected context of a turn (without empty blocks in its history) and its target, as marked bytes.

    With `has_own_block` the template puts an empty block between its prompt and the target. It belongs to the context.
    """

    context: bytes
    target: bytes
    has_own_block: bool


class SessionOracle:
    """The expectations for all assistant turns; `keep_thinking` says whose thinking the template gets."""

    def __init__(
        self,
        student: Student,
        conversation: Conversation,
        keep_thinking: Callable[[Turn], bool] = lambda _: False,
        manners: Manners | None = None,
    ) -> None:
        self.student, self._manners = student, manners or student.manners
        self._shield = Shield(student, texts_of(conversation))
        self._writer = MessageWriter(student, self._manners, self._shield, keep_thinking)
        self._writer.add_all(conversation)
        self.messages, self.places, self.turns = self._writer.messages, self._writer.places, self._writer.turns
        self.late = {number for number, turn in enumerate(self.turns) if late_texts(turn)}
        self._renders: dict[tuple[int, bool], bytes | None] = {}
        self._whole, self._ends, self._targets = b"", list[int](), list[bytes]()
        self._own_blocks: list[bool] = []
        self.is_assembled = self._assemble()

    def target(self, number: int, answer: Turn | None = None) -> bytes | None:
        """Return what the template writes for a turn (or another answer in its place) in a short conversation."""
        if answer is None and self.is_assembled:
            return self._targets[number]
        found = self._local(
            [Q], [Q, self.messages[self.places[number]] if answer is None else self._writer.assistant(answer)]
        )
        return None if found is None else found.target

    def fits(self, number: int, context: bytes, *, whole: bool) -> bool:
        """Return whether the template shows this context before turn `number`; in a cut window it may be the end of it.

        Without the assembled pieces, only the end of the context is compared with the template's prompt.
        """
        if not self.is_assembled:
            return context.endswith((self.student.header, self.student.header + self.student.own_block))
        if not self._has_right_end(number, context, self._own_blocks[number]):
            return False
        seen = self.student.without_own_blocks(context)
        end, late = self._ends[number], self._late_before(number)
        if late is not None:
            return seen.endswith(self._whole[self._ends[late] + len(self._targets[late]) : end])
        start = end - len(seen)
        return start >= 0 and (not whole or start == 0) and self._whole[start:end] == seen

    def agrees(self, number: int, expected: Expected, context: bytes, *, whole: bool) -> bool:
        """Like `fits`, but for a given expectation of turn `number`."""
        seen = self.student.without_own_blocks(context)
        is_same = expected.context == seen if whole else expected.context.endswith(seen)
        late = self._late_before(number)
        if late is not None and not is_same:
            place = self.places[late] + 1
            before = self.student.without_own_blocks(self._render(self.messages[:place], place, prompt=False) or b"")
            before = before[: before.rfind(MARK) + 1]
            is_same = expected.context.startswith(before) and seen.endswith(expected.context[len(before) :])
        return is_same and self._has_right_end(number, context, expected.has_own_block)

    def _has_right_end(self, number: int, context: bytes, has_own_block: bool) -> bool:
        """Return whether the context has an empty block at its end exactly if the template puts one there.

        Before the first user message Qwen3's template puts none after its prompt. There the prompt for answers without
        thinking, which has one, is accepted as well.
        """
        if self.student.ends_alike(context, has_own_block):
            return True
        asked = any(message["role"] == "user" for message in self.messages[: self.places[number]])
        return not has_own_block and not asked

    def _late_before(self, number: int) -> int | None:
        """Return the last earlier turn that has text after its calls, or None.

        No template can write this order from one message with calls, and no format is prescribed. The turn itself is
        judged by its order, and contexts are compared only after its end.
        """
        return next((each for each in range(number - 1, -1, -1) if each in self.late), None)

    def exact(self, number: int, answer: Turn | None = None) -> Expected | None:
        """Return the expectation from two complete renderings, or None if the template cannot render the turn.

        It is None as well if the template rewrites earlier messages. `answer` is another turn in place of turn
        `number`.
        """
        place = self.places[number]
        message = self.messages[place] if answer is None else self._writer.assistant(answer)
        before = self._render(self.messages[:place], place, prompt=True)
        bare = self._render(self.messages[:place], place, prompt=False)
        after = self._render([*self.messages[:place], message], None if answer else place + 1, prompt=False)
        if before is None or after is None or self._writes_results(place, message):
            return None
        return self._split(before, after, bare)

    def _writes_results(self, place: int, message: Message) -> bool:
        """Return whether the template shows tool results only together with the next turn, which nobody generates."""
        first = place
        while first and self.messages[first - 1]["role"] == "tool":
            first -= 1
        if first == place:
            return False
        unseen = [{**each, "content": _UNSEEN} for each in self.messages[first:place]]
        before = self._render([*self.messages[:first], *unseen], None, prompt=True)
        after = self._render([*self.messages[:first], *unseen, message], None, prompt=False)
        sign = _UNSEEN.encode()
        return before is None or after is None or before.count(sign) != after.count(sign)

    def _split(self, before: bytes, after: bytes, bare: bytes | None) -> Expected | None:
        bare_before, bare_after = self.student.without_own_blocks(before), self.student.without_own_blocks(after)
        if not after.startswith(before) and bare_after.startswith(
            bare_before
        ):  # an earlier turn has lost its empty block
            written, has_own_block = self._behind_header(after, bare_before.count(self.student.header))
            target = written[: written.rfind(MARK) + 1]
            return Expected(bare_before, target, has_own_block) if target else None
        shared = before
        if not after.startswith(before):  # formats.md 5.3, point 2: only the prompt itself may be rewritten
            size = next(n for n, (a, b) in enumerate(zip(before + b"\0", after + b"\1", strict=False)) if a != b)
            shared = before[:size]
            if bare is None or size < len(bare) or not before.startswith(bare):
                return None
        written = after[len(shared) :]
        own = self.student.own_block
        has_own_block = bool(own) and written.startswith(own)
        if has_own_block:
            shared, written = shared + own, written[len(own) :]
        target = written[: written.rfind(MARK) + 1]
        return Expected(self.student.without_own_blocks(shared), target, has_own_block) if target else None

    def _behind_header(self, after: bytes, count: int) -> tuple[bytes, bool]:
        """Return the bytes after `count` headers without a leading empty block, and whether there was such a block.

        A line end after the block belongs to the turn; only contexts are compared without such line ends.
        """
        written = after.split(self.student.header, count)[-1]
        own = self.student.own_block
        return (written[len(own) :], True) if own and written.startswith(own) else (written, False)

    def _render(self, messages: Sequence[Message], size: int | None, *, prompt: bool) -> bytes | None:
        if size is not None and (size, prompt) in self._renders:
            return self._renders[size, prompt]
        try:
            made = self.student.marked(
                self.student.text(messages, prompt=prompt, with_tools=self._manners.tools), self._shield
            )
        except CANNOT_SAY:
            made = None
        if size is not None:
            if len(self._renders) > 64:  # the prefixes of a long session would fill the memory
                self._renders.clear()
            self._renders[size, prompt] = made
        return made

    def _assemble(self) -> bool:
        """Assemble all contexts from pieces that are rendered in short conversations, in time linear in the session.

        Return whether the pieces together are the rendering of the whole session. `exact` checks samples of them.
        """
        if not self.places:
            return False
        first = self._render(self.messages[: self.places[0]], self.places[0], prompt=True)
        pieces = [] if first is None else [self.student.without_own_blocks(first)]
        for number, place in enumerate(self.places):
            message = self.messages[place]
            own = self._local([Q], [Q, message])
            if own is None or not pieces:
                return False
            self._ends.append(sum(map(len, pieces[-1:])) + (self._ends[-1] if self._ends else 0))
            self._targets.append(own.target)
            self._own_blocks.append(own.has_own_block)
            last = number + 1 == len(self.places)
            until = place + 1 if last else self.places[number + 1]
            after = self._between(message, self.messages[place + 1 : until])
            if after is None:
                return False
            pieces.append(after)
        self._whole = b"".join(pieces)
        made = self._render(self.messages[: self.places[-1] + 1], self.places[-1] + 1, prompt=True)
        return made is not None and self.student.without_own_blocks(made) == self._whole

    def _local(self, before: list[Message], after: list[Message]) -> Expected | None:
        texts = [self._small(before, prompt=True), self._small(after, prompt=False)]
        return None if texts[0] is None or texts[1] is None else self._split(texts[0], texts[1], None)

    def _between(self, message: Message, others: Sequence[Message]) -> bytes | None:
        """Return the rendering of a turn and what follows it, up to the next prompt."""
        texts = [self._small([Q], prompt=True), self._small([Q, message, *others], prompt=True)]
        if texts[0] is None or texts[1] is None:
            return None
        start, made = self.student.without_own_blocks(texts[0]), self.student.without_own_blocks(texts[1])
        return made[len(start) :] if made.startswith(start) else None

    def _small(self, messages: list[Message], *, prompt: bool) -> bytes | None:
        try:
            return self.student.marked(self.student.text(messages, prompt=prompt), self._shield)
        except CANNOT_SAY:
            return None


def late_texts(turn: Turn) -> list[str]:
    """Return the texts of a turn after its calls, if its layout is known."""
    found: list[str] = []
    at, has_called = 0, False
    for kind, size in turn.extra.get("blocks") or ():
        if kind == "text":
            text = turn.text[at : at + size]
            at += size + 1
            found += [text] if has_called and text.strip() else []
        has_called |= kind == "call"
    return found
