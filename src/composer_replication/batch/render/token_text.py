"""What single tokens say, without loss: their texts one after the other are the text of all of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
    known: dict[int, str] = {}
    for index in dict.fromkeys(ids):
        text = backend.decode([*lead, index], skip_special_tokens=False)
        shown = text.removeprefix(lead_text)
        known[index] = _with_bytes(backend.id_to_token(index) or "", shown) if _LOST in shown else shown
    return [known[index] for index in ids]


def joined_text(texts: Sequence[str]) -> str:
    """The text that the tokens make together; what stays half a character becomes U+FFFD."""
    return "".join(texts).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _with_bytes(token: str, shown: str) -> str:
    """The token's bytes, if they can be told from how the vocabulary writes it and agree with what is decoded."""
    match, alphabet = _BYTE_TOKEN.fullmatch(token), _byte_alphabet()
    if match:
        raw = bytes.fromhex(match[1])
    elif token and all(each in alphabet for each in token):
        raw = bytes(alphabet[each] for each in token)
    else:
        return shown
    return raw.decode("utf-8", "surrogateescape") if raw.decode("utf-8", "replace") == shown else shown


@cache
def _byte_alphabet() -> dict[str, int]:
    """How byte-level vocabularies write bytes: printable Latin-1 as itself, the rest from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
