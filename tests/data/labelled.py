"""The labelled tool results, and how a classifier of them scores."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from composer_replication.sites.actions.session_state import SessionState
from composer_replication.sites.classify import classify
from composer_replication.types import ToolCall

FILES = {
    "labelled": Path(__file__).parent / "labelled_results.jsonl",
    "held out": Path(__file__).parent / "heldout_results.jsonl",
}
BLAMES = ("model", "harness", "task", "user", "env", "unknown", "no failure")


def rows(name):
    return [json.loads(line) for line in FILES[name].read_text(encoding="utf-8").splitlines()]


def trap_rows():
    """Results that look like the model's doing; `allowed` are the blames that a careful engineer would accept."""
    path = Path(__file__).parent / "trap_results.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def verdict_of(row):
    """The verdict on a row, with what its context had shown before."""
    history = SessionState()
    for call in row.get("context", ()):
        text = call.get("text", call.get("result", ""))
        before = classify(call["tool"], call["arguments"], text, call.get("is_error"), before=history)
        made = ToolCall(id="", name=call["tool"], arguments=call["arguments"])
        history.add(made, text, failed=before.is_failure)
    return classify(row["tool"], row["arguments"], row["text"], row["is_error"], before=history)


def confusion(labelled):
    """(label, verdict) -> how often, by blame."""
    found = Counter()
    for row in labelled:
        verdict = verdict_of(row)
        found[row["blame"] or "no failure", verdict.blame if verdict.is_failure else "no failure"] += 1
    return found


def precision_and_recall(found, blame="model"):
    right = found[blame, blame]
    said = sum(number for (_, got), number in found.items() if got == blame)
    meant = sum(number for (label, _), number in found.items() if label == blame)
    return right / said, right / meant


def table(found):
    """The confusion as lines of Markdown: labels down, verdicts across."""
    lines = [f"| label \\ verdict | {' | '.join(BLAMES)} |", "|---|" + "---|" * len(BLAMES)]
    lines += [f"| {label} | {' | '.join(str(found[label, got]) for got in BLAMES)} |" for label in BLAMES]
    return lines
