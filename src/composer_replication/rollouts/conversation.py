"""A rollout as a conversation: its messages for the rules that find errors, its ids for everything that is computed.

A trainer's rollout is a prompt and a completion as token ids, a mask that says which of the completion's tokens the
model sampled, and the messages they were parsed into. Each run of sampled tokens is one assistant message.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from composer_replication.actions.calls import tool_call
from composer_replication.actions.messages import THINKING_KEYS, WrittenCall, content_text, written_calls
from composer_replication.sites.taxonomy import USUAL_BLAME
from composer_replication.types import Conversation, ErrorSite, Message, Provenance, ToolCall, ToolResult, Turn

FORMAT = "rollout"
_NOWHERE = Provenance(file="", lines=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One trajectory. `sampled` is 1 on the tokens the model wrote (None: all of them).

    `signals` are what the environment itself says went wrong: mappings with `turn` (number of the assistant message,
    from 0), `kind`, `message`, and a `hint` if it has one. `raised` says of each tool message, in order, whether the
    tool raised; without it, that is read from the message. `tools` are schemas by name.
    """

    rollout_id: str
    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    sampled: Sequence[int] | None
    prompt: Sequence[Message]
    messages: Sequence[Message]
    signals: Sequence[Mapping[str, Any]] = ()
    raised: Sequence[bool] | None = None
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])


class Run(NamedTuple):
    """Tokens [start, end) of a completion, written by the model in one go."""

    start: int
    end: int


def sampled_runs(rollout: Rollout) -> list[Run]:
    """The completion's runs of sampled tokens, in order."""
    if rollout.sampled is None:
        return [Run(0, len(rollout.completion_ids))] if rollout.completion_ids else []
    runs: list[Run] = []
    start: int | None = None
    for position, is_sampled in enumerate([*rollout.sampled, 0]):
        if is_sampled and start is None:
            start = position
        elif not is_sampled and start is not None:
            runs.append(Run(start, position))
            start = None
    return runs


def assistant_id(number: int) -> str:
    """The turn id of the n-th assistant message of a rollout."""
    return f"assistant-{number}"


def conversation_of(rollout: Rollout, runs: Sequence[Run]) -> Conversation:
    """The whole rollout; assistant turns of the completion have their sampled ids and the id of their number.

    A rollout function's completion is one message however many turns it has: then a turn is its ids and nothing else.
    """
    turns = [_plain_turn(number, message) for number, message in enumerate(rollout.prompt)]
    if not is_parsed(rollout, runs):
        bare = [_assistant_turn({}, number, _ids(rollout, run)) for number, run in enumerate(runs)]
        return Conversation(id=rollout.rollout_id, format=FORMAT, turns=(*turns, *bare))
    open_calls: list[ToolCall] = []
    number = 0
    raised = iter(rollout.raised) if rollout.raised is not None else None
    for index, message in enumerate(rollout.messages):
        if message.get("role") == "assistant":
            run = runs[number] if number < len(runs) else Run(0, 0)
            turn = _assistant_turn(message, number, _ids(rollout, run))
            open_calls = list(turn.calls)
            number += 1
        elif message.get("role") == "tool":
            turn = _result_turn(message, index, open_calls, None if raised is None else next(raised, False))
        else:
            turn = _plain_turn(len(rollout.prompt) + index, message)
        turns.append(turn)
    return Conversation(id=rollout.rollout_id, format=FORMAT, turns=tuple(turns))


def is_parsed(rollout: Rollout, runs: Sequence[Run]) -> bool:
    """Whether each run of sampled tokens has a message of its own."""
    return sum(message.get("role") == "assistant" for message in rollout.messages) == len(runs)


def _ids(rollout: Rollout, run: Run) -> tuple[int, ...]:
    return tuple(rollout.completion_ids[run.start : run.end])


def _plain_turn(number: int, message: Message) -> Turn:
    role = message.get("role")
    text = content_text(message.get("content"))
    if role == "assistant":
        calls = _calls(message, f"prompt-{number}")
        return Turn(
            id=f"prompt-{number}", role="assistant", origin="copied", text=text, calls=calls, provenance=_NOWHERE
        )
    role = "system" if role == "system" else "user"
    return Turn(id=f"prompt-{number}", role=role, origin="human", text=text, provenance=_NOWHERE)


def _assistant_turn(message: Message, number: int, ids: tuple[int, ...]) -> Turn:
    name = assistant_id(number)
    return Turn(
        id=name,
        role="assistant",
        origin="model",
        text=content_text(message.get("content")),
        thinking=content_text(next((message[key] for key in THINKING_KEYS if message.get(key)), "")),
        calls=_calls(message, name),
        provenance=_NOWHERE,
        token_ids=ids or None,
    )


def _result_turn(message: Message, index: int, open_calls: list[ToolCall], raised: bool | None) -> Turn:
    """Results name their tool, not their call, and those of asynchronous tools come last: the first open call of it."""
    call = next((open_call for open_call in open_calls if open_call.name == message.get("name")), None)
    if call is None and open_calls:
        call = open_calls[0]
    if call is not None:
        open_calls.remove(call)
    content = content_text(message.get("content"))
    text, is_error = result_of(content) if raised is not False else (content, None)
    result = ToolResult(call_id=call.id if call else f"result-{index}", text=text, is_error=is_error)
    return Turn(id=f"result-{index}", role="tool", origin="tool", results=(result,), provenance=_NOWHERE)


def result_of(content: str) -> tuple[str, bool | None]:
    """A result's text, and whether the tool raised: TRL writes that as a dict with the one key `error`.

    A tool that did not raise may still say in words that it failed, so the flag is then unknown, not False.
    """
    if content.startswith("{") and "error" in content[:12]:
        try:
            value = ast.literal_eval(content)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return content, None
        if isinstance(value, dict) and list(value) == ["error"]:
            return str(value["error"]), True
    return content, None


def _calls(message: Message, turn: str) -> tuple[ToolCall, ...]:
    entries = [call for call in written_calls(message) if isinstance(call.entry, Mapping)]
    return tuple(_call(call, f"{turn}-call-{number}") for number, call in enumerate(entries))


def _call(written: WrittenCall, identity: str) -> ToolCall:
    """A parsed value goes through the one reader of arguments as text: an engine's parser has limits of its own."""
    arguments = written.arguments
    text = (
        arguments
        if arguments is None or isinstance(arguments, str)
        else json.dumps(arguments, ensure_ascii=False, default=str)
    )
    return tool_call(identity, str(written.name or ""), text)


def signalled_sites(rollout: Rollout, conversation: Conversation) -> list[ErrorSite]:
    """What the environment itself says; it knows whose doing it was, and says so by saying it."""
    turn_ids = {turn.id for turn in conversation.turns}
    sites: list[ErrorSite] = []
    for number, signal in enumerate(rollout.signals):
        kind, message = str(signal.get("kind", "other")), str(signal.get("message", ""))
        turn_id = assistant_id(int(signal.get("turn", -1)))
        blame = signal.get("blame") or ("model" if USUAL_BLAME.get(kind, "model") in ("model", "unknown") else None)
        is_kept = turn_id in turn_ids and blame == "model"
        why = "the environment's signal" if is_kept else "blame or turn of a signal: not the model's, or no such turn"
        sites.append(
            ErrorSite(
                id=f"{rollout.rollout_id}-signal-{number}",
                conversation_id=rollout.rollout_id,
                turn_id=turn_id,
                call_id=str(signal.get("call", "")),
                result_turn_id=None,
                tool=str(signal.get("tool", "")),
                kind=kind,
                blame="model" if blame == "model" else "env",
                confidence=1.0,
                evidence=(0, len(message)),
                evidence_text=message,
                is_soft=False,
                is_rewound=False,
                repeats=0,
                repeat_of=None,
                between=0,
                is_kept=is_kept,
                reason=why,
            )
        )
    return sites


def signal_of(site: ErrorSite, rollout: Rollout) -> Mapping[str, Any] | None:
    prefix = f"{rollout.rollout_id}-signal-"
    return rollout.signals[int(site.id.removeprefix(prefix))] if site.id.startswith(prefix) else None
