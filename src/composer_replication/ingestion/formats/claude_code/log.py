"""Claude Code session logs, CLI 1.x to 2.1.x, as conversations: single files, the web export, sub-agent files."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from composer_replication.ingestion.formats.claude_code.queue import MessageQueue, Queued
from composer_replication.ingestion.formats.claude_code.record import Node
from composer_replication.ingestion.formats.claude_code.sidechains import first_text, prompt_of
from composer_replication.ingestion.formats.claude_code.tree import (
    Part,
    RecordTree,
    groups_apart,
    live_parts,
    sidechains,
)
from composer_replication.ingestion.formats.claude_code.turns import TurnBuilder
from composer_replication.ingestion.reading.documents import read_lines_or_document
from composer_replication.ingestion.reading.json_text import as_utf8
from composer_replication.ingestion.reading.source import TOO_DEEP, IngestReport, Record, SourceFile, read_records
from composer_replication.types import Conversation, Link

FORMAT = "claude_code"

_TYPED = re.compile(rb'"type"\s*:\s*"(?:user|assistant|progress|summary|system|file-history-snapshot)"')
# Other tools have session ids and types too; these keys are this one's.
_OWN_KEYS = (b'"parentUuid"', b'"isSidechain"', b'"isSnapshotUpdate"', b'"leafUuid"')
_AGENT_FILE = re.compile(r"agent-(?P<id>[\w-]+)\.jsonl$")


def sniff(head: bytes, path: Path) -> bool:
    """Records of a known type with the links only these logs have, or a web export's list of them."""
    del path
    head = as_utf8(head)
    if b'"loglines"' in head[:4096]:
        return True
    return _TYPED.search(head) is not None and any(key in head for key in _OWN_KEYS)


def read(source: SourceFile, report: IngestReport, *, with_branches: bool = False) -> Iterator[Conversation]:
    """The main thread (one conversation per context between compactions), inline sidechains, on request branches."""
    was_on = gc.isenabled()
    gc.disable()  # nothing is garbage while a log is read, and looking for some costs more than the parsing
    try:
        conversations = list(_read(source, report, with_branches))
    finally:
        if was_on:
            gc.enable()
    yield from conversations


def _read(source: SourceFile, report: IngestReport, with_branches: bool) -> Iterator[Conversation]:
    agent = _AGENT_FILE.search(source.name)
    tree = RecordTree(source.name, report, is_agent=agent is not None)
    for line, record in _records(source, report):
        tree.add(line, record)
    tree.settle()
    report.counts["records"] += tree.num_records
    report.counts["records without a message"] += tree.num_silent
    if not tree.nodes:
        return
    yield from _Reader(source, report, tree, agent["id"] if agent else None).conversations(with_branches)


def _records(source: SourceFile, report: IngestReport) -> Iterator[tuple[int, Record]]:
    reader = _exported_records if source.path.suffix == ".json" else read_records
    return reader(source, report)


def _exported_records(source: SourceFile, report: IngestReport) -> Iterator[tuple[int, Record]]:
    """The records of a web export; lines under its file name are read as lines."""
    for line, value in read_lines_or_document(source, report):
        export: Any = cast("Record", value).get("loglines") if isinstance(value, dict) else None
        if isinstance(export, list):
            yield from _objects(cast("list[Any]", export), source, report)
        elif isinstance(value, dict) and line:
            yield line, cast("Record", value)
        else:
            report.skip("no loglines", source.name)


def _objects(loglines: list[Any], source: SourceFile, report: IngestReport) -> Iterator[tuple[int, Record]]:
    for number, record in enumerate(loglines, start=1):
        if isinstance(record, dict):
            yield number, cast("Record", record)
        else:
            report.skip("not a JSON object", source.name, number)


class _Reader:
    def __init__(self, source: SourceFile, report: IngestReport, tree: RecordTree, agent_id: str | None) -> None:
        self._source, self._report, self._tree, self._agent_id = source, report, tree, agent_id
        self._queued: dict[str, list[Queued]] = {}
        session_ids = (node.record.get("sessionId") for node in tree.nodes.values())
        self._session_id = next((name for name in session_ids if isinstance(name, str)), None)
        stem = Path(source.name).stem
        self._base_id = stem if agent_id is None or self._session_id is None else f"{self._session_id}/{stem}"

    def conversations(self, with_branches: bool) -> Iterator[Conversation]:
        parts = live_parts(self._tree)
        self._queued = self._placed_queue()
        at_end = self._queued.pop("", [])
        lived = {node.uuid for part in parts for node in part.nodes}
        previous: Conversation | None = None
        part_of: dict[str, str] = {}
        for number, part in enumerate(parts):
            identity = self._base_id if len(parts) == 1 else f"{self._base_id}#{number}"
            part_of |= dict.fromkeys((node.uuid for node in part.nodes), identity)
            closing = at_end if number == len(parts) - 1 else []
            previous = self._conversation(identity, part.nodes, self._part_link(part, previous), closing)
            yield previous
        yield from self._sidechains(part_of)
        other_nodes = (node for node in self._tree.nodes.values() if node.uuid not in lived)
        rest = [node for node in other_nodes if not node.is_sidechain and not node.is_boundary]
        if with_branches:
            yield from self._branches(rest, part_of)
        for node in () if with_branches else rest:
            if node.attachment is None:
                self._report.skip("rewound branch", self._source.name, node.line)
        for lines in (message.lines for group in self._queued.values() for message in group):
            self._report.skip("queued message in a rewound branch", self._source.name, lines[0])

    def _placed_queue(self) -> dict[str, list[Queued]]:
        """Queued messages by the assistant record before which the model saw them."""
        queue = MessageQueue(self._report)
        for line, record in self._tree.queue_operations:
            queue.take(line, record)
        return queue.place(self._tree.nodes.values(), self._tree.attachments)

    def _part_link(self, part: Part, previous: Conversation | None) -> Link | None:
        if part.boundary is not None and previous is not None:
            last = previous.turns[-1].id if previous.turns else None
            return Link(kind="compaction", conversation_id=previous.id, turn_id=last)
        if self._agent_id is None or self._session_id is None:
            return None
        kind = "compaction_agent" if self._agent_id.startswith("acompact") else "subagent"
        return Link(kind=kind, conversation_id=self._session_id)

    def _sidechains(self, part_of: dict[str, str]) -> Iterator[Conversation]:
        """Old CLIs keep sub-agents inline: each tree of sidechain records is a conversation of its own."""
        groups = sidechains(self._tree)
        prompts = self._prompts_of_calls() if groups else {}
        for number, group in enumerate(groups):
            call_id, caller = prompts.get(first_text(group[0]), (None, None))
            where = part_of.get(caller.uuid, self._base_id) if caller else self._base_id
            turn_id = caller.message_key if caller else None
            link = Link(kind="sidechain", conversation_id=where, turn_id=turn_id, call_id=call_id)
            yield self._conversation(f"{self._base_id}/sidechain-{number}", group, link)

    def _prompts_of_calls(self) -> dict[str, tuple[str, Node]]:
        """Prompt text -> the call that gave it to a sub-agent: inline sidechains carry no other link."""
        calls: dict[str, tuple[str, Node]] = {}
        for node in self._tree.nodes.values():
            if node.is_sidechain or node.kind != "assistant":
                continue
            for block in node.blocks:
                prompt, name = prompt_of(block), block.get("id")
                if prompt is not None and isinstance(name, str):
                    calls.setdefault(prompt, (name, node))
        return calls

    def _branches(self, rest: list[Node], part_of: dict[str, str]) -> Iterator[Conversation]:
        for number, group in enumerate(groups_apart(self._tree, rest)):
            fork = self._tree.ancestor(group[0].parent)
            where = part_of.get(fork, self._base_id) if fork else self._base_id
            turn_id = self._tree.nodes[fork].message_key if fork else None
            link = Link(kind="branch", conversation_id=where, turn_id=turn_id)
            yield self._conversation(f"{self._base_id}/branch-{number}", group, link)

    def _conversation(
        self, identity: str, nodes: list[Node], link: Link | None, closing: Sequence[Queued] = ()
    ) -> Conversation:
        builder = TurnBuilder(self._source.name, self._report)
        for node in nodes:
            for queued in self._queued.pop(node.uuid, ()):
                builder.add_queued(queued)
            try:
                builder.add(node)
            except RecursionError:
                self._report.skip(TOO_DEEP, self._source.name, node.line)
        for queued in closing:
            builder.add_queued(queued)
        first = nodes[0].record if nodes else {}
        return Conversation(
            id=identity,
            format=FORMAT,
            turns=builder.turns(),
            parent=link,
            session_id=self._session_id,
            title=self._tree.title,
            cwd=_text_or_none(first.get("cwd")),
            agent_version=_text_or_none(first.get("version")),
            extra=self._extra(first, is_first=link is None),
        )

    def _extra(self, first: Mapping[str, Any], *, is_first: bool) -> dict[str, Any]:
        branch = _text_or_none(first.get("gitBranch"))
        fields = {
            "agent_id": self._agent_id,
            "git_branch": branch if branch != "HEAD" else None,
            "begins_inside": is_first and self._tree.begins_inside,
        }
        return {name: value for name, value in fields.items() if value}


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None
