"""Traces to a batch for all three channels: ids, masks and index pairs from one rendering of each trace."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypedDict, cast

import torch
from torch import Tensor

from composer_replication.batch.alignment import IGNORE_INDEX
from composer_replication.batch.flat_batch import NeededChannels, read_flat_batch
from composer_replication.batch.hint_placement import PLACEMENTS, Placement
from composer_replication.batch.pair_tokens import PairIds, ResponseIds
from composer_replication.batch.render.dialect import ThinkingRules
from composer_replication.batch.render.renderer import Renderer
from composer_replication.batch.trace_messages import caller_of, to_conversation
from composer_replication.errors import InputError, explain
from composer_replication.hint_generator import HINT_TEMPLATES
from composer_replication.hint_generator.context import is_json_error
from composer_replication.sites import KINDS, classify
from composer_replication.trainer.trace_rows import (
    Hinted,
    LeftCut,
    PairMaker,
    RowMaker,
    SegmentRenderer,
    SiteRow,
    StudentRow,
    TraceRows,
)
from composer_replication.types import (
    Conversation,
    DPOPair,
    ToolCall,
    ToolResult,
    Turn,
)

__all__ = ["CollatorConfig", "ComposerDataCollator", "TokenizerLike", "TraceExample", "TraceTurn"]


HintGenerator = Callable[[str, Any], str | None]
"""(error_kind, error_meta) to a hint, or None for none. `hint_generator.dispatch` is one."""


class TraceTurn(TypedDict, total=False):
    """One message. Those of the OpenAI shape (tool_calls, tool_call_id, a system role) are taken as well."""

    role: Literal["user", "assistant", "tool"]
    content: str
    tool_call: Any
    tool_error: Any
    error_meta: Mapping[str, Any]


class TraceExample(TypedDict, total=False):
    """A session, its reward, and the pairs made of its states."""

    trace_id: str
    turns: Sequence[TraceTurn]
    final_reward: float
    dpo_pairs: Sequence[DPOPair]


class TokenizerLike(Protocol):
    """What the collator needs of a tokenizer: ids for a text.

    With a fast Hugging Face tokenizer and a chat template (its own, or `CollatorConfig.chat_template`) conversations
    are rendered by the template. With any other, the content of each turn is tokenised on its own.
    """

    @property
    def pad_token_id(self) -> int | None: ...

    @property
    def apply_chat_template(self) -> Callable[..., Any]: ...

    def __call__(self, text: Any, *args: Any, **kwargs: Any) -> Any: ...


@dataclass
class CollatorConfig:
    """How traces become a batch.

    `pad_token_id` fills rows; what is padding is said by the attention masks, so any id of the vocabulary will do.
    `ignore_index` (-100 or 0) stands in `sdpo_loss_mask` where a token is no target; all other masks are 0 and 1.
    `placement` is where a hint goes, `tools` are schemas for the template, `chat_template` replaces the tokenizer's.
    `thinking` says what becomes of the messages' `reasoning_content`: by default that of the student itself, known by
    the messages' `model`, is learned (`ThinkingRules.student_models`; `render.thinking.ALL_OWN` where all of it is).
    """

    max_seq_len: int = 4096
    max_dpo_seq_len: int = 2048
    pad_token_id: int = 0
    ignore_index: int = IGNORE_INDEX
    enable_sdpo: bool = True
    hint_generator: HintGenerator | None = None
    enable_replay_dpo: bool = True
    rlvr_reward_key: str = "final_reward"
    _: KW_ONLY
    placement: Placement = "before_turn"
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template: str | None = None
    thinking: ThinkingRules | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_seq_len", 2), ("max_dpo_seq_len", 2), ("pad_token_id", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise InputError(explain(name, got=repr(value), expected=f"a whole number, {least} or more"))
        if self.ignore_index not in (IGNORE_INDEX, 0):
            expected = f"{IGNORE_INDEX} or 0, what a mask may hold where it does not count"
            raise InputError(explain("ignore_index", got=self.ignore_index, expected=expected))
        if self.placement not in PLACEMENTS:
            raise InputError(explain("placement", got=repr(self.placement), expected=f"one of {PLACEMENTS}"))
        if self.hint_generator is not None and not callable(self.hint_generator):
            got = type(self.hint_generator).__name__
            raise InputError(explain("hint_generator", got=got, expected="a function of (error_kind, error_meta)"))


@dataclass
class ComposerDataCollator:
    """Makes batches for `compose_loss` from traces.

    Always there: input_ids, attention_mask, response_mask (B, T), 1 on every token of every assistant turn with its
    end-of-turn token, and rewards (B,). With `enable_sdpo`, a hint generator and a site: ctx_teacher_input_ids and its
    attention mask, one row a site; sdpo_student_index, sdpo_teacher_index and sdpo_loss_mask. With `enable_replay_dpo`
    and a pair: dpo_{chosen,rejected}_{input_ids,attention_mask,response_mask}, and with a `reference` its log-probs.

    With a tokenizer that has no fast backend or no chat template, each turn's content is tokenised on its own and masks
    go by these segments; making the collator then warns, and a turn's mask has no end-of-turn token to cover.

    A trace is one row; where a template rewrites history it is one row a sequence, each with the trace's reward. A
    trace without a reward has NaN there, counted as `no_reward`. Rows longer than `max_seq_len` keep their end, from
    the start of a message on if one starts in time. Nothing that is scored is cut: a turn, site or pair that is not
    whole is left out. `counts` says how often, by reason, over all calls in this process (each worker of a data loader
    has its own; `counts.clear()` starts anew); what a template could not say as it was is in `renderer.counts`. Where
    no row is left, `batch_without_rows`, there is one of a single token with nothing to score, and a reward of NaN:
    `compose_loss` runs, and says in `active` that lm_ce did not.
    """

    tokenizer: TokenizerLike | Any  # transformers adds pad_token_id when it runs: a checker does not see it
    config: CollatorConfig
    _: KW_ONLY
    reference: _ReferenceLookup | None = None
    counts: Counter[str] = field(init=False, default_factory=Counter[str], repr=False)
    renderer: Renderer | SegmentRenderer = field(init=False, repr=False)

    def __post_init__(self) -> None:
        config = self.config
        self.renderer = _renderer_of(self.tokenizer, config)
        cut = LeftCut(self.renderer)
        self._rows = RowMaker(
            self.renderer, cut, self.counts, max_seq_len=config.max_seq_len, placement=config.placement
        )
        self._pairs = PairMaker(self.renderer, cut, self.counts, max_dpo_seq_len=config.max_dpo_seq_len)
        self._num_ids = _vocabulary_size(self.tokenizer)

    def __call__(self, batch: Sequence[TraceExample]) -> dict[str, Tensor]:
        """The batch, checked as `compose_loss` will check it."""
        if not batch:
            raise InputError(explain("batch", got="no traces", expected="at least one"))
        students, sites, pairs, rewards = list[StudentRow](), list[SiteRow](), list[PairIds](), list[float]()
        for number, example in enumerate(batch):
            where = _name(example, number)
            reward = self._reward(example, where)
            rows = self._trace_rows(example, where)
            sites += [site._replace(student_row=len(students) + site.student_row) for site in rows.sites]
            students += rows.students
            rewards += [reward] * len(rows.students)
            pairs += self._trace_pairs(example, where)
        if not students:  # one token that nothing scores: a long run must not end at one batch of unusable traces
            self.counts["batch_without_rows"] += 1
            students, rewards = [StudentRow([self.config.pad_token_id], [])], [math.nan]
        return self._tensors(students, sites, pairs, rewards)

    def pairs(self, traces: Iterable[TraceExample]) -> Iterator[PairIds]:
        """The pairs that batches of these traces hold, for `trainer.reference.precompute_ref_logprobs`. Not counted."""
        for number, example in enumerate(traces):
            before = Counter(self.counts)
            pairs = self._trace_pairs(example, _name(example, number))
            self.counts.clear()
            self.counts.update(before)
            yield from pairs

    def _trace_rows(self, example: TraceExample, where: str) -> TraceRows:
        messages = example.get("turns")
        if messages is None:
            got = f"keys {sorted(example)}"
            raise InputError(explain(where, got=got, expected="a 'turns' list of messages, which may be empty"))
        conversation = to_conversation(cast("Sequence[Mapping[str, Any]]", messages), conversation_id=where)
        if not conversation.turns:
            self.counts["empty_conversation"] += 1
            return TraceRows([], [])
        hints = list(self._hints(messages, conversation)) if self.config.enable_sdpo else []
        once = list(dict.fromkeys(hints))  # a call and its result may both be marked: that is one failure
        if len(once) < len(hints):
            self.counts["same_hint_again"] += len(hints) - len(once)
        return self._rows.rows(conversation, once)

    def _hints(self, messages: Sequence[TraceTurn], conversation: Conversation) -> Iterator[Hinted]:
        generate = self.config.hint_generator
        if generate is None:
            return
        for error in _marked_errors(cast("Sequence[Mapping[str, Any]]", messages), conversation.turns, self.counts):
            hint: Any = generate(error.kind, error.meta)
            turn_id = conversation.turns[error.turn].id
            if hint is None:
                self.counts["no_hint"] += 1
            elif isinstance(hint, str):
                yield Hinted(turn_id, hint)
            else:
                what = f"hint for {error.kind} at turn {turn_id}"
                raise InputError(explain(what, got=type(hint).__name__, expected="text, or None for no hint"))

    def _trace_pairs(self, example: TraceExample, where: str) -> list[PairIds]:
        pairs: Any = example.get("dpo_pairs") or ()
        if not self.config.enable_replay_dpo:
            return []
        if isinstance(pairs, str | Mapping) or not isinstance(pairs, Sequence):
            raise InputError(explain(f"dpo_pairs of {where}", got=type(pairs).__name__, expected="a list of DPOPairs"))
        pair_ids = [self._pairs.pair(pair, f"pair {number} of {where}") for number, pair in enumerate(pairs)]
        return [pair for pair in pair_ids if pair is not None]

    def _reward(self, example: TraceExample, where: str) -> float:
        key = self.config.rlvr_reward_key
        value: Any = example.get(key)
        if value is None:
            self.counts["no_reward"] += 1
            return math.nan
        try:
            reward = math.nan if isinstance(value, str) else float(value)
        except (TypeError, ValueError):
            reward = math.nan
        if not math.isfinite(reward):
            fix = "Leave the key out where there is no reward."
            raise InputError(explain(f"{key} of {where}", got=repr(value), expected="a finite number", fix=fix))
        return reward

    def _tensors(
        self, students: list[StudentRow], sites: list[SiteRow], pairs: list[PairIds], rewards: list[float]
    ) -> dict[str, Tensor]:
        pad = self.config.pad_token_id
        batch = _student_tensors(students, pad) | {"rewards": torch.tensor(rewards, dtype=torch.float32)}
        if sites:
            batch |= _site_tensors(sites, batch["input_ids"], pad, self.config.ignore_index)
        if pairs:
            batch |= _pair_tensors(pairs, pad)
        if pairs and self.reference is not None:
            batch |= _reference_tensors(pairs, self.reference)
        ids = (value for name, value in batch.items() if name.endswith("input_ids"))
        num_ids = self._num_ids or 1 + max(int(value.max()) for value in ids)  # a stub may not say how many it has
        read_flat_batch(batch, max(num_ids, pad + 1), NeededChannels(reference=self.reference is not None))
        return batch


def _renderer_of(tokenizer: Any, config: CollatorConfig) -> Renderer | SegmentRenderer:
    """Return what renders conversations: the chat template, or turn by turn with a warning where that cannot be."""
    is_fast = hasattr(tokenizer, "backend_tokenizer")
    if is_fast and (config.chat_template is not None or getattr(tokenizer, "chat_template", None)):
        return Renderer(tokenizer, tools=config.tools, chat_template=config.chat_template, thinking=config.thinking)
    name = type(tokenizer).__name__
    if config.chat_template is not None:
        fix = "Load a fast one with AutoTokenizer, or leave chat_template out: turns are then tokenised one by one."
        got = f"a text, and a tokenizer without a fast backend ({name})"
        raise InputError(explain("chat_template", got=got, expected="a fast tokenizer beside it", fix=fix))
    renderer = SegmentRenderer(tokenizer, tools=config.tools, thinking=config.thinking)
    lacks = "no chat template" if is_fast else "no fast backend"
    warnings.warn(
        f"tokenizer {name} has {lacks}: the content of each turn is tokenised on its own, and masks are aligned by "
        "these segments. The ids hold no role headers and no end-of-turn tokens, so they differ from what a chat model "
        "sees. For a chat model, load a fast tokenizer with a template, or pass CollatorConfig(chat_template=...).",
        UserWarning,
        stacklevel=4,  # where the collator is made
    )
    return renderer


def _vocabulary_size(tokenizer: Any) -> int | None:
    """Return how many ids there are; None where the tokenizer does not say."""
    if hasattr(tokenizer, "__len__"):
        return len(tokenizer)
    size = getattr(tokenizer, "vocab_size", None)
    return size if isinstance(size, int) else None


def _name(example: TraceExample, number: int) -> str:
    if not isinstance(example, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(explain(f"trace {number}", got=type(example).__name__, expected="a TraceExample"))
    return str(example.get("trace_id") or f"trace {number}")


# Marked errors of a trace: which assistant turn made them, of what kind, and what a hint may be made of.

_SAYS_LITTLE = ("other", "nonzero_exit")


class _MarkedError(NamedTuple):
    """The assistant turn that erred, by number, and what the hint generator is asked with."""

    turn: int
    kind: str
    meta: Mapping[str, Any]


def _marked_errors(
    messages: Sequence[Mapping[str, Any]], turns: Sequence[Turn], counts: Counter[str]
) -> Iterator[_MarkedError]:
    """Every message with a `tool_error`, at the assistant turn it is about; what is about none is counted.

    The kind is `error_meta["error_kind"]`. Without it, `tool_error` itself where that names a kind, or else what the
    rules of `sites` make of the call and its result (arguments that are no JSON: json_decode; other arguments that do
    not fit: type_error), and runtime_error where no rule knows. Without an `error_meta`, the generator gets what the
    trace shows: tool_name and error_message.
    """
    for index, message in enumerate(messages):
        error = message.get("tool_error")
        if not error:
            continue
        role = turns[index].role
        caller = index if role == "assistant" else caller_of(turns, index) if role == "tool" else None
        if caller is None:
            counts["error_without_assistant_turn"] += 1
            continue
        call, result = _call_and_result(turns, caller, index)
        text = result.text if result is not None else error if isinstance(error, str) else ""
        meta = _meta_of(message, turns[index].id)
        kind = meta.get("error_kind")
        if kind is None:
            kind = error if isinstance(error, str) and (error in KINDS or error in HINT_TEMPLATES) else None
        if kind is None:
            kind = _kind_of(call, text)
        if not isinstance(kind, str):
            where = f"error_kind of {turns[index].id}"
            raise InputError(explain(where, got=type(kind).__name__, expected="the name of a kind"))
        yield _MarkedError(caller, kind, meta or _shown(call, text))


def _meta_of(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    meta = message.get("error_meta")
    if meta is not None and not isinstance(meta, Mapping):
        raise InputError(explain(f"error_meta of {where}", got=type(meta).__name__, expected="a mapping"))
    return dict(cast("Mapping[str, Any]", meta or {}))


def _call_and_result(turns: Sequence[Turn], caller: int, marked: int) -> tuple[ToolCall | None, ToolResult | None]:
    """The call that failed and what came back; an assistant turn's own mark is about its first call."""
    calls = turns[caller].calls
    if marked != caller:
        result = turns[marked].results[0]
        return next((call for call in calls if call.id == result.call_id), None), result
    call = calls[0] if calls else None
    after = (result for turn in turns[caller + 1 :] for result in turn.results)
    return call, next((result for result in after if call is not None and result.call_id == call.id), None)


def _kind_of(call: ToolCall | None, text: str) -> str:
    kind = classify(call.name if call else "", call.arguments if call else {}, text, True).kind
    is_json = is_json_error(call, text)
    if kind == "input_validation":
        return "json_decode" if is_json else "type_error"
    if kind in _SAYS_LITTLE and call is not None and call.raw_arguments is not None:
        return "json_decode"
    return "runtime_error" if kind == "other" else kind


def _shown(call: ToolCall | None, text: str) -> dict[str, Any]:
    facts = {"tool_name": call.name if call else "", "error_message": text}
    return {key: value for key, value in facts.items() if value}


# Rows of token ids as the tensors of a batch: padded on the right, with masks that mark tokens.


class _ReferenceLookup(Protocol):
    """The start weights' summed log-probs of both answers of a pair, found by the very ids the batch holds."""

    def lookup(
        self, chosen_ids: Sequence[int], chosen_start: int, rejected_ids: Sequence[int], rejected_start: int
    ) -> tuple[float, float]: ...


def padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    """(B, T) with T the longest row; lengths, and never an id, say what is padding."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows], dtype=torch.int64)


def attention(rows: Sequence[Sequence[int]]) -> Tensor:
    return padded([[1] * len(row) for row in rows], 0)


def _student_tensors(rows: Sequence[StudentRow], pad: int) -> dict[str, Tensor]:
    ids = [row.ids for row in rows]
    mask = torch.zeros_like(attention(ids))
    for number, row in enumerate(rows):
        for start, end in row.targets:
            mask[number, start:end] = 1
    return {"input_ids": padded(ids, pad), "attention_mask": attention(ids), "response_mask": mask}


def _site_tensors(sites: Sequence[SiteRow], input_ids: Tensor, pad: int, ignore_index: int) -> dict[str, Tensor]:
    """Channel 2's keys; row n of both indices predicts the same token. The mask marks those tokens in `input_ids`."""
    mask = torch.full_like(input_ids, ignore_index)
    student: list[Tensor] = []
    teacher: list[Tensor] = []
    for number, site in enumerate(sites):
        offsets = torch.arange(len(site.ids) - site.start)
        mask[site.student_row, site.student_start + offsets] = 1
        student.append(_index(site.student_row, site.student_start - 1 + offsets))
        teacher.append(_index(number, site.start - 1 + offsets))
    ids = [site.ids for site in sites]
    return {
        "ctx_teacher_input_ids": padded(ids, pad),
        "ctx_teacher_attention_mask": attention(ids),
        "sdpo_loss_mask": mask,
        "sdpo_student_index": torch.cat(student),
        "sdpo_teacher_index": torch.cat(teacher),
    }


def _pair_tensors(pairs: Sequence[PairIds], pad: int) -> dict[str, Tensor]:
    sides = {"chosen": [pair.chosen for pair in pairs], "rejected": [pair.rejected for pair in pairs]}
    return {f"dpo_{side}_{key}": value for side, rows in sides.items() for key, value in _side(rows, pad).items()}


def _reference_tensors(pairs: Sequence[PairIds], reference: _ReferenceLookup) -> dict[str, Tensor]:
    pair_logprobs = [reference.lookup(*pair.chosen, *pair.rejected) for pair in pairs]
    for number, values in enumerate(pair_logprobs):
        if len(values) != 2 or not all(math.isfinite(value) for value in values):
            what = f"reference log-probs of pair {number}"
            raise InputError(explain(what, got=values, expected="two finite sums, chosen and rejected"))
    chosen, rejected = torch.tensor(pair_logprobs, dtype=torch.float32).unbind(1)
    return {"dpo_chosen_ref_logprobs": chosen.clone(), "dpo_rejected_ref_logprobs": rejected.clone()}


def _side(rows: Sequence[ResponseIds], pad: int) -> dict[str, Tensor]:
    ids = [row.ids for row in rows]
    answers = [[0] * row.start + [1] * (len(row.ids) - row.start) for row in rows]
    return {"input_ids": padded(ids, pad), "attention_mask": attention(ids), "response_mask": padded(answers, 0)}


def _index(row: int, positions: Tensor) -> Tensor:
    return torch.stack([torch.full_like(positions, row), positions], dim=1)
