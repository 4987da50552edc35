"""A tokenizer by folder or by name, or an error that says what was tried."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_replication.batch.model_folder import check_index_files, first_line
from composer_replication.errors import InputError, explain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FIX = "Pass a folder with tokenizer.json in it, or the name of a model that is in the Hugging Face cache"


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """`AutoTokenizer.from_pretrained`; what is on this machine already is loaded without asking the network.

    The `except` is broad: a broken folder shows as an OSError, a ValueError, a missing key or, from the tokenizers
    library, as a bare Exception, depending on which of its files it is.
    """
    from transformers import AutoTokenizer

    what, is_folder = f"tokenizer {name!r}", bool(name) and Path(name).is_dir()
    reason: Exception | None = None
    check_index_files(name)
    for options in ({"local_files_only": True}, {}):
        if reason is not None and (is_folder or not _is_model_name(name)):
            break  # no network could help
        try:
            loaded: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options)
            return loaded
        except Exception as error:
            reason = error
    expected = "a tokenizer that loads"
    if is_folder:
        got = f"a folder without one ({first_line(reason)})"
        raise InputError(explain(what, got=got, expected=expected, fix=f"{_FIX}.")) from reason
    got = "no folder of that name"
    if _is_model_name(name):
        got += f", and no model that is cached or can be downloaded now ({first_line(reason)})"
    raise InputError(explain(what, got=got, expected=expected, fix=f"{_FIX}, or can be downloaded.")) from reason


def _is_model_name(name: str) -> bool:
    """`owner/model` or `model`; anything else can only be a path."""
    parts = name.split("/")
    return len(parts) <= 2 and all(part and part.strip(".~") == part for part in parts)
