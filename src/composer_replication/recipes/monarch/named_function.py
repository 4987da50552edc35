"""Functions that a run names instead of sending: an actor imports them where it runs, and code is never an argument."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from composer_replication.errors import InputError, explain


def function_named(name: str, *, what: str) -> Callable[..., Any]:
    """`package.module:function`, imported."""
    module, colon, function = name.partition(":")
    expected = '"package.module:function"'
    if not colon or not module or not function:
        raise InputError(explain(what, got=repr(name), expected=expected))
    try:
        target: Any = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        fix = "The actor's process must be able to import it: install it, or put its folder into PYTHONPATH."
        raise InputError(explain(what, got=f"{name}: {error}", expected=f"{expected} that exists", fix=fix)) from error
    if not callable(target):
        raise InputError(explain(what, got=f"{name}, a {type(target).__name__}", expected="a function"))
    return target
