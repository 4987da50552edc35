"""What a scripted rollout states, and where its turns lie in `completion_ids`, worked out from the script alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

from rollouts.tiny_policy import Turn, turn_ids

DEFAULT_LIMIT = 800


class Site(NamedTuple):
    """A failure: the assistant turn that made it (from 0), any of the right kinds, whose doing, and the tool called.

    `tool` is None where no call could be read from the turn, or where the environment, not a tool, says so.
    """

    turn: int
    kinds: frozenset[str]
    blame: str
    tool: str | None

    @property
    def is_taught(self) -> bool:
        return self.blame == "model"


class Budget(NamedTuple):
    """Where `max_completion_length` falls: `inside` a turn after `tokens` of it, right `after` a turn's results, or
    `tokens` short of them, so that TRL rolls them back."""

    where: str
    turn: int
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scripted:
    """One rollout: what the model says turn by turn, what the tools answer, and which turns erred.

    `results[k]` are the results of turn k in the order TRL puts them into the record, as text. `dropped` are results
    that TRL took back because they did not fit. `is_hard` marks a case that the text of a result cannot decide: one
    has to know whether the tool raised.
    """

    name: str
    why: str
    turns: tuple[Turn, ...]
    results: tuple[tuple[str, ...], ...] = ()
    sites: tuple[Site, ...] = ()
    signals: tuple[tuple[int, str], ...] = ()
    budget: Budget | None = None
    dropped: tuple[str, ...] = ()
    max_iterations: int | None = None
    is_hard: bool = False

    @property
    def question(self) -> str:
        return f"Task {self.name}: do what has to be done."

    def row(self) -> dict[str, Any]:
        """A row of the trainer's data set."""
        return {"prompt": [{"role": "user", "content": self.question}], "case": self.name}


class TurnSpan(NamedTuple):
    """A turn's own tokens in `completion_ids`, [start, end), its end-of-turn token included."""

    start: int
    end: int
    ids: tuple[int, ...]


def result_ids(tokenizer: Any, results: tuple[str, ...]) -> list[int]:
    """What stands between two assistant turns in this template: the results, then the next turn's header."""
    body = "".join(f"\n<tool_response>\n{text}\n</tool_response>" for text in results)
    text = f"\n<|im_start|>user{body}<|im_end|>\n<|im_start|>assistant\n"
    return tokenizer.encode(text, add_special_tokens=False)


def limit_of(script: Scripted, tokenizer: Any) -> int:
    """The `max_completion_length` the script is meant for."""
    budget = script.budget
    if budget is None:
        return DEFAULT_LIMIT
    position = 0
    for index, turn in enumerate(script.turns):
        if budget.where == "inside" and index == budget.turn:
            return position + budget.tokens
        position += len(turn_ids(tokenizer, turn))
        answered = script.results[index] if index < len(script.results) else script.dropped
        position += len(result_ids(tokenizer, answered))
        if index == budget.turn:
            return position - budget.tokens
    raise AssertionError(f"{script.name}: no turn {budget.turn} in the script")


def turn_spans(script: Scripted, tokenizer: Any) -> list[TurnSpan]:
    """Every assistant turn that has tokens in the record, in order."""
    limit, position, spans = limit_of(script, tokenizer), 0, []
    for index, turn in enumerate(script.turns):
        ids = turn_ids(tokenizer, turn)[: limit - position]
        if ids:
            spans.append(TurnSpan(position, position + len(ids), tuple(ids)))
        position += len(ids)
        if index < len(script.results):
            position += len(result_ids(tokenizer, script.results[index]))
    return spans


def completion_ids(script: Scripted, tokenizer: Any) -> list[int]:
    """The whole completion as TRL has to record it."""
    ids: list[int] = []
    for index, span in enumerate(turn_spans(script, tokenizer)):
        ids += span.ids
        if index < len(script.results):
            ids += result_ids(tokenizer, script.results[index])
    return ids


def call(tool: str, **arguments: Any) -> str:
    return "<tool_call>\n" + json.dumps({"name": tool, "arguments": arguments}) + "\n</tool_call>"


def failed(message: str) -> str:
    """What TRL makes of an exception."""
    return str({"error": message})


def site(turn: int, kinds: str, blame: str = "model", tool: str | None = None) -> Site:
    """`kinds` are names of the taxonomy, separated by `|`."""
    return Site(turn, frozenset(kinds.split("|")), blame, tool)
