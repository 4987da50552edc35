"""Read ATIF (Agent Trajectory Interchange Format) documents with their subagents. `atif_write` writes such documents.

The error flag of a result is `extra["is_error"]` (None if it is missing). `Turn.extra["atif"]` keeps the fields of a
step that `Turn` does not have, and `Turn.extra["read_from"]` the location in the log from which the document was made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

from composer_replication.ingestion.formats.atif_write import (
    CACHE_KEY,
    ERROR_KEY,
    OURS,
    RAW_KEY,
    UNKNOWN_VERSION,
    UNMAPPED_DOCUMENT_KEYS,
    UNMAPPED_METRICS_KEYS,
    UNMAPPED_STEP_KEYS,
    USUAL_ORIGIN,
)
from composer_replication.ingestion.json_documents import read_lines_or_document
from composer_replication.ingestion.source_files import IngestReport, Record, SourceFile, as_text, as_utf8, image_count
from composer_replication.ingestion.turn_list import (
    NO_CALL,
    TurnList,
    as_list,
    as_record,
    as_string,
    key_paths,
    make_call,
    make_unique,
    read_usage,
    session_name,
    valid_count,
)
from composer_replication.types import (
    Conversation,
    Link,
    LinkKind,
    Origin,
    Provenance,
    Role,
    ToolCall,
    ToolResult,
    Turn,
    Usage,
)

FORMAT = "atif"
# Token counts in the metrics of a step.
_COUNTS = ("prompt_tokens", "completion_tokens", "cached_tokens")
_ROLES: dict[str, Role] = {"system": "system", "user": "user", "agent": "assistant"}


def sniff(head: bytes, path: Path) -> bool:  # noqa: ARG001
    """Return whether `head`, the first bytes of a file, has an ATIF schema version, or steps with ATIF keys."""
    keys, head = key_paths(head), as_utf8(head)
    return ("schema_version" in keys and b'"ATIF-' in head) or {"steps[].step_id", "steps[].source"} <= keys


def read(source: SourceFile, report: IngestReport) -> Iterator[Conversation]:
    """Yield the conversations in a file; subagents follow their parent."""
    taken_ids: set[str] = set()
    for _, document in read_lines_or_document(source, report):
        if isinstance(document, dict):
            yield from _conversations(document, source, report, taken_ids)
        else:
            report.skip("not a JSON object", source.name)


def _conversations(
    document: Record, source: SourceFile, report: IngestReport, taken_ids: set[str]
) -> Iterator[Conversation]:
    """Yield the conversation in a document, then those of its embedded subagents."""
    waiting: deque[tuple[Record, Link | None, str]] = deque([(document, None, session_name(source.name))])
    while waiting:
        trajectory, parent, name = waiting.popleft()
        reader = _TrajectoryReader(trajectory, make_unique(_id(trajectory) or name, taken_ids), source.name, report)
        conversation = reader.conversation(parent)
        if conversation.turns:
            yield conversation
        # Breadth first, without recursion: documents can nest subagents to any depth.
        for index, child in enumerate(as_list(trajectory.get("subagent_trajectories"))):
            if not isinstance(child, dict):
                report.skip("sub-agent is not an object", source.name)
                continue
            link = reader.links.get(_id(child) or "") or Link(kind="subagent", conversation_id=conversation.id)
            waiting.append((child, link, f"{name}:{index}"))


def _id(trajectory: Record) -> str | None:
    return as_string(trajectory.get("trajectory_id")) or as_string(trajectory.get("session_id"))


class _TrajectoryReader:
    """Converts the steps of one document to turns, and collects links for the subagents referenced by its steps."""

    def __init__(self, document: Record, id: str, file: str, report: IngestReport) -> None:
        self.turns, self.links = TurnList(file, report), dict[str, Link]()
        self._document, self._id, self._file, self._report = document, id, file, report
        self._agent = as_record(document.get("agent"))
        children = [as_record(trajectory) for trajectory in as_list(document.get("subagent_trajectories"))]
        self._embedded = {_id(child) for child in children}

    def conversation(self, parent: Link | None) -> Conversation:
        """Return the document as a conversation. A parent link in the document takes precedence over `parent`."""
        steps = self._document.get("steps")
        if not isinstance(steps, list):
            self._report.skip("no steps", self._file)
        self.turns.for_each_object(as_list(steps), self._add)
        document, our_fields = self._document, as_record(as_record(self._document.get("extra")).get(OURS))
        version, source_format = as_string(self._agent.get("version")), as_string(our_fields.get("format"))
        unmapped_fields = {key: document[key] for key in UNMAPPED_DOCUMENT_KEYS if document.get(key) is not None}
        unmapped_fields |= _rest("extra", document.get("extra"), {OURS})
        # The name is stored only if it differs from the log format.
        handled_keys = {"version", "name"} if self._agent.get("name") == source_format else {"version"}
        unmapped_fields |= _rest("agent", self._agent, handled_keys)
        extra = self.turns.storable_fields(as_record(our_fields.get("extra")), 0)
        if source_format not in (None, FORMAT):
            extra["source_format"] = source_format
        return Conversation(
            id=self._id,
            format=FORMAT,
            turns=tuple(self.turns.turns),
            parent=_link(our_fields.get("parent"), parent) or parent,
            session_id=as_string(document.get("session_id")),
            title=as_string(our_fields.get("title")),
            cwd=as_string(our_fields.get("cwd")),
            agent_version=None if version == UNKNOWN_VERSION else version,
            extra=extra | self.turns.storable_fields({"atif": unmapped_fields} if unmapped_fields else {}, 0),
        )

    def _add(self, step: Record, number: int) -> None:
        """Add the turns for one step: its message, and a turn for the results of its calls."""
        source = step.get("source")
        if not isinstance(source, str) or source not in _ROLES:
            self._report.skip(f"unknown record type {source!r}", self._file, number)
            return
        our_fields = as_record(as_record(step.get("extra")).get(OURS))
        results = [
            result for result in as_list(as_record(step.get("observation")).get("results")) if isinstance(result, dict)
        ]
        turn = self._turn(step, our_fields, number)
        if our_fields.get("role") == "tool":
            self._add_results(replace(turn, role="tool", origin=_origin(step, our_fields, "tool")), results)
            return
        # A system step may consist of results only; then it adds no turn for a message.
        if source != "system" or turn.text or our_fields or not results:
            turn = self.turns.add(turn)
        # One step holds the results of several tool turns; `n` is the number of results in each of them.
        for tool_turn in as_list(our_fields.get("tool_turns")) if results else []:
            part = as_record(tool_turn)
            part_results, results = results[: valid_count(part.get("n"))], results[valid_count(part.get("n")) :]
            if part_results:
                self._add_results(self._tool_turn(step, part, turn, number), part_results, caller=turn)
        if results:
            self._add_results(self._tool_turn(step, {}, turn, number), results, caller=turn)

    def _turn(self, step: Record, our_fields: Record, number: int) -> Turn:
        role, message = _ROLES[step["source"]], step.get("message")
        metrics = as_record(step.get("metrics")) or as_record(our_fields.get("metrics"))
        unmapped_fields = {key: step[key] for key in UNMAPPED_STEP_KEYS if step.get(key) is not None}
        unmapped_fields |= {key: metrics[key] for key in UNMAPPED_METRICS_KEYS if metrics.get(key) is not None}
        unmapped_fields |= _rest("extra", step.get("extra"), {OURS}) | _rest(
            "metrics_extra", metrics.get("extra"), {CACHE_KEY}
        )
        unmapped_fields |= {"message": message} if isinstance(message, list) else {}
        model = (
            step.get("model_name", self._agent.get("model_name")) if role == "assistant" else our_fields.get("model")
        )
        return Turn(
            id=as_string(our_fields.get("id")) or as_text(step.get("step_id", number)),
            role=role,
            origin=_origin(step, our_fields, role),
            text=as_text(message),
            thinking=as_text(step.get("reasoning_content", our_fields.get("thinking"))),
            calls=self._calls(step, number) if role == "assistant" else (),
            parent_id=as_string(our_fields.get("parent_id")),
            model=as_string(model),
            usage=_usage(metrics),
            timestamp=as_string(step.get("timestamp")) or as_string(our_fields.get("timestamp")),
            provenance=Provenance(file=self._file, lines=(number,)),
            token_ids=self._numbers(metrics.get("completion_token_ids"), int, number),
            logprobs=self._numbers(metrics.get("logprobs"), float, number),
            extra=image_count(message)
            | self._extra(our_fields, number)
            | self.turns.storable_fields(
                {"atif": self.turns.storable_fields(unmapped_fields, number)} if unmapped_fields else {}, number
            ),
        )

    def _extra(self, our_fields: Record, number: int) -> Record:
        """Return the data that `atif_write` stored about a turn: its `extra` and its original location."""
        read_from = {"read_from": our_fields["read_from"]} if isinstance(our_fields.get("read_from"), dict) else {}
        extra = self.turns.storable_fields(as_record(our_fields.get("extra")) | read_from, number)
        agents = extra.get("agents", {})
        # Links between conversations are derived from these fields, so a forged document must not use other types for
        # them.
        if not isinstance(agents, dict) or not all(isinstance(agent, str) for agent in agents.values()):
            self._report.skip("broken agents", self._file, number)
            del extra["agents"]
        return extra

    def _calls(self, step: Record, number: int) -> tuple[ToolCall, ...]:
        calls: list[ToolCall] = []
        for entry in as_list(step.get("tool_calls")):
            if not isinstance(entry, dict):
                self._report.skip(NO_CALL, self._file, number)
                continue
            call = make_call(entry.get("tool_call_id"), entry.get("function_name"), entry.get("arguments"))
            raw = as_record(entry.get("extra")).get(RAW_KEY)
            calls.append(replace(call, raw_arguments=raw) if isinstance(raw, str) else call)
        return tuple(calls)

    def _tool_turn(self, step: Record, our_fields: Record, turn: Turn, number: int) -> Turn:
        return Turn(
            id=as_string(our_fields.get("id")) or f"{turn.id}:observation",
            role="tool",
            origin=_origin(step, our_fields, "tool"),
            parent_id=as_string(our_fields.get("parent_id")),
            timestamp=as_string(our_fields.get("timestamp")),
            provenance=Provenance(file=self._file, lines=(number,)),
            extra=self._extra(our_fields, number),
        )

    def _add_results(self, turn: Turn, entries: list[Record], caller: Turn | None = None) -> None:
        """Add a turn with these results, and record the subagents that they reference."""
        results: list[ToolResult] = []
        outside: dict[str, list[Any]] = {}
        for entry in entries:
            flag, id = as_record(entry.get("extra")).get(ERROR_KEY), as_text(entry.get("source_call_id"))
            is_error = flag if isinstance(flag, bool) else None
            results.append(ToolResult(call_id=id, text=as_text(entry.get("content")), is_error=is_error))
            for ref in map(as_record, as_list(entry.get("subagent_trajectory_ref"))):
                child = as_string(ref.get("trajectory_id"))
                if child in self._embedded and child is not None:
                    # The subagent is linked to the turn with the call, not to the turn with the result.
                    turn_id = None if caller is None else caller.id
                    self.links.setdefault(
                        child, Link(kind="subagent", conversation_id=self._id, turn_id=turn_id, call_id=id)
                    )
                else:
                    outside.setdefault(id, []).append(ref)
        extra = image_count(*(entry.get("content") for entry in entries)) | dict(turn.extra)
        if outside:
            extra |= self.turns.storable_fields(
                {"atif": {**extra.get("atif", {}), "references": outside}}, turn.provenance.lines[0]
            )
        self.turns.add(replace(turn, results=tuple(results), extra=extra))

    def _numbers(self, values: Any, kind: type, number: int) -> Any:
        """Return a list of numbers as a tuple, or None. A list that contains any other value is counted and skipped
        as a whole.
        """
        if values is None:
            return None
        types = (int,) if kind is int else (int, float)
        if isinstance(values, list) and all(
            isinstance(value, types) and not isinstance(value, bool) for value in values
        ):
            return tuple(map(kind, values))
        self._report.skip("broken token ids or logprobs", self._file, number)
        return None


def _origin(step: Record, our_fields: Record, role: Role) -> Origin:
    if step.get("is_copied_context") is True:
        return "copied"
    if our_fields.get("origin") in get_args(Origin):
        return cast("Origin", our_fields["origin"])
    # A step without a model call was dispatched by the harness.
    return "meta" if role == "assistant" and step.get("llm_call_count") == 0 else USUAL_ORIGIN[role]


def _usage(metrics: Record) -> Usage | None:
    is_counted = any(isinstance(metrics.get(key), int) for key in _COUNTS)
    return read_usage(metrics, *_COUNTS, f"extra.{CACHE_KEY}") if is_counted else None


def _link(fields: Any, parent: Link | None) -> Link | None:
    """Return the parent link that is stored in a document, or None. The parent of an embedded document is the
    enclosing document.
    """
    link = as_record(fields)
    kind, where = link.get("kind"), as_string(link.get("conversation_id"))
    if kind not in get_args(LinkKind) or where is None:
        return None
    where = where if parent is None else parent.conversation_id
    turn_id, call_id = as_string(link.get("turn_id")), as_string(link.get("call_id"))
    return Link(kind=cast("LinkKind", kind), conversation_id=where, turn_id=turn_id, call_id=call_id)


def _rest(name: str, fields: Any, ours: set[str]) -> Record:
    """Return {name: fields} with the fields that this package does not use, or an empty dict if there are none."""
    rest = {key: value for key, value in as_record(fields).items() if key not in ours}
    return {name: rest} if rest else {}
