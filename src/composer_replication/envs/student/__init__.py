"""Load the embedded student: a 5M-parameter agent that works in the workspace, makes errors and follows hints.

`README.md` in this folder is its model card. `weights` is a folder for `from_pretrained`: a Qwen3 model in bf16 with
its own tokenizer and a chat template with tools. `scripts/student` trains it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

__all__ = ["TRAINED_CONTEXT", "load_student", "student_folder"]
TRAINED_CONTEXT = 2048
"""Tokens of the longest context in its training. The model accepts longer ones, but was not trained on them."""


def student_folder() -> Path:
    """Return the folder that contains weights, tokenizer and template, for `crf train --model` or any
    `from_pretrained`.
    """
    return Path(__file__).parent / "weights"


def load_student(**options: Any) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerBase]:
    """Return the model and the tokenizer. `options`, such as `dtype`, go to the model's `from_pretrained`."""
    # Imported here because transformers takes seconds to import and most callers only need the folder.
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    folder = student_folder()
    model = Qwen3ForCausalLM.from_pretrained(folder, **options)
    return model, AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
