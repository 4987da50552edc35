"""`crf export RUN`: export weights for other programs (`export_weights.py`), or sessions for other tools.

    --to        merged weights, and files for vLLM, Ollama and llama.cpp
    --atif      a JSON document per session, subagents included
    --sft       a row per good turn: `prompt` and `completion` as messages, `tools` as JSON text (TRL's SFTTrainer)
    --sharegpt  a row per conversation: `conversations` of `from` and `value`, calls as <tool_call> in the text

Data sets are JSONL files, one per split, with a card; `datasets.load_dataset("json", data_files=...)` reads them. No
file appears before every row has passed the outgoing check for secrets.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from composer_replication.action_text import arguments_text
from composer_replication.atomic import StagedFile, atomic_write_json, atomic_write_text, commit_together, staged
from composer_replication.canonical_json import encode_as_written
from composer_replication.cli.console import add_gate_arguments, log, plain, print_json, quiet_libraries, show, table
from composer_replication.errors import InputError, explain
from composer_replication.ingestion.formats.atif_write import to_atif
from composer_replication.ingestion.session_sources import read_accounts
from composer_replication.ingestion.states import states
from composer_replication.messages import call_entry
from composer_replication.pairs.export import build_prompt_messages
from composer_replication.privacy.outgoing import Find, LastGate, outgoing_gate, refusal
from composer_replication.runs import RunDir
from composer_replication.runs import files as rows
from composer_replication.runs.directory import record_outside_copy, require_empty_folder
from composer_replication.runs.files import ToolTable, read_tools
from composer_replication.runs.split import read_split
from composer_replication.trainer.trained import data_card, trained_weights
from composer_replication.types import Conversation, Turn

if TYPE_CHECKING:
    from composer_replication.cli.export_weights import ExportedWeights
    from composer_replication.trainer.sessions.rendering import LoggedSession


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory; with --to also a folder of trained weights")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--to", metavar="DIR", help="weights: merged, for vLLM and Ollama, with cards, in a new folder")
    what.add_argument("--atif", metavar="DIR", help="sessions as ATIF documents, one file per session, in a new folder")
    what.add_argument("--sft", metavar="DIR", help="good turns with the messages before them, for supervised training")
    what.add_argument("--sharegpt", metavar="DIR", help="conversations in the ShareGPT format")
    parser.add_argument("--adapter", metavar="DIR", help="with --to: these weights instead of the run's own")
    parser.add_argument(
        "--precision",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="with --to: of the merged weights; default auto: the initial model's, or float32 if that loses too much",
    )
    parser.add_argument(
        "--push", metavar="REPO", help="with --to: send merged weights and card to OWNER/NAME on the hub"
    )
    parser.add_argument(
        "--public", action="store_true", help="with --push: allow a public repository, which is refused otherwise"
    )
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    add_gate_arguments(parser)


def run(args: argparse.Namespace) -> int:
    _refuse_unused_options(args)
    if args.to is not None:
        return _run_weights(args)
    if args.no_scrub:
        log("crf export: --no-scrub: the outgoing check is off; the files contain secrets that the run contains")
    return _run_atif(args) if args.atif is not None else _run_data_set(args)


def _refuse_unused_options(args: argparse.Namespace) -> None:
    """Raise InputError for options that this export would silently ignore."""
    weight_options = {"--adapter": args.adapter, "--push": args.push, "--public": args.public}
    unused = [name for name, value in weight_options.items() if value and args.to is None]
    unused += ["--public"] if args.public and args.to is not None and args.push is None else []
    unused += ["--precision"] if args.precision != "auto" and args.to is None else []
    if unused:
        got = "no --to" if args.to is None else "no --push"
        raise InputError(explain(", ".join(unused), got=got, expected="--to DIR; for --public also --push REPO"))


def _run_weights(args: argparse.Namespace) -> int:
    # `export_weights` checks both as well. Here they fail before torch is loaded.
    require_empty_folder(Path(args.to))
    trained_weights(args.run, args.adapter)
    from composer_replication.cli.export_weights import export_weights

    with quiet_libraries():
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
            for artefact in done.formats
        }
        print_json({"folder": str(done.folder), "check": done.check, "made": artefacts, "pushed": done.pushed})
    else:
        _show_weights(done)
    return 0


def _show_weights(done: ExportedWeights) -> None:
    compared = (
        f"{done.check.num_tokens} tokens compared: {done.check}" if done.check.num_tokens else "copied as trained"
    )
    lines = [f"merged  {done.folder / 'merged'}: {compared}"]
    lines += [
        f"{artefact.what:<6}  {f'{artefact.path}: ' if artefact.path else ''}{artefact.sentence}"
        for artefact in done.formats
    ]
    print(plain("\n".join(lines)))
    log(f"{done.folder}: weights and cards. Try them with `crf chat {done.folder / 'merged'} --once TEXT`")
    if done.pushed is not None:
        log(f"pushed: {done.pushed}")


def _run_atif(args: argparse.Namespace) -> int:
    written = export_atif(RunDir.open(args.run), Path(args.atif), no_scrub=args.no_scrub, allowed=args.allow)
    if args.json:
        print_json({"folder": args.atif, "documents": [str(path) for path in written]})
        return 0
    for path in written:
        print(plain(str(path)))
    log(f"{len(written)} ATIF documents in {args.atif}")
    return 0


def _run_data_set(args: argparse.Namespace) -> int:
    folder = Path(args.sft or args.sharegpt)
    require_empty_folder(folder)
    shape = "sft" if args.sft else "sharegpt"
    done = _export_data_set(RunDir.open(args.run), folder, shape, no_scrub=args.no_scrub, allowed=args.allow)
    if args.json:
        print_json({"folder": str(folder), "rows": dict(done.rows)})
        return 0
    show(table("Rows", ("file", "rows"), [(f"{side}.jsonl", number) for side, number in done.rows.items()]))
    log(f"{folder}: README.md describes the fields and how to load them")
    return 0


# ---- Data sets
# The texts of the next two tables go into the card of the data set.

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
_DESCRIPTIONS: Mapping[Shape, str] = {
    "sft": "Turns of coding agents that nothing speaks against (no call failed, was refused or stopped), each with the "
    "messages before it: for supervised training on the completion alone.",
    "sharegpt": "Sessions of coding agents, whole, failures included: a row a context that a model saw at once.",
}
_SHAREGPT_ROLES = {"system": "system", "user": "human", "assistant": "gpt", "tool": "tool"}


class _DataSet(NamedTuple):
    """An exported data set: its folder and the number of rows in each split."""

    folder: Path
    rows: Mapping[str, int]


def _export_data_set(
    run: RunDir, folder: Path, shape: Shape, *, no_scrub: bool = False, allowed: Iterable[str] = ()
) -> _DataSet:
    """Write the rows and a card to `folder`. The caller has checked that the folder is new."""
    gate = outgoing_gate(run, os.environ, no_scrub=no_scrub, allowed=allowed)
    if not run.path("sites").exists():
        fix = f"Run `crf sites {run.root}` first: it finds the turns that erred."
        raise InputError(explain(f"sites of {run.root}", got="none", expected="sites.jsonl", fix=fix))
    tools, finds, numbers = read_tools(run), dict[bytes, Find](), Counter[str]()
    rows_of = _sft_rows if shape == "sft" else _sharegpt_rows
    folder.mkdir(parents=True, exist_ok=True)
    record_outside_copy(run, "data set", folder)
    with ExitStack() as stack:
        # Staged files become visible only if all rows have passed the check.
        files: dict[str, StagedFile] = {}
        for side, session in _sessions_by_split(run):
            for row in rows_of(session, tools):
                if side not in files:
                    files[side] = stack.enter_context(staged(folder / f"{side}.jsonl"))
                row = row if numbers[side] else _with_json_types(row)
                files[side].file.write(encode_as_written(row, where=row["id"]) + b"\n")
                numbers[side] += 1
                finds |= {find.digest: find for find in _find_secrets(row, gate)}
        if finds:
            raise refusal(f"{shape} rows for {folder}", list(finds.values()))
        if not numbers:
            fix = "Add sessions with turns in which `crf sites RUN` finds no error."
            raise InputError(explain(f"rows for {folder}", got="none", expected="at least one good turn", fix=fix))
        commit_together(*files.values())
    names = {side: f"{side}.jsonl" for side in ("train", "validation", "test") if numbers[side]}
    card = data_card(run, name=folder.name, what=_DESCRIPTIONS[shape], fields=_FIELDS[shape], files=names)
    atomic_write_text(folder / "README.md", card)
    return _DataSet(folder, dict(numbers))


def _sessions_by_split(run: RunDir) -> Iterator[tuple[str, LoggedSession]]:
    """Yield the split and the session of every conversation. In a run without a split, all sessions are in `train`."""
    from composer_replication.trainer.sessions.rendering import read_sessions

    split = read_split(run)
    sides = {} if split is None else {name: side for side in split._fields for name in getattr(split, side)}
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
            prompt = build_prompt_messages(before, "object", where)
            yield {
                "id": where,
                "prompt": prompt,
                "completion": build_prompt_messages([_message(turn)], "object", where),
                "tools": schemas,
            }


def _sharegpt_rows(session: LoggedSession, tools: ToolTable) -> Iterator[Row]:
    conversation = session.conversation
    messages: list[Mapping[str, Any]] = []
    for before, turn in states(conversation):
        messages = [*before, _message(turn)]
    if not messages:
        return
    talk = [
        {"from": _SHAREGPT_ROLES.get(str(message["role"]), "human"), "value": _sharegpt_value(message)}
        for message in messages
    ]
    yield {"id": conversation.id, "conversations": talk, "tools": _schemas(tools, conversation.format)}


def _message(turn: Turn) -> dict[str, Any]:
    calls = [call_entry(call.id, call.name, arguments_text(call)) for call in turn.calls]
    return {"role": "assistant", "content": turn.text, **({"tool_calls": calls} if calls else {})}


def _sharegpt_value(message: Mapping[str, Any]) -> str:
    """Return a message as one string. Arguments that are not valid JSON are kept as the model wrote them."""
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


def _with_json_types(row: Row) -> Row:
    """Return the row with an additional key in the first message of each column of messages.

    `datasets` then finds messages with different keys, and therefore reads the column as free-form JSON.
    """
    return {
        name: [{**value[0], "schema": "composer_replication.sft/1"}, *value[1:]]
        if name in ("prompt", "completion")
        else value
        for name, value in row.items()
    }


def _find_secrets(row: Row, gate: LastGate) -> Iterator[Find]:
    if gate.is_open:
        return
    for column, value in row.items():
        parts = value if isinstance(value, list) else [{column: value}]
        for number, part in enumerate(parts, start=1):
            if (find := gate.look(part, f"row {row['id']}, {column} {number}")) is not None:
                yield find


# ---- ATIF: one document per session, with its subagents inside

# "a/b: c" -> "a_b_c"; nothing in "session-1.a"
_UNSAFE_IN_FILE_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_NAME_CHARS = 120
_LIST_FIELDS = ("steps", "subagent_trajectories")


def export_atif(
    run: RunDir, folder: Path, *, gate: LastGate | None = None, no_scrub: bool = False, allowed: Iterable[str] = ()
) -> list[Path]:
    """Write one document per session, with its subagents, and one per part after a compaction. Return the paths.

    Raises if the folder contains files, so that two exports are never mixed. Also raises, before anything is written,
    if the outgoing check finds what looks like a secret. By default, this check refuses a run that was ingested with
    `--no-scrub`.
    """
    require_empty_folder(folder)
    if gate is None:
        gate = outgoing_gate(run, os.environ, no_scrub=no_scrub, allowed=allowed)
    _refuse_secrets(run, gate)
    folder.mkdir(parents=True, exist_ok=True)
    # Noted before the first file exists: `crf forget` must know of every copy, even if this process is killed.
    record_outside_copy(run, "ATIF documents", folder)
    paths: dict[str, Path] = {}
    for conversation_id, document in _atif_documents(run):
        path = folder / f"{_file_name(conversation_id, paths)}.json"
        atomic_write_json(path, document)
        paths[path.stem.lower()] = path
    return list(paths.values())


def _atif_documents(run: RunDir) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every document of a run, with the id of its conversation."""
    for family in _families(run):
        ids = {conversation.id for conversation in family}
        embedded = [conversation for conversation in family if _is_embedded(conversation, ids)]
        for conversation in family:
            if not _is_embedded(conversation, ids):
                yield conversation.id, to_atif(conversation, subagents=embedded)


def _refuse_secrets(run: RunDir, gate: LastGate) -> None:
    """Raise if a document, in the form in which it will be written, contains what looks like a secret.

    The message lists each find once.
    """
    finds: dict[bytes, Find] = {}
    for conversation_id, document in [] if gate.is_open else _atif_documents(run):
        for location, part in _parts(document, f"document {conversation_id}"):
            if (find := gate.look(part, location)) is not None:
                finds.setdefault(find.digest, find)
    if finds:
        raise refusal("ATIF documents", list(finds.values()))


def _parts(document: dict[str, Any], location: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield f"{location}, head", {key: value for key, value in document.items() if key not in _LIST_FIELDS}
    for step in document["steps"]:
        yield f"{location}, step {step['step_id']}", step
    for inner in document.get("subagent_trajectories", ()):
        yield from _parts(inner, f"document {inner['trajectory_id']}")


def _families(run: RunDir) -> Iterator[list[Conversation]]:
    # Conversations are stored in the order of the logs that they come from.
    stored = run.read_jsonl("conversations", schema=rows.CONVERSATIONS_SCHEMA, version=rows.CONVERSATIONS_VERSION)
    for account in read_accounts(run):
        yield [rows.conversation_from_row(row) for row in islice(stored, len(account.conversations))]


def _is_embedded(conversation: Conversation, family: set[str]) -> bool:
    """Return whether a conversation is embedded in the document of its parent.

    Parts after a compaction have documents of their own.
    """
    link = conversation.parent
    return link is not None and link.kind != "compaction" and link.conversation_id in family


def _file_name(conversation_id: str, used_names: Collection[str]) -> str:
    """Return an unused file name that is valid on any file system.

    Ids come from logs, so they may contain slashes or dots.
    """
    stem = _UNSAFE_IN_FILE_NAME.sub("_", conversation_id).strip(".")[:_MAX_NAME_CHARS] or "session"
    name, number = stem, 2
    while name.lower() in used_names:  # lower case, because macOS and Windows do not tell them apart
        name, number = f"{stem}-{number}", number + 1
    return name
