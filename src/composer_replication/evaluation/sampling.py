"""Actions that each model draws at held-out states: before an error, and before a good call of the same session.

Draws at a state share its prompt, and both models get the same random numbers. What is drawn is kept as it comes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from composer_replication.batch.render.renderer import Renderer, TurnSpan
from composer_replication.config.evaluation import EvaluationConfig
from composer_replication.evaluation.decisions import SiteDecisions, digest_of
from composer_replication.evaluation.forced import Kept
from composer_replication.evaluation.vllm_sampling import ArmEngine
from composer_replication.rollouts.generation.generator import RolloutGenerator
from composer_replication.sessions.phases import Phase, tell_phase

if TYPE_CHECKING:
    from composer_replication.evaluation.held_out import HeldOut

Sort = Literal["erring", "good"]
_MOST_AT_ONCE, _MOST_TOKENS = 8, 131_072
"""States, and tokens of all their prompts times draws, that are generated together."""


class State(NamedTuple):
    """A moment of a held-out session, as the tokens that a model is asked to go on from."""

    id: str
    conversation_id: str
    session: str
    turn: int
    turn_id: str
    sort: Sort
    site_id: str
    kind: str | None
    prompt: list[int]

    @property
    def place(self) -> tuple[str, str, Sort]:
        """The same in whatever tokens."""
        return self.conversation_id, self.turn_id, self.sort


class Drawn(NamedTuple):
    """One draw: its text, how many tokens it has, and whether it ended by itself."""

    text: str
    num_tokens: int
    has_ended: bool


def states_of(held: HeldOut, sites: Sequence[SiteDecisions], *, most: int, context: int) -> list[State]:
    """Up to `most` of each sort, a state of every session before a second one of any."""
    spans = {
        (rendered.conversation_id, span.turn_id): (sequence.ids, span)
        for rendered in (session.rendered for session in held.sessions)
        for sequence in rendered.sequences
        for span in sequence.spans
    }
    states: dict[Sort, dict[tuple[str, str], State]] = {"erring": {}, "good": {}}
    for site in _in_turn(sites):
        decisions: dict[Sort, Any] = {
            "erring": site.decided[0],
            "good": next(decision for decision in site.decided if decision.role == "good"),
        }
        for sort, decision in decisions.items():
            turn_key = (decision.conversation_id, decision.turn_id)
            if turn_key in spans and turn_key not in states[sort] and len(states[sort]) < most:
                states[sort][turn_key] = _state(site, sort, decision, *spans[turn_key], context)
    return [*states["erring"].values(), *states["good"].values()]


def _in_turn(sites: Sequence[SiteDecisions]) -> Iterator[SiteDecisions]:
    """The first of each session, then the second of each."""
    by_session: dict[str, list[SiteDecisions]] = {}
    for site in sites:
        by_session.setdefault(site.session, []).append(site)
    for at in range(max(map(len, by_session.values()), default=0)):
        yield from (several[at] for several in by_session.values() if at < len(several))


def _state(site: SiteDecisions, sort: Sort, call: Any, ids: list[int], span: TurnSpan, context: int) -> State:
    prompt = ids[max(0, span.header_start - context) : span.start]
    kind = site.kind if sort == "erring" else None
    name = f"{site.site_id}:{sort}"
    return State(name, call.conversation_id, site.session, call.turn, call.turn_id, sort, site.site_id, kind, prompt)


def draw_actions(
    model: Any,
    weights: str,
    renderer: Renderer,
    states: Sequence[State],
    section: EvaluationConfig,
    kept: Kept,
    arm: str,
    engine: ArmEngine | None = None,
) -> list[list[Drawn]]:
    """For each state its draws, by vLLM's `engine` or else by the model; what an earlier call drew is taken over."""
    number = section.samples if section.temperature else min(1, section.samples)
    draw = (_Drawer if engine is None else partial(_VllmDrawer, engine))(model, renderer, section, number)
    settings = f"{weights}:drawn:{number}:{section.temperature}:{section.new_tokens}:{section.seed}:{draw.name}"
    draws: list[list[Drawn]] = []
    for batch in _batches(states, number, draw.most_at_once):
        tell_phase(
            Phase(name=f"drawn actions, {arm}", done=len(draws), total=len(states), items="states", kept_in=kept.path)
        )
        key = f"{settings}:{digest_of([(state.prompt, 0) for state in batch])}"
        kept_rows = kept.get(key)
        rows = kept_rows if kept_rows is not None else kept.put(key, _as_rows(draw([state.prompt for state in batch])))
        draws += [[Drawn(*row) for row in several] for several in rows]
    tell_phase(
        Phase(name=f"drawn actions, {arm}", done=len(draws), total=len(states), items="states", kept_in=kept.path)
    )
    return draws


def _as_rows(drawn: Sequence[Sequence[Drawn]]) -> list[list[list[Any]]]:
    return [[list(draw) for draw in several] for several in drawn]


def _batches(states: Sequence[State], number: int, most: int) -> Iterator[list[State]]:
    batch: list[State] = []
    for state in states:
        longest = max(len(candidate.prompt) for candidate in (*batch, state))
        if batch and (len(batch) == most or (len(batch) + 1) * number * longest > _MOST_TOKENS):
            yield batch
            batch = []
        batch.append(state)
    if batch:
        yield batch


class _Texts:
    """Tokens to texts, up to the first that ends a turn."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        own_end: Any = renderer.tokenizer.eos_token_id
        ends = [renderer.protected.ids[stop] for stop in renderer.dialect.stops]
        self._stops: list[int] = sorted({*ends, *([] if own_end is None else [int(own_end)])})

    def _drawn(self, ids: list[int], has_ended: bool = False) -> Drawn:
        end = next((at for at, token in enumerate(ids) if token in self._stops), None)
        text = self._renderer.tokenizer.decode(ids[:end], skip_special_tokens=False)
        return Drawn(str(text), len(ids) if end is None else end, has_ended or end is not None)


class _VllmDrawer(_Texts):
    """The same settings, drawn by vLLM."""

    name = "vllm"

    def __init__(
        self, engine: ArmEngine, _model: Any, renderer: Renderer, section: EvaluationConfig, number: int
    ) -> None:
        super().__init__(renderer)
        self._seed, self.most_at_once = section.seed, engine.most_at_once
        self._draw = engine.drawer(self._stops, number, section.new_tokens, section.temperature)

    def __call__(self, prompts: Sequence[list[int]]) -> list[list[Drawn]]:
        answers = self._draw(prompts, _seed_of(prompts, self._seed))
        return [[self._drawn(*answer) for answer in several] for several in answers]


class _Drawer(_Texts):
    """Prompts in, texts out: plain sampling at a temperature, whatever a model's own settings are."""

    name = "transformers"

    def __init__(self, model: Any, renderer: Renderer, section: EvaluationConfig, number: int) -> None:
        from transformers import GenerationConfig

        super().__init__(renderer)
        self._model, self._number, self._seed, self.most_at_once = model, number, section.seed, _MOST_AT_ONCE
        warmth = {"do_sample": True, "temperature": section.temperature, "top_k": 0, "top_p": 1.0}
        self._config = GenerationConfig(
            **(warmth if section.temperature else {"do_sample": False}),
            repetition_penalty=1.0,
            max_new_tokens=section.new_tokens,
            eos_token_id=self._stops,
            pad_token_id=self._stops[0] if self._stops else 0,
        )
        self._generate: Callable[..., torch.Tensor] = RolloutGenerator().generate

    def __call__(self, prompts: Sequence[list[int]]) -> list[list[Drawn]]:
        rows = [prompt for prompt in prompts for _ in range(self._number)]
        width = max(map(len, rows))
        pad = int(self._config.pad_token_id or 0)
        device = next(self._model.parameters()).device
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
        torch.manual_seed(_seed_of(prompts, self._seed))
        sequences = self._generate(self._model, input_ids=ids, attention_mask=mask, generation_config=self._config)
        drawn = [self._drawn(row[width:]) for row in sequences.tolist()]
        return [drawn[at : at + self._number] for at in range(0, len(drawn), self._number)]


def _seed_of(prompts: Sequence[list[int]], seed: int) -> int:
    """The same for every model, and whatever was drawn before."""
    digest = hashlib.sha256(f"{seed}:{digest_of([(prompt, 0) for prompt in prompts])}".encode()).digest()
    return int.from_bytes(digest[:6], "big")
