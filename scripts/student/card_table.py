"""A card's figures as the tables of its page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

START, END = "<!-- figures -->", "<!-- end of figures -->"
_ROWS = (
    ("calls an episode", "calls_per_episode"),
    ("tokens an episode", "tokens_per_episode"),
    ("of them sampled", "sampled_tokens_per_episode"),
    ("turns without a call that can be read, of 100 episodes", "malformed_turns_per_100_episodes"),
)


def tables(card: dict[str, Any]) -> str:
    """Episodes by difficulty, then hints, then hints by kind."""
    played = {name: card[name] for name in ("easy", "medium", "hard") if name in card}
    kinds = list(dict.fromkeys(kind for each in played.values() for kind in each["invalid_by_kind_per_100"]))
    rows = [
        ["", *played],
        ["tasks", *(each["episodes"] for each in played.values())],
        ["solved, %", *(_interval(each["success"], 100) for each in played.values())],
        ["failing calls of 100", *(_interval(each["invalid_calls_per_100"]) for each in played.values())],
        *([f"`{kind}`", *(_of_kind(each, kind) for each in played.values())] for kind in kinds),
        *([text, *(each[key] for each in played.values())] for text, key in _ROWS),
    ]
    return f"{_table(rows)}\n\n{_hints(card['hints'])}\n\n{_spent(card)}"


def _hints(hints: dict[str, Any]) -> str:
    same, any_error, soon = hints["same_error"], hints["any_error"], hints["same_error_soon"]
    calls = hints["calls_of_a_try"]
    rows = [
        ["the erring turn again, easy tasks", "same error, %", "any error, %", f"same error within {calls} calls, %"]
    ]
    for name in same:
        rows.append([name, _interval(same[name], 100), f"{100 * any_error[name]:.1f}", _interval(soon[name], 100)])
    by_kind = [["same error, %, by kind", "sites", *same]]
    for kind, figures in hints["same_error_by_kind"].items():
        by_kind.append([f"`{kind}`", figures["sites"], *(f"{100 * figures[name]:.0f}" for name in same)])
    rarer, later = (_interval(hints[key]) for key in ("times_rarer_than_with_another_kinds", "times_rarer_soon"))
    return (
        f"{_table(rows)}\n\n{hints['sites']} sites, {hints['tries_each']} new try of each: with its own hint the "
        f"error is **{rarer} times rarer** than with a hint of another kind; within {calls} calls, {later} times."
        f"\n\n{_table(by_kind)}"
    )


def _spent(card: dict[str, Any]) -> str:
    return f"Measured in {card['seconds']:.0f} s; weights `sha256:{card['weights_sha256'][:16]}...`."


def _of_kind(figures: dict[str, Any], kind: str) -> str:
    return f"{figures['invalid_by_kind_per_100'].get(kind, 0.0):.1f}"


def _interval(figure: dict[str, float], factor: float = 1.0) -> str:
    value, low, high = (factor * figure[key] for key in ("value", "low", "high"))
    return f"{value:.1f} [{low:.1f}, {high:.1f}]"


def _table(rows: list[list[Any]]) -> str:
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def write_page(page: Path, card: dict[str, Any]) -> None:
    """Put the tables between the page's two marks."""
    before, _, rest = page.read_text(encoding="utf-8").partition(START)
    page.write_text(f"{before}{START}\n{tables(card)}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
