"""Warnings are errors in our code; PyTorch's compiler warns from inside of itself, and an error there breaks it."""

from __future__ import annotations

from pathlib import Path

import pytest

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == _HERE:
            item.add_marker(pytest.mark.filterwarnings("default"))
