"""Expect a refusal by its class and the facts in its fields, never by its wording."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from composer_replication.errors import ComposerError


@contextmanager
def refusal(
    error: type[ComposerError] = ComposerError, *, what: str = "", got: str = "", expected: str = "", fix: str = ""
) -> Iterator[pytest.ExceptionInfo]:
    """Expect `error`, with each given text somewhere in the field of that name.

    Give names, numbers, paths and commands: `refusal(ConfigError, what="train.batch.budget", got="-1")`.
    """
    with pytest.raises(error) as caught:
        yield caught
    facts = {"what": what, "got": got, "expected": expected, "fix": fix}
    missing = {name: fact for name, fact in facts.items() if fact not in getattr(caught.value, name)}
    assert not missing, f"{missing} not in the fields of {caught.value!r}"
