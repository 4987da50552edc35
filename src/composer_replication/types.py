"""Records shared by several stages: plain data without third-party types, in the public format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

Message = dict[str, object]
"""One chat message in the OpenAI format: a role, content, and the role's additional keys."""

# Message roles as the model sees them, and the actual authors: in an agent's log, most user messages are not written by
# a person.
Role = Literal["system", "user", "assistant", "tool"]
Origin = Literal["human", "model", "tool", "meta", "summary", "copied"]
Blame = Literal["model", "harness", "task", "user", "env", "unknown"]
# A "sidechain" is a subagent inside its main log, a "branch" a stretch that a rewind abandoned.
LinkKind = Literal["subagent", "sidechain", "compaction", "compaction_agent", "branch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The origin of a turn: the file, relative to the ingested folder, and the lines of its records."""

    file: str
    lines: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call as the model made it.

    Arguments that are not a JSON object are kept in `raw_arguments`, and `arguments` is empty.
    """

    id: str
    name: str
    arguments: Mapping[str, Any]
    raw_arguments: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The result of one call; `is_error` is None if the format has no error flag."""

    call_id: str
    text: str
    is_error: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts for one assistant message, counted once even if the message is split over several records."""

    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_creation_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What an assistant turn did: its text and its calls."""

    text: str
    calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message. An assistant turn has calls, a tool turn has results; `origin` is the actual author."""

    id: str
    role: Role
    origin: Origin
    text: str = ""
    thinking: str = ""
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()
    parent_id: str | None = None
    model: str | None = None
    usage: Usage | None = None
    timestamp: str | None = None
    provenance: Provenance
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def action(self) -> Action:
        return Action(text=self.text, calls=self.calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The relation of a conversation to its parent: its kind, and the turn or call from which it started."""

    kind: LinkKind
    conversation_id: str
    turn_id: str | None = None
    call_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One context as the model saw it: a session, a part of a compacted session, a subagent, or a rewound branch."""

    id: str
    format: str
    turns: tuple[Turn, ...]
    parent: Link | None = None
    session_id: str | None = None
    title: str | None = None
    cwd: str | None = None
    agent_version: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSite:
    """A failed tool call: its kind, the blame, the confidence, and the text that shows the error.

    It belongs to the assistant turn that made the call. `evidence` is a span in the result's text. `repeats` counts
    earlier failures of an identical call, and `between` the calls since the last such failure. Only kept sites are
    trained on; `reason` says why a site was kept or not.
    """

    id: str
    conversation_id: str
    turn_id: str
    call_id: str
    result_turn_id: str | None
    tool: str
    kind: str
    blame: Blame
    confidence: float
    evidence: tuple[int, int]
    evidence_text: str
    is_soft: bool
    is_rewound: bool
    repeats: int
    repeat_of: str | None
    between: int
    is_kept: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """A text to insert before the erring turn, its source, and the facts from the session that it uses."""

    text: str
    source: Literal["template", "raw_error", "writer", "user"]
    template: str
    version: int
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])


class _TeacherSpecRequired(TypedDict):
    slug: str


class TeacherSpec(_TeacherSpecRequired, total=False):
    """A teacher at an OpenAI-compatible endpoint, with its price in US dollars per million tokens.

    A teacher without a price cannot be used with a spending cap. `base_url` and `api_key_env` (the name of an
    environment variable) are for endpoints other than OpenRouter; `extra` is added to the request unchanged.
    """

    input_per_mtok: float
    output_per_mtok: float
    per_request_usd: float
    base_url: str
    api_key_env: str
    extra: dict[str, Any]


class _TraceStateRequired(TypedDict):
    state_id: str
    messages: list[Message]
    student_action: str


class TraceState(_TraceStateRequired, total=False):
    """A state in a logged session: the messages so far, and what the student did next.

    States with the same `session_id` (by default the part of `state_id` before `::`) belong to one session. `tools` has
    the schemas that are sent to the teacher; relative paths are relative to `cwd`.
    """

    session_id: str
    tools: list[dict[str, Any]]
    cwd: str | None


class _TeacherCallResultRequired(TypedDict):
    state_id: str
    teacher_slug: str
    response_text: str | None
    latency_s: float
    prompt_tokens: int
    completion_tokens: int
    cost_usd: float
    error: str | None


class TeacherCallResult(_TeacherCallResultRequired, total=False):
    """One teacher's answer in one state. A failed call has an `error` and no text.

    `response_text` is the whole answer in the format of `student_action`, and `message` is the original message from
    the endpoint.
    """

    message: Message | None
    finish_reason: str | None
    is_cached: bool
    attempts: int
    flags: list[str]


class DPOPair(TypedDict):
    """A preference pair for a state: the answer the teachers agreed on (chosen), and the student's (rejected)."""

    state_id: str
    state_messages: list[Message]
    chosen: str
    rejected: str
    n_teachers_agreeing: int
