"""Records that cross stages: plain data, no third-party types, in the shapes users already know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

Message = dict[str, object]
"""One chat message in the OpenAI shape: role, content, and what else the role carries."""

Role = Literal["system", "user", "assistant", "tool"]
Origin = Literal["human", "model", "tool", "meta", "summary", "copied"]
Blame = Literal["model", "harness", "task", "user", "env", "unknown"]
LinkKind = Literal["subagent", "sidechain", "compaction", "compaction_agent", "branch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where a turn was read: the file (relative to what was ingested) and the lines its records stand on."""

    file: str
    lines: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call as the model made it; arguments that are no JSON object stand in `raw_arguments`, with `arguments` {}."""

    id: str
    name: str
    arguments: Mapping[str, Any]
    raw_arguments: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What came back for one call; `is_error` is None where the format has no such flag."""

    call_id: str
    text: str
    is_error: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one assistant message, counted once however many records it was split over."""

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
    """One message. An assistant turn has calls, a tool turn has results; `origin` says who really wrote it."""

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
    """How a conversation hangs on another: through which turn or call, and as what."""

    kind: LinkKind
    conversation_id: str
    turn_id: str | None = None
    call_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One context as the model saw it: a session, a part of one after compaction, a sub-agent, or a rewound branch."""

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
    """A failing tool call: what kind, whose doing, how sure, and the text that shows it.

    It belongs to the assistant turn that made the call. `evidence` is a span of the result's text. `repeats` counts
    earlier failures of the very same call, `between` the calls made since the last of them. Only a kept site may teach;
    `reason` says why one was kept or not.
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
    """What to say before the erring turn: where it comes from, and the facts of the session it was made of."""

    text: str
    source: Literal["template", "raw_error", "writer", "user"]
    template: str
    version: int
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])


class _TeacherSpecRequired(TypedDict):
    slug: str


class TeacherSpec(_TeacherSpecRequired, total=False):
    """A teacher behind an OpenAI-compatible endpoint, with its price in US dollars per million tokens.

    Without a price it cannot be asked under a cap. `base_url` and `api_key_env` (the name of an environment variable)
    say where else than OpenRouter it is; `extra` goes into the request as it is.
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
    """A moment in a logged session: the messages so far, and what the student did next.

    `session_id` (else what stands before `::` in the state's id) says which states are one session; `tools` are the
    schemas a teacher is given; `cwd` is what relative paths are relative to.
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
    """One teacher's answer at one state; a failed call has an `error` and no text.

    `response_text` is the whole answer in the form of `student_action`; `message` is the same as the endpoint sent it.
    """

    message: Message | None
    finish_reason: str | None
    is_cached: bool
    attempts: int
    flags: list[str]


class DPOPair(TypedDict):
    """What the teachers agreed on (chosen) against what the student did (rejected) at one state."""

    state_id: str
    state_messages: list[Message]
    chosen: str
    rejected: str
    n_teachers_agreeing: int
