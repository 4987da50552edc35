"""Read mini-swe-agent trajectories: a message list, bare or in a document; commands are part of the text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from composer_replication.ingestion.json_documents import read_lines_or_document
from composer_replication.ingestion.source_files import IngestReport, Record, SourceFile, as_text, as_utf8, image_count
from composer_replication.ingestion.turn_list import (
    TurnList,
    as_record,
    as_string,
    key_paths,
    make_unique,
    session_name,
)
from composer_replication.types import Conversation, Origin

FORMAT = "mini_sweagent"
# Strings from the agent's templates that appear in every trajectory.
_MARKS = (b"mswea_bash_command", b"<returncode>", b"mini-swe-agent")
_OUTPUT_MARKS = ("<returncode>", "<output", "<exception>")
# The beginning of harness messages about the protocol: "Please always provide exactly one action", "Format error".
# Not "The file was written": any other message may be the output of a program.
_PROTOCOL = re.compile(
    r"\s*(?:please\b|<format_error>|format error|(?:tool )?call error|error parsing|interrupted|the user\b"
    r"|limits? ?exceeded|(?:your|the) (?:last )?(?:response|output|message|answer)\b)",
    re.IGNORECASE,
)
_KEPT_INFO_KEYS = ("exit_status", "submission")


def sniff(head: bytes, path: Path) -> bool:
    """Return whether `head`, the first bytes of a file, is from a trajectory of this agent."""
    keys, head = key_paths(head), as_utf8(head)
    ours = path.name.endswith(".traj.json") or any(mark in head for mark in _MARKS)
    if head.lstrip()[:1] == b"[":
        return ours and {"[].role", "[].content"} <= keys
    if "info.mini_version" in keys:
        return True
    return ours and path.suffix == ".json" and "messages[].role" in keys and "info" in keys


def read(source: SourceFile, report: IngestReport) -> Iterator[Conversation]:
    """Yield the conversations in the file."""
    taken_ids: set[str] = set()
    for _, document in read_lines_or_document(source, report):
        yield from _conversation(document, source, report, taken_ids)


def _conversation(
    document: Any, source: SourceFile, report: IngestReport, taken_ids: set[str]
) -> Iterator[Conversation]:
    record = as_record(document)
    messages = document if isinstance(document, list) else record.get("messages")
    if not isinstance(messages, list):
        report.skip("no list of messages", source.name)
        return
    turns, info = TurnList(source.name, report), as_record(record.get("info"))
    turns.for_each_object(messages, lambda message, number: _add(turns, message, number))
    yield from turns.conversation(
        make_unique(as_string(record.get("instance_id")) or session_name(source.name), taken_ids),
        FORMAT,
        agent_version=as_string(info.get("mini_version")),
        extra=turns.storable_fields({key: info[key] for key in _KEPT_INFO_KEYS if key in info}),
    )


def _add(turns: TurnList, message: Record, number: int) -> None:
    role, content, id = message.get("role"), message.get("content"), str(number)
    if role == "tool":
        call_id, extra = as_text(message.get("tool_call_id")), image_count(content)
        turns.add_result(call_id, as_text(content), None, id=id, line=number, extra=extra)
        return
    # Later versions call tools. In older versions the command is part of the model's text, and stays there.
    fields = {"origin": _origin(turns, as_text(content))} if role == "user" else {"model": _model(message)}
    if not turns.add_message(message, id, number, **fields):
        turns.skip(f"unknown record type {role!r}", number)


def _origin(turns: TurnList, text: str) -> Origin:
    """Return the origin of a user message: "human", "tool" for the output of a command, or "meta" for a message about
    the protocol.

    After the model's first answer, the harness writes all user messages. Users can change the output templates, and the
    last output has none, so phrases from the protocol are matched instead.
    """
    if not any(turn.role == "assistant" for turn in turns.turns):
        return "human"
    holds_output = any(mark in text for mark in _OUTPUT_MARKS)
    return "meta" if not holds_output and _PROTOCOL.match(text) else "tool"


def _model(message: Record) -> str | None:
    response = as_record(as_record(message.get("extra")).get("response"))
    return as_string(response.get("model"))
