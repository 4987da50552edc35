"""DiLoCo: replicas on different machines train one model, and exchange weights only once in many steps.

store         object stores: in memory, in a folder, in a bucket, on the Hub
payload       a vector as bytes that a reader can verify
rounds        rounds of averaging over an object store
training      the outer loop of a replica around any training loop, over torchft's DiLoCo
tiny_trainer  a trainer for trying out a launch, and an example for your own
serverless    replicas on rented machines: executors that start them, and the program that they run

Importing this package does not import torch. Without torchft `DiLoCo`, `Manager` and `_DummyWork` are None, and
`make_diloco_outer_loop` raises an error that says what to install.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from composer_replication.optional import available as _available

if TYPE_CHECKING:
    from composer_replication.diloco.training import make_diloco_outer_loop

_TORCHFT_NAMES = {"DiLoCo": "torchft.local_sgd", "Manager": "torchft.manager", "_DummyWork": "torchft.work"}
_TORCHFT_AVAILABLE: bool = _available("torchft")

__all__ = ["make_diloco_outer_loop"]


def __getattr__(name: str) -> Any:
    if name == "make_diloco_outer_loop":
        return import_module("composer_replication.diloco.training").make_diloco_outer_loop
    if name not in _TORCHFT_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_TORCHFT_NAMES[name]), name) if _TORCHFT_AVAILABLE else None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_TORCHFT_NAMES})
