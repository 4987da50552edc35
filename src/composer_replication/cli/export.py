"""`crf export RUN`: weights for other programs to run, or sessions for other tools to read."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from composer_replication.action_text import arguments_text
from composer_replication.atomic import (
    StagedFile,
    atomic_write_json,
    atomic_write_text,
    commit_together,
    staged,
)
from composer_replication.canonical_json import encode_as_written
from composer_replication.cli.console import add_gate_arguments
from composer_replication.errors import InputError, explain
from composer_replication.ingestion.formats.atif_write import to_atif
from composer_replication.ingestion.session_sources import read_accounts
from composer_replication.ingestion.states import states
from composer_replication.messages import call_entry
from composer_replication.pairs.export import prompt_messages
from composer_replication.privacy.outgoing import (
    Find,
    LastGate,
    gate_of,
    refusal,
)
from composer_replication.runs import RunDir
from composer_replication.runs import files as rows
from composer_replication.runs.directory import note_elsewhere, refuse_used
from composer_replication.runs.files import ToolTable, read_tools
from composer_replication.runs.split import sides_of
from composer_replication.trainer.trained import data_card
from composer_replication.types import Conversation, Turn

if TYPE_CHECKING:
    from composer_replication.cli.export_weights import ExportedWeights
    from composer_replication.trainer.sessions.rendering import LoggedSession


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory; with --to also a folder of trained weights")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--to", metavar="DIR", help="weights: merged, for vLLM and Ollama, with cards, in a new folder")
    what.add_argument("--atif", metavar="DIR", help="sessions as ATIF documents, one file per session, in a new folder")
    what.add_argument("--sft", metavar="DIR", help="good turns with what stood before them, for supervised training")
    what.add_argument("--sharegpt", metavar="DIR", help="conversations in ShareGPT's form")
    parser.add_argument("--adapter", metavar="DIR", help="with --to: these weights instead of the run's own")
    parser.add_argument(
        "--precision",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="with --to: of the merged weights; default auto: as the start weights, or float32 where that would lose",
    )
    parser.add_argument(
        "--push", metavar="REPO", help="with --to: send merged weights and card to OWNER/NAME on the hub"
    )
    parser.add_argument(
        "--public", action="store_true", help="with --push: everybody may have it; else a public repository is refused"
    )
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    add_gate_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from composer_replication.cli.console import say

    _refuse_idle_options(args)
    if args.to is not None:
        return _weights(args)
    if args.no_scrub:
        say("crf export: --no-scrub: nothing is looked at, and what is written holds whatever the run holds")
    return _documents(args) if args.atif is not None else _data_set(args)


def _refuse_idle_options(args: argparse.Namespace) -> None:
    """An option that does nothing here must not look as if it had been followed."""
    from composer_replication.errors import InputError, explain

    of_weights = {"--adapter": args.adapter, "--push": args.push, "--public": args.public}
    idle = [name for name, value in of_weights.items() if value and args.to is None]
    idle += ["--public"] if args.public and args.to is not None and args.push is None else []
    idle += ["--precision"] if args.precision != "auto" and args.to is None else []
    if idle:
        expected = "--to DIR, and --push REPO for --public"
        raise InputError(explain(", ".join(idle), got="nothing to use it for", expected=expected))


def _weights(args: argparse.Namespace) -> int:
    from composer_replication.cli.console import print_json
    from composer_replication.cli.export_weights import export_weights, trained_weights
    from composer_replication.cli.run import quiet

    refuse_used(Path(args.to))
    trained_weights(args.run, args.adapter)
    with quiet():
        done = export_weights(
            args.run,
            Path(args.to),
            adapter=args.adapter,
            precision=args.precision,
            push=args.push,
            is_public=args.public,
        )
    if args.json:
        artefacts = {
            artefact.what: {"path": artefact.path and str(artefact.path), "about": artefact.sentence}
            for artefact in done.made
        }
        print_json({"folder": str(done.folder), "check": done.check, "made": artefacts, "pushed": done.pushed})
    else:
        _show_weights(done)
    return 0


def _show_weights(done: ExportedWeights) -> None:
    from composer_replication.cli.console import plain, say

    compared = (
        f"{done.check.num_tokens} tokens compared: {done.check}" if done.check.num_tokens else "copied as trained"
    )
    lines = [f"merged  {done.folder / 'merged'}: {compared}"]
    lines += [
        f"{artefact.what:<6}  {f'{artefact.path}: ' if artefact.path else ''}{artefact.sentence}"
        for artefact in done.made
    ]
    print(plain("\n".join(lines)))
    say(f"{done.folder}: weights and cards. `crf chat {done.folder / 'merged'} --once TEXT` talks to them")
    if done.pushed is not None:
        say(f"sent: {done.pushed}")


def _documents(args: argparse.Namespace) -> int:
    from composer_replication.cli.console import plain, print_json, say
    from composer_replication.runs import RunDir

    written = export_atif(RunDir.open(args.run), Path(args.atif), no_scrub=args.no_scrub, allowed=args.allow)
    if args.json:
        print_json({"folder": args.atif, "documents": [str(path) for path in written]})
        return 0
    for path in written:
        print(plain(str(path)))
    say(f"{len(written)} ATIF documents in {args.atif}")
    return 0


def _data_set(args: argparse.Namespace) -> int:
    from composer_replication.cli.console import (
        print_json,
        say,
        show,
        table,
    )
    from composer_replication.runs import RunDir

    folder = Path(args.sft or args.sharegpt)
    refuse_used(folder)
    shape = "sft" if args.sft else "sharegpt"
    done = _export_data_set(RunDir.open(args.run), folder, shape, no_scrub=args.no_scrub, allowed=args.allow)
    if args.json:
        print_json({"folder": str(folder), "rows": dict(done.rows)})
        return 0
    show(table("Rows", ("file", "rows"), [(f"{side}.jsonl", number) for side, number in done.rows.items()]))
    say(f"{folder}: README.md says what the fields are, and how to load them")
    return 0


# Sessions as data sets that other trainers take: good turns with what stood before them, and whole conversations.
#
#     --sft       a row a good turn: `prompt` and `completion` as messages, `tools` as JSON text (TRL's SFTTrainer)
#     --sharegpt  a row a conversation: `conversations` of `from` and `value`, calls as <tool_call> in the text
#
# Files are JSONL by side of the split, with a card; `datasets.load_dataset("json", data_files=...)` reads them. Nothing
# is written before all rows have passed the last gate.

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


class _DataSet(NamedTuple):
    """What was written: the folder, and rows by side."""

    folder: Path
    rows: Mapping[str, int]


def _export_data_set(
    run: RunDir, folder: Path, shape: Shape, *, no_scrub: bool = False, allowed: Iterable[str] = ()
) -> _DataSet:
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
    return _DataSet(folder, dict(numbers))


def _by_side(run: RunDir) -> Iterator[tuple[str, LoggedSession]]:
    """Every conversation with the side of the split that it stands on; all are `train` where nobody drew one."""
    split = sides_of(run)
    sides = {} if split is None else {identity: side for side in split._fields for identity in getattr(split, side)}
    from composer_replication.trainer.sessions.rendering import read_sessions

    for session in read_sessions(run, with_sites=True, with_pairs=run.path("pairs").exists()):
        if split is None or session.conversation.id in sides:
            yield sides.get(session.conversation.id, "train"), session


def _sft_rows(session: LoggedSession, tools: ToolTable) -> Iterator[Row]:
    from composer_replication.trainer.sessions.rendering import good_turns

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


# ATIF: one document per session, with its subagents inside.

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_NAME = 120
_LISTS = ("steps", "subagent_trajectories")


def export_atif(
    run: RunDir, folder: Path, *, gate: LastGate | None = None, no_scrub: bool = False, allowed: Iterable[str] = ()
) -> list[Path]:
    """Write a document per session, sub-agents inside it, and one per part after a compaction.

    Files that are there already are an error, so that no export is mixed with another. So is a document in which the
    gate finds something, before any is written; the default gate refuses a run that was made with `--no-scrub`.
    """
    refuse_used(folder)
    if gate is None:
        gate = gate_of(run, os.environ, no_scrub=no_scrub, allowed=allowed)
    _refuse_secrets(run, gate)
    folder.mkdir(parents=True, exist_ok=True)
    note_elsewhere(run, "ATIF documents", folder)  # before the first: a process that dies here leaves no unknown copy
    written: dict[str, Path] = {}
    for identity, document in _atif_documents(run):
        path = folder / f"{_file_name(identity, written)}.json"
        atomic_write_json(path, document)
        written[path.stem.lower()] = path
    return list(written.values())


def _atif_documents(run: RunDir) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every document of a run, with the id of its conversation."""
    for family in _families(run):
        ids = {conversation.id for conversation in family}
        embedded = [conversation for conversation in family if _is_embedded(conversation, ids)]
        for conversation in family:
            if not _is_embedded(conversation, ids):
                yield conversation.id, to_atif(conversation, subagents=embedded)


def _refuse_secrets(run: RunDir, gate: LastGate) -> None:
    """Look at all documents as they will be written; a part that stands in several is named once."""
    finds: dict[bytes, Find] = {}
    for identity, document in [] if gate.is_open else _atif_documents(run):
        for location, part in _parts(document, f"document {identity}"):
            if (find := gate.look(part, location)) is not None:
                finds.setdefault(find.digest, find)
    if finds:
        raise refusal("ATIF documents", list(finds.values()))


def _parts(document: dict[str, Any], location: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield f"{location}, head", {key: value for key, value in document.items() if key not in _LISTS}
    for step in document["steps"]:
        yield f"{location}, step {step['step_id']}", step
    for inner in document.get("subagent_trajectories", ()):
        yield from _parts(inner, f"document {inner['trajectory_id']}")


def _families(run: RunDir) -> Iterator[list[Conversation]]:
    stored = run.read_jsonl("conversations", schema=rows.CONVERSATIONS_SCHEMA, version=rows.CONVERSATIONS_VERSION)
    for account in read_accounts(run):
        yield [rows.conversation_from_row(row) for row in islice(stored, len(account.conversations))]


def _is_embedded(conversation: Conversation, family: set[str]) -> bool:
    """Whether it is shown inside the document of another: the parts of one thread stand side by side."""
    link = conversation.parent
    return link is not None and link.kind != "compaction" and link.conversation_id in family


def _file_name(identity: str, taken_names: dict[str, Path]) -> str:
    """A name for any file system: ids are text from logs, and may hold slashes, dots or anything else."""
    plain = _NOT_IN_A_NAME.sub("_", identity).strip(".")[:_MAX_NAME] or "session"
    name, number = plain, 2
    while name.lower() in taken_names:
        name, number = f"{plain}-{number}", number + 1
    return name
