"""Tokenizer, config and weights of a model that somebody else made: read as data, none of its code is run.

A folder can name Python files of its own (`auto_map`), and transformers asks on the terminal whether to run them unless
it is told not to. Everything here is loaded with `trust_remote_code=False`, and files that are read stay in the folder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, cast

from composer_replication.errors import (
    ComposerError,
    InputError,
    explain,
    is_rust_panic,
)
from composer_replication.optional import require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STUDENT = "student"
_FIX = "Pass a folder with tokenizer.json in it, or the name of a model that is in the Hugging Face cache"
_SECONDS_FOR_HUB = 5.0
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_LARGEST_INDEX = 64 << 20  # bytes; the index of the largest published models has 10 MB


def resolve_model(name: str) -> str:
    """Return what `from_pretrained` takes for a model's name: a folder that is here, or a name on the hub, as it is.

    `student`, where no folder here has that name, is the folder of the tiny model that comes with the package.
    """
    if name != STUDENT or Path(name).is_dir():
        return name
    from composer_replication.envs.student import student_folder

    return str(student_folder())


def hide_progress_bars() -> None:
    """Those of the hub's library and of transformers, which asks it once, when it is loaded."""
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    if "transformers" in sys.modules:
        from transformers.utils import logging

        logging.disable_progress_bar()


def check_model_name(name: str, *, what: str, expected: str = "a model's folder, or a name on the hub") -> None:
    """Refuse a name that stands for no model, before the libraries that would load one are: they take seconds."""
    from huggingface_hub import try_to_load_from_cache

    name = resolve_model(name)
    if name and Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise InputError(explain(what, got="a folder without config.json", expected=expected))
        return
    absent = "that is no name on the hub" if not _is_model_name(name) else ""
    if not absent and not isinstance(try_to_load_from_cache(name, "config.json"), str):
        absent = not_on_hub(name)
    if absent:
        got = f"no folder of that name here, nothing in the cache, and {absent}"
        raise InputError(explain(what, got=got, expected=expected))


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """`AutoTokenizer.from_pretrained`; what is on this machine already is loaded without asking the network.

    The `except` is broad: a broken folder shows as an OSError, a ValueError, a missing key or, from the tokenizers
    library, as a bare Exception, depending on which of its files it is.
    """
    from transformers import AutoTokenizer

    name = resolve_model(name)
    what, is_folder = f"tokenizer {name!r}", bool(name) and Path(name).is_dir()
    reason: BaseException | None = None
    absent = ""
    _check_index_files(name)
    for options in ({"local_files_only": True}, {}):
        if reason is not None and (is_folder or not _is_model_name(name) or (absent := not_on_hub(name))):
            break  # no network could help
        try:
            loaded: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options)
            # Sessions are tokenized whole, then cut into windows: that one is longer than a context is no news.
            loaded.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
            return loaded
        except BaseException as error:
            if not isinstance(error, Exception) and not is_rust_panic(error):
                raise
            reason = error
    expected = "a tokenizer that loads"
    if is_folder:
        got = f"a folder without one ({_first_line(reason)})"
        raise InputError(explain(what, got=got, expected=expected, fix=f"{_FIX}.")) from reason
    got = "no folder of that name"
    if _is_model_name(name):
        got += f", and no model that is cached or can be downloaded now ({absent or _first_line(reason)})"
    raise InputError(explain(what, got=got, expected=expected, fix=f"{_FIX}, or can be downloaded.")) from reason


def load_config(name: str, *, what: str) -> Any:
    """The config of a model, without its weights; `what` says where the name was given."""
    from transformers import AutoConfig

    name = resolve_model(name)
    with reading(name, what):
        return _loaded(AutoConfig.from_pretrained, name, what, trust_remote_code=False)


def load_model(name: str, *, what: str, **options: Any) -> Any:
    """A causal language model; `options` as `from_pretrained` takes them."""
    from transformers import AutoModelForCausalLM

    name = resolve_model(name)
    with reading(name, what):
        load = AutoModelForCausalLM.from_pretrained
        return _loaded(load, name, what, trust_remote_code=False, use_safetensors=True, **options)


def load_adapter(model: Any, folder: str | Path, *, what: str) -> Any:
    """`model` with the adapter of a folder on it, for use and not for training.

    Where a folder has no safetensors PEFT would unpickle `adapter_model.bin`: that is refused.
    """
    if not (Path(folder) / _ADAPTER_WEIGHTS).is_file():
        fix = "Save the adapter again with a PEFT that writes safetensors; pickled weights are not read."
        raise InputError(explain(what, got=f"no {_ADAPTER_WEIGHTS} in {folder}", expected="one", fix=fix))
    peft = require("peft", extra="train")
    with reading(str(folder), what):
        return peft.PeftModel.from_pretrained(model, str(folder), is_trainable=False).eval()


def _loaded(load: Callable[..., Any], name: str, what: str, **options: Any) -> Any:
    """A folder as it is; a name from the cache if it is there, else from the hub if it has it, which is asked once."""
    if not name or Path(name).is_dir():
        return load(name, **options)
    try:
        return load(name, local_files_only=True, **options)
    except OSError:
        absent = not_on_hub(name) if _is_model_name(name) else "that is no name of a model"
    if absent:
        got = f"no folder {name!r}, nothing of that name in the cache, and {absent}"
        expected = "a folder or hub name of a causal language model that transformers knows"
        raise InputError(explain(what, got=got, expected=expected, fix="Look at the name, and at where you are."))
    return load(name, **options)


def not_on_hub(name: str) -> str:
    """Why the hub will not give us this model; empty where it will, or nobody can say.

    One short question: whoever loads would ask for file after file, with waits between, for minutes. A name behind a
    folder that is there is a path, and is not asked for.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage] (of whichever HTTP library this version is built on)
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    if "/" in name and Path(name).parent.is_dir():
        return f"{Path(name).parent} is a folder here, so this is a path and no name on the hub"
    try:
        HfApi().model_info(name, timeout=_SECONDS_FOR_HUB)
    except GatedRepoError:  # it is there; what is missing is said by whoever loads
        return ""
    except RepositoryNotFoundError:
        return "the hub has no model of that name (a private one needs HF_TOKEN)"
    except OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE is set"
    except (HTTPError, OSError) as error:
        return f"the hub cannot be reached ({_first_line(error)})"
    return ""


@contextmanager
def reading(name: str, what: str) -> Iterator[None]:
    """Whatever a broken or hostile folder makes a library raise is one error that names the folder.

    This `except` is broad: tokenizers raises bare `Exception`, safetensors and the hub classes of their own, and an odd
    config any of a dozen.
    """
    try:
        _check_index_files(name)
        yield
    except ComposerError:
        raise
    except MemoryError as error:
        got = f"{name!r}, which asks for more memory than there is"
        raise InputError(explain(what, got=got, expected="a model that fits")) from error
    except BaseException as error:
        if not isinstance(error, Exception) and not is_rust_panic(error):
            raise
        fix = "Files of its own code are never run; what transformers itself cannot load cannot be used here."
        got = f"{name!r}: {_first_line(error)}"
        expected = "a folder or hub name of a causal language model that transformers knows"
        raise InputError(explain(what, got=got, expected=expected, fix=fix)) from error


@contextmanager
def tokenizing(tokenizer: Any) -> Iterator[None]:
    """Raise InputError where the tokenizers library panics: over an expression of a `tokenizer.json`, for one."""
    try:
        yield
    except BaseException as error:
        if not is_rust_panic(error):
            raise
        what = f"tokenizer {getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__!r}"
        fix = "Use another tokenizer: the expressions in its tokenizer.json may need more steps than the library takes."
        got = f"a failure inside of its library ({_first_line(error)})"
        raise InputError(explain(what, got=got, expected="token ids of a text", fix=fix)) from error


def _check_index_files(name: str) -> None:
    """The files that an index of shards names lie in the folder itself."""
    folder = Path(name)
    if not name or not folder.is_dir():
        return
    for index in sorted(folder.glob("*.index.json")):
        if index.stat().st_size > _LARGEST_INDEX:
            got = f"{index.stat().st_size:,} bytes"
            raise InputError(explain(str(index), got=got, expected=f"at most {_LARGEST_INDEX:,}"))
        for shard in sorted(_shards(index)):
            if PurePosixPath(shard).name != shard or "\\" in shard or shard in ("", ".", ".."):
                fix = "Do not use this folder: its index reads files from elsewhere."
                expected = "names of files in the same folder"
                raise InputError(explain(f"{index.name} of {name!r}", got=repr(shard), expected=expected, fix=fix))


def _shards(index: Path) -> set[str]:
    try:
        held: Any = json.loads(index.read_bytes())
        return {str(shard) for shard in cast("dict[str, object]", held["weight_map"]).values()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        expected = "JSON with a weight_map"
        raise InputError(explain(str(index), got=_first_line(error), expected=expected)) from error


def _first_line(error: BaseException | None) -> str:
    """What an error of a library says, short enough for a sentence."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip(' :')}" if lines else type(error).__name__


def _is_model_name(name: str) -> bool:
    """`owner/model` or `model`; anything else can only be a path."""
    parts = name.split("/")
    return len(parts) <= 2 and all(part and part.strip(".~") == part for part in parts)
