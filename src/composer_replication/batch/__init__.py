"""Convert conversations to the input of a training step: token ids, the rows that predict them, and batches of both.

    model_folder     load a model's tokenizer, config and weights without running any of its code
    trace_messages   convert the messages of a trace to a conversation
    render           render a conversation to token ids with exact spans
    hint_placement   insert a hint into the student's ids, which gives the hinted teacher's context
    pair_tokens      tokenize two answers to the same state
    site_view        show one error site the way training sees it
    tree             merge sequences that share prefixes into one tree of tokens
    alignment        the shift from tokens to the rows that predict them
    tree_batch       the input of `compose_loss`: the rows of each channel, in a tree or in padded sequences
    flat_batch       check the documented batch keys and convert them to those rows
    windows          cut a long session into windows, and pack trees into batches
    session_batch    convert a session of any length to tree batches

`build_batch` needs a model for its reference log-probs, so it lives in `trainer.objective` and is a lazy alias here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_replication.trainer.objective.smoke_chat import build_batch

__all__ = ["build_batch"]

# `trainer` imports this package, so the alias must not be resolved at import time.
_HOME = "composer_replication.trainer.objective.smoke_chat"


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(_HOME), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
