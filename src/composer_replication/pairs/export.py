"""Export preference pairs as a JSONL data set that `datasets` reads and TRL's DPOTrainer takes unchanged.

    dataset = datasets.load_dataset("json", data_files="preferences.jsonl", split="train")

A row has `prompt`, `chosen` and `rejected` as messages, `tools` as JSON text (TRL reads it), and `state_id`.

* Types. `datasets` infers them from the first 10 MB. Messages that all have the same keys become a fixed record, and a
  later message with other keys, or a call with other arguments, then fails or loses its types. The first message of
  each column therefore has an extra key, `schema`, with which all messages are read as free JSON.
* Arguments. Most chat templates write them with `tojson`, which needs objects: given text, it would quote it, and the
  model would learn to quote its arguments. `arguments="text"` is for templates that take text only.
* Numbers. `datasets` reads free JSON with a parser that misses the last bit of some fractions (0.6 becomes
  0.6000000000000001) and keeps 10 decimals. Arguments with numbers that would change by more are written as text.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

from composer_replication import teacher_replay
from composer_replication.action_text import parse_action_text, remove_thinking
from composer_replication.atomic import resolve_link, staged
from composer_replication.canonical_json import decode, decode_object, encode_as_written
from composer_replication.errors import InputError, explain
from composer_replication.messages import call_entry, message_calls, required_text, thinking_text
from composer_replication.pairs.normalise import DJNormalizer, NormalizedDPOPair
from composer_replication.privacy.outgoing import Find, LastGate, refusal
from composer_replication.teacher_replay.replay import check_threshold
from composer_replication.teacher_replay.teachers import DEFAULT_TEACHERS
from composer_replication.types import DPOPair, Message, TeacherCallResult, TeacherSpec, ToolCall, TraceState

SCHEMA = "composer_replication.preferences/1"
Tools = Sequence[Mapping[str, Any]]
Arguments = Literal["object", "text"]
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# What `datasets` keeps of a number in a JSON column: 10 decimals, 64 bits.
_DECIMALS, _MAX_ERROR = 10, 1e-9
_INTEGERS = range(-(1 << 63), 1 << 64)


def export_preferences(
    pairs: Iterable[DPOPair | NormalizedDPOPair],
    path: str | os.PathLike[str],
    *,
    tools: Tools | None = None,
    arguments: Arguments = "object",
    gate: LastGate | None = None,
) -> int:
    """Write the pairs to a JSONL file atomically, and return their number.

    `tools` are the tool schemas for pairs that have no "tools" themselves. `gate=OpenGate()` disables the check for
    secrets.

    Raises:
        InputError: There are no pairs, or a row may contain a secret, such as the value of an environment variable.
    """
    if arguments not in ("object", "text"):
        raise InputError(explain("arguments", got=repr(arguments), expected='"object" or "text"'))
    target, num_rows, finds = resolve_link(path), 0, dict[bytes, Find]()
    gate = LastGate(os.environ) if gate is None else gate
    target.parent.mkdir(parents=True, exist_ok=True)
    with staged(target) as stage:
        # All rows are checked before the error is raised, so that it lists every secret, not only the first.
        for row in _build_rows(pairs, tools, arguments):
            line = encode_as_written(row, where=f"pair {row['state_id']!r}")
            for find in _find_secrets(line, gate, num_rows):
                finds.setdefault(find.digest, find)
            stage.file.write(line + b"\n")
            num_rows += 1
        if finds:
            raise refusal(f"preference pairs for {target}", list(finds.values()))
        if not num_rows:
            raise InputError(explain(f"pairs for {target}", got="none", expected="at least one"))
        stage.commit()
    return num_rows


def _find_secrets(line: bytes, gate: LastGate, number: int) -> Iterator[Find]:
    """Yield the suspected secrets in an encoded row."""
    row: Any = decode_object(line)
    name = {"state_id": row["state_id"]}
    # An id that itself looks like a secret must not appear in the error message.
    location = f"pair {row['state_id'] if gate.look(name, '') is None else number}"
    parts: list[tuple[str, Any]] = [("state_id", name), ("tools", decode(row["tools"].encode()))]
    # Each message is checked separately, so that an error can say where the secret is.
    for column in ("prompt", "chosen", "rejected"):
        parts += [(f"{column} message {number}", message) for number, message in enumerate(row[column], start=1)]
    finds = (gate.look(part, f"{location}, {name}") for name, part in parts)
    return (find for find in finds if find is not None)


def _build_rows(
    pairs: Iterable[DPOPair | NormalizedDPOPair], tools: Tools | None, arguments: Arguments
) -> Iterator[dict[str, Any]]:
    """Yield one row per pair.

    In the first row, the first message of each column has the key `schema` (see the module).
    """
    for number, pair in enumerate(pairs):
        row = build_preference_row(pair, number=number, tools=tools, arguments=arguments)
        if number == 0:
            for column in ("prompt", "chosen", "rejected"):
                row[column][0] = {**row[column][0], "schema": SCHEMA}
        yield row


def build_preference_row(
    pair: DPOPair | NormalizedDPOPair, *, number: int = 0, tools: Tools | None = None, arguments: Arguments = "object"
) -> dict[str, Any]:
    """Return the row for a pair. Errors identify the pair by `number` and by the id of its state."""
    fields = _pair_fields(pair, number)
    where = f"pair {number} ({fields['state_id']!r})"
    prompt = build_prompt_messages(fields["state_messages"], arguments, where)
    if not prompt:
        raise InputError(explain(f"state of {where}", got="no messages", expected="at least one"))
    schemas = fields.get("tools") or tools or ()
    chosen, rejected = _build_answer_messages((fields["chosen"], fields["rejected"]), arguments)
    return {
        "state_id": fields["state_id"],
        "prompt": prompt,
        "chosen": [chosen],
        "rejected": [rejected],
        "tools": encode_as_written(list(schemas), where=f"tools of {where}").decode(),
    }


def _pair_fields(pair: DPOPair | NormalizedDPOPair, number: int) -> Mapping[str, Any]:
    """Return the fields of an extracted or filtered pair, with its answers as text.

    Raises InputError if a field is missing or has the wrong type.
    """
    if isinstance(pair, NormalizedDPOPair):
        sides = {"chosen": pair.chosen_messages, "rejected": pair.rejected_messages}
        texts = {side: "\n".join(str(message["content"]) for message in messages) for side, messages in sides.items()}
        return pair.metadata | {"state_id": pair.state_id, "state_messages": pair.state_messages} | texts
    expected_types = {"state_id": str, "state_messages": list, "chosen": str, "rejected": str}
    fields = cast("Mapping[str, Any]", pair) if isinstance(pair, Mapping) else {}  # pyright: ignore[reportUnnecessaryIsInstance]
    for key, kind in expected_types.items():
        if not isinstance(fields.get(key), kind):
            raise InputError(
                explain(f"pair {number}, {key!r}", got=type(fields.get(key)).__name__, expected=kind.__name__)
            )
    return fields


def _build_answer_message(action: str, arguments: Arguments) -> Message:
    """Return the assistant message for the text of an action."""
    parsed = parse_action_text(action)
    return _assistant_message(parsed.action.text, parsed.thinking, parsed.action.calls, arguments)


def _build_answer_messages(actions: Sequence[str], arguments: Arguments) -> list[Message]:
    """Return the messages for the answers in a pair, with thinking only if all of them have it.

    Often the log contains only the student's thinking. DPO would then learn to prefer answers without thinking.
    """
    messages = [_build_answer_message(action, arguments) for action in actions]
    if not all("reasoning_content" in message for message in messages):
        for message in messages:
            message.pop("reasoning_content", None)
            message["content"] = remove_thinking(str(message["content"]))
    return messages


def build_prompt_messages(messages: Sequence[Mapping[str, Any]], arguments: Arguments, where: str) -> list[Message]:
    """Return the messages of a state as a chat template expects them: tool results have the name of their tool.

    Raises InputError for a message with an unknown role or malformed content.
    """
    names: dict[str, str] = {}
    prompt: list[Message] = []
    for number, message in enumerate(messages):
        location = f"message {number} of {where}"
        role = _ROLES.get(str(message.get("role"))) if isinstance(message, Mapping) else None  # pyright: ignore[reportUnnecessaryIsInstance]
        if role is None:
            got = repr(message.get("role")) if isinstance(message, Mapping) else type(message).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(explain(f"role of {location}", got=got, expected=f"one of {', '.join(_ROLES)}"))
        text = required_text(message.get("content"), location)
        if role == "assistant":
            calls = message_calls(message, location)
            names |= {call.id: call.name for call in calls}
            prompt.append(_assistant_message(text, thinking_text(message, location), calls, arguments))
        elif role == "tool":
            # Logs identify the call only by its id, but some templates print the name of the tool.
            call_id = str(message.get("tool_call_id") or "")
            name = str(message.get("name") or names.get(call_id, ""))
            prompt.append({"role": role, "content": text, "tool_call_id": call_id, "name": name})
        else:
            prompt.append({"role": role, "content": text})
    return prompt


def _assistant_message(text: str, thinking: str, calls: Iterable[ToolCall], arguments: Arguments) -> Message:
    """Return an assistant message, without keys for empty parts."""
    message: Message = {"role": "assistant", "content": text}
    if thinking:
        message["reasoning_content"] = thinking
    entries = [call_entry(call.id, call.name, _format_arguments(call, arguments)) for call in calls]
    # Some templates test whether the key exists, others whether the list is empty: no key works for both.
    return message | {"tool_calls": entries} if entries else message


def _format_arguments(call: ToolCall, form: Arguments) -> object:
    """Return a call's arguments in the requested form, or as text if they are not an object or would lose precision."""
    # Arguments that are not a JSON object are exported as the model wrote them.
    if call.raw_arguments is not None:
        return call.raw_arguments
    if form == "object" and _survives_datasets(call.arguments):
        return dict(call.arguments)
    return json.dumps(dict(call.arguments), ensure_ascii=False)


def _survives_datasets(value: object) -> bool:
    """Return whether `datasets` reads back all numbers in a value unchanged."""
    # A stack instead of recursion: arguments may be nested deeper than Python's recursion limit.
    pending = [value]
    while pending:
        node = pending.pop()
        if isinstance(node, Mapping):
            pending.extend(cast("Mapping[str, object]", node).values())
        elif isinstance(node, list | tuple):
            pending.extend(cast("list[object]", node))
        elif isinstance(node, int | float) and not _number_survives_datasets(node):
            return False
    return True


def _number_survives_datasets(number: float) -> bool:
    if isinstance(number, int):
        return number in _INTEGERS
    return math.isclose(round(number, _DECIMALS), number, rel_tol=_MAX_ERROR)


async def replay_and_normalize_trace(
    *,
    states: Sequence[TraceState],
    teachers: Sequence[TeacherSpec] | None = None,
    agreement_threshold: int = 2,
    max_total_usd: float = 5.0,
    normalizer: DJNormalizer | None = None,
    **replay_kwargs: Any,
) -> tuple[list[TeacherCallResult], list[NormalizedDPOPair]]:
    """Ask the teachers about states, and return their answers and the filtered pairs.

    Runs `replay_trace`, `extract_dpo_pairs` and the normalizer, by default with the built-in recipe. `replay_kwargs`
    are passed to `replay_trace`, and `teachers=None` selects its default teachers. The normalizer's `counts` show how
    many pairs were dropped.
    """
    # Both can fail on bad input, so they run before the first paid request.
    normalizer = normalizer or DJNormalizer()
    teacher_options: dict[str, Any] = {} if teachers is None else {"teachers": teachers}
    check_threshold(len(DEFAULT_TEACHERS if teachers is None else teachers), agreement_threshold)
    actions = await teacher_replay.replay_trace(states, max_total_usd=max_total_usd, **teacher_options, **replay_kwargs)
    pairs = teacher_replay.extract_dpo_pairs(states, actions, agreement_threshold=agreement_threshold)
    return actions, normalizer.normalize(pairs)


def replay_and_normalize_trace_sync(
    *,
    states: Sequence[TraceState],
    teachers: Sequence[TeacherSpec] | None = None,
    agreement_threshold: int = 2,
    max_total_usd: float = 5.0,
    normalizer: DJNormalizer | None = None,
    **replay_kwargs: Any,
) -> tuple[list[TeacherCallResult], list[NormalizedDPOPair]]:
    """Run `replay_and_normalize_trace` outside an event loop. Raises InputError if an event loop is running."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        work = replay_and_normalize_trace(
            states=states,
            teachers=teachers,
            agreement_threshold=agreement_threshold,
            max_total_usd=max_total_usd,
            normalizer=normalizer,
            **replay_kwargs,
        )
        return asyncio.run(work)
    raise InputError("an event loop is already running. Use `await replay_and_normalize_trace(...)` instead")
