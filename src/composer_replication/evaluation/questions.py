"""Prepare the questions that every model is asked, and get one model's answers.

Models are asked for log-probs of the decisions at error sites, for sampled actions, and, to reveal side effects of the
training, for losses on good turns of held-out sessions and on code, and for answers to math questions. Code and math
questions come from files, which are data: a code solution is scored as text and never run.

For the report, the gap of each token of an erring turn is measured before and after training:

    gap(token) = log p(token | hint, context) - log p(token | context)

Hint distillation (channel 2) trains on these gaps. Where the gap is negative, the hint makes the token less likely.
After training, the gaps are smaller if the model has learned what the hint says.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from composer_replication.batch.hint_placement import exclusion_reason, hinted_turn
from composer_replication.batch.render.renderer import Renderer, token_texts
from composer_replication.config import CrfConfig
from composer_replication.config.sections import EvaluationConfig, Primary
from composer_replication.errors import ConfigError, explain
from composer_replication.evaluation.sampling import SampledText, State, sample_actions, select_states
from composer_replication.evaluation.scored_calls import (
    HeldOut,
    ScoreJournal,
    Scores,
    SiteDecisions,
    check_finite,
    digest_of,
    score_groups,
    site_decisions,
)
from composer_replication.evaluation.vllm_sampling import ArmEngine
from composer_replication.runs.files import control_name, controls_among
from composer_replication.trainer.objective.reference import Response, token_logprobs
from composer_replication.trainer.sessions.phases import Phase, report_phase
from composer_replication.types import Conversation, Provenance, Turn

if TYPE_CHECKING:
    from composer_replication.evaluation.scored_calls import HeldOutSession


GOOD_TURNS, CODE, MATH = "loss_good_turns", "loss_code", "gsm8k"
# At most so many tokens of a good turn, and of an erring turn with its hint, are scored.
_MAX_TURN_TOKENS = 512
# At most so many rows of a file are asked; bounds the time when a whole benchmark is given.
_MAX_QUESTIONS = 1000
# Room for the steps of a GSM8K answer, whatever evaluation.new_tokens allows for an action.
_MATH_TOKENS = 256


class _GoodTurn(NamedTuple):
    """A good turn of a held-out session, preceded by its context."""

    session: str
    response: Response


class _GapSite(NamedTuple):
    """The tokens of an erring turn, once preceded by the context alone and once by the context and the hint."""

    site_id: str
    conversation_id: str
    turn: int
    side: str
    tokens: list[str]
    plain: Response
    hinted: Response


class _TextQuestion(NamedTuple):
    """A question from a file: the tokens of its prompt, the expected answer, and the tokens of both for scoring."""

    prompt: list[int]
    answer: str
    response: Response


@dataclass(kw_only=True)
class Questions:
    """What every model is asked: error sites to score, states for sampling, good turns, token gaps, code and math
    questions.
    """

    sites: list[SiteDecisions]
    states: list[State]
    good_turns: list[_GoodTurn]
    gap_sites: list[_GapSite]
    code: list[_TextQuestion]
    math: list[_TextQuestion]

    def max_tokens(self, new_tokens: int) -> int:
        """Return the number of tokens of the longest prompt with its answer, which determines the size of the
        engine.
        """
        state_lengths = [len(state.prompt) + new_tokens for state in self.states]
        math_lengths = [len(question.prompt) + max(new_tokens, _MATH_TOKENS) for question in self.math]
        return max([*state_lengths, *math_lengths], default=0)

    def sessions_with_values(self, primary: Primary) -> list[str]:
        """Return, for every site or state that contributes a value to the primary metric, its session."""
        if primary == "sampled_failures":
            return [state.session for state in self.states]
        role = "correction" if primary == "forced_correction" else "good"
        return [site.session for site in self.sites if any(decision.role == role for decision in site.decisions)]

    @property
    def has_any(self) -> bool:
        """Whether there is anything to evaluate. Token gaps alone do not count: they compare no models."""
        return bool(self.sites or self.states or self.good_turns or self.code or self.math)


@dataclass(kw_only=True)
class Answers:
    """The answers of the models so far, by arm.

    A model with non-finite log-probs is listed in `broken` and has no answers. `engine` names the library that sampled
    the actions. `untrained_tokens` describes, for each arm, which tokens of the template the model never learned.
    """

    broken: list[str] = field(default_factory=list[str])
    engine: str = "transformers"
    digests: dict[str, str] = field(default_factory=dict[str, str])
    scores: Scores = field(default_factory=dict[str, list[list[float]]])
    samples: dict[str, list[list[SampledText]]] = field(default_factory=dict[str, list[list[SampledText]]])
    untrained_tokens: dict[str, str] = field(default_factory=dict[str, str])
    gaps: dict[str, list[list[float]]] = field(default_factory=dict[str, list[list[float]]])
    losses: dict[str, dict[str, list[float]]] = field(default_factory=dict[str, dict[str, list[float]]])

    def add(self, answers: Answers) -> None:
        """Add the answers of another model."""
        self.digests |= answers.digests
        self.scores |= answers.scores
        self.samples |= answers.samples
        self.gaps |= answers.gaps
        for name, losses_by_arm in answers.losses.items():
            self.losses.setdefault(name, {}).update(losses_by_arm)


def prepare_questions(
    config: CrfConfig, renderer: Renderer, held_out: HeldOut, drops: Counter[str], max_states: int
) -> Questions:
    """Return the questions about the held-out sessions. Sites without questions are counted in `drops` by reason."""
    section = config.evaluation
    sites = list(site_decisions(renderer, held_out, context=section.context, num_good=section.good_calls, drops=drops))
    states = select_states(held_out, sites, max_states, section.context) if section.samples else []
    return Questions(
        sites=sites,
        states=states,
        good_turns=_select_good_turns(held_out, section.good_turns, section.context),
        gap_sites=_select_gap_sites(config, renderer, held_out),
        code=_read_questions(section.code, renderer, "evaluation.code", is_math=False),
        math=_read_questions(section.gsm8k, renderer, "evaluation.gsm8k", is_math=True),
    )


def ask(
    model: Any,
    digest: str,
    arm: str,
    questions: Questions,
    renderer: Renderer,
    section: EvaluationConfig,
    journal: ScoreJournal,
    engine: ArmEngine | None = None,
) -> Answers:
    """Return one model's answers to all questions, reusing those that `journal` has for the same weights.

    For a control, token gaps are not computed. For its second and later shuffles, only the log-probs at the sites are.
    """
    # The dtype is part of the key: bfloat16 and float32 scores of the same weights differ.
    weights = f"{digest}:{next(model.parameters()).dtype}"
    groups = [site.responses for site in questions.sites]
    answers = Answers(digests={arm: digest})
    # Without a site to score, one state shows whether the log-probs are finite: from NaN no action can be sampled.
    groups = groups or [[(state.prompt, len(state.prompt) - 1)] for state in questions.states[:1]]
    scores = score_groups(model, weights, groups, journal, name=f"log-probs, {arm}", items="sites")
    answers.scores[arm] = scores[: len(questions.sites)]
    if controls_among([arm]) and arm != control_name():
        return answers
    if questions.good_turns:
        responses = [turn.response for turn in questions.good_turns]
        answers.losses[GOOD_TURNS] = {arm: _losses(model, weights, responses, journal, f"good turns, {arm}")}
    if questions.code:
        responses = [question.response for question in questions.code]
        answers.losses[CODE] = {arm: _losses(model, weights, responses, journal, f"code, {arm}")}
    if questions.gap_sites and arm != "control":
        answers.gaps[arm] = _token_gaps(model, weights, questions.gap_sites, journal, arm)
    if questions.states:
        answers.samples[arm] = sample_actions(model, weights, renderer, questions.states, section, journal, arm, engine)
    if questions.math:
        scores = _score_math(model, weights, questions.math, renderer, section, journal, arm, engine)
        answers.losses[MATH] = {arm: scores}
    return answers


def _losses(
    model: nn.Module, weights: str, responses: Sequence[Response], journal: ScoreJournal, name: str
) -> list[float]:
    """Return the loss of each response, in nats/token."""
    sums = score_groups(model, weights, [[response] for response in responses], journal, name=name, items="texts")
    return [-total / (len(ids) - start) for (ids, start), [total] in zip(responses, sums, strict=True)]


# ---- good turns


def _select_good_turns(held_out: HeldOut, max_turns: int, context: int) -> list[_GoodTurn]:
    """Return up to `max_turns` good turns, round-robin over sessions."""
    by_session: dict[str, list[_GoodTurn]] = {}
    for session in held_out.sessions:
        by_session.setdefault(session.session, []).extend(_good_turns(session, held_out, context))
    longest = max(map(len, by_session.values()), default=0)
    turns = [several[at] for at in range(longest) for several in by_session.values() if at < len(several)]
    return turns[:max_turns]


def _good_turns(session: HeldOutSession, held_out: HeldOut, context: int) -> Iterator[_GoodTurn]:
    good = session.rendered.responses
    for sequence in session.rendered.sequences:
        for span in sequence.spans:
            if span.turn_id not in good or exclusion_reason(span):
                continue
            if held_out.is_duplicate(session.conversation.id, span.turn_id):
                continue
            # Context before the turn, then the first tokens of the turn itself.
            first, end = max(0, span.header_start - context), min(span.end, span.start + _MAX_TURN_TOKENS)
            yield _GoodTurn(session.session, (sequence.ids[first:end], span.start - first))


# ---- code and math questions

# Column names of GSM8K, HumanEval, MBPP and similar files; the first that exists is used.
_QUESTION_COLUMNS = ("prompt", "question", "text")
_ANSWER_COLUMNS = ("solution", "canonical_solution", "code", "answer")
# GSM8K's marked answer: "#### 1,234" -> "1,234"; "#### $-5.50" -> "-5.50"; not "### 5"
_MARKED_NUMBER = re.compile(r"####\s*\$?\s*(-?[\d,]*\.?\d+)")
# Any number in a text: "costs 1,200.50 euros" -> "1,200.50"; "in 3." -> "3." (the full stop is removed later)
_NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")
_MATH_INSTRUCTION = "Think step by step. End with a line that is #### and the number alone."


def _read_questions(path: str | None, renderer: Renderer, option: str, *, is_math: bool) -> list[_TextQuestion]:
    """Read questions from a JSONL file, with their prompts in the model's own chat template."""
    if path is None:
        return []
    return [_render_question(row, at, renderer, option, is_math) for at, row in enumerate(_read_rows(path, option))]


def _read_rows(path: str, option: str) -> Iterator[Any]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(explain(option, got=f"{path!r}: {error}", expected="a JSONL file")) from error
    rows = [line for line in lines if line.strip()][:_MAX_QUESTIONS]
    if not rows:
        raise ConfigError(explain(option, got=f"{path!r}, which is empty", expected="one JSON object per line"))
    for number, line in enumerate(rows, start=1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise ConfigError(explain(f"{option}, line {number} of {path}", got=error, expected="JSON")) from error


def _render_question(row: Any, at: int, renderer: Renderer, option: str, is_math: bool) -> _TextQuestion:
    fields: Any = row if isinstance(row, dict) else {}
    question, answer = (
        next((fields[key] for key in keys if isinstance(fields.get(key), str)), None)
        for keys in (_QUESTION_COLUMNS, _ANSWER_COLUMNS)
    )
    if question is None or answer is None:
        expected = f"one of {', '.join(_QUESTION_COLUMNS)} and one of {', '.join(_ANSWER_COLUMNS)}"
        raise ConfigError(explain(f"{option}, line {at + 1}", got=f"keys {sorted(fields)}", expected=expected))
    where = Provenance(file=option, lines=(at + 1,))
    prompt = f"{question}\n{_MATH_INSTRUCTION}" if is_math else question
    turns = (
        Turn(id="asked", role="user", origin="human", text=prompt, provenance=where),
        # The renderer needs some text in an assistant turn.
        Turn(id="answer", role="assistant", origin="model", text=answer.strip() or "-", provenance=where),
    )
    rendered = renderer.render(Conversation(id=f"{option}-{at}", format=option, turns=turns))[-1]
    span = rendered.spans[-1]
    return _TextQuestion(rendered.ids[: span.start], answer, (rendered.ids[: span.end], span.start))


def _score_math(
    model: Any,
    weights: str,
    questions: list[_TextQuestion],
    renderer: Renderer,
    section: EvaluationConfig,
    journal: ScoreJournal,
    arm: str,
    engine: ArmEngine | None,
) -> list[float]:
    """Return 100 for every question whose greedily decoded answer ends in the right number, and 0 for the others."""
    # Temperature 0 needs one sample; more would be the same text.
    greedy = replace(section, temperature=0.0, samples=1, new_tokens=max(section.new_tokens, _MATH_TOKENS))
    states = [State(str(at), "", "", 0, "", "good", "", None, question.prompt) for at, question in enumerate(questions)]
    samples = sample_actions(model, weights, renderer, states, greedy, journal, f"sums, {arm}", engine)
    return [
        100.0 * _is_right(texts[0].text, question.answer) for texts, question in zip(samples, questions, strict=True)
    ]


def _is_right(text: str, answer: str) -> bool:
    """Return whether a text ends with the same number as the expected answer."""
    expected, actual = _final_number(answer), _final_number(text)
    return expected is not None and expected == actual


def _final_number(text: str) -> float | None:
    matches = _MARKED_NUMBER.findall(text) or _NUMBER.findall(text)
    return float(matches[-1].replace(",", "").rstrip(".")) if matches else None


# ---- token gaps


def _select_gap_sites(config: CrfConfig, renderer: Renderer, held_out: HeldOut) -> list[_GapSite]:
    """Return the first sites whose hint the template can place: sites of held-out sessions, then of training
    sessions.
    """
    sites: list[_GapSite] = []
    for site in _gap_sites(config, renderer, held_out):
        if len(sites) == config.evaluation.token_gaps:
            break
        sites.append(site)
    return sites


def _gap_sites(config: CrfConfig, renderer: Renderer, held_out: HeldOut) -> Iterator[_GapSite]:
    batch = config.train.batch
    for session in (*held_out.sessions, *held_out.training):
        for site in session.rendered.sites:
            first = max(0, site.span.header_start - config.evaluation.context)
            options: dict[str, Any] = {"placement": batch.placement, "part": batch.part, "first": first}
            turn = hinted_turn(renderer, site.rendered, site.span, site.hint, **options)
            if isinstance(turn, str):
                continue
            end = min(turn.end, turn.start + _MAX_TURN_TOKENS)
            ids = site.rendered.ids
            yield _GapSite(
                site.site.id,
                session.conversation.id,
                site.number,
                session.side,
                [_replace_half_characters(text) for text in token_texts(renderer.tokenizer, ids[turn.start : end])],
                (ids[first:end], turn.start - first),
                (turn.context.ids[: turn.teacher_start + end - turn.start], turn.teacher_start),
            )


def _replace_half_characters(text: str) -> str:
    # A token may be only some bytes of a character.
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _token_gaps(
    model: nn.Module, weights: str, sites: Sequence[_GapSite], journal: ScoreJournal, arm: str
) -> list[list[float]]:
    """Return, for each site, one gap per token of the erring turn."""
    gaps: list[list[float]] = []
    phase = Phase(name=f"token gaps, {arm}", done=0, total=len(sites), items="sites", stored_in=journal.path)
    for number, site in enumerate(sites):
        report_phase(replace(phase, done=number))
        key = f"{weights}:gaps:{digest_of([site.plain, site.hinted])}"
        if (site_gaps := journal.get(key)) is None:
            plain, hinted = token_logprobs(model, [site.plain, site.hinted])
            site_gaps = journal.put(key, check_finite([round(gap, 4) for gap in (hinted - plain).tolist()]))
        gaps.append(site_gaps)
    report_phase(replace(phase, done=len(sites)))
    return gaps
