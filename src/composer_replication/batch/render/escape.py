"""Text that must never become a special token: sentinels stand for it while a template is at work.

A log may say `<|im_end|>` in a tool's output, in an argument, in a tool's name. Before rendering, every string that a
template writes as structure is replaced by one private-use character; after rendering, whatever still reads as a
special token was written by the template, and the sentinels are encoded as the plain text they stand for. Private-use
characters that were in the text to begin with are marked by an escape character first, so the way back is exact.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ESCAPE = "\U000f0000"  # the next character is meant literally
_FIRST_SENTINEL = 0xF0001
_PRIVATE = "\U000f0000-\U0010ffff"
_PRIVATE_CHARACTER = re.compile(f"[{_PRIVATE}]")
_ESCAPED = re.compile(f"[{_PRIVATE}](?:(?<={_ESCAPE}).)?", re.DOTALL)  # starts with a class: `re` skips to it fast
_EDGE = "\U000ffffd"  # stands for nothing, at an end of a text that a template could complete to a token
_RAW = "\U00100000"  # encloses the number of a raw text; see `raw_marker`
_RAW_MARKER = re.compile(f'"?{_RAW}([0-9]+){_RAW}"?')


class ProtectedTokens:
    """The strings only a template may write as tokens: special ones, and added ones that it writes itself.

    Other added tokens (Gemma's runs of newlines, HTML tags) are ordinary text, in training as in inference.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, structure: str) -> None:
        added = {token.content: (index, token) for index, token in tokenizer.added_tokens_decoder.items()}
        self.ids = {
            text: index
            for text, (index, token) in added.items()
            if text.strip() and (token.special or text in structure)
        }
        self.special = frozenset(text for text in self.ids if added[text][1].special)
        self._texts = sorted(self.ids, key=len, reverse=True)  # the longest match wins, as in the tokenizer
        self._sentinels = {text: chr(_FIRST_SENTINEL + number) for number, text in enumerate(self._texts)}
        self._meaning = {sentinel: text for text, sentinel in self._sentinels.items()} | {_EDGE: ""}
        self.swallows_before = frozenset(text for text in self.ids if added[text][1].lstrip)
        self.swallows_after = frozenset(text for text in self.ids if added[text][1].rstrip)
        self.longest = max(map(len, self._texts), default=0)
        self._beginnings = {text[:size] for text in self._texts for size in range(1, len(text))}
        self._endings = {text[size:] for text in self._texts for size in range(1, len(text))}
        tokens = _any_of(self._texts)
        self.pattern = re.compile(tokens)
        self._special_pattern = re.compile(_any_of([text for text in self._texts if text in self.special]))
        self._to_escape = re.compile(f"[{_PRIVATE}]|{tokens}")
        self.boundary = re.compile(f"{_ESCAPE}.|([{_PRIVATE}]|{tokens})", re.DOTALL)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._normalizer = getattr(backend, "normalizer", None)

    def escape(self, text: str) -> str:
        """The text with sentinels; a lone surrogate, which no tokenizer takes, becomes U+FFFD."""
        if not text.isascii():
            text = self._normalized_if_forged(without_surrogates(text))
        is_private = not text.isascii() and _PRIVATE_CHARACTER.search(text)
        return self._edged((self._to_escape if is_private else self.pattern).sub(self._sentinel, text))

    def escape_tree(self, value: Any) -> Any:
        """Every string of a JSON value escaped, keys included."""
        if isinstance(value, str):
            return self.escape(value)
        if isinstance(value, dict):
            return {self.escape(str(key)): self.escape_tree(member) for key, member in value.items()}
        if isinstance(value, list | tuple):
            return [self.escape_tree(element) for element in value]
        return value

    def plain(self, text: str) -> str:
        """The text that escaped text stands for."""
        return text if text.isascii() else _ESCAPED.sub(self._literal, text)

    def meaning(self, sentinel: str) -> str:
        return self._meaning[sentinel]

    def last_special(self, text: str) -> str | None:
        """The last special token that the template wrote into escaped text."""
        tokens = self._special_pattern.findall(text)
        return tokens[-1] if tokens else None

    def splits_at_edge(self, before: str, after: str) -> bool:
        """Whether two texts that meet at an edge would read as a token that neither of them holds."""
        both, border = before[-self.longest :] + after, min(len(before), self.longest)
        return any(match.start() < border < match.end() for match in self.pattern.finditer(both))

    def _edged(self, text: str) -> str:
        """A template may write `>` behind a name: half a token in a text must not become a whole one."""
        if len(text) < self.longest and any(text in token_text for token_text in self._texts if text):
            return f"{_EDGE}{text}{_EDGE}"
        sizes = range(1, min(self.longest, len(text)) + 1)
        end = _EDGE if any(text[-size:] in self._beginnings for size in sizes) else ""
        start = _EDGE if any(text[:size] in self._endings for size in sizes) else ""
        return f"{start}{text}{end}" if start or end else text

    def _sentinel(self, match: re.Match[str]) -> str:
        matched_text = match[0]
        return self._sentinels.get(matched_text) or _ESCAPE + matched_text

    def _literal(self, match: re.Match[str]) -> str:
        matched_text = match[0]
        return matched_text[1:] or self._meaning.get(matched_text, matched_text)

    def _normalized_if_forged(self, text: str) -> str:
        """Some tokenizers normalise before they look for added tokens: look-alikes are seen as they will be then."""
        if self._normalizer is None:
            return text
        normal = self._normalizer.normalize_str(text)
        return normal if len(self.pattern.findall(normal)) > len(self.pattern.findall(text)) else text


def raw_marker(number: int) -> str:
    """Stands for text that goes into the rendering as it is, even where the template would quote a string."""
    return f"{_RAW}{number}{_RAW}"


def insert_raw(rendered: str, raw: list[str]) -> str:
    """The rendering with every marker (and the quotes a template put around it) replaced by its text."""
    return _RAW_MARKER.sub(lambda match: raw[int(match[1])], rendered) if raw else rendered


def _any_of(texts: Iterable[str]) -> str:
    return "|".join(map(re.escape, texts)) or r"(?!)"


def without_surrogates(text: str) -> str:
    """Return the text with U+FFFD for each lone surrogate, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
