"""Conversations as what a training step reads: token ids, rows that predict targets, trees and padded batches.

    model_folder     tokenizer, config and weights of a model, read as data
    trace_messages   messages of a trace as a conversation
    render           a conversation as token ids with exact spans
    hint_placement   a teacher's context: the student's ids with a hint put in
    taught_turns     a hinted turn: its target tokens, and the same tokens in that context
    pair_tokens      two answers to one state: the same context, then each one's own tokens
    site_view        one error site as training reads it, for people to look at
    prefixes         which sequences share which prefixes
    tree             sequences that share prefixes as one tree of tokens
    alignment        tokens, and the rows that predict them
    tree_batch       what `compose_loss` reads: the rows of each channel, of a tree or of padded sequences
    flat_batch       the documented keys, checked and read into those rows
    windows          how a long session is cut
    session_records  what a session's channels ask for, and the windows that hold it
    session_batch    a session of any length as tree batches
    packed_batch     several trees in one batch

`build_batch` needs a model for its references: it lives in `objective` and is a lazy alias here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_replication.trainer.objective.smoke_chat import build_batch

__all__ = ["build_batch"]


_HOME = "composer_replication.trainer.objective.smoke_chat"


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(_HOME), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
