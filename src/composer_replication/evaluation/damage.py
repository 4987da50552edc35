"""Measure what training may have cost, and what hints do to single tokens.

The cost is the loss on good turns of held-out sessions and, if files are given, on code and math questions. The files
are data: a solution in code is scored as text and never run.

The gap of a token is how much more likely a hint makes it, before training and after:

    gap(token) = log p(token | hint, context) - log p(token | context)

This is what channel 2 teaches: with a gap below zero, the hinted model would not have written the token; once the model
has learned that, the gap is smaller.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from composer_replication.batch.hint_placement import Part, Placement, exclusion_reason, hinted_turn
from composer_replication.batch.render.renderer import Renderer, token_texts
from composer_replication.errors import ConfigError, explain
from composer_replication.evaluation.decisions import ScoreJournal, digest_of, numbers
from composer_replication.evaluation.figures import NATS, Value
from composer_replication.trainer.objective.reference import Response, token_logprobs
from composer_replication.trainer.sessions.phases import Phase, report_phase
from composer_replication.types import Conversation, Provenance, Turn

if TYPE_CHECKING:
    from composer_replication.evaluation.decisions import HeldOut


GOOD_TURNS, CODE, SUMS = "loss_good_turns", "loss_code", "gsm8k"
# Tokens of a good turn that are scored, and rows of a file that are asked.
_MOST_TOKENS, _MOST_ROWS = 512, 1000
# Column names of GSM8K, HumanEval, MBPP and their relatives; the first that exists is used.
_QUESTIONS, _ANSWERS = ("prompt", "question", "text"), ("solution", "canonical_solution", "code", "answer")
# GSM8K's marked answer: "#### 1,234" -> "1,234"; "#### $-5.50" -> "-5.50"; not "### 5"
_MARKED = re.compile(r"####\s*\$?\s*(-?[\d,]*\.?\d+)")
# Any number in a text: "costs 1,200.50 euros" -> "1,200.50"; "in 3." -> "3." (the full stop is removed later)
_NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")
_ASK = "Think step by step. End with a line that is #### and the number alone."


class GoodTurn(NamedTuple):
    """A good turn of a held-out session, after its context."""

    session: str
    response: Response


class Question(NamedTuple):
    """A question as the tokens of a prompt, its answer, and both together for scoring."""

    prompt: list[int]
    answer: str
    whole: Response


def good_turns_of(held: HeldOut, *, most: int, context: int) -> list[GoodTurn]:
    """Return up to `most` good turns, round-robin over sessions. Of a long turn only the first tokens are scored."""
    by_session: dict[str, list[GoodTurn]] = {}
    for session in held.sessions:
        by_session.setdefault(session.session, []).extend(_good_turns(session, held, context))
    longest = max(map(len, by_session.values()), default=0)
    turns = [several[at] for at in range(longest) for several in by_session.values() if at < len(several)]
    return turns[:most]


def _good_turns(session: Any, held: HeldOut, context: int) -> Iterator[GoodTurn]:
    good = session.rendered.responses
    for sequence in session.rendered.sequences:
        for span in sequence.spans:
            if span.turn_id not in good or exclusion_reason(span):
                continue
            if held.is_duplicate(session.conversation.id, span.turn_id):
                continue
            # Context before the turn, then at most _MOST_TOKENS of the turn itself.
            first, end = max(0, span.header_start - context), min(span.end, span.start + _MOST_TOKENS)
            yield GoodTurn(session.session, (sequence.ids[first:end], span.start - first))


def losses(responses: Sequence[Response], sums: Sequence[float]) -> list[float]:
    """Return the loss of each response in nats/token."""
    return [-total / (len(ids) - start) for (ids, start), total in zip(responses, sums, strict=True)]


def loss_values(turns: Sequence[GoodTurn], by_arm: Mapping[str, Sequence[float]]) -> list[Value]:
    """Return one value per turn: the change of its loss."""
    return [
        Value(
            turn.session,
            None,
            {arm: every[at] - by_arm["before"][at] for arm, every in by_arm.items() if arm != "before"},
        )
        for at, turn in enumerate(turns)
    ]


def damage_row(name: str, unit: str, by_arm: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the means of each arm, as the record stores them."""
    means = {arm: fmean(every) for arm, every in by_arm.items()}
    return {
        "name": name,
        "before": means["before"],
        "after": means["after"],
        "control": means.get("control"),
        "unit": unit,
    }


def questions_of(path: str, renderer: Renderer, *, option: str, with_sums: bool) -> list[Question]:
    """Return the rows of a JSONL file as prompts in the model's own template."""
    return [_question(row, at, renderer, option, with_sums) for at, row in enumerate(_rows(path, option))]


def _rows(path: str, option: str) -> Iterator[Any]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(explain(option, got=f"{path!r}: {error}", expected="a JSONL file")) from error
    # Bounds the time of an evaluation when a whole benchmark is given.
    rows = [line for line in lines if line.strip()][:_MOST_ROWS]
    if not rows:
        raise ConfigError(explain(option, got=f"{path!r}, which is empty", expected="one JSON object per line"))
    for number, line in enumerate(rows, start=1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise ConfigError(explain(f"{option}, line {number} of {path}", got=error, expected="JSON")) from error


def _question(row: Any, at: int, renderer: Renderer, option: str, with_sums: bool) -> Question:
    fields: Any = row if isinstance(row, dict) else {}
    question, answer = (
        next((fields[key] for key in keys if isinstance(fields.get(key), str)), None) for keys in (_QUESTIONS, _ANSWERS)
    )
    if question is None or answer is None:
        expected = f"one of {', '.join(_QUESTIONS)} and one of {', '.join(_ANSWERS)}"
        raise ConfigError(explain(f"{option}, line {at + 1}", got=f"keys {sorted(fields)}", expected=expected))
    where = Provenance(file=option, lines=(at + 1,))
    prompt = f"{question}\n{_ASK}" if with_sums else question
    turns = (
        Turn(id="asked", role="user", origin="human", text=prompt, provenance=where),
        # The renderer needs some text in an assistant turn.
        Turn(id="answer", role="assistant", origin="model", text=answer.strip() or "-", provenance=where),
    )
    rendered = renderer.render(Conversation(id=f"{option}-{at}", format=option, turns=turns))[-1]
    span = rendered.spans[-1]
    return Question(rendered.ids[: span.start], answer, (rendered.ids[: span.end], span.start))


def is_right(text: str, answer: str) -> bool:
    """Return whether the number at the end of a text equals that of the answer."""
    expected, actual = _number(answer), _number(text)
    return expected is not None and expected == actual


def _number(text: str) -> float | None:
    matches = _MARKED.findall(text) or _NUMBER.findall(text)
    return float(matches[-1].replace(",", "").rstrip(".")) if matches else None


UNITS = {GOOD_TURNS: NATS, CODE: NATS, SUMS: "per cent right"}


# ---- gaps by token

_TOKEN_GAPS_MOST_TOKENS = 512


class GapSite(NamedTuple):
    """The tokens of an erring turn after the context alone, and after the context with its hint."""

    site_id: str
    conversation_id: str
    turn: int
    side: str
    tokens: list[str]
    plain: Response
    hinted: Response


def gap_sites(
    renderer: Renderer, held: HeldOut, *, most: int, context: int, placement: Placement, part: Part
) -> list[GapSite]:
    """Return up to `most` sites, those of held-out sessions first; sites whose hint the template cannot place are left
    out.
    """
    sites: list[GapSite] = []
    for site in _sites(renderer, held, context, placement, part):
        if len(sites) == most:
            break
        sites.append(site)
    return sites


def _sites(renderer: Renderer, held: HeldOut, context: int, placement: Placement, part: Part) -> Iterator[GapSite]:
    for session in (*held.sessions, *held.training):
        for site in session.rendered.sites:
            first = max(0, site.span.header_start - context)
            options: dict[str, Any] = {"placement": placement, "part": part, "first": first}
            turn = hinted_turn(renderer, site.rendered, site.span, site.hint, **options)
            if isinstance(turn, str):
                continue
            end = min(turn.end, turn.start + _TOKEN_GAPS_MOST_TOKENS)
            ids = site.rendered.ids
            yield GapSite(
                site.site.id,
                session.conversation.id,
                site.number,
                session.side,
                [_shown(text) for text in token_texts(renderer.tokenizer, ids[turn.start : end])],
                (ids[first:end], turn.start - first),
                (turn.context.ids[: turn.teacher_start + end - turn.start], turn.teacher_start),
            )


def _shown(text: str) -> str:
    """Return the text with a replacement character for half a character, which a single token may be."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def gaps_of(
    model: nn.Module, weights: str, sites: Sequence[GapSite], journal: ScoreJournal, *, arm: str
) -> list[list[float]]:
    """Return the gaps of each site, one value per token."""
    gaps: list[list[float]] = []
    for number, site in enumerate(sites):
        report_phase(
            Phase(name=f"token gaps, {arm}", done=number, total=len(sites), items="sites", stored_in=journal.path)
        )
        key = f"{weights}:gaps:{digest_of([site.plain, site.hinted])}"
        kept_gaps = journal.get(key)
        gaps.append(kept_gaps if kept_gaps is not None else journal.put(key, numbers(_gaps(model, site))))
    report_phase(
        Phase(name=f"token gaps, {arm}", done=len(sites), total=len(sites), items="sites", stored_in=journal.path)
    )
    return gaps


def _gaps(model: nn.Module, site: GapSite) -> list[float]:
    plain, hinted = token_logprobs(model, [site.plain, site.hinted])
    return [round(gap, 4) for gap in (hinted - plain).tolist()]


def gap_rows(sites: Sequence[GapSite], gaps: Mapping[str, list[list[float]]]) -> list[dict[str, Any]]:
    """Return one row per site."""
    return [
        {
            "site_id": site.site_id,
            "conversation_id": site.conversation_id,
            "turn": site.turn,
            "side": site.side,
            "tokens": site.tokens,
            "before": gaps["before"][number],
            "after": gaps["after"][number],
        }
        for number, site in enumerate(sites)
    ]
