"""The embedded student: a 5M-parameter agent that works in the workspace, errs at a useful rate and follows hints.

`README.md` here is its card; `weights` is a folder that `from_pretrained` reads: Qwen3 in bf16, a tokenizer of its own
and a chat template with tools. `scripts/student` made it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

__all__ = ["TRAINED_CONTEXT", "load_student", "student_folder"]
TRAINED_CONTEXT = 2048
"""Tokens of the longest context that it has seen; it has more positions, and has learnt nothing about them."""


def student_folder() -> Path:
    """The folder of weights, tokenizer and template; what `crf train --model` and any `from_pretrained` take."""
    return Path(__file__).parent / "weights"


def load_student(**options: Any) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerBase]:
    """Model and tokenizer; `options` as `from_pretrained` takes them, such as `dtype`."""
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    folder = student_folder()
    model = Qwen3ForCausalLM.from_pretrained(folder, **options)
    return model, AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
