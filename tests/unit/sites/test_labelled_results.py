"""The rules against results that were labelled by somebody who had not seen them."""

from __future__ import annotations

import pytest

from composer_replication.sites import BLAMES, KINDS, classify
from data.labelled import confusion, precision_and_recall, rows, trap_rows, verdict_of

ROWS = [pytest.param(row, id=row["id"]) for name in ("labelled", "held out") for row in rows(name)]
# A rejected push: one labeller calls it the model's by the page, the other says that nobody can tell. Nobody can.
# A version manager that is not installed is the machine's.
NOT_BLAMED = {"git_state_05", "tie_27", "tool_versions_02"}
# Kinds that the labeller calls arguable, of the same blame; and two where a missing part of the set-up reads as work.
OTHER_KIND = {"lint_08", "nonzero_exit_03", "nonzero_exit_13", "h_other_04", "h_nonzero_exit_04"}
OTHER_BLAME = {"tool_versions_04", "tie_04", "h_other_04"}


@pytest.mark.parametrize("row", ROWS)
def test_a_labelled_result_gets_its_label(row):
    verdict = verdict_of(row)
    assert verdict.is_failure is row["expected_site"]
    blame = verdict.blame if verdict.is_failure else None
    if row["id"] in NOT_BLAMED | OTHER_BLAME:
        assert blame not in ("model", row["blame"])
    else:
        assert blame == row["blame"]
    if row["expected_site"] and row["id"] not in OTHER_KIND:
        assert verdict.kind == row["kind"]
    assert verdict.is_soft is row["soft"]


@pytest.mark.parametrize("name", ["labelled", "held out"])
def test_nothing_but_the_models_own_failures_is_taught_and_most_of_those_are_found(name, note):
    precision, recall = precision_and_recall(confusion(rows(name)))
    note(f"error sites, {name} set: precision {precision:.3f} and recall {recall:.3f} of blame=model")
    assert precision == 1.0
    assert recall >= 0.9


@pytest.mark.parametrize("row", [each for each in ROWS if each.values[0]["evidence"]])
def test_the_evidence_is_a_span_of_the_text_near_what_the_labeller_named(row):
    verdict = verdict_of(row)
    start, end = verdict.span
    assert 0 <= start <= end <= len(row["text"])
    if row["blame"] == "model" and row["id"] not in NOT_BLAMED:
        place = row["text"].index(row["evidence"])
        assert start < place + len(row["evidence"]), (row["text"][start:end], row["evidence"])
        assert end > place, (row["text"][start:end], row["evidence"])


def test_the_sets_cover_every_kind_and_every_blame():
    labels = rows("labelled")
    # A user's correction is a refusal to those who see one result: test_user_words.py has its cases.
    assert {row["kind"] for row in labels} == {*KINDS, None} - {"user_corrected"}
    assert {row["blame"] for row in labels} == {*BLAMES, None}
    assert len(labels) >= 150
    assert not {row["id"] for row in labels} & {row["id"] for row in rows("held out")}


TRAPS = [pytest.param(row, id=f"{row['id']}-{row['name']}") for row in trap_rows()]


@pytest.mark.parametrize("row", TRAPS)
def test_a_trap_is_not_taught(row):
    """Written by somebody who tried to have good actions blamed; several blames may be right, the model's is not."""
    verdict = classify(row["tool"], row["arguments"], row["text"], row["is_error"])
    if "model" not in row["allowed"]:
        assert not (verdict.is_failure and verdict.blame == "model"), (verdict.kind, verdict.reason)
