"""The page on scale says what its command prints."""

from __future__ import annotations

from pathlib import Path

import pytest

import diloco_scale

PAGE = Path(__file__).resolve().parents[3] / "docs" / "concepts" / "diloco-scale.md"


@pytest.mark.parametrize("payload", sorted(diloco_scale.PAYLOADS))
@pytest.mark.parametrize("place", sorted(diloco_scale.PLACES))
def test_the_page_s_rows_are_the_simulation_s(payload, place):
    row = diloco_scale.row_of_scale(payload, place, 8)
    assert f"| {' | '.join(map(str, row))} |" in PAGE.read_text(encoding="utf-8").splitlines()
