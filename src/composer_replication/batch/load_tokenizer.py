"""A tokenizer by folder or by name, or an error that says what was tried."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_replication.errors import InputError, explain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FIX = "Pass a folder with tokenizer.json in it, or the name of a model that is in the Hugging Face cache"


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """`AutoTokenizer.from_pretrained`; what is on this machine already is loaded without asking the network."""
    from transformers import AutoTokenizer

    what, is_folder = f"tokenizer {name!r}", bool(name) and Path(name).is_dir()
    reason: Exception | None = None
    # A broken folder shows as an OSError, a ValueError or a missing key, depending on which of its files it is.
    for options in ({"local_files_only": True}, {}):
        if reason is not None and (is_folder or not _is_model_name(name)):
            break  # no network could help
        try:
            loaded: Any = AutoTokenizer.from_pretrained(name, **options)
            return loaded
        except (OSError, ValueError, LookupError) as error:
            reason = error
    expected = "a tokenizer that loads"
    if is_folder:
        got = f"a folder without one ({_first_line(reason)})"
        raise InputError(explain(what, got=got, expected=expected, fix=f"{_FIX}.")) from reason
    got = "no folder of that name"
    if _is_model_name(name):
        got += f", and no model that is cached or can be downloaded now ({_first_line(reason)})"
    raise InputError(explain(what, got=got, expected=expected, fix=f"{_FIX}, or can be downloaded.")) from reason


def _is_model_name(name: str) -> bool:
    """`owner/model` or `model`; anything else can only be a path."""
    parts = name.split("/")
    return len(parts) <= 2 and all(part and part.strip(".~") == part for part in parts)


def _first_line(error: Exception | None) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip(' :')}" if lines else type(error).__name__
