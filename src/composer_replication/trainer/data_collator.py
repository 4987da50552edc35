"""Traces to a batch for all three channels: ids, masks and index pairs from one rendering of each trace."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, Protocol, TypedDict, cast

import torch
from torch import Tensor

from composer_replication.batch.alignment import IGNORE_INDEX
from composer_replication.batch.flat_batch import Wanted, read_flat_batch
from composer_replication.batch.hint_placement import PLACEMENTS, Placement
from composer_replication.batch.pair_tokens import PairIds
from composer_replication.batch.render.renderer import Renderer
from composer_replication.batch.render.thinking import ThinkingRules
from composer_replication.batch.trace_messages import to_conversation
from composer_replication.errors import InputError, explain
from composer_replication.trainer.traces.rows import (
    Hinted,
    LeftCut,
    PairMaker,
    RowMaker,
    SiteRow,
    StudentRow,
    TraceRows,
)
from composer_replication.trainer.traces.segments import SegmentRenderer
from composer_replication.trainer.traces.sites import marked_errors
from composer_replication.trainer.traces.tensors import (
    ReferenceLookup,
    pair_tensors,
    reference_tensors,
    site_tensors,
    student_tensors,
)
from composer_replication.types import Conversation, DPOPair

__all__ = [
    "CollatorConfig",
    "ComposerDataCollator",
    "TokenizerLike",
    "TraceExample",
    "TraceTurn",
]

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
    reference: ReferenceLookup | None = None
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
        for error in marked_errors(cast("Sequence[Mapping[str, Any]]", messages), conversation.turns, self.counts):
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
        batch = student_tensors(students, pad) | {"rewards": torch.tensor(rewards, dtype=torch.float32)}
        if sites:
            batch |= site_tensors(sites, batch["input_ids"], pad, self.config.ignore_index)
        if pairs:
            batch |= pair_tensors(pairs, pad)
        if pairs and self.reference is not None:
            batch |= reference_tensors(pairs, self.reference)
        ids = (value for name, value in batch.items() if name.endswith("input_ids"))
        num_ids = self._num_ids or 1 + max(int(value.max()) for value in ids)  # a stub may not say how many it has
        read_flat_batch(batch, max(num_ids, pad + 1), Wanted(reference=self.reference is not None))
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
