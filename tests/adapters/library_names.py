"""What a library has to have by name: for the tests that pin what the adapters take for granted."""

from __future__ import annotations

import inspect


def named(library, path: str, says: str):
    """What stands below a library's module under a dotted path; `says` is the library and its version."""
    value = library
    for part in path.split("."):
        assert hasattr(value, part), f"{says}: {path} is gone"
        value = getattr(value, part)
    return value


def assert_parameters(library, path: str, expected: list[str], says: str) -> None:
    present = list(inspect.signature(named(library, path, says)).parameters)
    assert present == expected, f"{says}: {path} takes {present}, the adapter expects {expected}"
