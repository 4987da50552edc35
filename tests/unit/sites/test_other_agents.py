"""What other agents' tools print, and whether what is plainly the model's is taught without an error flag."""

from __future__ import annotations

import pytest

from composer_replication.sites import find_error_sites
from data.agent_results import ROWS, judged
from session_pieces import Session


@pytest.mark.parametrize(
    ("row", "found"), [pytest.param(*each, id=f"{each[0][0]}, {each[0][3][:40]!r}") for each in judged()]
)
def test_a_result_of_another_agent_gets_its_kind_and_blame(row, found):
    assert found == row[5:]


@pytest.mark.parametrize("row", [row for row in ROWS if row[6] == "model"], ids=lambda row: f"{row[0]}, {row[1]}")
def test_what_is_the_models_is_taught_also_where_the_format_has_no_flag(row):
    session = Session()
    session.call(row[1], row[3], is_error=row[4], **row[2])
    (site,) = find_error_sites(session.conversation())
    assert site.is_kept, site.reason


def test_an_edit_that_was_not_applied_and_is_made_again_is_the_models():
    session, text = Session(), "Your proposed edit has introduced new syntax error(s).\n- E999 SyntaxError"
    for _ in range(2):
        session.call("bash", text, input="edit 3:3\nx(\nend_of_edit")
    assert [site.blame for site in find_error_sites(session.conversation())] == ["task", "model"]
