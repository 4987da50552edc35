"""Read Claude Code session logs as conversations: logs from CLI 1.x to 2.1.x, the web export, and subagent files."""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from composer_replication.ingestion.formats.claude_code.links import first_text_block, prompt_of
from composer_replication.ingestion.formats.claude_code.record import (
    CALL_BLOCKS,
    QUEUED,
    Node,
    is_notification,
    plain_prompt,
)
from composer_replication.ingestion.formats.claude_code.tree import (
    ContextSegment,
    RecordTree,
    connected_groups,
    live_parts,
    sidechains,
)
from composer_replication.ingestion.json_documents import read_lines_or_document
from composer_replication.ingestion.source_files import (
    MAX_COUNT,
    TOO_DEEP,
    IngestReport,
    Record,
    SourceFile,
    as_text,
    as_utf8,
    images_in,
    read_records,
)
from composer_replication.ingestion.turn_list import make_call
from composer_replication.types import Conversation, Link, Origin, Provenance, Role, ToolCall, ToolResult, Turn, Usage

FORMAT = "claude_code"
# Matches '"type": "user"' or '"type":"summary"'; not '"type": "message"', which responses from the API contain.
_RECORD_TYPE = re.compile(rb'"type"\s*:\s*"(?:user|assistant|progress|summary|system|file-history-snapshot)"')
# Other tools write session ids and types, too; only Claude Code writes these keys.
_OWN_KEYS = (b'"parentUuid"', b'"isSidechain"', b'"isSnapshotUpdate"', b'"leafUuid"')
# "s1/subagents/agent-a1b2.jsonl" -> id "a1b2"; not "agent-a1b2.json".
_AGENT_FILE = re.compile(r"agent-(?P<id>[\w-]+)\.jsonl$")


def sniff(head: bytes, path: Path) -> bool:
    """Return whether `head`, the first bytes of a file, is from a web export, or has records with a known type and
    keys specific to these logs.
    """
    del path
    head = as_utf8(head)
    # The web export is one document; its characteristic key is near the beginning.
    if b'"loglines"' in head[:4096]:
        return True
    return _RECORD_TYPE.search(head) is not None and any(key in head for key in _OWN_KEYS)


def read(source: SourceFile, report: IngestReport, *, with_branches: bool = False) -> Iterator[Conversation]:
    """Yield the conversations in a log: one per context of the main thread, then inline subagents.

    With `with_branches`, the parts of the log that rewinds abandoned follow as separate conversations.
    """
    was_on = gc.isenabled()
    gc.disable()  # reading a log creates no garbage, and searching for it takes longer than the parsing
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
    tree.build()
    report.counts["records"] += tree.num_records
    report.counts["records without a message"] += tree.num_silent
    if not tree.nodes:
        return
    yield from _LogReader(source, report, tree, agent["id"] if agent else None).conversations(with_branches)


def _records(source: SourceFile, report: IngestReport) -> Iterator[tuple[int, Record]]:
    reader = _exported_records if source.path.suffix == ".json" else read_records
    return reader(source, report)


def _exported_records(source: SourceFile, report: IngestReport) -> Iterator[tuple[int, Record]]:
    """Yield the records in a web export with their lines. A file that holds JSON lines under the name of a web
    export is read as lines.
    """
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


class _LogReader:
    """Converts the record tree of a log to conversations."""

    def __init__(self, source: SourceFile, report: IngestReport, tree: RecordTree, agent_id: str | None) -> None:
        self._source, self._report, self._tree, self._agent_id = source, report, tree, agent_id
        self._queued: dict[str, list[_QueuedMessage]] = {}
        session_ids = (node.record.get("sessionId") for node in tree.nodes.values())
        self._session_id = next((name for name in session_ids if isinstance(name, str)), None)
        stem = Path(source.name).stem
        self._base_id = stem if agent_id is None or self._session_id is None else f"{self._session_id}/{stem}"

    def conversations(self, with_branches: bool) -> Iterator[Conversation]:
        """Yield the parts of the main thread, the inline subagents and, if requested, the rewound branches."""
        parts = live_parts(self._tree)
        self._queued = self._queued_by_answer()
        queued_at_end = self._queued.pop("", [])
        live_uuids = {node.uuid for part in parts for node in part.nodes}
        previous: Conversation | None = None
        conversation_of: dict[str, str] = {}
        for number, part in enumerate(parts):
            identity = self._base_id if len(parts) == 1 else f"{self._base_id}#{number}"
            conversation_of |= dict.fromkeys((node.uuid for node in part.nodes), identity)
            closing = queued_at_end if number == len(parts) - 1 else []
            previous = self._conversation(identity, part.nodes, self._part_link(part, previous), closing)
            yield previous
        yield from self._sidechains(conversation_of)
        dead_nodes = (node for node in self._tree.nodes.values() if node.uuid not in live_uuids)
        rewound = [node for node in dead_nodes if not node.is_sidechain and not node.is_boundary]
        if with_branches:
            yield from self._branches(rewound, conversation_of)
        for node in () if with_branches else rewound:
            if node.attachment is None:
                self._report.skip("rewound branch", self._source.name, node.line)
        for lines in (message.lines for group in self._queued.values() for message in group):
            self._report.skip("queued message in a rewound branch", self._source.name, lines[0])

    def _queued_by_answer(self) -> dict[str, list[_QueuedMessage]]:
        """Return the queued messages, keyed by the uuid of the first assistant record that was written after the
        model saw them.
        """
        queue = _MessageQueue(self._report)
        for line, record in self._tree.queue_operations:
            queue.take(line, record)
        return queue.place(self._tree.nodes.values(), self._tree.attachments)

    def _part_link(self, part: ContextSegment, previous: Conversation | None) -> Link | None:
        """Return the link to the context before a compaction, or the link from a subagent file to its session."""
        if part.boundary is not None and previous is not None:
            last = previous.turns[-1].id if previous.turns else None
            return Link(kind="compaction", conversation_id=previous.id, turn_id=last)
        if self._agent_id is None or self._session_id is None:
            return None
        kind = "compaction_agent" if self._agent_id.startswith("acompact") else "subagent"
        return Link(kind=kind, conversation_id=self._session_id)

    def _sidechains(self, conversation_of: dict[str, str]) -> Iterator[Conversation]:
        """Yield inline subagents, as logged by old CLIs: each tree of sidechain records is a conversation."""
        groups = sidechains(self._tree)
        prompts = self._prompts_of_calls() if groups else {}
        for number, group in enumerate(groups):
            call_id, caller = prompts.get(first_text_block(group[0]), (None, None))
            parent_id = conversation_of.get(caller.uuid, self._base_id) if caller else self._base_id
            turn_id = caller.message_key if caller else None
            link = Link(kind="sidechain", conversation_id=parent_id, turn_id=turn_id, call_id=call_id)
            yield self._conversation(f"{self._base_id}/sidechain-{number}", group, link)

    def _prompts_of_calls(self) -> dict[str, tuple[str, Node]]:
        """Return a dict that maps each prompt passed to a subagent to the passing call's id and record.

        Nothing else in the log connects an inline sidechain with its call.
        """
        calls: dict[str, tuple[str, Node]] = {}
        for node in self._tree.nodes.values():
            if node.is_sidechain or node.kind != "assistant":
                continue
            for block in node.blocks:
                prompt, name = prompt_of(block), block.get("id")
                if prompt is not None and isinstance(name, str):
                    calls.setdefault(prompt, (name, node))
        return calls

    def _branches(self, rewound: list[Node], conversation_of: dict[str, str]) -> Iterator[Conversation]:
        """Yield the parts of the log that rewinds abandoned, each linked to the turn at which it branches off."""
        for number, group in enumerate(connected_groups(self._tree, rewound)):
            fork = self._tree.ancestor(group[0].parent)
            parent_id = conversation_of.get(fork, self._base_id) if fork else self._base_id
            turn_id = self._tree.nodes[fork].message_key if fork else None
            link = Link(kind="branch", conversation_id=parent_id, turn_id=turn_id)
            yield self._conversation(f"{self._base_id}/branch-{number}", group, link)

    def _conversation(
        self, identity: str, nodes: list[Node], link: Link | None, closing: Sequence[_QueuedMessage] = ()
    ) -> Conversation:
        """Return the conversation for these records; `closing` are the queued messages after its last answer."""
        builder = _TurnBuilder(self._source.name, self._report)
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


# Turns: the records in one context are merged into messages, and results follow the turn with their calls.

# Nearly every message has its blocks in this order; only a different order is stored.
_PLAIN_ORDER = ("thinking", "text", "call")
_USAGE = {
    "input_tokens": "input_tokens",
    "output_tokens": "output_tokens",
    "cache_read_input_tokens": "cache_read_tokens",
    "cache_creation_input_tokens": "cache_creation_tokens",
}


@dataclass(slots=True)
class _TurnDraft:
    """A turn under construction."""

    id: str
    role: Role
    origin: Origin
    node: Node
    # Bare `list` and `dict`: calling `list[str]` takes five times as long, and every message needs a draft.
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    results: list[ToolResult] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    agents: dict[str, str] = field(default_factory=dict)
    attachment_kind: str | None = None
    """The kind of the attachment, `QUEUED` for a queued message, None for an ordinary message."""
    images: int = 0
    unseen_kinds: tuple[str, ...] = ()

    def freeze(self, file: str) -> Turn:
        """Return the finished turn as an immutable Turn."""
        record, message = self.node.record, self.node.message
        model, parent, timestamp = message.get("model"), record.get("parentUuid"), record.get("timestamp")
        extra: dict[str, Any] = {"agents": self.agents} if self.agents else {}
        if self.role == "assistant" and not self._is_plain():
            extra["blocks"] = self._block_lengths()
        if self.attachment_kind is not None:
            extra["attachment"] = self.attachment_kind
        if self.images:
            extra["images"] = self.images
        if self.unseen_kinds:
            extra["unseen_context"] = list(self.unseen_kinds)
        return Turn(
            id=self.id,
            role=self.role,
            origin=self.origin,
            text="\n".join(self.texts),
            thinking="\n".join(self.thoughts),
            calls=tuple(self.calls),
            results=tuple(self.results),
            parent_id=parent if isinstance(parent, str) else None,
            model=model if self.role == "assistant" and isinstance(model, str) else None,
            usage=Usage(**self.usage) if self.usage else None,
            timestamp=timestamp if isinstance(timestamp, str) else None,
            provenance=Provenance(file=file, lines=tuple(self.lines)),
            extra=extra,
        )

    def _is_plain(self) -> bool:
        """Return whether the blocks are in the default order: thinking, then text, then calls."""
        if len(self.texts) > 1 or len(self.thoughts) > 1:
            return False
        return len(self.order) == 1 or self.order == sorted(self.order, key=_PLAIN_ORDER.index)

    def _block_lengths(self) -> list[list[Any]]:
        lengths = {
            "thinking": map(len, self.thoughts),
            "text": map(len, self.texts),
            "call": iter(range(len(self.calls))),
        }
        return [[kind, next(lengths[kind])] for kind in self.order]


class _TurnBuilder:
    """Builds the turns of one context from its records, which are passed in file order."""

    def __init__(self, file: str, report: IngestReport) -> None:
        self._file, self._report = file, report
        self._drafts: list[_TurnDraft] = []
        self._assistants: dict[str, _TurnDraft] = {}
        self._caller_of: dict[str, _TurnDraft] = {}
        self._unseen_kinds: dict[
            str, None
        ] = {}  # attachments so far whose text is not in the log; a dict keeps the order

    def add(self, node: Node) -> None:
        """Add a record to the turns. The records of one assistant message become one turn."""
        if node.kind == "assistant":
            self._add_assistant(node)
        elif node.attachment is not None:
            self._add_attachment(node)
        else:
            self._add_user(node)

    def add_queued(self, message: _QueuedMessage) -> None:
        """Add a turn for a message that only the records of the message queue contain."""
        origin: Origin = "meta" if is_notification(message.text) else "human"
        record: Record = {"timestamp": message.timestamp or None}
        # No record contains the message, so a node is constructed for it.
        name = f"queued-line-{message.lines[0]}"
        node = Node(0, message.lines[0], name, record, None, False, "user", {}, name, [], None)
        draft = _TurnDraft(
            name, "user", origin, node, texts=[message.text], lines=list(message.lines), attachment_kind=QUEUED
        )
        self._drafts.append(draft)

    def _add_attachment(self, node: Node) -> None:
        attachment = node.attachment
        assert attachment is not None
        if not attachment.is_known:
            self._report.skip(f"unknown attachment type {attachment.kind!r}", self._file, node.line)
        if attachment.text is None:
            self._unseen_kinds[attachment.kind] = None
            if attachment.is_known:
                self._report.counts[f"attachments without text: {attachment.kind}"] += 1
            return
        self._report.counts[PLACED if attachment.kind == QUEUED else f"attachments placed: {attachment.kind}"] += 1
        draft = _TurnDraft(
            node.uuid,
            "user",
            attachment.origin,
            node,
            texts=[attachment.text],
            lines=[node.line],
            attachment_kind=attachment.kind,
        )
        draft.images = attachment.images
        self._drafts.append(draft)

    def turns(self) -> tuple[Turn, ...]:
        return tuple(draft.freeze(self._file) for draft in self._drafts)

    def _add_assistant(self, node: Node) -> None:
        draft = self._assistants.get(node.message_key)
        if draft is None:
            draft = _TurnDraft(node.message_key, "assistant", "meta" if node.is_harness else "model", node)
            self._assistants[node.message_key] = draft
            self._drafts.append(draft)
            draft.unseen_kinds = tuple(self._unseen_kinds)
        draft.lines.append(node.line)
        _raise_usage(draft.usage, node.message.get("usage"))
        for block in node.blocks:
            self._add_block(draft, block, node)

    def _add_block(self, draft: _TurnDraft, block: Record, node: Node) -> None:
        kind = block.get("type")
        if kind == "text":
            draft.texts.append(as_text(block.get("text")))
            draft.order.append("text")
        elif kind in ("thinking", "redacted_thinking"):
            draft.thoughts.append(as_text(block.get("thinking", "")))
            draft.order.append("thinking")
        elif kind in CALL_BLOCKS:
            call = make_call(block.get("id"), block.get("name"), block.get("input"))
            draft.calls.append(call)
            draft.order.append("call")
            self._caller_of[call.id] = draft
        else:
            self._report.skip(f"unknown block type {kind!r}", self._file, node.line)

    def _add_user(self, node: Node) -> None:
        content = node.blocks
        results = [block for block in content if block.get("type") == "tool_result"]
        if results:
            self._add_results(node, results)
        texts = [as_text(block) for block in content if block.get("type") != "tool_result"]
        if texts or not content:
            draft = _TurnDraft(node.uuid, "user", _origin(node), node, texts=texts, lines=[node.line])
            draft.order = ["text"] * len(texts)
            if len(content) > 1 or not isinstance(content[0].get("text") if content else "", str):
                draft.images = images_in([block for block in content if block.get("type") != "tool_result"])
            self._drafts.append(draft)

    def _add_results(self, node: Node, results: list[Record]) -> None:
        answers = [_tool_result(block) for block in results]
        caller = self._caller_of.get(answers[0].call_id)
        for result in answers:
            if result.call_id not in self._caller_of:
                self._report.skip("tool result without its call", self._file, node.line)
        # The output of hooks for one of several parallel calls is logged between their results, but was shown after
        # all results.
        last = self._drafts[-1] if self._drafts else None
        if last is not None and last.attachment_kind is not None:
            last = next((draft for draft in reversed(self._drafts) if draft.attachment_kind is None), None)
        same_caller = last is not None and last.results and self._caller_of.get(last.results[0].call_id) is caller
        if last is None or not same_caller or caller is None:
            last = _TurnDraft(node.uuid, "tool", "tool", node)
            self._drafts.append(last)
        last.results += answers
        last.lines.append(node.line)
        for content in (block.get("content") for block in results):
            if not isinstance(content, str):
                last.images += images_in(content)
        if node.agent is not None:
            last.agents[answers[0].call_id] = node.agent


def _origin(node: Node) -> Origin:
    if node.record.get("isCompactSummary") is True:
        return "summary"
    if node.record.get("isMeta") is True:
        return "meta"
    text = node.blocks[0].get("text") if node.blocks else None
    return "meta" if isinstance(text, str) and is_notification(text) else "human"


def _tool_result(block: Record) -> ToolResult:
    flag = block.get("is_error")  # the format omits the flag if the call succeeded
    return ToolResult(
        call_id=str(block.get("tool_use_id", "")), text=as_text(block.get("content")), is_error=flag is True
    )


def _raise_usage(usage: dict[str, int], record_usage: Any) -> None:
    """Raise token counts to the maximum over the records of one message.

    Later records repeat and complete the counts in earlier records, so adding them up would count tokens twice.
    """
    if isinstance(record_usage, dict):
        for logged_name, name in _USAGE.items():
            value = record_usage.get(logged_name)
            if type(value) is int and usage.get(name, -1) < value <= MAX_COUNT:
                usage[name] = value


# The queue of messages typed while Claude Code was working: `queue-operation` records, and the position of each
# message.
#
# `enqueue` adds a text. Then one of these follows (counted in real sessions, versions 2.0.76 to 2.1.39):
#
# * `dequeue`: the turn is over, and the message follows as a separate record: a text as typed, or a slash command
#   as tags with its name and arguments. Nothing needs to be added.
# * `remove`: the message was inserted into the running turn, after the results of its calls. In these versions no other
#   record shows this, and the model answers the message next; later versions add an `attachment` record, and often a
#   `reason`.
# * `popAll`: the user moved all messages back into the editor.

# "2025-11-02T10:00:00.123Z"; not "2025-11-02T10:00:00+01:00", which cannot be compared as text.
_TIME = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z$")
# A slash command in the message that runs it; some versions omit the slash.
# "<command-name>/review</command-name>" -> "/review"
_COMMAND_NAME = re.compile(r"<command-name>\s*(\S+?)\s*</command-name>")
# "<command-args>src tests</command-args>" -> "src tests"
_COMMAND_ARGUMENTS = re.compile(r"<command-args>(.*?)</command-args>", re.DOTALL)
_ABSORBED = "absorbed_mid_turn"
# Names of counts, which sidecars of runs store.
PLACED, TAKEN_BACK = "queued messages placed", "queued messages taken back"
NOT_DELIVERED = "queued messages never delivered"


@dataclass(frozen=True, slots=True)
class _QueuedMessage:
    """A message that left the queue: its text, the lines of its records, and the time at which it left."""

    text: str
    lines: tuple[int, ...]
    timestamp: str
    operation: str = "enqueue"
    reason: str | None = None


@dataclass(slots=True)
class _MessageQueue:
    """The message queue of one log, reconstructed from its records."""

    report: IngestReport
    _waiting: list[_QueuedMessage] = field(default_factory=list[_QueuedMessage])
    _removed: list[_QueuedMessage] = field(default_factory=list[_QueuedMessage])

    def take(self, line: int, record: Record) -> None:
        """Apply the change that a queue record describes to the queue."""
        operation = record.get("operation")
        if operation == "enqueue":
            self._waiting.append(_QueuedMessage(_words(record.get("content")), (line,), _time(record)))
        elif operation == "popAll":
            self.report.counts[TAKEN_BACK] += len(self._waiting)
            self._waiting.clear()
        elif operation in ("dequeue", "remove") and self._waiting:
            message = self._waiting.pop(self._index_of(record.get("content")))
            reason = record.get("reason")
            reason = reason if isinstance(reason, str) else None
            self._removed.append(_QueuedMessage(message.text, (*message.lines, line), _time(record), operation, reason))

    def _index_of(self, content: Any) -> int:
        """Return the index of the waiting message that a record quotes; if it quotes none, 0 for the oldest message."""
        texts = [message.text for message in self._waiting]
        return texts.index(content) if content in texts else 0

    def place(self, nodes: Iterable[Node], attachments: list[Record]) -> dict[str, list[_QueuedMessage]]:
        """Return the queued messages that no other record holds, keyed by the uuid of the first answer after the
        model saw them.

        The key "" is for messages after the last answer.
        """
        if self._waiting:
            self.report.counts[NOT_DELIVERED] += len(self._waiting)
        if not self._removed:
            return {}
        main = [node for node in nodes if not node.is_sidechain]
        num_attached = Counter(plain_prompt(record) for record in attachments)
        placed: dict[str, list[_QueuedMessage]] = {}
        for message in self._removed:
            text = message.text.strip()
            if num_attached[text] > 0:  # the attachment already contains the message
                num_attached[text] -= 1
            elif message.operation == "dequeue" and _has_own_record(message, main):
                continue
            elif message.operation == "remove" and not _was_absorbed(message, bool(attachments)):
                self.report.counts[TAKEN_BACK] += 1
            else:
                self.report.counts[PLACED] += 1
                placed.setdefault(_answer_to(message, main), []).append(message)
        return placed


def _was_absorbed(removed: _QueuedMessage, has_attachments: bool) -> bool:
    """Return whether a message was removed from the queue because it was inserted into the running turn.

    In a log with attachments, the user took back a message that was removed without an attachment and without a reason.
    """
    return removed.reason == _ABSORBED or (removed.reason is None and not has_attachments)


def _has_own_record(message: _QueuedMessage, main: list[Node]) -> bool:
    text = message.text.strip()
    users = (node for node in main if node.kind == "user" and node.line > message.lines[0])
    return any(_contains(_words(block.get("text")), text) for node in users for block in node.blocks)


def _contains(words: str, text: str) -> bool:
    """Return whether a message contains a queued text, either as typed or as the command `/name arguments` in tags."""
    name = _COMMAND_NAME.search(words)
    if name is None or not text.startswith("/"):
        return text in words
    arguments = _COMMAND_ARGUMENTS.search(words)
    command = [name[1].removeprefix("/"), *(arguments[1].split() if arguments else ())]
    return command == text.removeprefix("/").split()


def _answer_to(message: _QueuedMessage, main: list[Node]) -> str:
    """Return the uuid of the first assistant message that began after a queued message, or "" if there is none.

    A message that was already being written does not count, although some of its records come later.
    """
    seen_keys = {node.message_key for node in main if node.line < message.lines[-1]}
    for node in main:
        if node.kind != "assistant" or node.line < message.lines[-1] or node.message_key in seen_keys:
            continue
        if not message.timestamp or not _time(node.record) or _time(node.record) >= message.timestamp:
            return node.uuid
        seen_keys.add(node.message_key)
    return ""


def _words(content: Any) -> str:
    return content if isinstance(content, str) else ""


def _time(record: Record) -> str:
    """Return the timestamp of a record if it can be compared as text, otherwise ""."""
    written = record.get("timestamp")
    return written if isinstance(written, str) and _TIME.match(written) else ""
