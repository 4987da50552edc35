"""Every guide, run from top to bottom as a newcomer would: each command works and prints what the page shows."""

from __future__ import annotations

import pytest
from guide_pages import play, steps
from repository import ROOT, relative

GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))


@pytest.mark.parametrize("page", GUIDES, ids=relative)
def test_a_guide_runs_and_prints_what_it_shows(page, tmp_path):
    num_compared = 0
    for step, printed in play(page.read_text(encoding="utf-8"), tmp_path):
        if step.expected is not None:
            assert printed == step.expected, f"{page.name}:{step.line}: {step.command}"
            num_compared += 1
    assert num_compared > 0


def test_commands_are_found_with_their_output():
    found = steps("```console\n$ one\na\nb\n$ two\n```\n\n```python\nx = 1\n```\n")
    assert [(each.command, each.line, each.expected) for each in found] == [
        ("one", 2, ["a", "b"]),
        ("two", 5, None),
        ("x = 1", 9, None),
    ]
