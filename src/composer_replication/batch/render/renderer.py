"""Render conversations to token ids with exact spans of the assistant turns.

The context of an assistant turn and the turn itself are encoded separately. So a span begins and ends at token
boundaries, and the context has the same ids as a prompt that asks for the turn. `pieces` finds the boundaries.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from composer_replication.action_text import has_late_thinking, has_text_after_call
from composer_replication.batch.model_folder import catch_tokenizer_panics
from composer_replication.batch.render.dialect import Outcome, ProtectedTokens, ThinkingRules, read_dialect
from composer_replication.batch.render.messages import WRAPPERS, Chat, to_chat
from composer_replication.batch.render.pieces import Cutter, TurnPiece
from composer_replication.batch.render.templates import ChatTemplate, prefix_preserving, template_source
from composer_replication.errors import AlignmentError, InputError, explain
from composer_replication.types import Conversation, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


T = TypeVar("T")
Tools = Sequence[Mapping[str, Any]] | Mapping[str | None, Sequence[Mapping[str, Any]]]
"""Tool schemas for all conversations, or a mapping from `Conversation.format` to them (None: all other formats)."""
# Reasons why a turn is not trained on. Reports count them by these strings. Templates write a turn's thinking before
# its text and its text before its calls: a turn that was written in another order would be learned in the wrong one.
TEXT_FOLLOWS_CALL, THINKING_COMES_LATE, WITHOUT_ANSWER = "text_follows_call", "thinking_comes_late", "without_answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSpan:
    """The position of an assistant turn in a sequence: header at [header_start, start), own tokens at [start, end).

    [start, end) includes the end-of-turn token, unless a rollout was cut off before it. Calls are at [call_start,
    call_end); both are None if the turn has no calls. `text` is the rendering of the turn. `thinking` says how the
    turn's thinking was treated; with `has_empty_thought` the header ends with an empty thought. `no_target` is the
    reason why the turn may be context but not a target; it is empty if the turn may be trained on.
    """

    turn_id: str
    header_start: int
    start: int
    end: int
    call_start: int | None
    call_end: int | None
    text: str
    previous_role: str
    is_verbatim: bool
    thinking: Outcome = "none"
    has_empty_thought: bool = False
    no_target: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedSequence:
    """Token ids up to the end of the last turn in `spans`.

    `notes` counts what the template could not show in its original form. `message_starts` are the positions at which
    messages begin, for templates without a token that marks them.
    """

    conversation_id: str
    ids: list[int]
    spans: list[TurnSpan]
    notes: Mapping[str, int]
    message_starts: tuple[int, ...] | None = None


class Renderer:
    """Renders conversations with a tokenizer's chat template, or with `chat_template` instead.

    Args:
        tools: Tool schemas for the template (written into the system prompt if it does not show tools), or a mapping
            from a conversation's format to its schemas.
        thinking: What to do with the thinking of turns. Where it appears is up to the template.
        prefer_prefix_preserving: If a variant of the template is known that never rewrites history, use it, so that a
            session is one sequence. An explicit `chat_template` is never changed.
        template_options: Additional variables for the template, such as `enable_thinking`.

    `counts` accumulates over all calls of `render`: conversations, turns, sequences, notes, and turns by what was done
    with their thinking.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        tools: Tools | None = None,
        chat_template: str | None = None,
        thinking: ThinkingRules | None = None,
        prefer_prefix_preserving: bool = True,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        by_format: Mapping[str | None, Sequence[Mapping[str, Any]]]
        by_format = tools if isinstance(tools, Mapping) else {None: tools or ()}
        source = template_source(
            tokenizer, chat_template, [tool for format_tools in by_format.values() for tool in format_tools]
        )
        if chat_template is None and prefer_prefix_preserving:
            source = prefix_preserving(source) or source
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, source, template_options)
        self.protected = ProtectedTokens(tokenizer, source + WRAPPERS)
        self.dialect = read_dialect(self.template, self.protected)
        self.encoder = _PieceEncoder(tokenizer, self.protected)
        self.counts: Counter[str] = Counter()
        self._tools = {name: list(format_tools) for name, format_tools in by_format.items()}
        self._escaped = {
            name: [self.protected.escape_tree(tool) for tool in format_tools]
            for name, format_tools in by_format.items()
        }
        self._is_by_format = isinstance(tools, Mapping)
        self.thinking = thinking or ThinkingRules()
        self._num_tokens = len(tokenizer)
        self._stop_ids = frozenset(self.protected.ids[stop] for stop in self.dialect.stops)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that determine a conversation's ids together with the tokenizer, as JSON data."""
        # Canonical JSON sorts keys, and None cannot be sorted among strings.
        by_format = {name or "": format_tools for name, format_tools in self._tools.items()}
        return {
            "template": self.template.source,
            "options": self.template.options,
            "tools": by_format if self._is_by_format else self._tools[None],
            "thinking": {**asdict(self.thinking), "student_models": list(self.thinking.student_models)},
        }

    def tools_for(self, format_name: str) -> list[Mapping[str, Any]]:
        """Return the tool schemas for conversations of this format."""
        return _for_format(self._tools, format_name)

    def render(self, conversation: Conversation) -> list[RenderedSequence]:
        """Render a conversation to sequences that together contain every assistant turn once.

        There is more than one sequence only if the template rewrites history.
        """
        if not conversation.turns:
            fix = "Drop the conversation."
            what = f"conversation {conversation.id}"
            raise InputError(explain(what, got="no turns", expected="at least one turn", fix=fix))
        chat, cut = self._cut_turns(conversation)
        cut = [self._fit_to_sampled_ids(pieces) for pieces in cut]
        encoded = iter(
            self.encoder.encode([text for turns in cut for turn in turns for text in (turn.context, turn.completion)])
        )
        notes = dict(chat.notes)
        sequences = [self._build_sequence(conversation.id, pieces, encoded, notes) for pieces in cut]
        self.counts.update(chat.notes)
        self.counts.update(conversations=1, sequences=len(cut), turns=sum(map(len, cut)))
        self.counts.update(count_thinking(sequences))
        if not cut:
            self.counts["without_assistant_turn"] += 1
        return sequences

    def _cut_turns(self, conversation: Conversation) -> tuple[Chat, list[list[TurnPiece]]]:
        """Return the chat messages and the pieces of their rendering. If the template rejects the calls, they are
        written as text.
        """
        refusal: InputError | None = None
        tools, escaped = self.tools_for(conversation.format), _for_format(self._escaped, conversation.format)
        for dialect in dict.fromkeys((self.dialect, self.dialect.without_tools())):
            template_tools, as_text = (escaped, None) if dialect.tools else (None, tools)
            chat = to_chat(conversation, dialect, self.protected, thinking=self.thinking, tools=as_text)
            if refusal is not None:
                chat.notes["refused_by_template"] += 1
            try:
                return chat, Cutter(self.template, dialect, self.protected, template_tools).cut(chat)
            # Not retried: calls as text would hide the misalignment, and the model does not write calls as text.
            except AlignmentError as error:
                raise AlignmentError(f"conversation {conversation.id}: {error}") from error
            except InputError as error:
                refusal = error
        raise InputError(f"conversation {conversation.id}: {refusal}") from refusal

    def _fit_to_sampled_ids(self, pieces: list[TurnPiece]) -> list[TurnPiece]:
        """Change the contexts around rollout turns so that they fit the turns' sampled ids, and check that those ids
        are in the vocabulary.
        """
        missing_stop, last_stop, changed = "", "", list[TurnPiece]()
        for piece in pieces:
            sampled = piece.turn.token_ids
            # Sampled ids follow the complete generation prompt.
            prompt_tail = piece.prompt_tail if sampled else ""
            before, header_start = piece.context, piece.header_start
            # In a prompt, the end-of-turn token and this context are one text, and the token strips whitespace after
            # it.
            if last_stop in self.protected.rstrip_tokens:
                before = before.lstrip()
                header_start -= len(piece.context) - len(before)
            last_stop = piece.stop
            context, header_start = missing_stop + before + prompt_tail, len(missing_stop) + header_start
            changed.append(replace(piece, context=context, header_start=header_start))
            # A turn that was cut off has no end-of-turn token; the next context begins with it.
            missing_stop = piece.stop if sampled and sampled[-1] not in self._stop_ids else ""
            if sampled and not all(0 <= index < self._num_tokens for index in sampled):
                got, expected = f"{min(sampled)} to {max(sampled)}", f"0 to {self._num_tokens - 1}"
                raise InputError(explain(f"token ids of turn {piece.turn.id}", got=got, expected=expected))
        return changed

    def _build_sequence(
        self, conversation_id: str, pieces: list[TurnPiece], encoded: Iterator[list[int]], notes: Mapping[str, int]
    ) -> RenderedSequence:
        ids: list[int] = []
        spans: list[TurnSpan] = []
        for piece in pieces:
            context_ids, own_ids = next(encoded), next(encoded)
            header_start = len(ids) + self._header_index(piece, context_ids)
            ids += context_ids
            start = len(ids)
            ids += piece.turn.token_ids or own_ids
            spans.append(self._build_span(piece, own_ids, header_start, start, len(ids)))
        return RenderedSequence(conversation_id=conversation_id, ids=ids, spans=spans, notes=notes)

    def _header_index(self, piece: TurnPiece, context_ids: list[int]) -> int:
        """Return the index of the header's first token in the context."""
        header = piece.context[piece.header_start :]
        if not header:
            return len(context_ids)
        # In most templates the header begins with a special token, so encoding it alone gives the same ids.
        header_ids = self.encoder.encode([header])[0]
        if context_ids[-len(header_ids) :] == header_ids:
            return len(context_ids) - len(header_ids)
        return self.encoder.token_at(piece.context, piece.header_start)

    def _build_span(self, piece: TurnPiece, own_ids: list[int], header_start: int, start: int, end: int) -> TurnSpan:
        call_start, call_end = self._call_tokens(piece, own_ids)
        return TurnSpan(
            turn_id=piece.turn.id,
            header_start=header_start,
            start=start,
            end=end,
            call_start=None if call_start is None else start + call_start,
            call_end=None if call_end is None else start + call_end,
            text=self.protected.unescape(piece.completion),
            previous_role=piece.previous_role,
            is_verbatim=bool(piece.turn.token_ids),
            thinking=piece.thinking,
            has_empty_thought=piece.has_empty_thought,
            no_target=_exclusion_reason(piece.turn, piece.thinking),
        )

    def _call_tokens(self, piece: TurnPiece, own_ids: list[int]) -> tuple[int | None, int | None]:
        """Return the range of the calls' tokens within the turn; (None, None) if the turn has no calls."""
        if piece.call is None:
            return None, None
        first, last = (self.encoder.token_at(piece.completion, position) for position in piece.call)
        sampled = piece.turn.token_ids
        if not sampled:
            return first, last
        # The sampled ids may differ from the rendered ones, but the token that opens a call is the same in both.
        opening = own_ids[first]
        if opening not in self.encoder.protected_ids or opening not in sampled:
            return None, None
        return sampled.index(opening), len(sampled) - int(sampled[-1] in self._stop_ids)


def _exclusion_reason(turn: Turn, thinking: Outcome) -> str:
    """Return the reason why a turn must not be trained on as the template renders it; an empty string if it may be."""
    is_shown = thinking in ("target", "context")
    # The model sampled these ids in this order.
    if turn.token_ids:
        return ""
    if has_text_after_call(turn):
        return TEXT_FOLLOWS_CALL
    if is_shown and has_late_thinking(turn):
        return THINKING_COMES_LATE
    has_answer = turn.calls or turn.text.strip() or thinking == "target"
    return "" if has_answer else WITHOUT_ANSWER


def count_thinking(sequences: Sequence[RenderedSequence]) -> Counter[str]:
    """Count turns by how their thinking was treated, and headers that end with an empty thought."""
    spans = [span for sequence in sequences for span in sequence.spans]
    counts = Counter(f"thinking_{span.thinking}" for span in spans if span.thinking != "none")
    return counts + Counter(empty_thought_as_header=sum(span.has_empty_thought for span in spans))


def _for_format(tools: Mapping[str | None, list[T]], format_name: str) -> list[T]:
    return tools[format_name] if format_name in tools else tools.get(None, [])


# If a template splits a session into several sequences, their contexts overlap, so a cache saves most of the encoding.
_MAX_CACHED_CHARS = 1 << 25


class _Segment(NamedTuple):
    """A part of a piece: one protected token (`token`), or text to encode."""

    start: int  # in the escaped piece
    text: str
    token: int | None = None
    is_quoted: bool = False  # the text of a protected token that appeared in a log


class _PieceEncoder:
    """Encodes pieces of a rendering independently of each other; only the template can produce special tokens.

    Every tokenizer splits text at protected tokens, so text is encoded in segments between them. Equal segments have
    equal ids in every context, and are encoded only once.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, protected: ProtectedTokens) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            what = f"tokenizer {type(tokenizer).__name__}"
            expected = "a fast tokenizer (with a backend_tokenizer)"
            raise InputError(
                explain(what, got="a slow tokenizer", expected=expected, fix="Load it with AutoTokenizer.")
            )
        self._tokenizer, self._backend, self._protected = tokenizer, backend, protected
        self.protected_ids = frozenset(protected.ids.values())
        self._cache: dict[_Segment, list[int]] = {}
        self._cached_chars = 0
        # `_find_leading_token` itself encodes without a lead, to find out whether one is needed.
        self._lead = ""
        self._lead = self._find_leading_token()

    def encode(self, pieces: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each piece of escaped text."""
        cut = [list(self._segments(piece)) for piece in pieces]
        self._fill_cache([segment for segments in cut for segment in segments])
        return [[index for segment in segments for index in self._ids(segment)] for segments in cut]

    def token_at(self, piece: str, position: int) -> int:
        """Return the index of the token that contains character `position` of the escaped piece; the number of
        tokens if `position` is the end.
        """
        segments = list(self._segments(piece))
        self._fill_cache(segments)
        before = 0
        for segment in segments:
            if segment.start >= position:
                return before
            offset = len(self._protected.unescape(piece[segment.start : position]))
            if segment.token is None and offset < len(segment.text):
                return before + self._token_index(segment, offset)
            before += len(self._ids(segment))
        return before

    def _segments(self, piece: str) -> Iterator[_Segment]:
        """Split an escaped piece into segments."""
        start, parts = 0, list[str]()
        after = 0
        for match in self._protected.boundary.finditer(piece):
            parts.append(piece[after : match.start()])
            after = match.end()
            # An escaped private-use character is ordinary text.
            if match[1] is None:
                parts.append(match[0][1])
                continue
            token = self._protected.ids.get(match[1])
            original = match[1] if token is not None else self._protected.sentinel_text(match[1])
            # An edge mark has no text. It splits only if the texts around it would form a token.
            if not original and not self._would_form_token(parts, piece[after:]):
                continue
            text = "".join(parts)
            if token is not None and original in self._protected.lstrip_tokens:
                text = text.rstrip()
            if text:
                yield _Segment(start, text)
            if original:
                yield _Segment(match.start(), original, token, is_quoted=token is None)
            if token is not None and original in self._protected.rstrip_tokens:
                after += len(piece[after:]) - len(piece[after:].lstrip())
            start, parts = after, []
        if text := "".join(parts) + piece[after:]:
            yield _Segment(start, text)

    def _would_form_token(self, parts: list[str], rest: str) -> bool:
        # Twice the length, because an escaped character takes two.
        following = self._protected.unescape(rest[: 2 * self._protected.longest])
        return self._protected.splits_at_edge("".join(parts), following)

    def _ids(self, segment: _Segment) -> list[int]:
        return [segment.token] if segment.token is not None else self._cache[segment._replace(start=0)]

    def _fill_cache(self, segments: list[_Segment]) -> None:
        """Encode the segments that are not in the cache yet."""
        text_segments = {segment._replace(start=0) for segment in segments if segment.token is None}
        if self._cached_chars > _MAX_CACHED_CHARS:
            self._cache.clear()
            self._cached_chars = 0
        new = [segment for segment in text_segments if segment not in self._cache]
        if not new:
            return
        plain = [segment for segment in new if not segment.is_quoted]
        encoded = zip(plain, self._encode_texts([segment.text for segment in plain]), strict=True)
        self._cache.update((segment, self._without_forged_tokens(segment.text, ids)) for segment, ids in encoded)
        self._cache.update((segment, self._quoted_ids(segment.text)) for segment in new if segment.is_quoted)
        self._cached_chars += sum(len(segment.text) for segment in new)

    def _encode_texts(self, texts: list[str]) -> list[list[int]]:
        self._reset_backend()
        skip = 1 if self._lead else 0
        texts_with_lead = [self._lead + text for text in texts] if skip else texts
        with catch_tokenizer_panics(self._tokenizer):
            return [
                encoding.ids[skip:]
                for encoding in self._backend.encode_batch_fast(texts_with_lead, add_special_tokens=False)
            ]

    def _without_forged_tokens(self, text: str, ids: list[int]) -> list[int]:
        """Return the ids if none of them is a protected token; otherwise encode the text character by character.
        Raises InputError if that yields a protected token, too.
        """
        # A tokenizer that normalizes text before it searches for tokens may find one that was not in the text.
        if self.protected_ids.isdisjoint(ids):
            return ids
        ids_by_char = [index for char_ids in self._encode_texts(list(text)) for index in char_ids]
        if self.protected_ids.isdisjoint(ids_by_char):
            return ids_by_char
        got = f"{text[:40]!r}, which the tokenizer turns into a special token"
        raise InputError(explain("text of the conversation", got=got, expected="text with ordinary tokens"))

    def _reset_backend(self) -> None:
        """Switch off truncation, padding and the splitting of special tokens, which earlier calls of the tokenizer
        may have left on.
        """
        if self._backend.truncation is not None:
            self._backend.no_truncation()
        if self._backend.padding is not None:
            self._backend.no_padding()
        if self._backend.encode_special_tokens:
            self._backend.encode_special_tokens = False

    def _quoted_ids(self, text: str) -> list[int]:
        """Encode the text of a protected token as ordinary tokens. Raises InputError if the tokenizer always makes
        it a special token.
        """
        for ids in self._spellings(text):
            if ids and not self.protected_ids.intersection(ids):
                return ids
        got = f"{text!r}, which the tokenizer always turns into a special token"
        raise InputError(explain("text of the conversation", got=got, expected="text with ordinary tokens"))

    def _spellings(self, text: str) -> Iterator[list[int]]:
        """Yield candidate encodings of a protected token's text, the most natural one first."""
        if not self._lead:
            self._reset_backend()
            # This setting splits special tokens, but not all added tokens.
            self._backend.encode_special_tokens = True
            try:
                yield self._encode_raw(text)
            finally:
                self._backend.encode_special_tokens = False
        for cut in range(1, len(text)):
            first_ids, second_ids = self._encode_texts([text[:cut], text[cut:]])
            yield first_ids + second_ids

    def _encode_raw(self, text: str) -> list[int]:
        with catch_tokenizer_panics(self._tokenizer):
            return self._backend.encode(text, add_special_tokens=False).ids if text else []

    def _find_leading_token(self) -> str:
        """Return a special token to prepend to every text if the tokenizer treats the start of a text specially.

        SentencePiece tokenizers, for example, add a space there. The id of the prepended token is removed afterwards.
        """
        # Tokens that strip whitespace around them come last.
        strips = self._protected.lstrip_tokens | self._protected.rstrip_tokens
        for token in sorted(self._protected.special, key=lambda token: (token in strips, token)):
            ids = self._encode_raw(token + "a")
            if ids[:1] == [self._protected.ids[token]]:
                return "" if ids[1:] == self._encode_raw("a") else token
        return ""

    def _token_index(self, segment: _Segment, offset: int) -> int:
        """Return the index of the token that contains character `offset` of the segment."""
        self._reset_backend()
        skip, position = (1, offset + len(self._lead)) if self._lead else (0, offset)
        with catch_tokenizer_panics(self._tokenizer):
            offsets = self._backend.encode(self._lead + segment.text, add_special_tokens=False).offsets[skip:]
        return next((index for index, (_, end) in enumerate(offsets) if end > position), len(offsets))


# A byte in vocabularies with byte fallback: "<0x0A>" -> "0A"; not "<0xA>".
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT_CHARACTER = "\ufffd"


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Return the text of each token; bytes of incomplete characters become lone surrogates (surrogateescape).

    So `join_token_texts` gives the same text for consecutive tokens as the tokenizer's own decoding.
    """
    backend = cast("Any", tokenizer).backend_tokenizer
    # Each token is decoded after another one, because decoders may drop a leading space at the start of a text.
    first = backend.token_to_id("a")
    lead = [] if first is None else [first]
    lead_text = backend.decode(lead, skip_special_tokens=False)
    texts: dict[int, str] = {}
    for index in dict.fromkeys(ids):
        text = backend.decode([*lead, index], skip_special_tokens=False)
        decoded = text.removeprefix(lead_text)
        texts[index] = decoded
        if _REPLACEMENT_CHARACTER in decoded:
            texts[index] = _restore_bytes(backend.id_to_token(index) or "", decoded)
    return [texts[index] for index in ids]


def join_token_texts(texts: Sequence[str]) -> str:
    """Join the texts of consecutive tokens; incomplete characters become U+FFFD."""
    return "".join(texts).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _restore_bytes(token: str, decoded: str) -> str:
    """Return the token's bytes as surrogate-escaped text, if the vocabulary shows them and they match the decoded
    text.
    """
    match, alphabet = _BYTE_TOKEN.fullmatch(token), _byte_alphabet()
    if match:
        raw = bytes.fromhex(match[1])
    elif token and all(character in alphabet for character in token):
        raw = bytes(alphabet[character] for character in token)
    else:
        return decoded
    return raw.decode("utf-8", "surrogateescape") if raw.decode("utf-8", "replace") == decoded else decoded


@cache
def _byte_alphabet() -> dict[str, int]:
    """Return the characters with which byte-level vocabularies write the 256 bytes, mapped to those bytes."""
    # GPT-2's alphabet: printable Latin-1 as itself, the other bytes from U+0100 on, in order.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    other_bytes = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(other_bytes)}
