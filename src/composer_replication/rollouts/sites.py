"""Error sites of a rollout with what channel 2 needs of each: the erring turn's tokens, and the hinted context's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from composer_replication.actions.calls import json_value
from composer_replication.batch.hint_placement import Placement
from composer_replication.batch.render.renderer import RenderedSequence, Renderer, TurnSpan
from composer_replication.batch.taught_turns import HintedTurn, Part, hinted_turn
from composer_replication.errors import InputError, explain
from composer_replication.hint_generator.write import HintSource, HintWriter, write_hint
from composer_replication.rollouts.conversation import (
    Rollout,
    Run,
    assistant_id,
    conversation_of,
    is_parsed,
    sampled_runs,
    signal_of,
    signalled_sites,
)
from composer_replication.rollouts.failure_rules import MALFORMED, ROLLOUT_RULES, judged_by_schema
from composer_replication.sites.find import MIN_CONFIDENCE, find_error_sites
from composer_replication.sites.rule import FailureRule
from composer_replication.types import Conversation, ErrorSite, ToolCall, ToolResult, Turn

HintGenerator = Callable[[str, Mapping[str, Any]], str | None]
NO_HINT = "no_hint"
NO_HEADER = "no_header_before_turn"
TOO_LONG = "teacher_context_too_long"


SITES, ITEMS = "sdpo_sites", "sdpo_items"
"""Keys of a batch of rollouts: the taught turns of each, and how many tokens of all of them are taught."""


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """How rollouts are taught from, beside their reward.

    Error sites: where a hint goes, which part of the erring turn is taught, who writes hints, which rules are added.
    `hints` are a template's words, the error's own ("raw_error"), or, as a control, the hint of another rollout's error
    of another kind ("other_kind"); `unhinted_kinds` have none.
    `only_failed_rollouts` leaves out the sites of rollouts that did better than their group. `max_resamples` draws
    groups with equal rewards again, that many times at most. `k1_coefficient` takes log p - log p_start of each token
    off its advantage (k1, without gradient). `fast_generation` samples from kept keys where TRL would call the model's
    own `generate` and the model allows it ("auto"), at most `generation_batch` rollouts at once, or never ("off").
    """

    placement: Placement = "before_turn"
    part: Part = "turn"
    hints: Literal["template", "raw_error", "other_kind"] = "template"
    unhinted_kinds: tuple[str, ...] = ()
    hint_generator: HintGenerator | None = None
    hint_writer: HintWriter | None = None
    extra_rules: tuple[FailureRule, ...] = ()
    min_confidence: float = MIN_CONFIDENCE
    max_teacher_length: int | None = None
    only_failed_rollouts: bool = False
    max_resamples: int = 0
    k1_coefficient: float = 0.0
    fast_generation: Literal["auto", "off"] = "auto"
    generation_batch: int | None = None

    def __post_init__(self) -> None:
        if self.generation_batch is not None and self.generation_batch < 1:
            raise InputError(explain("generation_batch", got=self.generation_batch, expected="1 or more"))
        if self.max_resamples < 0:
            raise InputError(explain("max_resamples", got=self.max_resamples, expected="0 or more"))
        if not self.k1_coefficient >= 0:
            raise InputError(explain("k1_coefficient", got=self.k1_coefficient, expected="0 or more"))


class TaughtTurn(NamedTuple):
    """An erring turn: its tokens [start, end) of prompt + completion, and the same tokens in the hinted ids."""

    start: int
    end: int
    teacher_ids: Tensor
    teacher_start: int
    kind: str
    hint: str
    turn_id: str
    wrong_ids: Tensor | None = None
    wrong_start: int = 0
    """The same tokens after a hint that does not belong to the site, for a contrast."""
    wrong_kind: str = ""
    hint_kind: str = ""
    """The kind of error that the hint is about, where it is not the turn's own: a control's."""

    @property
    def about(self) -> str:
        """The kind of error that its hint is about."""
        return self.hint_kind or self.kind


@dataclass(eq=False, slots=True)
class FoundSites:
    """What a rollout taught: the turns, every site the rules saw, and counts of what happened to each."""

    sequence: RenderedSequence
    taught: list[TaughtTurn] = field(default_factory=list[TaughtTurn])
    sites: list[ErrorSite] = field(default_factory=list[ErrorSite])
    counts: Counter[str] = field(default_factory=Counter[str])


class RolloutSites:
    """Finds the sites of rollouts made with one tokenizer and template."""

    def __init__(self, renderer: Renderer, options: RolloutOptions | None = None) -> None:
        self.renderer, self.options = renderer, options or RolloutOptions()
        self._rules = (*self.options.extra_rules, *ROLLOUT_RULES)
        self._header_ids = renderer.encoder.encode([renderer.dialect.header])[0] if renderer.dialect.header else []
        token = renderer.dialect.call_token
        self._call_id = renderer.protected.ids.get(token) if token else None
        self._call_text = token or "<tool_call>"
        self._stop_ids = {renderer.protected.ids[stop] for stop in renderer.dialect.stops}

    def find(self, rollout: Rollout) -> FoundSites:
        """Every failure of the rollout, and the turns that may be taught."""
        runs = sampled_runs(rollout)
        conversation = conversation_of(rollout, runs)
        if rollout.tools and is_parsed(rollout, runs):  # without tools nobody parses calls
            conversation = self._with_malformed(conversation)
        sites = find_error_sites(conversation, min_confidence=self.options.min_confidence, extra_rules=self._rules)
        sequence = self._rendered(rollout, runs)
        judged = judged_by_schema(sites, conversation, rollout.tools)
        found_sites = FoundSites(sequence, sites=[*judged, *signalled_sites(rollout, conversation)])
        found_sites.counts.update(rollouts=1, turns=len(runs), sites=len(found_sites.sites))
        for site in found_sites.sites:
            if not site.is_kept:
                found_sites.counts["not_taught:" + site.reason.partition(":")[0]] += 1
                continue
            if site.kind in self.options.unhinted_kinds:
                found_sites.counts["not_taught:unhinted_kind"] += 1
                continue
            hint = self._hint(site, conversation, rollout)
            turn = self.hinted(sequence, site.turn_id, hint) if hint else NO_HINT
            if hint is None or isinstance(turn, str):
                found_sites.counts[f"dropped:{turn}"] += 1
                continue
            found_sites.counts["kind:" + site.kind] += 1
            if self.options.part == "call" and turn.is_whole:
                found_sites.counts["whole_turn_without_call"] += 1
            ids = torch.tensor(turn.ids)
            found_sites.taught.append(
                TaughtTurn(turn.start, turn.end, ids, turn.teacher_start, site.kind, hint, site.turn_id)
            )
        return found_sites

    def _with_malformed(self, conversation: Conversation) -> Conversation:
        """With the parser's refusals: a turn that opens a call and has none is answered by what was wrong with it."""
        turns: list[Turn] = []
        for turn in conversation.turns:
            turns.append(turn)
            ids = turn.token_ids or ()
            opens = self._call_id in ids if self._call_id is not None else self._call_text in turn.text
            was_cut = bool(ids) and ids[-1] not in self._stop_ids  # half a call, because the budget ended
            if turn.origin != "model" or turn.calls or not opens or was_cut:
                continue
            raw = self._call_part(turn)
            call = ToolCall(id=f"{turn.id}-call-0", name=_name_in(raw), arguments={}, raw_arguments=raw)
            result = ToolResult(call_id=call.id, text=_why_not_json(raw), is_error=True)
            turns[-1] = replace(turn, calls=(call,))
            turns.append(
                Turn(
                    id=f"{turn.id}-parser",
                    role="tool",
                    origin="tool",
                    results=(result,),
                    provenance=turn.provenance,
                )
            )
        return replace(conversation, turns=tuple(turns))

    def _call_part(self, turn: Turn) -> str:
        """What the turn wrote after the token that opens a call."""
        if self._call_id is not None and turn.token_ids and self._call_id in turn.token_ids:
            rest = turn.token_ids[turn.token_ids.index(self._call_id) + 1 :]
            return str(self.renderer.tokenizer.decode(list(rest), skip_special_tokens=True)).strip()
        return turn.text.partition(self._call_text)[2].strip()

    def _rendered(self, rollout: Rollout, runs: Sequence[Run]) -> RenderedSequence:
        """The rollout's own ids, with the span of every sampled run that has a header before it."""
        ids = [*rollout.prompt_ids, *rollout.completion_ids]
        offset = len(rollout.prompt_ids)
        roles = _roles_before(rollout)
        spans: list[TurnSpan] = []
        for number, run in enumerate(runs):
            start, end = run.start + offset, run.end + offset
            header = self._header_start(ids, start)
            if header is None:
                continue
            call = self._call_span(ids, start, end)
            spans.append(
                TurnSpan(
                    turn_id=assistant_id(number),
                    header_start=header,
                    start=start,
                    end=end,
                    call_start=call[0],
                    call_end=call[1],
                    text="",
                    previous_role=roles[number] if number < len(roles) else "tool",
                    is_verbatim=True,
                )
            )
        return RenderedSequence(conversation_id=rollout.rollout_id, ids=ids, spans=spans, notes={})

    def _header_start(self, ids: list[int], start: int) -> int | None:
        """Where the generation prompt before a turn begins; one that ends on more than the header begins the same."""
        header = self._header_ids
        if not header:
            return start
        if ids[start - len(header) : start] == header:
            return start - len(header)
        for position in range(start - 1, max(-1, start - len(header) - 64), -1):
            if ids[position] == header[0]:
                return position
        return None

    def _call_span(self, ids: list[int], start: int, end: int) -> tuple[int | None, int | None]:
        if self._call_id is None or self._call_id not in ids[start:end]:
            return None, None
        return ids.index(self._call_id, start, end), end - int(ids[end - 1] in self._stop_ids)

    def hinted(self, sequence: RenderedSequence, turn_id: str, hint: str) -> HintedTurn | str:
        """The turn after a hint, or why not."""
        span = next((candidate for candidate in sequence.spans if candidate.turn_id == turn_id), None)
        if span is None:
            return NO_HEADER
        options = self.options
        turn = hinted_turn(self.renderer, sequence, span, hint, placement=options.placement, part=options.part)
        limit = options.max_teacher_length
        return TOO_LONG if not isinstance(turn, str) and limit is not None and len(turn.context.ids) > limit else turn

    def _hint(self, site: ErrorSite, conversation: Conversation, rollout: Rollout) -> str | None:
        signal = signal_of(site, rollout)
        if signal is not None and signal.get("hint"):
            return str(signal["hint"])
        if self.options.hint_generator is not None:
            about = {
                "error_message": site.evidence_text,
                "tool_name": site.tool,
                "available_tools": sorted(rollout.tools),
            }
            return self.options.hint_generator(site.kind, about)
        sources: tuple[HintSource, ...] = ("template", "raw_error")
        if self.options.hints == "raw_error":
            sources = ("raw_error",)
        elif self.options.hint_writer is not None:
            sources = ("writer", *sources)
        hint = write_hint(
            site, conversation, sources=sources, writer=self.options.hint_writer, tool_schemas=rollout.tools or None
        )
        return None if hint is None else hint.text


def _roles_before(rollout: Rollout) -> list[str]:
    """The role of the message before each assistant message of the completion."""
    everything = [*rollout.prompt, *rollout.messages]
    first = len(rollout.prompt)
    return [
        str(everything[index - 1].get("role", "")) if index else ""
        for index in range(first, len(everything))
        if everything[index].get("role") == "assistant"
    ]


def _why_not_json(raw: str) -> str:
    """The parser's words about a call's text; one that is JSON lacks what a call needs."""
    text = raw.partition("</")[0].strip()
    try:
        json_value(text)
    except ValueError as error:
        return f"{MALFORMED}: {error}"
    return f"{MALFORMED} object with a name and arguments"


def _name_in(raw: str) -> str:
    """The tool's name as far as a broken call shows it."""
    after = raw.partition('"name"')[2].partition('"')[2]
    return after.partition('"')[0] if after else ""
