"""Collate traces into batches for all three channels: ids, masks and index pairs from one rendering of each trace."""

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
from composer_replication.batch.pair_tokens import PairIds
from composer_replication.batch.render.dialect import ThinkingRules
from composer_replication.batch.render.renderer import Renderer
from composer_replication.batch.trace_messages import to_conversation
from composer_replication.errors import InputError, explain
from composer_replication.hint_generator import HINT_TEMPLATES
from composer_replication.hint_generator.facts import is_json_error
from composer_replication.sites import KINDS, classify
from composer_replication.trainer.trace_rows import SegmentRenderer, TraceRenderer, TraceRows, pair_tensors
from composer_replication.types import Conversation, DPOPair, ToolCall, ToolResult, Turn

__all__ = ["CollatorConfig", "ComposerDataCollator", "TokenizerLike", "TraceExample", "TraceTurn"]


HintGenerator = Callable[[str, Any], str | None]
"""A function of (error_kind, error_meta) that returns a hint, or None for no hint, such as
`hint_generator.dispatch`."""


class TraceTurn(TypedDict, total=False):
    """One message of a trace. The OpenAI format (tool_calls, tool_call_id, a system role) is accepted as well."""

    role: Literal["user", "assistant", "tool"]
    content: str
    tool_call: Any
    tool_error: Any
    error_meta: Mapping[str, Any]


class TraceExample(TypedDict, total=False):
    """A logged session with its reward and the preference pairs for its states."""

    trace_id: str
    turns: Sequence[TraceTurn]
    final_reward: float
    dpo_pairs: Sequence[DPOPair]


class TokenizerLike(Protocol):
    """The tokenizer methods that the collator uses to turn texts into token ids.

    With a fast Hugging Face tokenizer and a chat template (its own, or `CollatorConfig.chat_template`), conversations
    are rendered with the template. With any other tokenizer, the content of each turn is tokenized on its own.
    """

    @property
    def pad_token_id(self) -> int | None: ...

    @property
    def apply_chat_template(self) -> Callable[..., Any]: ...

    def __call__(self, text: Any, *args: Any, **kwargs: Any) -> Any: ...


@dataclass
class CollatorConfig:
    """Settings for collating traces.

    Args:
        pad_token_id: The id that rows are padded with. Any id in the vocabulary works, since attention masks mark the
            padding.
        ignore_index: The value (-100 or 0) that marks non-target tokens in `sdpo_loss_mask`. All other masks contain 0
            and 1.
        hint_generator: Returns the hints. Without a generator, channel 2 has no targets.
        placement: Where a hint is inserted.
        tools: Tool schemas for the chat template.
        chat_template: Replaces the tokenizer's template.
        thinking: Which `reasoning_content` is trained on: by default only the student's own, recognized by the
            messages' `model` (`ThinkingRules.student_models`); with `render.thinking.ALL_OWN`, all of it.
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
        # At least two tokens, since a target needs a token before it that predicts it.
        for name, minimum in (("max_seq_len", 2), ("max_dpo_seq_len", 2), ("pad_token_id", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < minimum:
                raise InputError(explain(name, got=repr(value), expected=f"a whole number, {minimum} or more"))
        if self.ignore_index not in (IGNORE_INDEX, 0):
            expected = f"{IGNORE_INDEX} or 0"
            raise InputError(explain("ignore_index", got=self.ignore_index, expected=expected))
        if self.placement not in PLACEMENTS:
            raise InputError(explain("placement", got=repr(self.placement), expected=f"one of {PLACEMENTS}"))
        if self.hint_generator is not None and not callable(self.hint_generator):
            got = type(self.hint_generator).__name__
            raise InputError(explain("hint_generator", got=got, expected="a function of (error_kind, error_meta)"))


@dataclass
class ComposerDataCollator:
    """A collator that turns traces into batches for `compose_loss`.

    Every batch has input_ids, attention_mask, response_mask (B, T), which is 1 on every token of every assistant turn
    including its end-of-turn token, and rewards (B,). With `enable_sdpo`, a hint generator and an error site it also
    has ctx_teacher_input_ids and its attention mask, one row per site; sdpo_student_index, sdpo_teacher_index and
    sdpo_loss_mask. With `enable_replay_dpo` and a pair it has dpo_{chosen,rejected}_{input_ids,attention_mask,
    response_mask}, and with a `reference` their log-probs.

    If a tokenizer has no fast backend or no chat template, each turn's content is tokenized on its own and masks follow
    these segments. The constructor then warns, and there are no end-of-turn tokens that a mask could include.

    A trace is one row, or one row per sequence if a template rewrites history; each row gets the trace's reward. A
    trace without a reward gets NaN, counted as `no_reward`. Rows longer than `max_seq_len` are truncated on the left,
    at the start of a message if possible. Targets are never truncated: a turn, site or pair that does not fit is
    dropped.

    `counts` has the number of dropped items by reason, over all calls in this process (each data loader worker has its
    own; `counts.clear()` resets it). `renderer.counts` counts what a template could not render faithfully. If no row is
    left (`batch_without_rows`), the batch has one row of a single token without a target and a reward of NaN:
    `compose_loss` runs, and its `active` shows that lm_ce did not.
    """

    # transformers adds pad_token_id at run time, so type checkers do not see it.
    tokenizer: TokenizerLike | Any
    config: CollatorConfig
    _: KW_ONLY
    reference: _ReferenceLookup | None = None
    counts: Counter[str] = field(init=False, default_factory=Counter[str], repr=False)
    renderer: Renderer | SegmentRenderer = field(init=False, repr=False)

    def __post_init__(self) -> None:
        config = self.config
        self.renderer = _make_renderer(self.tokenizer, config)
        self._traces = TraceRenderer(
            self.renderer,
            self.counts,
            max_seq_len=config.max_seq_len,
            max_dpo_seq_len=config.max_dpo_seq_len,
            placement=config.placement,
        )
        self._num_ids = _vocabulary_size(self.tokenizer)

    def __call__(self, batch: Sequence[TraceExample]) -> dict[str, Tensor]:
        """Return the batch for these traces, after validating it as `compose_loss` does."""
        if not batch:
            raise InputError(explain("batch", got="no traces", expected="at least one trace"))
        rows, pairs, rewards = TraceRows(), list[PairIds](), list[float]()
        for number, example in enumerate(batch):
            where = _trace_name(example, number)
            reward = self._reward(example, where)
            trace_rows = self._trace_rows(example, where)
            rows.extend(trace_rows)
            rewards += [reward] * len(trace_rows.students)
            pairs += self._trace_pairs(example, where)
        # One token without a target, so that a batch of unusable traces does not end a long run.
        if not rows.students:
            self.counts["batch_without_rows"] += 1
            rows.add_token_without_target(self.config.pad_token_id)
            rewards = [math.nan]
        return self._tensors(rows, pairs, rewards)

    def pairs(self, traces: Iterable[TraceExample]) -> Iterator[PairIds]:
        """Yield the pairs in these traces for `trainer.reference.precompute_ref_logprobs`, without changing
        `counts`.
        """
        for index, example in enumerate(traces):
            before = Counter(self.counts)
            pairs = self._trace_pairs(example, _trace_name(example, index))
            # `counts` is restored before the yield, which may never return.
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
            return TraceRows()
        hints = list(self._hints(messages, conversation)) if self.config.enable_sdpo else []
        # A call and its result may both be marked, for the same error.
        unique_hints = list(dict.fromkeys(hints))
        if len(unique_hints) < len(hints):
            self.counts["same_hint_again"] += len(hints) - len(unique_hints)
        return self._traces.rows(conversation, unique_hints)

    def _hints(self, messages: Sequence[TraceTurn], conversation: Conversation) -> Iterator[tuple[str, str]]:
        generate = self.config.hint_generator
        if generate is None:
            return
        for error in _marked_errors(cast("Sequence[Mapping[str, Any]]", messages), conversation.turns, self.counts):
            hint: Any = generate(error.kind, error.meta)
            turn_id = conversation.turns[error.turn].id
            if hint is None:
                self.counts["no_hint"] += 1
            elif isinstance(hint, str):
                yield turn_id, hint
            else:
                what = f"hint for {error.kind} at turn {turn_id}"
                raise InputError(explain(what, got=type(hint).__name__, expected="text, or None for no hint"))

    def _trace_pairs(self, example: TraceExample, where: str) -> list[PairIds]:
        pairs: Any = example.get("dpo_pairs") or ()
        if not self.config.enable_replay_dpo:
            return []
        # A single pair instead of a list is a common mistake, and a mapping would be iterated by its keys.
        if isinstance(pairs, str | Mapping) or not isinstance(pairs, Sequence):
            raise InputError(explain(f"dpo_pairs in {where}", got=type(pairs).__name__, expected="a list of DPOPairs"))
        pair_ids = [self._traces.pair(pair, f"pair {number} in {where}") for number, pair in enumerate(pairs)]
        return [pair for pair in pair_ids if pair is not None]

    def _reward(self, example: TraceExample, where: str) -> float:
        key = self.config.rlvr_reward_key
        value: Any = example.get(key)
        if value is None:
            self.counts["no_reward"] += 1
            return math.nan
        try:
            # `float` would accept the text "1", which is more likely a mistake in the data.
            reward = math.nan if isinstance(value, str) else float(value)
        except (TypeError, ValueError):
            reward = math.nan
        if not math.isfinite(reward):
            fix = "Leave the key out if there is no reward."
            raise InputError(explain(f"{key} in {where}", got=repr(value), expected="a finite number", fix=fix))
        return reward

    def _tensors(self, rows: TraceRows, pairs: list[PairIds], rewards: list[float]) -> dict[str, Tensor]:
        pad = self.config.pad_token_id
        batch = rows.tensors(pad, self.config.ignore_index)
        batch["rewards"] = torch.tensor(rewards, dtype=torch.float32)
        if pairs:
            batch |= pair_tensors(pairs, pad)
        if pairs and self.reference is not None:
            batch |= _reference_tensors(pairs, self.reference)
        ids = (value for name, value in batch.items() if name.endswith("input_ids"))
        # A stub may not state the size of its vocabulary.
        num_ids = self._num_ids or 1 + max(int(value.max()) for value in ids)
        read_flat_batch(batch, max(num_ids, pad + 1), NeededChannels(reference=self.reference is not None))
        return batch


def _make_renderer(tokenizer: Any, config: CollatorConfig) -> Renderer | SegmentRenderer:
    """Return a renderer that uses the chat template.

    If there is no template or no fast tokenizer, this warns and returns a renderer that tokenizes turn by turn.
    """
    is_fast = hasattr(tokenizer, "backend_tokenizer")
    if is_fast and (config.chat_template is not None or getattr(tokenizer, "chat_template", None)):
        # Only a fast tokenizer reports the offsets that align masks with a rendered template.
        return Renderer(tokenizer, tools=config.tools, chat_template=config.chat_template, thinking=config.thinking)
    name = type(tokenizer).__name__
    if config.chat_template is not None:
        fix = "Load a fast tokenizer with AutoTokenizer, or omit chat_template to tokenize turns one by one."
        got = f"a template for a tokenizer without a fast backend ({name})"
        raise InputError(explain("chat_template", got=got, expected="a fast tokenizer", fix=fix))
    renderer = SegmentRenderer(tokenizer, tools=config.tools, thinking=config.thinking)
    lacks = "no chat template" if is_fast else "no fast backend"
    warnings.warn(
        f"tokenizer {name} has {lacks}: the content of each turn is tokenized on its own, and masks are aligned by "
        "these segments. There are no role headers and no end-of-turn tokens, so the ids differ from what a chat model "
        "sees. For a chat model, load a fast tokenizer with a template, or pass CollatorConfig(chat_template=...).",
        UserWarning,
        # Attribute the warning to the code that creates the collator.
        stacklevel=4,
    )
    return renderer


def _vocabulary_size(tokenizer: Any) -> int | None:
    """Return the number of token ids, or None if the tokenizer does not report it."""
    if hasattr(tokenizer, "__len__"):
        return len(tokenizer)
    size = getattr(tokenizer, "vocab_size", None)
    return size if isinstance(size, int) else None


def _trace_name(example: TraceExample, number: int) -> str:
    if not isinstance(example, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(explain(f"trace {number}", got=type(example).__name__, expected="a TraceExample"))
    return str(example.get("trace_id") or f"trace {number}")


# Kinds that are too general to override evidence of malformed arguments.
_GENERIC_KINDS = ("other", "nonzero_exit")


class _MarkedError(NamedTuple):
    """An error marked in a trace: the assistant turn at fault, and the arguments for the hint generator."""

    turn: int
    kind: str
    meta: Mapping[str, Any]


def _marked_errors(
    messages: Sequence[Mapping[str, Any]], turns: Sequence[Turn], counts: Counter[str]
) -> Iterator[_MarkedError]:
    """Yield the error in every message with a `tool_error`; errors without an assistant turn are only counted.

    The kind is `error_meta["error_kind"]`, or else `tool_error` itself if it names a kind. Otherwise the rules in
    `sites` classify the call and its result: json_decode for arguments that are not JSON, type_error for other invalid
    arguments, and runtime_error if no rule matches. Without an `error_meta`, the generator gets the trace's tool_name
    and error_message.
    """
    for index, message in enumerate(messages):
        error = message.get("tool_error")
        if not error:
            continue
        role = turns[index].role
        # A mark on an assistant message is about that turn; one on a tool result is about the turn that made the call.
        caller = index if role == "assistant" else _find_calling_turn(turns, index) if role == "tool" else None
        if caller is None:
            counts["error_without_assistant_turn"] += 1
            continue
        call, result = _call_and_result(turns, caller, index)
        text = result.text if result is not None else error if isinstance(error, str) else ""
        meta = _read_error_meta(message, turns[index].id)
        kind = meta.get("error_kind")
        if kind is None:
            kind = error if isinstance(error, str) and (error in KINDS or error in HINT_TEMPLATES) else None
        if kind is None:
            kind = _classify_error(call, text)
        if not isinstance(kind, str):
            where = f"error_kind in {turns[index].id}"
            raise InputError(explain(where, got=type(kind).__name__, expected="the name of a kind"))
        facts = {"tool_name": call.name if call else "", "error_message": text}
        yield _MarkedError(caller, kind, meta or {key: value for key, value in facts.items() if value})


def _read_error_meta(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    meta = message.get("error_meta")
    if meta is not None and not isinstance(meta, Mapping):
        raise InputError(explain(f"error_meta in {where}", got=type(meta).__name__, expected="a mapping"))
    return dict(cast("Mapping[str, Any]", meta or {}))


def _call_and_result(turns: Sequence[Turn], caller: int, marked: int) -> tuple[ToolCall | None, ToolResult | None]:
    """Return the failed call and its result; if an assistant turn is marked, these are of the turn's first call."""
    calls = turns[caller].calls
    if marked != caller:
        result = turns[marked].results[0]
        return next((call for call in calls if call.id == result.call_id), None), result
    call = calls[0] if calls else None
    after = (result for turn in turns[caller + 1 :] for result in turn.results)
    return call, next((result for result in after if call is not None and result.call_id == call.id), None)


def _classify_error(call: ToolCall | None, text: str) -> str:
    kind = classify(call.name if call else "", call.arguments if call else {}, text, True).kind
    is_json = is_json_error(call, text)
    if kind == "input_validation":
        return "json_decode" if is_json else "type_error"
    if kind in _GENERIC_KINDS and call is not None and call.raw_arguments is not None:
        return "json_decode"
    return "runtime_error" if kind == "other" else kind


class _ReferenceLookup(Protocol):
    """An object that looks up the initial model's log-probs for both answers in a pair by their token ids."""

    def lookup(
        self, chosen_ids: Sequence[int], chosen_start: int, rejected_ids: Sequence[int], rejected_start: int
    ) -> tuple[float, float]: ...


def _reference_tensors(pairs: Sequence[PairIds], reference: _ReferenceLookup) -> dict[str, Tensor]:
    pair_logprobs = [reference.lookup(*pair.chosen, *pair.rejected) for pair in pairs]
    for number, values in enumerate(pair_logprobs):
        if len(values) != 2 or not all(math.isfinite(value) for value in values):
            what = f"reference log-probs of pair {number}"
            raise InputError(explain(what, got=values, expected="two finite sums, chosen and rejected"))
    chosen, rejected = torch.tensor(pair_logprobs, dtype=torch.float32).unbind(1)
    return {"dpo_chosen_ref_logprobs": chosen.clone(), "dpo_rejected_ref_logprobs": rejected.clone()}


def _find_calling_turn(turns: Sequence[Turn], index: int) -> int | None:
    """Return the index of the assistant turn whose call is answered by the tool turn at `index`.

    If no call has the result's id, return the assistant turn directly before the results, or None if there is none.
    """
    call_ids = {result.call_id for result in turns[index].results}
    # Backwards, because some logs reuse ids, and the latest call with the id is the one that was answered.
    earlier = range(index - 1, -1, -1)
    for position in earlier:
        if any(call.id in call_ids for call in turns[position].calls):
            return position
    nearest = next((position for position in earlier if turns[position].role != "tool"), None)
    return nearest if nearest is not None and turns[nearest].role == "assistant" else None
