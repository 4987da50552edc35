"""A conversation's turns as a template would have generated each: the context it sees, and the run it writes.

For turn i with the messages m before it: `context` is apply_chat_template(m, add_generation_prompt=True), with an empty
block that the template writes by itself; `target` is what apply_chat_template(m + [turn]) adds to that, up to and with
the last control token. A thought is in both only where the student itself had it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jinja2.exceptions import TemplateError

from composer_replication.types import Conversation, Message, ToolResult, Turn
from template_oracle import MARK, Manners, Q, Shield, Student, call_fields, texts_of

_BETWEEN = "\n\n"
_UNSEEN = "Uuu-nobody-said-this"
CANNOT_SAY = (TemplateError, TypeError, ValueError, KeyError, IndexError)


class Expected(NamedTuple):
    """Marked bytes: what stands before a turn (its history without empty blocks), and what the template writes for it.

    `has_own_block`: the template itself puts an empty block between its prompt and the target, which is context.
    """

    context: bytes
    target: bytes
    has_own_block: bool


class SessionOracle:
    """Expectations for every assistant turn; `keep_thinking` says whose thoughts are shown to the template."""

    def __init__(
        self,
        student: Student,
        conversation: Conversation,
        keep_thinking: Callable[[Turn], bool] = lambda _: False,
        manners: Manners | None = None,
    ) -> None:
        self.student, self._manners = student, manners or student.manners
        self._shield = Shield(student, texts_of(conversation))
        self._writer = _Writer(student, self._manners, self._shield, keep_thinking)
        self._writer.add_all(conversation)
        self.messages, self.places, self.turns = self._writer.messages, self._writer.places, self._writer.turns
        self.late = {number for number, turn in enumerate(self.turns) if late_texts(turn)}
        self._renders: dict[tuple[int, bool], bytes | None] = {}
        self._whole, self._ends, self._targets = b"", list[int](), list[bytes]()
        self._own_blocks: list[bool] = []
        self.is_assembled = self._assemble()

    def target(self, number: int, answer: Turn | None = None) -> bytes | None:
        """What the template writes for turn `number` (or another answer in its place), from a small conversation."""
        if answer is None and self.is_assembled:
            return self._targets[number]
        found = self._local(
            [Q], [Q, self.messages[self.places[number]] if answer is None else self._writer.assistant(answer)]
        )
        return None if found is None else found.target

    def fits(self, number: int, context: bytes, *, whole: bool) -> bool:
        """Whether this context is what the template shows before turn `number`, or, in a cut window, the end of it.

        From the assembled pieces; without them, only whether it ends with the template's prompt.
        """
        if not self.is_assembled:
            return context.endswith((self.student.header, self.student.header + self.student.own_block))
        if not self.student.ends_alike(context, self._own_blocks[number]):
            return False
        seen = self.student.without_own_blocks(context)
        end, late = self._ends[number], self._late_before(number)
        if late is not None:
            return seen.endswith(self._whole[self._ends[late] + len(self._targets[late]) : end])
        start = end - len(seen)
        return start >= 0 and (not whole or start == 0) and self._whole[start:end] == seen

    def agrees(self, number: int, expected: Expected, context: bytes, *, whole: bool) -> bool:
        """The same for an expectation of turn `number` that is at hand."""
        seen = self.student.without_own_blocks(context)
        is_same = expected.context == seen if whole else expected.context.endswith(seen)
        late = self._late_before(number)
        if late is not None and not is_same:
            place = self.places[late] + 1
            before = self.student.without_own_blocks(self._render(self.messages[:place], place, prompt=False) or b"")
            before = before[: before.rfind(MARK) + 1]
            is_same = expected.context.startswith(before) and seen.endswith(expected.context[len(before) :])
        return is_same and self.student.ends_alike(context, expected.has_own_block)

    def _late_before(self, number: int) -> int | None:
        """The last turn before it that said something after its calls.

        No template can write that from one message with calls, and how it is said is not laid down: the turn itself is
        judged by its order, and contexts are compared from its end on.
        """
        return next((each for each in range(number - 1, -1, -1) if each in self.late), None)

    def exact(self, number: int, answer: Turn | None = None) -> Expected | None:
        """From two whole renderings; None where the template cannot say it, or rewrites what was before.

        `answer` is another turn in the place of turn `number`.
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
        """Whether the template shows what tools answered only when the next turn is there: nobody generates that."""
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
            if len(self._renders) > 64:  # a long session's prefixes would fill the memory
                self._renders.clear()
            self._renders[size, prompt] = made
        return made

    def _assemble(self) -> bool:
        """Every context from pieces, rendered in a small conversation each: linear in the session's length.

        The pieces count if together they are the rendering of the whole session; `exact` is there to check samples.
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
        """A turn and what follows it, up to the next prompt."""
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
    """What a turn said after a call, where its layout is known."""
    found: list[str] = []
    at, has_called = 0, False
    for kind, size in turn.extra.get("blocks") or ():
        if kind == "text":
            text = turn.text[at : at + size]
            at += size + 1
            found += [text] if has_called and text.strip() else []
        has_called |= kind == "call"
    return found


class _Writer:
    """Turns as messages. What a template does not take is said as text, in the package's documented forms."""

    def __init__(
        self, student: Student, manners: Manners, shield: Shield, keep_thinking: Callable[[Turn], bool]
    ) -> None:
        self._student, self._manners, self._shield = student, manners, shield
        self._keep_thinking = keep_thinking
        self._names: dict[str, str] = {}
        self.messages: list[Message] = []
        self.places: list[int] = []
        self.turns: list[Turn] = []

    def add_all(self, conversation: Conversation) -> None:
        tools = "" if self._manners.tools or not self._student.tools else self._tools_as_text()
        turns = conversation.turns
        if tools and not (turns and turns[0].role == "system"):
            self._add_system(tools)
            tools = ""
        for turn in turns:
            if turn.role == "system":
                self._add_system(self._shield.hide(turn.text) + (f"{_BETWEEN}{tools}" if tools else ""))
                tools = ""
            elif turn.role == "user":
                self._add_user(self._shield.hide(turn.text))
            elif turn.role == "tool":
                for result in turn.results:
                    self._add_result(result)
            else:
                self._add_assistant(turn)

    def assistant(self, turn: Turn) -> Message:
        hide, manners = self._shield.hide, self._manners
        message: Message = {"role": "assistant", "content": hide(turn.text)}
        if turn.thinking and manners.thinking and self._keep_thinking(turn):
            message["reasoning_content"] = hide(turn.thinking)
        if not turn.calls:
            return message
        if manners.calls and (len(turn.calls) == 1 or manners.parallel):
            calls = [call_fields(call, self._shield, takes_strings=manners.string_arguments) for call in turn.calls]
            return {**message, "tool_calls": calls}
        said = [message["content"]] if message["content"] else []
        return {**message, "content": "\n".join(map(str, [*said, *map(self._call_as_text, turn.calls)]))}

    def _add_assistant(self, turn: Turn) -> None:
        spoken = [str(each["role"]) for each in self.messages[-1:] if each["role"] != "system"]
        if spoken == ["assistant"] and not self._manners.assistants_in_a_row:
            self.messages.append({"role": "user", "content": ""})
        if not spoken and not self._manners.assistant_first:
            self.messages.append({"role": "user", "content": ""})
        for call in turn.calls:
            self._names[call.id] = self._shield.hide(call.name)
        self.places.append(len(self.messages))
        self.turns.append(turn)
        self.messages.append(self.assistant(turn))

    def _add_system(self, text: str) -> None:
        if self._manners.system_later if self.messages else self._manners.system_first:
            self.messages.append({"role": "system", "content": text})
        else:
            self._add_user(text)

    def _add_user(self, text: str) -> None:
        last = self.messages[-1] if self.messages else None
        if last is not None and last["role"] == "user" and not self._manners.users_in_a_row:
            self.messages[-1] = {"role": "user", "content": f"{last['content']}{_BETWEEN}{text}"}
        else:
            self.messages.append({"role": "user", "content": text})

    def _add_result(self, result: ToolResult) -> None:
        text = self._shield.hide(result.text)
        if self._manners.results:
            name = self._names.get(result.call_id, "")
            identity = self._shield.hide(result.call_id)
            self.messages.append({"role": "tool", "content": text, "tool_call_id": identity, "name": name})
        else:
            self._add_user(f"<tool_response>\n{text}\n</tool_response>")

    def _tools_as_text(self) -> str:
        return "\n".join(["# Tools", "", *(_json(self._shield.hide(tool)) for tool in self._student.tools)])

    def _call_as_text(self, call: Any) -> str:
        hidden = self._shield.hide
        arguments = _json(hidden(dict(call.arguments))) if call.raw_arguments is None else hidden(call.raw_arguments)
        return f'<tool_call>{{"name": {_json(hidden(call.name))}, "arguments": {arguments}}}</tool_call>'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
