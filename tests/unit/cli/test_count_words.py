"""What the tables of `crf train` count is explained below them: every note and every reason has its line."""

from __future__ import annotations

import json

from composer_replication.batch import hint_placement, pair_tokens, session_batch, windows
from composer_replication.batch.render import renderer
from composer_replication.evaluation.report.records import MEANINGS, explained, of_good_turns
from composer_replication.trainer.objective import hint_proof
from composer_replication.trainer.sessions import rendering
from output_facts import lines_with

REASONS = {
    windows: ("LONGER_THAN_WINDOW", "SHORT_CONTEXT", "CUT_IN_MESSAGE"),
    session_batch: ("REFERENCE_SAW_MORE", "NO_WRONG_HINT"),
    hint_placement: ("HINT_HAS_NO_PLACE", "HINT_MAKES_NO_TOKENS", "NOTHING_BEFORE_IT"),
    hint_proof: ("HINT_DOES_NOTHING", "LOWERS_GOOD_CALLS", "NO_OTHER_KIND"),
    renderer: ("TEXT_FOLLOWS_CALL", "THINKING_COMES_LATE", "WITHOUT_ANSWER"),
    rendering: (
        *("NOT_RENDERED", "NOT_IN_RENDERING", "NO_SUCH_TURN"),
        *("REFUSED", "BLOCKED", "INTERRUPTED", "FAILED", "FAILED_AS_WORK", "REJECTED", "IMAGE", "UNSEEN"),
    ),
    pair_tokens: ("WITHOUT_ANSWER", "EQUAL_ANSWERS", "CONTEXTS_DIFFER"),
}


def test_every_reason_that_the_code_names_has_a_line():
    named = {getattr(module, name) for module, names in REASONS.items() for name in names}
    assert named <= MEANINGS.keys()
    assert MEANINGS.keys() - named == {"wrong_hint", "placement", "without_hint", "whole_turn_without_call"}


def test_a_line_is_called_as_its_table_calls_it_and_comes_once():
    drops = ("sdpo_kl: longer_than_window", "lm_ce: longer_than_window", "lm_ce: failed_call")
    lines = explained(("windows", "cut_in_message", "placement:head->before_turn"), drops)
    assert [line.partition(": ")[0] for line in lines] == [
        *("cut in message", "placement", "failed_call", "longer_than_window"),
    ]


def test_a_dry_run_explains_what_it_counts(train):
    small = ("--set", "train.batch.budget=48", "--set", "train.batch.overlap=32")
    counted = json.loads(train("--dry-run", "--json", *small)[1])
    status, out, err = train("--dry-run", *small)
    assert status == 0, err
    assert counted["counts"].keys() >= {"cut_in_message", "short_context"}
    assert "lm_ce: failed_call" in counted["drops"]
    for name in ("cut in message", "short context", "failed_call", "longer_than_window"):
        assert [line for line in out.splitlines() if line.startswith(f"{name}: ")]


def test_good_turns_and_those_left_out_add_up_or_it_is_said_why_not():
    counts = {"model_turns": 10, "good_turns": 7}
    assert of_good_turns(counts, {"lm_ce: failed_call": 3, "sdpo_kl: longer_than_window": 5}) == []
    assert of_good_turns({}, {"lm_ce: failed_call": 3}) == []
    (line,) = of_good_turns(counts, {"lm_ce: failed_call": 3, "lm_ce: longer_than_window": 2})
    assert lines_with(line, 2, "turns")
