"""Records that cross stages: plain data, no behaviour, no third-party types, in the shapes users already know."""

from __future__ import annotations

from typing import TypedDict

Message = dict[str, object]
"""One chat message in the OpenAI shape: role, content, and what else the role carries."""


class TeacherSpec(TypedDict):
    """A teacher behind an OpenAI-compatible endpoint, with its price in US dollars per million tokens."""

    slug: str
    input_per_mtok: float
    output_per_mtok: float


class TraceState(TypedDict):
    """A moment in a logged session: the messages so far, and what the student did next."""

    state_id: str
    messages: list[Message]
    student_action: str


class TeacherCallResult(TypedDict):
    """One teacher's answer at one state; a failed call has an `error` and no text."""

    state_id: str
    teacher_slug: str
    response_text: str | None
    latency_s: float
    prompt_tokens: int
    completion_tokens: int
    cost_usd: float
    error: str | None


class DPOPair(TypedDict):
    """What the teachers agreed on (chosen) against what the student did (rejected) at one state."""

    state_id: str
    state_messages: list[Message]
    chosen: str
    rejected: str
    n_teachers_agreeing: int
