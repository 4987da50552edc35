"""All that is asked of every model, and each model's answers: made once from the held-out sessions, then asked anew."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from composer_replication.batch.render.renderer import Renderer
from composer_replication.config import CrfConfig
from composer_replication.config.evaluation import EvaluationConfig, Primary
from composer_replication.evaluation import damage
from composer_replication.evaluation.damage import GoodTurn, Question, good_turns_of, is_right, questions_of
from composer_replication.evaluation.decisions import SiteDecisions, site_decisions
from composer_replication.evaluation.forced import Kept, Scores, score_groups
from composer_replication.evaluation.sampling import Drawn, State, draw_actions, states_of
from composer_replication.evaluation.token_gaps import GapSite, gap_sites, gaps_of
from composer_replication.evaluation.vllm_sampling import ArmEngine
from composer_replication.runs.evaluation import control_name, controls_among

if TYPE_CHECKING:
    from composer_replication.evaluation.held_out import HeldOut

_SUM_TOKENS = 256


@dataclass(kw_only=True)
class Questions:
    """Sites to score, states to draw at, good turns, sites whose gaps are kept, and questions of files."""

    sites: list[SiteDecisions]
    states: list[State]
    turns: list[GoodTurn]
    gaps: list[GapSite]
    code: list[Question]
    sums: list[Question]

    def longest(self, new_tokens: int) -> int:
        """Tokens of the longest prompt with what may be drawn behind it."""
        drawn = [len(state.prompt) + new_tokens for state in self.states]
        sums = [len(question.prompt) + max(new_tokens, _SUM_TOKENS) for question in self.sums]
        return max([*drawn, *sums], default=0)

    def places_of(self, primary: Primary) -> list[str]:
        """Return the session of every site or state of which the primary figure will have a value."""
        if primary == "sampled_failures":
            return [state.session for state in self.states]
        role = "correction" if primary == "forced_correction" else "good"
        return [site.session for site in self.sites if any(decision.role == role for decision in site.decided)]

    @property
    def are_any(self) -> bool:
        """Gaps alone are no evaluation."""
        return bool(self.sites or self.states or self.turns or self.code or self.sums)


@dataclass(kw_only=True)
class Answers:
    """Those of the models so far, by arm; a model whose log-probs are not numbers is `broken` and has none.

    `engine` is what actions were drawn with; `unlearnt` says what a model that draws was never taught to write.
    """

    broken: list[str] = field(default_factory=list[str])
    engine: str = "transformers"
    digests: dict[str, str] = field(default_factory=dict[str, str])
    scores: Scores = field(default_factory=dict[str, list[list[float]]])
    draws: dict[str, list[list[Drawn]]] = field(default_factory=dict[str, list[list[Drawn]]])
    unlearnt: dict[str, str] = field(default_factory=dict[str, str])
    gaps: dict[str, list[list[float]]] = field(default_factory=dict[str, list[list[float]]])
    losses: dict[str, dict[str, list[float]]] = field(default_factory=dict[str, dict[str, list[float]]])


def questions_on(
    config: CrfConfig, renderer: Renderer, held: HeldOut, drops: Counter[str], most_states: int
) -> Questions:
    section, batch = config.evaluation, config.train.batch
    sites = list(site_decisions(renderer, held, context=section.context, num_good=section.good_calls, drops=drops))
    states = states_of(held, sites, most=most_states, context=section.context) if section.samples else []
    return Questions(
        sites=sites,
        states=states,
        turns=good_turns_of(held, most=section.good_turns, context=section.context),
        gaps=gap_sites(
            renderer,
            held,
            most=section.token_gaps,
            context=section.context,
            placement=batch.placement,
            part=batch.part,
        ),
        code=_of_file(section.code, renderer, "evaluation.code", with_sums=False),
        sums=_of_file(section.gsm8k, renderer, "evaluation.gsm8k", with_sums=True),
    )


def _of_file(path: str | None, renderer: Renderer, option: str, *, with_sums: bool) -> list[Question]:
    return [] if path is None else questions_of(path, renderer, option=option, with_sums=with_sums)


def ask(
    model: Any,
    digest: str,
    arm: str,
    asked: Questions,
    renderer: Renderer,
    section: EvaluationConfig,
    kept: Kept,
    engine: ArmEngine | None = None,
) -> Answers:
    """All of it of one model; what an earlier evaluation kept of these weights is not asked again.

    Of a control the gaps are of no use; of its further shuffles nothing but the log-probs at the sites.
    """
    weights = f"{digest}:{next(model.parameters()).dtype}"
    groups = [site.responses for site in asked.sites]
    answers = Answers(digests={arm: digest})
    # Without a site to score, one state tells whether actions can be drawn at all.
    groups = groups or [[(state.prompt, len(state.prompt) - 1)] for state in asked.states[:1]]
    scores = score_groups(model, weights, groups, kept, what=f"log-probs, {arm}", items="sites")
    answers.scores[arm] = scores[: len(asked.sites)]
    if controls_among([arm]) and arm != control_name():
        return answers
    if asked.turns:
        answers.losses[damage.GOOD_TURNS] = {arm: _losses(model, weights, asked.turns, kept, f"good turns, {arm}")}
    if asked.code:
        answers.losses[damage.CODE] = {arm: _losses(model, weights, asked.code, kept, f"code, {arm}")}
    if asked.gaps and arm != "control":
        answers.gaps[arm] = gaps_of(model, weights, asked.gaps, kept, arm=arm)
    if asked.states:
        answers.draws[arm] = draw_actions(model, weights, renderer, asked.states, section, kept, arm, engine)
    if asked.sums:
        answers.losses[damage.SUMS] = {arm: _sums(model, weights, asked.sums, renderer, section, kept, arm, engine)}
    return answers


def _losses(model: Any, weights: str, texts: list[GoodTurn] | list[Question], journal: Kept, what: str) -> list[float]:
    responses = [text.response if isinstance(text, GoodTurn) else text.whole for text in texts]
    sums = score_groups(model, weights, [[response] for response in responses], journal, what=what, items="texts")
    return damage.losses(responses, [scores[0] for scores in sums])


def _sums(
    model: Any,
    weights: str,
    questions: list[Question],
    renderer: Renderer,
    section: EvaluationConfig,
    journal: Kept,
    arm: str,
    engine: ArmEngine | None,
) -> list[float]:
    """100 for every question that is answered with the right number, by the likeliest tokens."""
    likeliest = replace(section, temperature=0.0, samples=1, new_tokens=max(section.new_tokens, _SUM_TOKENS))
    states = [State(str(at), "", "", 0, "", "good", "", None, question.prompt) for at, question in enumerate(questions)]
    drawn = draw_actions(model, weights, renderer, states, likeliest, journal, f"sums, {arm}", engine)
    return [100.0 * is_right(texts[0].text, question.answer) for texts, question in zip(drawn, questions, strict=True)]


def add_answers(into: Answers, more: Answers) -> None:
    into.digests |= more.digests
    into.scores |= more.scores
    into.draws |= more.draws
    into.gaps |= more.gaps
    for name, by_arm in more.losses.items():
        into.losses.setdefault(name, {}).update(by_arm)
