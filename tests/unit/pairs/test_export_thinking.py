"""An exported pair has thinking on both sides or on neither."""

from __future__ import annotations

import pytest

from composer_replication.pairs.export import build_preference_row


@pytest.mark.parametrize(
    ("chosen", "rejected", "kept"),
    [
        ("Yes.", "[THINKING] Hm.\nNo.", [None, None]),
        ("[THINKING] Hm.\nYes.", "No.", [None, None]),
        ("[THINKING] Hm.\nYes.", "[THINKING] So.\nNo.", ["Hm.", "So."]),
    ],
)
def test_thinking_of_one_side_alone_is_left_out(chosen, rejected, kept):
    state = [{"role": "user", "content": "Well?"}]
    pair = {"state_id": "s", "state_messages": state, "n_teachers_agreeing": 2, "chosen": chosen, "rejected": rejected}
    row = build_preference_row(pair)
    (yes,), (no,) = row["chosen"], row["rejected"]
    assert [yes.get("reasoning_content"), no.get("reasoning_content")] == kept
    assert (yes["content"], no["content"]) == ("Yes.", "No.")
