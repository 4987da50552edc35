"""Read Inspect `.eval` logs: a zip with one JSON document per sample, read in memory and never extracted to disk.

Sizes are limited, and member names are only compared, never used as paths. A compression method that the standard
library does not support affects only that sample.
"""

from __future__ import annotations

import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from composer_replication.ingestion.json_documents import parse_document, salvage_messages
from composer_replication.ingestion.source_files import (
    MAX_FILE_WEIGHT,
    MAX_LINE_BYTES,
    IngestReport,
    Record,
    SourceFile,
    as_text,
    image_count,
    is_too_large,
)
from composer_replication.ingestion.turn_list import (
    TurnList,
    as_list,
    as_record,
    as_string,
    make_unique,
    read_usage,
    session_name,
)
from composer_replication.types import Conversation

FORMAT = "inspect_eval"
MAX_MEMBER_BYTES = MAX_LINE_BYTES
MAX_TOTAL_BYTES = MAX_FILE_WEIGHT  # per archive; samples beyond this limit are skipped
# Checked in the archive's directory before anything is read. Sessions in JSON compress to between a tenth and a
# twentieth of their size, so an archive of a few megabytes that claims gigabytes is a zip bomb.
MAX_RATIO, FREE_BYTES = 50, 64 * 2**20
MAX_MEMBERS = 100_000
# Methods that Inspect uses and zipfile can extract in bounded steps. The newer zstd (93) requires a newer Python.
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
# "samples/1_epoch_1.json"; not "samples/a/b.json" and not "samples/..\\x.json".
_SAMPLE = re.compile(r"samples/[^/\\]+\.json")
# "attachment://0f3a" -> "0f3a", "tc://0F3A" -> "0F3A"; not "see attachment://0f3a", since the whole text must match.
_ATTACHMENT = re.compile(r"(?:attachment|tc)://([0-9a-fA-F]+)")
_CACHED = ("input_tokens_cache_read", "input_tokens_cache_write")
# Exceptions that zipfile, zlib and the file system raise for a damaged archive.
_BROKEN = (zipfile.BadZipFile, OSError, EOFError, ValueError, RuntimeError, zlib.error, struct.error)


def sniff(head: bytes, path: Path) -> bool:
    """Return whether the file is a zip with the Inspect suffix or an Inspect journal."""
    if not head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return False
    return path.suffix == ".eval" or b"_journal/start.json" in head


def read(source: SourceFile, report: IngestReport) -> Iterator[Conversation]:
    """Yield one conversation per sample."""
    try:
        archive = zipfile.ZipFile(source.path)
    except _BROKEN as error:
        report.skip(f"unreadable zip: {type(error).__name__}", source.name)
        return
    with archive:
        # A later member replaces an earlier member with the same name.
        members = {info.filename: info for info in archive.infolist()}
        samples = [info for name, info in members.items() if _SAMPLE.fullmatch(name)]
        if (reason := _too_large(archive, samples, source.path)) is not None:
            report.skip(reason, source.name)
            return
        remaining_bytes, taken_ids = MAX_TOTAL_BYTES, set[str]()
        header = as_record(
            as_record(_load(archive, members.get("header.json"), remaining_bytes, source.name, report)).get("eval")
        )
        if not samples:
            report.skip("no samples", source.name)
        for index, info in enumerate(samples):
            sample = _load(archive, info, remaining_bytes, source.name, report)
            remaining_bytes -= info.file_size
            if isinstance(sample, dict):
                yield from _conversation(
                    sample, header, f"{session_name(source.name)}:{index}", source.name, report, taken_ids
                )
            elif sample is not None:
                report.skip("sample is not an object", source.name)


def _too_large(archive: zipfile.ZipFile, samples: list[zipfile.ZipInfo], path: Path) -> str | None:
    """Return the reason why an archive is skipped without reading it, or None if it can be read."""
    if len(archive.infolist()) > MAX_MEMBERS:
        return f"zip with more than {MAX_MEMBERS:,} members"
    allowed = max(FREE_BYTES, MAX_RATIO * path.stat().st_size)
    return "zip that unpacks to too much" if sum(info.file_size for info in samples) > allowed else None


def _load(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo | None, remaining_bytes: int, file: str, report: IngestReport
) -> Any:
    """Return the JSON value in a member of the archive. If it cannot be read, count the reason and return None."""
    if info is None:
        return None
    limit = min(MAX_MEMBER_BYTES, remaining_bytes)
    if info.file_size > limit:
        report.skip("zip member too large", file)
        return None
    if info.compress_type not in _METHODS:
        report.skip(f"zip compression method {info.compress_type} is not readable", file)
        return None
    try:
        with archive.open(info) as member:
            data = member.read(limit + 1)
    except _BROKEN as error:
        report.skip(f"broken zip member: {type(error).__name__}", file)
        return None
    if len(data) > limit or is_too_large(data):
        report.skip("zip member too large", file)
        return None
    try:
        return parse_document(data, report)
    except ValueError:
        value, position = salvage_messages(data)
        report.skip("invalid JSON document", file, position)
        return value or None


def _conversation(
    sample: Record, header: Record, name: str, file: str, report: IngestReport, taken_ids: set[str]
) -> Iterator[Conversation]:
    reader = _EvalSample(sample, file, report)
    reader.turns.for_each_object(reader.messages(), reader.add)
    if not reader.turns.turns:
        report.skip("sample without messages", file)
        return
    sample_fields = {key: sample[key] for key in ("epoch", "target", "scores", "error") if sample.get(key) is not None}
    task = {key: header[key] for key in ("task", "model") if isinstance(header.get(key), str)}
    packages = as_record(header.get("packages"))
    yield from reader.turns.conversation(
        make_unique(as_string(sample.get("uuid")) or name, taken_ids),
        FORMAT,
        # Epochs of a sample repeat the same task; the samples of an evaluation are different tasks.
        session_id=f"{as_string(header.get('eval_id')) or name}/{sample.get('id', name)}",
        title=as_string(header.get("task")),
        agent_version=as_string(packages.get("inspect_ai")),
        extra=reader.turns.storable_fields({"sample_id": sample.get("id"), **sample_fields, **task}),
    )


class _EvalSample:
    """The messages of one sample, with their references resolved."""

    def __init__(self, sample: Record, file: str, report: IngestReport) -> None:
        self.turns = TurnList(file, report)
        self._sample, self._file, self._report = sample, file, report
        self._attachments = as_record(sample.get("attachments"))
        # An attachment may be referenced many times, so the total size after resolving is limited as well.
        self._remaining_characters = MAX_MEMBER_BYTES
        self._events = [
            event
            for event in as_list(sample.get("events"))
            if isinstance(event, dict) and event.get("event") == "model"
        ]
        self._event_of = {as_string(_output_message(event).get("id")): event for event in self._events}

    def messages(self) -> list[Any]:
        """Return the messages of the sample or, if there are none, the input and answer of the last model call."""
        messages = as_list(self._sample.get("messages"))
        if messages or not self._events:
            return messages
        last = self._events[-1]
        data = as_record(self._sample.get("events_data"))
        pool = as_list(self._sample.get("message_pool")) or as_list(data.get("messages"))
        answer = _output_message(last)
        return as_list(last.get("input")) + self._from_pool(last.get("input_refs"), pool) + ([answer] if answer else [])

    def _from_pool(self, refs: Any, pool: list[Any]) -> list[Any]:
        """Return the messages in ranges [start, end) of the sample's message pool.

        Ranges may overlap, so the total is limited to four times the size of the pool.
        """
        messages: list[Any] = []
        for ref in as_list(refs):
            bounds = [bound for bound in as_list(ref) if isinstance(bound, int)]
            is_valid = len(bounds) == 2 and 0 <= bounds[0] <= bounds[1] <= len(pool)
            if not is_valid or len(messages) + bounds[1] - bounds[0] > max(len(pool), 1) * 4:
                self._report.skip("message reference outside the pool", self._file)
                continue
            messages += pool[bounds[0] : bounds[1]]
        return messages

    def add(self, message: Record, number: int) -> None:
        """Add the turn for one message."""
        message = self._resolved(message, number)
        role, id = message.get("role"), as_string(message.get("id")) or str(number)
        if role == "tool":
            error = message.get("error")
            failed = self.turns.storable_fields({"error": error} if error is not None else {}, number)
            extra = failed | image_count(message.get("content"))
            call_id, text = as_text(message.get("tool_call_id")), _tool_text(message)
            self.turns.add_result(call_id, text, error is not None, id=id, line=number, extra=extra)
        elif not self.turns.add_message(
            message, id, number, **self._answer_fields(message, id) if role == "assistant" else {}
        ):
            self.turns.skip(f"unknown record type {role!r}", number)

    def _answer_fields(self, message: Record, id: str) -> Record:
        """Return the fields of an assistant turn from the blocks of the message and the event of its model call."""
        content = message.get("content")
        blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
        event = self._event_of.get(id, {})
        usage = as_record(event.get("output")).get("usage")
        return {
            "text": as_text([block for block in blocks if not _is_reasoning(block)]),
            "thinking": "\n".join(_reasoning(block) for block in blocks if _is_reasoning(block)),
            "model": as_string(message.get("model")) or as_string(event.get("model")),
            "usage": read_usage(usage, "input_tokens", "output_tokens", *_CACHED, is_disjoint=True),
            "timestamp": as_string(event.get("timestamp")),
            "extra": {},
        }

    def _resolved(self, value: Any, number: int) -> Any:
        """Return the value with `attachment://` references replaced by the attachments."""
        if isinstance(value, dict):
            return {key: self._resolved(child, number) for key, child in value.items()}
        if isinstance(value, list):
            return [self._resolved(child, number) for child in value]
        match = _ATTACHMENT.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            return value
        attachment = self._attachments.get(match[1])
        if not isinstance(attachment, str) or len(attachment) > self._remaining_characters:
            self._report.skip("attachment is missing or too large", self._file, number)
            return value
        self._remaining_characters -= len(attachment)
        return attachment


def _output_message(event: Record) -> Record:
    choices = as_list(as_record(event.get("output")).get("choices"))
    return as_record(as_record(choices[0]).get("message")) if choices else {}


def _is_reasoning(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "reasoning"


def _reasoning(block: Record) -> str:
    return as_text(block.get("summary") if block.get("redacted") is True else block.get("reasoning"))


def _tool_text(message: Record) -> str:
    """Return the output of the tool and, if the tool failed, the error that the model was shown."""
    content, error = as_text(message.get("content")), as_text(as_record(message.get("error")).get("message"))
    return content if error in content else f"{error}\n{content}" if content else error
