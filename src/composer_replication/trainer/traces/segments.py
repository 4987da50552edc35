"""Conversations as token ids without a chat template: the content of each turn is tokenised on its own.

For tokenizers that only promise ids: slow ones, stubs, and those of base models, which have no template. A sequence is
the turns' ids one after another, so the edges of a turn are known and no text is searched for. There are no headers and
no end-of-turn tokens, which is why the collator warns when it has to do this.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from composer_replication.actions.write import action_text, action_text_without_thinking
from composer_replication.batch.hint_placement import TeacherContext
from composer_replication.batch.pair_tokens import EQUAL_ANSWERS, WITHOUT_ANSWER, PairIds, ResponseIds
from composer_replication.batch.render.escape import without_surrogates
from composer_replication.batch.render.renderer import WITHOUT_ANSWER as NO_TOKENS
from composer_replication.batch.render.renderer import RenderedSequence, TurnSpan
from composer_replication.batch.render.thinking import Outcome, ThinkingRules
from composer_replication.batch.taught_turns import HINT_MAKES_NO_TOKENS, HintedTurn, why_no_target
from composer_replication.errors import InputError, explain
from composer_replication.types import Conversation, Turn

# Texts that begin and end differently: what the ids of all of them share was added by the tokenizer.
_PROBES = ("a", "Zq 7", "(x) 1, b")
# Options that keep a tokenizer from adding tokens and from reading special tokens in a text; not all take them.
_OPTIONS: tuple[dict[str, Any], ...] = (
    {"add_special_tokens": False, "split_special_tokens": True},
    {"add_special_tokens": False},
    {},
)


class _TurnSegment(NamedTuple):
    """A stretch of a sequence; `role` is that of the turn that it is the first stretch of, or empty."""

    ids: list[int]
    role: str = ""


class SegmentTokenizer:
    """Turns one text into its own ids, whatever the tokenizer puts before and after each text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._options: dict[str, Any] | None = None
        self.prefix, self._suffix = self._added()

    def ids(self, text: str) -> list[int]:
        """Return the ids of the text, without what the tokenizer adds to every text."""
        if not text:
            return []
        text = without_surrogates(text)
        ids, start, end = self._all_ids(text), len(self.prefix), len(self._suffix)
        if ids[:start] != self.prefix or ids[len(ids) - end :] != self._suffix or len(ids) < start + end:
            got = f"{len(ids)} ids that do not begin with {self.prefix} and end with {self._suffix}"
            expected = "the tokens that this tokenizer adds to other texts"
            raise InputError(explain(f"tokens of {text[:40]!r}", got=got, expected=expected))
        return ids[start : len(ids) - end]

    def _added(self) -> tuple[list[int], list[int]]:
        """Return what stands before and after the ids of every text: a BOS or EOS token for each call, for example."""
        empty = self._probe("") or []
        probes = [ids for text in _PROBES if (ids := self._probe(text))]
        if not probes:  # a small vocabulary; `ids` refuses a text that this does not fit
            ends = {getattr(self._tokenizer, name, None) for name in ("eos_token_id", "sep_token_id")} - {None}
            size = next((at for at, index in enumerate(empty) if index in ends), len(empty))
            return empty[:size], empty[size:]
        most = min(map(len, probes)) - 1  # each of these texts has a token of its own
        texts = [*probes, *([empty] if empty else [])]
        prefix = _common(texts, most=most)
        suffix = _common([ids[len(prefix) :][::-1] for ids in texts], most=most - len(prefix))[::-1]
        return prefix, suffix

    def _probe(self, text: str) -> list[int] | None:
        """Return all ids of a text; None where the tokenizer knows no such text, as one with a few words may not."""
        try:
            return self._all_ids(text)
        except (LookupError, AssertionError):
            return None

    def _all_ids(self, text: str) -> list[int]:
        if self._options is not None:
            return _flat_ids(self._tokenizer(text, **self._options))
        for options in _OPTIONS[:-1]:
            try:
                ids = _flat_ids(self._tokenizer(text, **options))
            except TypeError:  # it does not take these options; what else is wrong comes out of the plain call
                continue
            self._options = options
            return ids
        self._options = _OPTIONS[-1]
        return _flat_ids(self._tokenizer(text))


class SegmentRenderer:
    """Renders conversations turn by turn; stands in for `batch.render.Renderer` where there is no template.

    A call is written as in `student_action` (`[TOOL_USE] name=… input=…`). `tools` become the text of a first segment.
    A token that the tokenizer puts before every text (BOS) comes once, at the start of a sequence. `counts` adds up
    over calls, as a `Renderer`'s.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: ThinkingRules | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.segments = SegmentTokenizer(tokenizer)
        self.thinking = thinking or ThinkingRules()
        self.counts: Counter[str] = Counter()
        self._tools = [dict(tool) for tool in tools or ()]
        self._preamble = "\n".join(["# Tools", "", *(json.dumps(tool, ensure_ascii=False) for tool in self._tools)])

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that decides which ids a conversation becomes, besides the tokenizer; plain data."""
        sample = self.segments.ids("".join(_PROBES))
        rules = {"own": self.thinking.own, "others": self.thinking.others, "models": [*self.thinking.student_models]}
        return {"segments": 1, "tools": self._tools, "thinking": rules, "sample": sample}

    def render(self, conversation: Conversation) -> list[RenderedSequence]:
        """Return one sequence that ends with the last assistant turn, or none where no turn is an assistant's."""
        ids, starts, spans = list(self.segments.prefix), list[int](), list[TurnSpan]()
        end_of_last, previous_role = 0, ""
        for segment, turn in self._pieces(conversation.turns):
            if segment.role:
                starts.append(len(ids))
            ids += segment.ids
            if turn is not None:
                answer_ids = self._answer_ids(turn)
                spans.append(self._span(turn, starts[-1], len(ids), len(ids) + len(answer_ids), previous_role))
                ids += answer_ids
                end_of_last = len(ids)
            previous_role = segment.role or previous_role
        self.counts.update(conversations=1, turns=len(spans), sequences=min(1, len(spans)))
        if not spans:
            self.counts["without_assistant_turn"] += 1
            return []
        self.counts.update(f"thinking_{span.thinking}" for span in spans if span.thinking != "none")
        return [
            RenderedSequence(
                conversation_id=conversation.id,
                ids=ids[:end_of_last],
                spans=spans,
                notes={},
                message_starts=tuple(starts),
            )
        ]

    def hinted_turn(self, rendered: RenderedSequence, span: TurnSpan, hint: str, *, first: int = 0) -> HintedTurn | str:
        """Return the turn with its hint as a segment right before it, or the reason why it cannot be taught."""
        if reason := why_no_target(span):
            return reason
        hint_ids = self.segments.ids(hint.strip())
        if hint and not hint_ids:
            return HINT_MAKES_NO_TOKENS
        before, after = rendered.ids[first : span.header_start], rendered.ids[span.header_start : span.end]
        hint_end = len(before) + len(hint_ids)
        start = hint_end + span.start - span.header_start
        context = TeacherContext(before + hint_ids + after, start, "before_turn", len(before), hint_end)
        return HintedTurn(span.start, span.end, context, start, is_whole=True)

    def compared_ids(self, state: Conversation, chosen: Turn, rejected: Turn) -> tuple[PairIds, list[int]] | str:
        """Return both answers after one context and where the context's messages start, or why they cannot be compared.

        Their thinking is treated alike (`ThinkingRules.alike`).
        """
        context, starts = list(self.segments.prefix), list[int]()
        for segment, turn in self._pieces(state.turns):
            if segment.role:
                starts.append(len(context))
            context += segment.ids + (self._answer_ids(turn) if turn is not None else [])
        if not context:
            return "pair_without_state"
        answers = [self._answer_ids(turn) for turn in self.thinking.alike(chosen, rejected)]
        if not all(answers):
            return WITHOUT_ANSWER
        if answers[0] == answers[1]:
            return EQUAL_ANSWERS
        return PairIds(*(ResponseIds(context + ids, len(context)) for ids in answers)), starts

    def _pieces(self, turns: Sequence[Turn]) -> Iterator[tuple[_TurnSegment, Turn | None]]:
        """Yield the segments of a conversation, with the assistant turn whose own tokens follow, if one's do."""
        if self._tools:
            yield _TurnSegment(self.segments.ids(self._preamble), "system"), None
        for turn in turns:
            if turn.role == "assistant":
                thought = turn.thinking if self._outcome(turn) == "context" else ""
                yield _TurnSegment(self.segments.ids(thought), turn.role), turn
            else:
                text = "\n".join(result.text for result in turn.results) if turn.role == "tool" else turn.text
                yield _TurnSegment(self.segments.ids(text), turn.role), None

    def _answer_ids(self, turn: Turn) -> list[int]:
        return self.segments.ids(self._answer(turn))

    def _answer(self, turn: Turn) -> str:
        return action_text(turn) if self._outcome(turn) == "target" else action_text_without_thinking(turn)

    def _outcome(self, turn: Turn) -> Outcome:
        return self.thinking.treatment(turn) if turn.thinking.strip() else "none"

    def _span(self, turn: Turn, header_start: int, start: int, end: int, previous_role: str) -> TurnSpan:
        return TurnSpan(
            turn_id=turn.id,
            header_start=header_start,
            start=start,
            end=end,
            call_start=None,
            call_end=None,
            text=self._answer(turn),
            previous_role=previous_role,
            is_verbatim=False,
            thinking=self._outcome(turn),
            no_target="" if end > start else NO_TOKENS,
        )


def _common(rows: Sequence[Sequence[int]], *, most: int) -> list[int]:
    """Return what all rows begin with, at most `most` ids."""
    same = 0
    while same < most and all(len(ids) > same and ids[same] == rows[0][same] for ids in rows):
        same += 1
    return list(rows[0][:same])


def _flat_ids(encoded: Any) -> list[int]:
    """Return the ids of one text from what a tokenizer returned: ids, a tensor, one row of them, or a mapping."""
    ids: Any = encoded.get("input_ids") if isinstance(encoded, Mapping) else getattr(encoded, "input_ids", encoded)
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    if isinstance(ids, list | tuple) and len(ids) == 1 and isinstance(ids[0], list | tuple):
        ids = ids[0]
    if not isinstance(ids, list | tuple) or not all(isinstance(index, int) for index in ids):
        got = f"{type(encoded).__name__} with {type(ids).__name__}"
        expected = "token ids of one text: a list, a tensor, or a mapping that has them as input_ids"
        raise InputError(explain("what the tokenizer returned", got=got, expected=expected))
    return list(ids)
