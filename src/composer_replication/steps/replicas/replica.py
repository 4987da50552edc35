"""What every replica of `crf diloco` runs: it gets the run's files, trains, and leaves the outcome in the bucket."""

from __future__ import annotations

import importlib
import inspect
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from composer_replication.canonical_json import encode
from composer_replication.diloco.store import open_store
from composer_replication.errors import InputError, explain
from composer_replication.steps.replicas.bucket_files import CONFIG, digests_of, download, trained_files, upload
from composer_replication.steps.replicas.launches import launch_key

DONE = "done.json"
FOLDER_VARIABLE = "CRF_REPLICA_FOLDER"


def train(
    *,
    manager: Any,
    rank: int,
    world_size: int,
    bucket: str,
    launch: int,
    module: str,
    function: str,
    arguments: Mapping[str, Any],
    files: Mapping[str, str],
) -> dict[str, Any]:
    """Call the trainer; the folder that its answer names as `saved` goes to the bucket."""
    store = open_store(bucket)
    trainer_arguments = dict(arguments)
    with tempfile.TemporaryDirectory(prefix=f"crf-replica-{rank}-") as folder:
        os.environ[FOLDER_VARIABLE] = folder  # where a trainer may write what is needed no longer than this
        if files:
            download(store, launch_key(launch, "input"), files, Path(folder))
            trainer_arguments |= {"config": str(Path(folder) / CONFIG), "overrides": _overrides(folder)}
        value = _trainer(module, function, trainer_arguments)(
            **trainer_arguments, manager=manager, rank=rank, world_size=world_size
        )
        answer = dict(value) if isinstance(value, Mapping) else {"value": value}
        saved = answer.pop("saved", None)
        prefix = launch_key(launch, "output", f"{rank:03d}")
        weights = trained_files(Path(saved)) if saved else {}
        upload(store, prefix, weights)
        # Last, so that who sees it sees all of it.
        store.put(
            f"{prefix}/{DONE}", encode({"files": digests_of(weights), "answer": answer}, where="a replica's answer")
        )
        return answer


def _trainer(module: str, function: str, arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """The trainer; InputError where it is not there or does not take what it is given, which no other start mends."""
    trainer = getattr(importlib.import_module(module), function, None)
    if trainer is None:
        raise InputError(explain(f"--trainer-fn {function}", got="no such function", expected=f"one of {module}"))
    try:
        # Its own, not that of what it wraps: a decorator may supply arguments.
        inspect.signature(trainer, follow_wrapped=False).bind(**arguments, manager=None, rank=0, world_size=1)
    except ValueError:  # one that does not say what it takes, such as a built-in: the call will
        return trainer
    except TypeError as error:
        fix = "Its arguments are those of --trainer-kwargs-json, and what --round says of the outer loop."
        expected = "arguments that it takes, with manager, rank and world_size"
        raise InputError(
            explain(f"trainer {module}.{function}", got=str(error).removeprefix("got "), expected=expected, fix=fix)
        ) from None
    return trainer


def _overrides(folder: str) -> list[str]:
    """Where this machine has the run, and the model that comes with the package."""
    from composer_replication.batch.model_folder import STUDENT, resolve_model
    from composer_replication.config.presets import load_with_preset

    overrides = [f"train.run={folder}", f"train.output={folder}"]
    is_student = load_with_preset(Path(folder) / CONFIG).train.model == STUDENT
    return [*overrides, f"train.model={resolve_model(STUDENT)}"] if is_student else overrides
