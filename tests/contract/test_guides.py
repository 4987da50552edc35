"""Every guide, run from top to bottom as a newcomer would: each command works and prints what the page shows."""

from __future__ import annotations

import re

import pytest
from guide_needs import needs_of, provide
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


def test_a_page_says_what_it_needs(tmp_path):
    assert needs_of("# Title\n\n<!-- needs: sessions, qwen2.5 -->\n\ntext <!-- needs: x -->\n") == [
        "sessions",
        "qwen2.5",
    ]
    provide("# needs nothing", tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="a guide needs 'gpu', expected sessions or one of"):
        provide("<!-- needs: gpu -->", tmp_path)


def test_the_guide_to_masks_shows_three_kinds_of_sites_as_they_print():
    page = (ROOT / "docs" / "guides" / "inspect.md").read_text(encoding="utf-8")
    shown = ["\n".join(each.expected or ()) for each in steps(page) if each.command.startswith("crf inspect ")]
    rows_of_both, all_of_them = r"\d+\.\.\d+.*\d+\.\.\d+.*", r"\((\d+)\D+\1\)$"
    taught = [each for each in shown if re.search(rows_of_both + all_of_them, each, re.MULTILINE)]
    assert len({re.search(r"^site \w+  (\w+)", each)[1] for each in taught}) >= 3
    assert any("⟦⟪" in each.split("student:")[1] for each in taught)  # a turn that is a call and nothing else
    assert str(ROOT) not in page
