"""Escaped text to token ids, piece by piece: the same ids in every context, special tokens only from the template.

And back: what single tokens say, without loss.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from composer_replication.batch.model_folder import tokenizing
from composer_replication.batch.render.escape import ProtectedTokens
from composer_replication.errors import InputError, explain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_MAX_CACHED_CHARS = 1 << 25  # contexts repeat where a template breaks a session into several sequences


class _Segment(NamedTuple):
    """A stretch of a piece between two boundaries: `token` is one protected token, otherwise `text` is encoded."""

    start: int  # in the escaped piece
    text: str
    token: int | None = None
    is_quoted: bool = False  # looks like a protected token and is none


class PieceEncoder:
    """Encodes pieces of a rendering on their own.

    A protected token ends the text before it for every tokenizer, so text is encoded from one to the next: equal
    stretches give equal ids wherever they stand, and are encoded once.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, protected: ProtectedTokens) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            what = f"tokenizer {type(tokenizer).__name__}"
            expected = "a fast one (with a backend_tokenizer)"
            raise InputError(explain(what, got="a slow one", expected=expected, fix="Load it with AutoTokenizer."))
        self._tokenizer, self._backend, self._protected = tokenizer, backend, protected
        self.protected_ids = frozenset(protected.ids.values())
        self._cache: dict[_Segment, list[int]] = {}
        self._cached_chars = 0
        self._lead = ""
        self._lead = self._leading_token()

    def encode(self, pieces: Sequence[str]) -> list[list[int]]:
        """Ids of each piece of escaped text."""
        cut = [list(self._segments(piece)) for piece in pieces]
        self._fill_cache([segment for segments in cut for segment in segments])
        return [[index for segment in segments for index in self._ids(segment)] for segments in cut]

    def token_at(self, piece: str, position: int) -> int:
        """Index of the token that holds the character at `position` of the escaped piece; its length if none does."""
        segments = list(self._segments(piece))
        self._fill_cache(segments)
        before = 0
        for segment in segments:
            if segment.start >= position:
                return before
            inside = len(self._protected.plain(piece[segment.start : position]))
            if segment.token is None and inside < len(segment.text):
                return before + self._offset_index(segment, inside)
            before += len(self._ids(segment))
        return before

    def _segments(self, piece: str) -> Iterator[_Segment]:
        start, parts = 0, list[str]()
        after = 0
        for match in self._protected.boundary.finditer(piece):
            parts.append(piece[after : match.start()])
            after = match.end()
            if match[1] is None:  # an escaped private-use character: ordinary text
                parts.append(match[0][1])
                continue
            token = self._protected.ids.get(match[1])
            meant = match[1] if token is not None else self._protected.meaning(match[1])
            if not meant and not self._splits(parts, piece[after:]):
                continue  # an edge where nothing would be forged
            text = "".join(parts)
            if token is not None and meant in self._protected.swallows_before:
                text = text.rstrip()
            if text:
                yield _Segment(start, text)
            if meant:
                yield _Segment(match.start(), meant, token, is_quoted=token is None)
            if token is not None and meant in self._protected.swallows_after:
                after += len(piece[after:]) - len(piece[after:].lstrip())
            start, parts = after, []
        if text := "".join(parts) + piece[after:]:
            yield _Segment(start, text)

    def _splits(self, parts: list[str], rest: str) -> bool:
        behind = self._protected.plain(rest[: 2 * self._protected.longest])
        return self._protected.splits_at_edge("".join(parts), behind)

    def _ids(self, segment: _Segment) -> list[int]:
        return [segment.token] if segment.token is not None else self._cache[segment._replace(start=0)]

    def _fill_cache(self, segments: list[_Segment]) -> None:
        text_segments = {segment._replace(start=0) for segment in segments if segment.token is None}
        if self._cached_chars > _MAX_CACHED_CHARS:
            self._cache.clear()
            self._cached_chars = 0
        new = [segment for segment in text_segments if segment not in self._cache]
        if not new:
            return
        plain = [segment for segment in new if not segment.is_quoted]
        encoded = zip(plain, self._encode_texts([segment.text for segment in plain]), strict=True)
        self._cache.update((segment, self._unforged(segment.text, ids)) for segment, ids in encoded)
        self._cache.update((segment, self._quoted_ids(segment.text)) for segment in new if segment.is_quoted)
        self._cached_chars += sum(len(segment.text) for segment in new)

    def _encode_texts(self, texts: list[str]) -> list[list[int]]:
        self._reset_backend()
        skip = 1 if self._lead else 0
        led = [self._lead + text for text in texts] if skip else texts
        with tokenizing(self._tokenizer):
            return [encoding.ids[skip:] for encoding in self._backend.encode_batch_fast(led, add_special_tokens=False)]

    def _unforged(self, text: str, ids: list[int]) -> list[int]:
        """A tokenizer that rewrites text before it looks for tokens may find one that was not there."""
        if self.protected_ids.isdisjoint(ids):
            return ids
        letters = [index for char_ids in self._encode_texts(list(text)) for index in char_ids]
        if self.protected_ids.isdisjoint(letters):
            return letters
        got = f"{text[:40]!r}, which the tokenizer turns into a special token"
        raise InputError(explain("text of the conversation", got=got, expected="text that can be written out"))

    def _reset_backend(self) -> None:
        """The backend keeps the settings of whoever called the tokenizer last."""
        if self._backend.truncation is not None:
            self._backend.no_truncation()
        if self._backend.padding is not None:
            self._backend.no_padding()
        if self._backend.encode_special_tokens:
            self._backend.encode_special_tokens = False

    def _quoted_ids(self, text: str) -> list[int]:
        """Ids of a protected token's text as plain text: split by the tokenizer, or else cut in two by hand."""
        for ids in self._spellings(text):
            if ids and not self.protected_ids.intersection(ids):
                return ids
        got = f"{text!r}, which the tokenizer always turns into a special token"
        raise InputError(explain("text of the conversation", got=got, expected="text that can be written out"))

    def _spellings(self, text: str) -> Iterator[list[int]]:
        if not self._lead:
            self._reset_backend()
            self._backend.encode_special_tokens = True  # splits special tokens, but not every added one
            try:
                yield self._encode_raw(text)
            finally:
                self._backend.encode_special_tokens = False
        for cut in range(1, len(text)):
            left_ids, right = self._encode_texts([text[:cut], text[cut:]])
            yield left_ids + right

    def _encode_raw(self, text: str) -> list[int]:
        with tokenizing(self._tokenizer):
            return self._backend.encode(text, add_special_tokens=False).ids if text else []

    def _leading_token(self) -> str:
        """A special token to put before every text where the tokenizer treats the start of a text in its own way."""
        strips = self._protected.swallows_before | self._protected.swallows_after
        for token in sorted(self._protected.special, key=lambda token: (token in strips, token)):
            led = self._encode_raw(token + "a")
            if led[:1] == [self._protected.ids[token]]:
                return "" if led[1:] == self._encode_raw("a") else token
        return ""

    def _offset_index(self, segment: _Segment, inside: int) -> int:
        self._reset_backend()
        skip, position = (1, inside + len(self._lead)) if self._lead else (0, inside)
        with tokenizing(self._tokenizer):
            offsets = self._backend.encode(self._lead + segment.text, add_special_tokens=False).offsets[skip:]
        return next((index for index, (_, end) in enumerate(offsets) if end > position), len(offsets))


_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_LOST = "\ufffd"


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """The text of each token. A byte that is no whole character is a lone surrogate, as `surrogateescape` has it.

    So `joined_text` of any stretch of tokens is what the tokenizer decodes it to.
    """
    backend = cast("Any", tokenizer).backend_tokenizer
    # After another token: alone, a decoder may drop the space that a token begins with.
    first = backend.token_to_id("a")
    lead = [] if first is None else [first]
    lead_text = backend.decode(lead, skip_special_tokens=False)
    texts: dict[int, str] = {}
    for index in dict.fromkeys(ids):
        text = backend.decode([*lead, index], skip_special_tokens=False)
        decoded = text.removeprefix(lead_text)
        texts[index] = _with_bytes(backend.id_to_token(index) or "", decoded) if _LOST in decoded else decoded
    return [texts[index] for index in ids]


def joined_text(texts: Sequence[str]) -> str:
    """The text that the tokens make together; what stays half a character becomes U+FFFD."""
    return "".join(texts).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _with_bytes(token: str, decoded: str) -> str:
    """The token's bytes, if they can be told from how the vocabulary writes it and agree with what is decoded."""
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
    """How byte-level vocabularies write bytes: printable Latin-1 as itself, the rest from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    other_bytes = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(other_bytes)}
