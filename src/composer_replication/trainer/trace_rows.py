"""Turn traces into rows of token ids and tensors: the student's sequences, a hinted context per site, preference pairs.

A sequence that is too long is truncated on the left, at the start of a message if possible; both answers in a pair are
truncated at the same token. A target is never truncated: a turn, site or pair that does not fit as a whole is dropped,
and counted in `counts` by reason. `SegmentRenderer` renders conversations for tokenizers without a chat template.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composer_replication.action_text import action_text, action_text_without_thinking, answer_turn
from composer_replication.batch.alignment import pad_rows
from composer_replication.batch.hint_placement import (
    HINT_MAKES_NO_TOKENS,
    NOTHING_BEFORE_IT,
    HintedTurn,
    Placement,
    TeacherContext,
    exclusion_reason,
    hinted_turn,
)
from composer_replication.batch.pair_tokens import EQUAL_ANSWERS, WITHOUT_ANSWER, PairIds, ResponseIds, comparable_ids
from composer_replication.batch.render.dialect import Outcome, ThinkingRules, assistant, replace_surrogates, user
from composer_replication.batch.render.renderer import WITHOUT_ANSWER as WITHOUT_TOKENS
from composer_replication.batch.render.renderer import RenderedSequence, Renderer, TurnSpan
from composer_replication.batch.trace_messages import to_conversation
from composer_replication.errors import InputError, explain
from composer_replication.types import Conversation, Turn

# Reasons why a turn, or an error site in that turn, cannot be a target; keys of `counts`.
LONGER, LEFT_OF_CUT = "longer_than_max_seq_len", "left_of_cut"


class _StudentRow(NamedTuple):
    """A token sequence for the student. Each target is the token range [start, end) of a turn to train on."""

    ids: list[int]
    targets: list[tuple[int, int]]


class _SiteRow(NamedTuple):
    """A hinted context: `ids[start:]` is the erring turn, which begins at `student_start` in row `student_row`."""

    ids: list[int]
    start: int
    student_row: int
    student_start: int


class TraceRows:
    """The rows made from one or several traces; a site's `student_row` is an index into `students`."""

    def __init__(self) -> None:
        self.students: list[_StudentRow] = []
        self.sites: list[_SiteRow] = []

    def extend(self, rows: TraceRows) -> None:
        """Append another trace's rows, and adjust the row indices of its sites."""
        offset = len(self.students)
        self.sites += [site._replace(student_row=offset + site.student_row) for site in rows.sites]
        self.students += rows.students

    def add_token_without_target(self, token_id: int) -> None:
        self.students.append(_StudentRow([token_id], []))

    def tensors(self, pad: int, ignore_index: int) -> dict[str, Tensor]:
        """Return a batch's tensors for the student's rows and, if there are sites, for channel 2."""
        ids = [row.ids for row in self.students]
        mask = torch.zeros_like(_attention(ids))
        for number, row in enumerate(self.students):
            for start, end in row.targets:
                mask[number, start:end] = 1
        batch = {"input_ids": pad_rows(ids, pad), "attention_mask": _attention(ids), "response_mask": mask}
        return batch | (self._site_tensors(batch["input_ids"], pad, ignore_index) if self.sites else {})

    def _site_tensors(self, input_ids: Tensor, pad: int, ignore_index: int) -> dict[str, Tensor]:
        # Row n of both index tensors predicts the same token; the mask marks that token in `input_ids`.
        mask = torch.full_like(input_ids, ignore_index)
        student: list[Tensor] = []
        teacher: list[Tensor] = []
        for number, site in enumerate(self.sites):
            offsets = torch.arange(len(site.ids) - site.start)
            mask[site.student_row, site.student_start + offsets] = 1
            # The hidden state of a token predicts the next one, hence the - 1.
            student.append(_index_pairs(site.student_row, site.student_start - 1 + offsets))
            teacher.append(_index_pairs(number, site.start - 1 + offsets))
        ids = [site.ids for site in self.sites]
        return {
            "ctx_teacher_input_ids": pad_rows(ids, pad),
            "ctx_teacher_attention_mask": _attention(ids),
            "sdpo_loss_mask": mask,
            "sdpo_student_index": torch.cat(student),
            "sdpo_teacher_index": torch.cat(teacher),
        }


class _TruncatedSequence(NamedTuple):
    """A sequence truncated to the tokens [first, end); `lost` maps turns that cannot be targets to the reason."""

    sequence: RenderedSequence
    first: int
    end: int
    lost: dict[str, str]


class TraceRenderer:
    """A renderer of conversations and preference pairs with a maximum length; `counts` counts what is dropped."""

    def __init__(
        self,
        renderer: Renderer | SegmentRenderer,
        counts: Counter[str],
        *,
        max_seq_len: int,
        max_dpo_seq_len: int,
        placement: Placement,
    ) -> None:
        self._renderer, self._cut, self._counts = renderer, _LeftCut(renderer), counts
        self._max_seq_len, self._max_dpo_seq_len = max_seq_len, max_dpo_seq_len
        self._placement: Placement = placement

    def rows(self, conversation: Conversation, hints: Sequence[tuple[str, str]]) -> TraceRows:
        """Return a row per sequence with a complete assistant turn, and a site row per hint about such a turn.

        `hints` are pairs of a turn's id and the hint for that turn.
        """
        rows = TraceRows()
        sequences = self._renderer.render(conversation)
        if not sequences:
            self._counts["no_assistant_turn"] += 1
        for sequence in sequences:
            # A template that rewrites history renders one conversation as several sequences.
            fitted = self._fit(sequence)
            targets = {span.turn_id: span for span in sequence.spans if span.turn_id not in fitted.lost}
            for turn_id, hint in hints:
                if reason := fitted.lost.get(turn_id):
                    self._counts[f"site_{reason}"] += 1
                elif span := targets.get(turn_id):
                    rows.sites.extend(self._site_rows(fitted, span, hint, len(rows.students)))
            if targets:
                spans = [(span.start - fitted.first, span.end - fitted.first) for span in targets.values()]
                rows.students.append(_StudentRow(sequence.ids[fitted.first : fitted.end], spans))
        return rows

    def _fit(self, sequence: RenderedSequence) -> _TruncatedSequence:
        """Truncate the sequence on the left so that it fits.

        If the last turn is too long by itself, it is dropped, and so on for the turns before it.
        """
        spans, first = list(sequence.spans), None
        # The last turn determines the cut. If even that turn alone is too long, try the previous turn.
        while spans and first is None:
            last = spans[-1]
            first = self._first(sequence, last, self._max_seq_len)
            if first is None:
                spans.pop()
        end = spans[-1].end if spans else 0
        lost = {
            span.turn_id: self._reason(span)
            for span in sequence.spans
            # A target needs its whole header and at least one token before it, which predicts its first token.
            if first is None or span.end > end or span.header_start < first or span.start <= first
        }
        # `no_target` has reasons other than length; for a turn with both, the reason for the cut wins.
        lost = {span.turn_id: span.no_target for span in sequence.spans if span.no_target} | lost
        self._counts.update(f"turn_{reason}" for reason in lost.values())
        if first or end < len(sequence.ids):
            self._counts["sequence_cut"] += 1
        return _TruncatedSequence(sequence, first or 0, end, lost)

    def _reason(self, span: TurnSpan) -> str:
        if span.start == 0:
            return NOTHING_BEFORE_IT
        return LONGER if span.end - _latest_cut(span) > self._max_seq_len else LEFT_OF_CUT

    def _first(self, sequence: RenderedSequence, span: TurnSpan, limit: int) -> int | None:
        if span.start == 0:
            return None if span.end > limit else 0
        starts = sequence.message_starts
        return self._cut.first(sequence.ids, end=span.end, limit=limit, latest=_latest_cut(span), starts=starts)

    def _site_rows(self, fitted: _TruncatedSequence, span: TurnSpan, hint: str, student_row: int) -> list[_SiteRow]:
        turn = self._hinted(fitted, span, hint)
        if isinstance(turn, str):
            self._counts[turn] += 1
            return []
        # The requested placement may be impossible, for example before the first turn.
        used = turn.context.placement
        if used != self._placement:
            self._counts[f"placement_fell_back:{self._placement}->{used}"] += 1
        return [_SiteRow(turn.ids, turn.teacher_start, student_row, turn.start - fitted.first)]

    def _hinted(self, fitted: _TruncatedSequence, span: TurnSpan, hint: str) -> HintedTurn | str:
        """Return the erring turn in the student's context with the hint added, or the reason why this is impossible.

        Tokens that the student's context keeps are cut only if the context with the hint would otherwise be too long.
        """
        first: int | None = fitted.first
        while first is not None:
            if isinstance(self._renderer, SegmentRenderer):
                turn = self._renderer.hinted_turn(fitted.sequence, span, hint, first=first)
            else:
                turn = hinted_turn(self._renderer, fitted.sequence, span, hint, placement=self._placement, first=first)
            over = 0 if isinstance(turn, str) else len(turn.context.ids) - self._max_seq_len
            if over <= 0:
                if first > fitted.first and not isinstance(turn, str):
                    self._counts["teacher_context_cut"] += 1
                return turn
            # Cut at a later message start, to remove the tokens by which the context is too long.
            first = self._first(fitted.sequence, span, span.end - first - over)
        return f"site_{LONGER}"

    def pair(self, pair: Mapping[str, Any], where: str) -> PairIds | None:
        """Return the token ids of a `DPOPair`, or None if the pair was dropped."""
        if not isinstance(pair, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(explain(where, got=type(pair).__name__, expected="a DPOPair"))
        identity = str(pair.get("state_id") or where)
        answers = [_parse_answer(pair, key, where) for key in ("chosen", "rejected")]
        state = to_conversation(_required_field(pair, "state_messages", where), conversation_id=identity)
        ids: PairIds | str = "pair_without_state"
        starts: list[int] | None = None
        renderer = self._renderer
        if state.turns and isinstance(renderer, SegmentRenderer):
            compared = renderer.compared_ids(state, *answers)
            ids, starts = (compared, None) if isinstance(compared, str) else compared
        elif state.turns and not isinstance(renderer, SegmentRenderer):
            labels = {"conversation_id": identity, "format_name": state.format}
            ids = comparable_ids(renderer, state.turns, *answers, **labels)
        if not isinstance(ids, str):
            ids = self._cut_alike(ids, starts) or "pair_longer_than_max_dpo_seq_len"
        if isinstance(ids, str):
            self._counts[f"pair_{ids.removeprefix('pair_')}"] += 1
            return None
        return ids

    def _cut_alike(self, pair: PairIds, starts: Collection[int] | None) -> PairIds | None:
        # Both answers follow the same context, so a cut that fits the longer one fits both.
        longest = max(pair, key=lambda answer: len(answer.ids))
        latest = max(0, longest.start - max(1, self._cut.header_tokens))
        end = len(longest.ids)
        first = self._cut.first(longest.ids, end=end, limit=self._max_dpo_seq_len, latest=latest, starts=starts)
        if first is None or any(answer.start <= first for answer in pair):
            return None
        if first:
            self._counts["pair_context_cut"] += 1
        return PairIds(*(ResponseIds(answer.ids[first:], answer.start - first) for answer in pair))


def _latest_cut(span: TurnSpan) -> int:
    """Return the last index to cut before, so that the turn's header and one token before the turn are kept."""
    return min(span.header_start, span.start - 1)


def _required_field(pair: Mapping[str, Any], key: str, where: str) -> Any:
    if pair.get(key) is None:
        raise InputError(explain(where, got=f"keys {sorted(map(str, pair))}", expected=f"a DPOPair with {key!r}"))
    return pair[key]


def _parse_answer(pair: Mapping[str, Any], key: str, where: str) -> Turn:
    text = _required_field(pair, key, where)
    if not isinstance(text, str):
        raise InputError(explain(f"{key} in {where}", got=type(text).__name__, expected="an action as text"))
    return answer_turn(text, turn_id=f"{where}:{key}")


# A word that no chat template contains, which shows where a message's text begins in the rendered template.
_PROBE_WORD = "Zqword"


class _LeftCut:
    """A rule for where to truncate a sequence: at the special tokens that open a message, which no text can contain.

    The template is rendered once to find these tokens. For a sequence that was rendered without a template, the caller
    passes the starts of its messages.
    """

    def __init__(self, renderer: Renderer | SegmentRenderer) -> None:
        self._openings, self._stops, self.header_tokens = frozenset[int](), frozenset[int](), 0
        if isinstance(renderer, SegmentRenderer):
            return
        # Only protected tokens, which no message text can produce, mark the start of a message.
        self._openings = frozenset(_opening_ids(renderer))
        self._stops = frozenset(renderer.protected.ids[stop] for stop in renderer.dialect.stops)
        self.header_tokens = max(map(len, renderer.encoder.encode(renderer.dialect.headers)))

    def first(
        self, ids: Sequence[int], *, end: int, limit: int, latest: int, starts: Collection[int] | None = None
    ) -> int | None:
        """Return the index of the first token to keep, with at most `limit` tokens up to `end`.

        Returns None if this index would be after `latest`, and 0 for a sequence that fits. If no message starts in the
        allowed range, the cut is inside a message.
        """
        lowest = max(0, end - limit)
        # Even the smallest sufficient cut would remove a part of the target.
        if lowest > latest:
            return None
        if lowest == 0:
            return 0
        possible = range(lowest, latest + 1)
        if starts is not None:
            return next((index for index in possible if index in starts), lowest)
        return next((index for index in possible if self._starts_message(ids, index)), lowest)

    def _starts_message(self, ids: Sequence[int], index: int) -> bool:
        # A template may open messages with ordinary text only; then a message starts after a stop token.
        return ids[index] in self._openings if self._openings else ids[index - 1] in self._stops


def _opening_ids(renderer: Renderer) -> list[int]:
    """Return the special tokens that open messages: the first one of the generation prompt, and of a user's message."""
    openings = [renderer.dialect.header]
    try:
        answered = renderer.template.render([user("u"), assistant("a")])
        # The text that the template adds between an answer and the next user text opens a user message.
        follow_up = renderer.template.render([user("u"), assistant("a"), user(_PROBE_WORD)])
    except InputError:  # a template that allows only one user message; its header is then the only opening
        pass
    else:
        openings.append(follow_up[len(answered) :].partition(_PROBE_WORD)[0] if follow_up.startswith(answered) else "")
    indices = (
        next((index for index in ids if index in renderer.encoder.protected_ids), None)
        for ids in renderer.encoder.encode(openings)
    )
    return [index for index in indices if index is not None]


# Texts with different beginnings and ends, so any ids that they share there were added by the tokenizer.
_PROBES = ("a", "Zq 7", "(x) 1, b")
# Options that keep a tokenizer from adding tokens, and from parsing special tokens in a text. Not all tokenizers
# accept all options.
_TOKENIZER_OPTIONS: tuple[dict[str, Any], ...] = (
    {"add_special_tokens": False, "split_special_tokens": True},
    {"add_special_tokens": False},
    {},
)


class _TurnSegment(NamedTuple):
    """A segment of a sequence. If a turn begins with it, `role` is that turn's role, otherwise it is empty."""

    ids: list[int]
    role: str = ""


class _SegmentTokenizer:
    """A tokenizer for single texts that omits the tokens which its base tokenizer adds before and after every text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._options: dict[str, Any] | None = None
        self.prefix, self._suffix = self._added()

    def ids(self, text: str) -> list[int]:
        """Return the text's ids, without those that the base tokenizer adds to every text."""
        if not text:
            return []
        # Logs may contain lone surrogates, which cannot be encoded as UTF-8.
        text = replace_surrogates(text)
        ids, start, end = self._all_ids(text), len(self.prefix), len(self._suffix)
        if ids[:start] != self.prefix or ids[len(ids) - end :] != self._suffix or len(ids) < start + end:
            got = f"{len(ids)} ids that do not begin with {self.prefix} and end with {self._suffix}"
            expected = "the tokens that this tokenizer adds to every text"
            raise InputError(explain(f"token ids for {text[:40]!r}", got=got, expected=expected))
        return ids[start : len(ids) - end]

    def _added(self) -> tuple[list[int], list[int]]:
        """Return the ids that the tokenizer adds before and after every text, such as BOS and EOS."""
        empty = self._probe("") or []
        probes = [ids for text in _PROBES if (ids := self._probe(text))]
        # With a tiny vocabulary, guess from the empty text; `ids` raises if a text contradicts the guess.
        if not probes:
            ends = {getattr(self._tokenizer, name, None) for name in ("eos_token_id", "sep_token_id")} - {None}
            size = next((position for position, token in enumerate(empty) if token in ends), len(empty))
            return empty[:size], empty[size:]
        # At least one token belongs to the text itself.
        most = min(map(len, probes)) - 1
        texts = [*probes, *([empty] if empty else [])]
        prefix = _common_prefix(texts, most=most)
        suffix = _common_prefix([ids[len(prefix) :][::-1] for ids in texts], most=most - len(prefix))[::-1]
        return prefix, suffix

    def _probe(self, text: str) -> list[int] | None:
        """Return the ids for a text, including added ones, or None if the vocabulary does not cover the text."""
        try:
            return self._all_ids(text)
        except (LookupError, AssertionError):
            return None

    def _all_ids(self, text: str) -> list[int]:
        if self._options is not None:
            return _flat_ids(self._tokenizer(text, **self._options))
        for options in _TOKENIZER_OPTIONS[:-1]:
            try:
                ids = _flat_ids(self._tokenizer(text, **options))
            except (
                TypeError
            ):  # it does not accept these options; any other cause raises again in the call without options
                continue
            self._options = options
            return ids
        self._options = _TOKENIZER_OPTIONS[-1]
        return _flat_ids(self._tokenizer(text))


class SegmentRenderer:
    """A renderer that tokenizes conversations turn by turn, for tokenizers that `batch.render.Renderer` cannot use.

    These are slow tokenizers, stubs, and tokenizers of base models without a chat template. The content of each turn is
    tokenized on its own, so the boundaries of turns are known without searching any text. There are no role headers and
    no end-of-turn tokens, which is why the collator warns.

    A call is written as in `student_action` (`[TOOL_USE] name=… input=…`). `tools` are rendered as the first segment. A
    token that the tokenizer adds before every text (BOS) appears once, at the start of a sequence. `counts` accumulates
    over calls, as in a `Renderer`.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: ThinkingRules | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.segments = _SegmentTokenizer(tokenizer)
        self.thinking = thinking or ThinkingRules()
        self.counts: Counter[str] = Counter()
        self._tools = [dict(tool) for tool in tools or ()]
        self._preamble = "\n".join(["# Tools", "", *(json.dumps(tool, ensure_ascii=False) for tool in self._tools)])

    @property
    def settings(self) -> dict[str, Any]:
        """The settings besides the tokenizer on which a conversation's ids depend, as plain data."""
        sample = self.segments.ids("".join(_PROBES))
        rules = {"own": self.thinking.own, "others": self.thinking.others, "models": [*self.thinking.student_models]}
        return {"segments": 1, "tools": self._tools, "thinking": rules, "sample": sample}

    def render(self, conversation: Conversation) -> list[RenderedSequence]:
        """Return a list with one sequence, which ends with the last assistant turn; [] without assistant turns."""
        ids, starts, spans = list(self.segments.prefix), list[int](), list[TurnSpan]()
        # Tokens after the last assistant turn are context for no target, so they are removed.
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
        """Return the turn with the hint directly before it, or the reason why the turn cannot be a target."""
        if reason := exclusion_reason(span):
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
        """Return the ids of both answers after the same context, and the message starts in the context.

        If the answers cannot be compared, the reason is returned instead. Thinking is treated in the same way in both
        answers (`ThinkingRules.align`).
        """
        context, starts = list(self.segments.prefix), list[int]()
        for segment, turn in self._pieces(state.turns):
            if segment.role:
                starts.append(len(context))
            context += segment.ids + (self._answer_ids(turn) if turn is not None else [])
        if not context:
            return "pair_without_state"
        answers = [self._answer_ids(turn) for turn in self.thinking.align(chosen, rejected)]
        if not all(answers):
            return WITHOUT_ANSWER
        if answers[0] == answers[1]:
            return EQUAL_ANSWERS
        return PairIds(*(ResponseIds(context + ids, len(context)) for ids in answers)), starts

    def _pieces(self, turns: Sequence[Turn]) -> Iterator[tuple[_TurnSegment, Turn | None]]:
        """Yield (segment, turn) pairs, where `turn` is the assistant turn that follows the segment, or None."""
        if self._tools:
            yield _TurnSegment(self.segments.ids(self._preamble), "system"), None
        for turn in turns:
            if turn.role == "assistant":
                # Thinking that is not trained on precedes the target as context.
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
            no_target="" if end > start else WITHOUT_TOKENS,
        )


def _common_prefix(rows: Sequence[Sequence[int]], *, most: int) -> list[int]:
    """Return the common prefix of all rows, at most `most` ids long."""
    same = 0
    while same < most and all(len(ids) > same and ids[same] == rows[0][same] for ids in rows):
        same += 1
    return list(rows[0][:same])


def _flat_ids(encoded: Any) -> list[int]:
    """Return one text's ids from a tokenizer's output, which may be ids, a tensor, a batch of one row, or a mapping."""
    ids: Any = encoded.get("input_ids") if isinstance(encoded, Mapping) else getattr(encoded, "input_ids", encoded)
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    # A batch of one row, as tokenizers return with `return_tensors`.
    if isinstance(ids, list | tuple) and len(ids) == 1 and isinstance(ids[0], list | tuple):
        ids = ids[0]
    if not isinstance(ids, list | tuple) or not all(isinstance(index, int) for index in ids):
        got = f"{type(encoded).__name__} with {type(ids).__name__}"
        expected = "token ids for one text: a list, a tensor, or a mapping with input_ids"
        raise InputError(explain("tokenizer output", got=got, expected=expected))
    return list(ids)


def pair_tensors(pairs: Sequence[PairIds], pad: int) -> dict[str, Tensor]:
    """Return a batch's tensors for channel 3, without reference log-probs."""
    batch: dict[str, Tensor] = {}
    for name, rows in (("chosen", [pair.chosen for pair in pairs]), ("rejected", [pair.rejected for pair in pairs])):
        ids = [row.ids for row in rows]
        masks = [[0] * row.start + [1] * (len(row.ids) - row.start) for row in rows]
        batch[f"dpo_{name}_input_ids"] = pad_rows(ids, pad)
        batch[f"dpo_{name}_attention_mask"] = _attention(ids)
        batch[f"dpo_{name}_response_mask"] = pad_rows(masks, 0)
    return batch


def _attention(rows: Sequence[Sequence[int]]) -> Tensor:
    return pad_rows([[1] * len(row) for row in rows], 0)


def _index_pairs(row: int, positions: Tensor) -> Tensor:
    return torch.stack([torch.full_like(positions, row), positions], dim=1)
