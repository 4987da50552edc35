"""Sessions as data sets that other trainers take: good turns with what stood before them, and whole conversations.

    --sft       a row a good turn: `prompt` and `completion` as messages, `tools` as JSON text (TRL's SFTTrainer)
    --sharegpt  a row a conversation: `conversations` of `from` and `value`, calls as <tool_call> in the text

Files are JSONL by side of the split, with a card; `datasets.load_dataset("json", data_files=...)` reads them. Nothing
is written before all rows have passed the last gate.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple

from composer_replication.actions.messages import call_entry
from composer_replication.actions.write import arguments_text
from composer_replication.atomic import StagedFile, atomic_write_text, commit_together, staged
from composer_replication.canonical_json import encode_as_written
from composer_replication.errors import InputError, explain
from composer_replication.ingestion.last_gate import Find, LastGate, gate_of, refusal
from composer_replication.ingestion.states import states
from composer_replication.pairs.export import prompt_messages
from composer_replication.runs import RunDir
from composer_replication.runs.elsewhere import note_elsewhere
from composer_replication.runs.split import sides_of
from composer_replication.runs.tools import ToolTable, read_tools
from composer_replication.sessions.good_turns import good_turns
from composer_replication.sessions.read_run import LoggedSession, read_sessions
from composer_replication.types import Turn
from composer_replication.use.cards import data_card

Shape = Literal["sft", "sharegpt"]
Row = dict[str, Any]
_FIELDS: Mapping[Shape, Mapping[str, str]] = {
    "sft": {
        "id": "conversation and turn",
        "prompt": "messages before the turn; calls have their arguments as objects",
        "completion": "the turn, one message of the assistant",
        "tools": "schemas of the tools, JSON text",
    },
    "sharegpt": {
        "id": "conversation",
        "conversations": "from (system, human, gpt, tool) and value; calls and results stand in tags in the text",
        "tools": "schemas of the tools, JSON text",
    },
}
_WHAT: Mapping[Shape, str] = {
    "sft": "Turns of coding agents that nothing speaks against (no call failed, was refused or stopped), each with the "
    "messages before it: for supervised training on the completion alone.",
    "sharegpt": "Sessions of coding agents, whole, failures included: a row a context that a model saw at once.",
}
_FROM = {"system": "system", "user": "human", "assistant": "gpt", "tool": "tool"}


class DataSet(NamedTuple):
    """What was written: the folder, and rows by side."""

    folder: Path
    rows: Mapping[str, int]


def export_data_set(
    run: RunDir, folder: Path, shape: Shape, *, no_scrub: bool = False, allowed: Iterable[str] = ()
) -> DataSet:
    """Write the rows and their card to a folder, which the caller knows to be new."""
    gate = gate_of(run, os.environ, no_scrub=no_scrub, allowed=allowed)
    if not run.path("sites").exists():
        fix = f"Run `crf sites {run.root}` first: without it nobody knows which turns erred."
        raise InputError(explain(f"sites of {run.root}", got="none", expected="sites.jsonl", fix=fix))
    tools, finds, numbers = read_tools(run), dict[bytes, Find](), Counter[str]()
    rows_of = _sft_rows if shape == "sft" else _sharegpt_rows
    folder.mkdir(parents=True, exist_ok=True)
    note_elsewhere(run, "data set", folder)
    with ExitStack() as held:
        files: dict[str, StagedFile] = {}
        for side, session in _by_side(run):
            for row in rows_of(session, tools):
                if side not in files:
                    files[side] = held.enter_context(staged(folder / f"{side}.jsonl"))
                row = row if numbers[side] else _with_free_types(row)
                files[side].file.write(encode_as_written(row, where=row["id"]) + b"\n")
                numbers[side] += 1
                finds |= {find.digest: find for find in _finds(row, gate)}
        if finds:
            raise refusal(f"{shape} rows for {folder}", list(finds.values()))
        if not numbers:
            fix = "`crf sites RUN` names failures; what is left has to hold turns of a model."
            raise InputError(explain(f"rows for {folder}", got="none", expected="a turn to learn", fix=fix))
        commit_together(*files.values())
    names = {side: f"{side}.jsonl" for side in ("train", "validation", "test") if numbers[side]}
    card = data_card(run, name=folder.name, what=_WHAT[shape], fields=_FIELDS[shape], files=names)
    atomic_write_text(folder / "README.md", card)
    return DataSet(folder, dict(numbers))


def _by_side(run: RunDir) -> Iterator[tuple[str, LoggedSession]]:
    """Every conversation with the side of the split that it stands on; all are `train` where nobody drew one."""
    split = sides_of(run)
    sides = {} if split is None else {identity: side for side in split._fields for identity in getattr(split, side)}
    for session in read_sessions(run, with_sites=True, with_pairs=run.path("pairs").exists()):
        if split is None or session.conversation.id in sides:
            yield sides.get(session.conversation.id, "train"), session


def _sft_rows(session: LoggedSession, tools: ToolTable) -> Iterator[Row]:
    conversation, good = session.conversation, good_turns(session).good
    schemas = _schemas(tools, conversation.format)
    for number, (before, turn) in enumerate(states(conversation)):
        if turn.id in good and (turn.text.strip() or turn.calls):
            where = f"{conversation.id}::{number:04d}"
            prompt = prompt_messages(before, "object", where)
            yield {
                "id": where,
                "prompt": prompt,
                "completion": prompt_messages([_message(turn)], "object", where),
                "tools": schemas,
            }


def _sharegpt_rows(session: LoggedSession, tools: ToolTable) -> Iterator[Row]:
    conversation = session.conversation
    messages: list[Mapping[str, Any]] = []
    for before, turn in states(conversation):
        messages = [*before, _message(turn)]
    if not messages:
        return
    talk = [{"from": _FROM.get(str(message["role"]), "human"), "value": _value(message)} for message in messages]
    yield {"id": conversation.id, "conversations": talk, "tools": _schemas(tools, conversation.format)}


def _message(turn: Turn) -> dict[str, Any]:
    calls = [call_entry(call.id, call.name, arguments_text(call)) for call in turn.calls]
    return {"role": "assistant", "content": turn.text, **({"tool_calls": calls} if calls else {})}


def _value(message: Mapping[str, Any]) -> str:
    """A message as one text; arguments that are no JSON stand as the model wrote them."""
    if message["role"] == "tool":
        return f"<tool_response>\n{message['content']}\n</tool_response>"
    calls = [call["function"] for call in message.get("tool_calls", ())]
    blocks = [
        f'<tool_call>\n{{"name": {json.dumps(call["name"])}, "arguments": {call["arguments"]}}}\n</tool_call>'
        for call in calls
    ]
    return "\n".join([*([str(message["content"])] if message["content"] else []), *blocks])


def _schemas(tools: ToolTable, format_name: str) -> str:
    return encode_as_written(list(tools.of(format_name)), where="tools").decode()


def _with_free_types(row: Row) -> Row:
    """The first message of a column has a key more than the others, so that `datasets` reads all as free JSON."""
    return {
        name: [{**value[0], "schema": "composer_replication.sft/1"}, *value[1:]]
        if name in ("prompt", "completion")
        else value
        for name, value in row.items()
    }


def _finds(row: Row, gate: LastGate) -> Iterator[Find]:
    if gate.is_open:
        return
    for column, value in row.items():
        parts = value if isinstance(value, list) else [{column: value}]
        for number, part in enumerate(parts, start=1):
            if (find := gate.look(part, f"row {row['id']}, {column} {number}")) is not None:
                yield find
