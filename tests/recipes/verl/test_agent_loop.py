"""verl's agent loop finds the sites that the scripts state, as turns end, and writes their hinted contexts."""

from __future__ import annotations

import json

import pytest

from composer_replication.recipes.verl.columns import read_sites
from composer_replication.trainer.rollouts.sites import assistant_id
from data.scripted_rollout_types import Scripted, call
from data.scripted_rollouts_edges import TURNS, UNREADABLE
from data.scripted_rollouts_failures import RAISED, SAID
from recipes.verl.scripted_server import run_loop, sites_of, student_tokenizer

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]
ONE_OF_TWO = "one of two calls malformed"  # TRL runs neither call of such a turn and ends, verl runs the good one
SCRIPTS = [
    each
    for each in (*RAISED, *SAID, *UNREADABLE, *TURNS)
    if not each.signals and each.budget is None and each.name != ONE_OF_TWO
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda each: each.name)
def test_sites_are_those_the_script_states(script: Scripted) -> None:
    output = run_loop(script.turns, script.question)
    found = {(site["turn_id"], site["kind"]) for site in sites_of(output)}
    wanted = [each for each in script.sites if each.has_teacher]
    for site in wanted:
        assert {turn for turn, kind in found if kind in site.kinds} >= {assistant_id(site.turn)}, (found, site)
    assert len(found) == len(wanted), found


def test_verl_drops_a_malformed_call_beside_a_good_one_without_a_word() -> None:
    script = next(each for each in UNREADABLE if each.name == ONE_OF_TWO)
    output = run_loop([*script.turns, "I am done."], script.question)
    assert sites_of(output) == []
    assert output.num_turns == 4


FAILS = call("read_file", path="src/mian.py")


def test_hinted_contexts_hold_the_turn_after_its_hint() -> None:
    output = run_loop([FAILS, call("bash", command="pytset -q"), "I am done."], "Look at it.")
    row = [*output.prompt_ids, *output.response_ids]
    assert len(output.response_mask) == len(output.response_ids)
    turns = read_sites(output.extra_fields["sdpo_sites"], row)
    assert [turn.turn_id for turn in turns] == ["assistant-0", "assistant-1"]
    for turn in turns:
        size = turn.end - turn.start
        hinted = turn.teacher_ids.tolist()
        assert hinted[turn.teacher_start : turn.teacher_start + size] == row[turn.start : turn.end]
        assert all(output.response_mask[turn.start - len(output.prompt_ids) : turn.end - len(output.prompt_ids)])
        text = student_tokenizer().decode(hinted[: turn.teacher_start])
        assert turn.hint in text
        assert turn.hint not in student_tokenizer().decode(row)
    assert json.loads(output.extra_fields["composer_counts"])["sites"] == 2


def test_a_rollout_that_is_cut_off_keeps_the_sites_of_its_ended_turns() -> None:
    """verl ends such a rollout before it has written its last message: messages and turns no longer match."""
    whole = run_loop([FAILS, FAILS.replace("mian", "mina"), "I am done."], "Look at it.")
    ends = [site["end"] - len(whole.prompt_ids) for site in sites_of(whole)]
    assert len(ends) == 2
    cut = run_loop([FAILS, FAILS.replace("mian", "mina"), "I am done."], "Look at it.", response_length=ends[1] - 4)
    assert len(cut.response_ids) == ends[1] - 4
    assert [site["turn_id"] for site in sites_of(cut)] == ["assistant-0"]
    after = run_loop([FAILS, "I am done."], "Look at it.", response_length=ends[0] + 4)
    assert [site["turn_id"] for site in sites_of(after)] == ["assistant-0"]


def test_a_turn_that_ends_in_the_middle_of_a_call_is_no_failure() -> None:
    output = run_loop([FAILS], "Look at it.", most=8)
    assert sites_of(output) == []
    assert json.loads(output.extra_fields["composer_counts"])["turns"] == 1
