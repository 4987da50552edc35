"""Load the tokenizer, config and weights of a model from an untrusted source, without running any of its code.

A model folder can name Python files of its own (`auto_map`), and by default transformers asks on the terminal whether
to run them. Everything here is loaded with `trust_remote_code=False`, from safetensors, and from the folder itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, cast

from composer_replication.errors import ComposerError, InputError, explain, is_rust_panic
from composer_replication.optional import require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STUDENT = "student"
_FIX = "Pass a folder that contains tokenizer.json, or the name of a model that is in the Hugging Face cache"
_HUB_TIMEOUT_S = 5.0
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
# The shard index of the largest published models has 10 MB.
_MAX_INDEX_BYTES = 64 << 20


def resolve_model(name: str) -> str:
    """Return the folder or hub name to pass to `from_pretrained`.

    `student` resolves to the folder of the packaged 5M demo student, unless the working directory has a folder of that
    name. Every other name is returned unchanged.
    """
    if name != STUDENT or Path(name).is_dir():
        return name
    # Lazy: `envs` is a layer above this one.
    from composer_replication.envs.student import student_folder

    return str(student_folder())


def check_model_name(name: str, *, what: str, expected: str = "a model's folder, or a name on the hub") -> None:
    """Raise InputError unless the name is a model folder, or a model in the cache or on the hub.

    `what` is the option or key that holds the name; error messages mention it. The check imports none of the libraries
    that load models, because importing them takes seconds.
    """
    from huggingface_hub import try_to_load_from_cache

    name = resolve_model(name)
    if name and Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise InputError(explain(what, got="a folder without config.json", expected=expected))
        return
    absence = "" if _is_model_name(name) else "it is not a valid hub name"
    if not absence and not isinstance(try_to_load_from_cache(name, "config.json"), str):
        absence = hub_absence_reason(name)
    if absence:
        got = f"no such folder, not in the cache, and {absence}"
        raise InputError(explain(what, got=got, expected=expected))


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer, and download it only if it is not on this machine. Raises InputError if it cannot be
    loaded.
    """
    from transformers import AutoTokenizer

    name = resolve_model(name)
    what, is_folder = f"tokenizer {name!r}", bool(name) and Path(name).is_dir()
    reason: BaseException | None = None
    absence = ""
    _check_index_files(name)
    for options in ({"local_files_only": True}, {}):
        # Loading from this machine has failed: use the network only if the hub has the model.
        if reason is not None and (is_folder or not _is_model_name(name) or (absence := hub_absence_reason(name))):
            break
        try:
            loaded: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options)
            # Whole sessions are tokenized before they are cut into windows, so the warning about long sequences is
            # noise.
            loaded.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
            return loaded
        # Depending on which file is broken, transformers raises OSError, ValueError or KeyError, and the tokenizers
        # library a bare Exception or a Rust panic, which is a BaseException.
        except BaseException as error:
            if not isinstance(error, Exception) and not is_rust_panic(error):
                raise
            reason = error
    expected = "a tokenizer that loads"
    if is_folder:
        got = f"a folder without one ({_first_line(reason)})"
        raise InputError(explain(what, got=got, expected=expected, fix=f"{_FIX}.")) from reason
    got = "no such folder"
    if _is_model_name(name):
        got += f", and no model that is cached or can be downloaded now ({absence or _first_line(reason)})"
    raise InputError(explain(what, got=got, expected=expected, fix=f"{_FIX}, or can be downloaded.")) from reason


def load_config(name: str, *, what: str) -> Any:
    """Load a model's config. Raises InputError if it cannot be loaded; `what` is the option or key that error
    messages mention.
    """
    from transformers import AutoConfig

    name = resolve_model(name)
    with catch_load_errors(name, what):
        return _load_cached_first(AutoConfig.from_pretrained, name, what, trust_remote_code=False)


def load_model(name: str, *, what: str, **options: Any) -> Any:
    """Load a causal language model; `options` are passed to `from_pretrained`. Raises InputError if it cannot be
    loaded.
    """
    from transformers import AutoModelForCausalLM

    name = resolve_model(name)
    with catch_load_errors(name, what):
        load = AutoModelForCausalLM.from_pretrained
        return _load_cached_first(load, name, what, trust_remote_code=False, use_safetensors=True, **options)


def load_adapter(model: Any, folder: str | Path, *, what: str) -> Any:
    """Apply the adapter in a folder to `model`, and return the result in eval mode. Raises InputError if it cannot
    be loaded.
    """
    # Without safetensors, PEFT would unpickle `adapter_model.bin`, which can run any code.
    if not (Path(folder) / _ADAPTER_WEIGHTS).is_file():
        fix = "Save the adapter again with a PEFT that writes safetensors; pickled weights are not read."
        raise InputError(
            explain(
                what, got=f"no {_ADAPTER_WEIGHTS} in {folder}", expected="the adapter's weights as safetensors", fix=fix
            )
        )
    peft = require("peft", extra="train")
    with catch_load_errors(str(folder), what):
        return peft.PeftModel.from_pretrained(model, str(folder), is_trainable=False).eval()


def _load_cached_first(load: Callable[..., Any], name: str, what: str, **options: Any) -> Any:
    """Load from a folder or from the cache; otherwise download from the hub. Raises InputError if the name is in
    none of them.
    """
    if not name or Path(name).is_dir():
        return load(name, **options)
    try:
        return load(name, local_files_only=True, **options)
    except OSError:
        absence = hub_absence_reason(name) if _is_model_name(name) else "it is not a valid hub name"
    if absence:
        got = f"no folder {name!r}, not in the cache, and {absence}"
        expected = "a folder or hub name of a causal language model that transformers knows"
        fix = "Check the name and the working directory."
        raise InputError(explain(what, got=got, expected=expected, fix=fix))
    return load(name, **options)


def hub_absence_reason(name: str) -> str:
    """Return the reason why a model cannot be downloaded from the hub; an empty string if no reason is known."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage] (of whichever HTTP library this version is built on)
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    # "runs/adapter" beside a folder "runs" is a mistyped path, which must not be sent to the hub.
    if "/" in name and Path(name).parent.is_dir():
        return f"{Path(name).parent} is a folder, so this is a path and not a hub name"
    # One short request. `from_pretrained` would request file after file and retry for minutes.
    try:
        HfApi().model_info(name, timeout=_HUB_TIMEOUT_S)
    # The model exists. Loading it will raise an error that says how to get access.
    except GatedRepoError:
        return ""
    except RepositoryNotFoundError:
        return "the hub has no model of that name (a private one needs HF_TOKEN)"
    except OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE is set"
    except (HTTPError, OSError) as error:
        return f"the hub cannot be reached ({_first_line(error)})"
    return ""


@contextmanager
def catch_load_errors(name: str, what: str) -> Iterator[None]:
    """Convert any error that a broken or hostile folder causes in a library to an InputError that names the folder."""
    try:
        _check_index_files(name)
        yield
    except ComposerError:
        raise
    except MemoryError as error:
        got = f"{name!r}, which needs more memory than is available"
        raise InputError(explain(what, got=got, expected="a model that fits")) from error
    # Broad: tokenizers raises bare `Exception`, safetensors and the hub their own classes, and a bad config any of a
    # dozen built-in ones.
    except BaseException as error:
        if not isinstance(error, Exception) and not is_rust_panic(error):
            raise
        fix = "Use a model that transformers can load without the model's own code, which is never run here."
        got = f"{name!r}: {_first_line(error)}"
        expected = "a folder or hub name of a causal language model that transformers knows"
        raise InputError(explain(what, got=got, expected=expected, fix=fix)) from error


@contextmanager
def catch_tokenizer_panics(tokenizer: Any) -> Iterator[None]:
    """Convert a panic in the tokenizers library to an InputError that names the tokenizer."""
    # A regular expression in `tokenizer.json` can exceed the step limit of the library's regex engine.
    try:
        yield
    except BaseException as error:
        if not is_rust_panic(error):
            raise
        what = f"tokenizer {getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__!r}"
        fix = "Use another tokenizer: the regular expressions in its tokenizer.json may exceed the library's limits."
        got = f"a panic in the tokenizers library ({_first_line(error)})"
        raise InputError(explain(what, got=got, expected="token ids of a text", fix=fix)) from error


def _check_index_files(name: str) -> None:
    """Raise InputError if a shard index in the folder points to files outside the folder."""
    folder = Path(name)
    if not name or not folder.is_dir():
        return
    for index in sorted(folder.glob("*.index.json")):
        if index.stat().st_size > _MAX_INDEX_BYTES:
            got = f"{index.stat().st_size:,} bytes"
            raise InputError(explain(str(index), got=got, expected=f"at most {_MAX_INDEX_BYTES:,}"))
        for shard in sorted(_shards(index)):
            # "model-00001-of-00002.safetensors" passes; "../model.safetensors", "/etc/model" and "a\\b" do not.
            if PurePosixPath(shard).name != shard or "\\" in shard or shard in ("", ".", ".."):
                fix = "Do not use this folder: its index points to files outside of it."
                expected = "names of files in the same folder"
                raise InputError(explain(f"{index.name} of {name!r}", got=repr(shard), expected=expected, fix=fix))


def _shards(index: Path) -> set[str]:
    """Return the names of the weight files listed in an index such as `model.safetensors.index.json`."""
    try:
        content: Any = json.loads(index.read_bytes())
        return {str(shard) for shard in cast("dict[str, object]", content["weight_map"]).values()}
    # RecursionError: JSON of thousands of nested brackets.
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        expected = "JSON with a weight_map"
        raise InputError(explain(str(index), got=_first_line(error), expected=expected)) from error


def _first_line(error: BaseException | None) -> str:
    """Return the class of an error and the first line of its message, because libraries raise errors with long
    messages.
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip(' :')}" if lines else type(error).__name__


def _is_model_name(name: str) -> bool:
    """Whether a name has the form of a hub name: `owner/model` or `model`, but not `./model` or `~/model`."""
    parts = name.split("/")
    return len(parts) <= 2 and all(part and part.strip(".~") == part for part in parts)
