"""The tiny world's tasks: what is asked, what the untaught model does about it, and the rule that says what is right.

A kind of task has one slot of the call that decides: the tool's name, or the value of an argument. Habit fills it
wrongly. A rule in the context says what to fill it with; a rule about another kind of task says nothing about this one.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer_replication.types import Conversation, Message, Origin, Provenance, Role, ToolCall, ToolResult, Turn

_HERE = Provenance(file="world.jsonl", lines=(1,))
FILES = (
    *("apple", "birch", "cedar", "daisy", "elder", "fern", "grape", "hazel", "iris", "juniper", "kale", "lemon"),
    *("maple", "nettle", "olive", "peach", "quince", "rose", "sage", "tulip", "umber", "violet", "willow", "yarrow"),
)
DONE, FAILED = "Done.", "It failed."
WORKED = "ok"
IRRELEVANT_HINT = "The page is in the file."


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of task. `slot` is "tool" or the name of the argument that habit gets wrong; `right` is what works."""

    name: str
    request: str
    rule: str
    vague_rule: str
    error: str
    tool: str
    slot: str
    habit: str
    right: str
    others: tuple[str, ...]

    @property
    def values(self) -> tuple[str, ...]:
        """What a rule may ask for."""
        return (self.right, *self.others)

    def hint(self, value: str | None = None) -> str:
        return self.rule.format(value=self.right if value is None else value, habit=self.habit)

    def vague_hint(self) -> str:
        """Says what is wrong and not what is right: who obeys it is left with several values to choose from."""
        return self.vague_rule.format(habit=self.habit)

    def call(self, file: str, value: str) -> tuple[str, dict[str, str]]:
        """Name and arguments of the call that fills the slot with a value."""
        if self.slot == "tool":
            return value, {"path": file}
        return self.tool, {"path": file, self.slot: value}

    def complaint(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        """What the tool has to say against a call; only the right value works."""
        value = name if self.slot == "tool" else arguments.get(self.slot)
        is_right = value == self.right and name in (self.right, self.tool)
        return None if is_right else self.error.format(value=value)

    def result(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The tool message, in the form that TRL gives to a tool's exception."""
        complaint = self.complaint(name, arguments)
        return WORKED if complaint is None else str({"error": complaint})


KINDS = (
    Kind(
        name="wrong_tool",
        request="Find the word in '{file}'.",
        rule="To find a word, call '{value}', not '{habit}'.",
        vague_rule="To find a word, never call '{habit}'.",
        error="The tool {value} is off.",
        tool="",
        slot="tool",
        habit="grep",
        right="scan",
        others=("seek", "hunt"),
    ),
    Kind(
        name="unknown_tool",
        request="Get the page '{file}'.",
        rule="To get a page, call '{value}', not '{habit}'.",
        vague_rule="To get a page, never call '{habit}'.",
        error="Tool {value} not found.",
        tool="",
        slot="tool",
        habit="fetch",
        right="load",
        others=("pull", "browse"),
    ),
    Kind(
        name="wrong_mode",
        request="Show the file '{file}'.",
        rule="To show a file, mode must be '{value}', not '{habit}'.",
        vague_rule="To show a file, mode is never '{habit}'.",
        error="The mode {value} is bad.",
        tool="read",
        slot="mode",
        habit="text",
        right="raw",
        others=("lines", "bytes"),
    ),
    Kind(
        name="wrong_folder",
        request="Store the file '{file}'.",
        rule="To store a file, folder must be '{value}', not '{habit}'.",
        vague_rule="To store a file, folder is never '{habit}'.",
        error="The folder {value} is bad.",
        tool="save",
        slot="folder",
        habit="temp",
        right="build",
        others=("dist", "share"),
    ),
)
KIND_OF = {kind.name: kind for kind in KINDS}
# Habit calls a tool of the second kind that does not exist, so it is in no list.
TOOL_NAMES = ("grep", "scan", "seek", "hunt", "load", "pull", "browse", "read", "save")
_NAMES = (*FILES, *TOOL_NAMES, "path", "mode", "folder", *(v for kind in KINDS for v in (kind.habit, *kind.values)))
_WORDS = (
    *("Find", "Get", "Show", "Store", "To", "the", "a", "word", "in", "page", "file", "find", "get", "show", "store"),
    *("call", "not", "never", "must", "be", "is", "The", "Tool", "tool", "off", "found", "bad", "Done", "It", "failed"),
    *("ok", "system", "user", "assistant"),
)
VOCABULARY = tuple(dict.fromkeys([*_NAMES, *_WORDS]))


def schema(name: str) -> dict[str, Any]:
    """A tool's schema, in the shape of the OpenAI interface."""
    extra = [kind.slot for kind in KINDS if kind.tool == name]
    properties = {each: {"type": "string", "description": each} for each in ("path", *extra)}
    parameters = {"type": "object", "properties": properties, "required": ["path"]}
    return {
        "type": "function",
        "function": {"name": name, "description": f"The tool {name}.", "parameters": parameters},
    }


TOOLS = [schema(name) for name in TOOL_NAMES]


@dataclass(frozen=True, slots=True)
class GoodTask:
    """A task of a session that went well, and the turn that made its call."""

    kind: Kind
    file: str
    turn_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToySession:
    """A session with one erring call: the turn, the rule it broke, a rule about something else, and what went well."""

    conversation: Conversation
    kind: Kind
    file: str
    turn_id: str
    hint: str
    shuffled_hint: str
    good_tasks: tuple[GoodTask, ...] = ()

    @property
    def vague_hint(self) -> str:
        return self.kind.vague_hint()

    @property
    def irrelevant_hint(self) -> str:
        """The world's words in a sentence that is no rule about anything."""
        return IRRELEVANT_HINT

    @property
    def tasks(self) -> set[tuple[str, str]]:
        """Kind and file of every task in it, the good ones too."""
        return {(self.kind.name, self.file), *((good.kind.name, good.file) for good in self.good_tasks)}

    @property
    def state(self) -> tuple[Turn, ...]:
        """The turns before the erring one."""
        turns = self.conversation.turns
        return turns[: next(at for at, turn in enumerate(turns) if turn.id == self.turn_id)]

    @property
    def erring(self) -> Turn:
        return self.conversation.turns[len(self.state)]

    def answer(self, value: str | None = None) -> Turn:
        """The call with another value in its slot; without one, the right call."""
        return answering_turn(self.turn_id, self.kind, self.file, self.kind.right if value is None else value)


def sample_session(
    draw: random.Random,
    kind: str | None = None,
    *,
    identity: str = "toy",
    num_tasks_before: int = 0,
    files: Sequence[str] = FILES,
) -> ToySession:
    """A session whose last task goes wrong by habit; those before it are of other kinds and go well.

    They go well because their rule stands before the call: what the model does there by itself, so that a change of
    these calls' log-probs is damage and not learning.
    """
    wrong = KIND_OF[kind] if kind is not None else draw.choice(KINDS)
    others = [each for each in KINDS if each is not wrong]
    turns: list[Turn] = []
    good: list[GoodTask] = []
    for _ in range(num_tasks_before):
        task = GoodTask(draw.choice(others), draw.choice(files), f"t{len(turns) + 2}")
        good.append(task)
        turns += _task(len(turns), task.kind, task.file, task.kind.right, rule=task.kind.hint())
    file = draw.choice(files)
    turn_id = f"t{len(turns) + 1}"
    turns += _task(len(turns), wrong, file, wrong.habit)
    return ToySession(
        conversation=Conversation(id=identity, format="toy", turns=tuple(turns)),
        kind=wrong,
        file=file,
        turn_id=turn_id,
        hint=wrong.hint(),
        shuffled_hint=draw.choice(others).hint(),
        good_tasks=tuple(good),
    )


def _task(first: int, kind: Kind, file: str, value: str, rule: str | None = None) -> list[Turn]:
    """A request, a rule if there is one, a call, its result, and a last word."""
    asked: list[tuple[Role, Origin, str]] = [("user", "human", kind.request.format(file=file))]
    if rule is not None:
        asked.append(("system", "meta", rule))
    turns = [
        Turn(id=f"t{first + at}", role=role, origin=origin, text=text, provenance=_HERE)
        for at, (role, origin, text) in enumerate(asked)
    ]
    at = first + len(turns)
    call = answering_turn(f"t{at}", kind, file, value)
    made = call.calls[0]
    text = kind.result(made.name, made.arguments)
    result = ToolResult(call_id=made.id, text=text, is_error=text != WORKED)
    return [
        *turns,
        call,
        Turn(id=f"t{at + 1}", role="tool", origin="tool", results=(result,), provenance=_HERE),
        Turn(id=f"t{at + 2}", role="assistant", origin="model", text=last_word(text), provenance=_HERE),
    ]


def answering_turn(turn_id: str, kind: Kind, file: str, value: str) -> Turn:
    """The assistant's turn that fills the slot of a task with a value."""
    name, arguments = kind.call(file, value)
    call = ToolCall(id=f"call-{turn_id}", name=name, arguments=arguments)
    return Turn(id=turn_id, role="assistant", origin="model", calls=(call,), provenance=_HERE)


def last_word(result: str) -> str:
    return DONE if result == WORKED else FAILED


def task_messages(kind: Kind, file: str, value: str, hint: str | None) -> list[Message]:
    """A task as chat messages, a hint where `before_turn` puts one: a system message before the call."""
    name, arguments = kind.call(file, value)
    text = kind.result(name, arguments)
    function = {"name": name, "arguments": arguments}
    messages: list[Message] = [{"role": "user", "content": kind.request.format(file=file)}]
    if hint is not None:
        messages.append({"role": "system", "content": hint})
    messages += [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "name": name, "content": text},
        {"role": "assistant", "content": last_word(text)},
    ]
    return messages
