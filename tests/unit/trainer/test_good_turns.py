"""Good turns: those of the model that nothing speaks against; all others are counted by what does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from offline_pieces import logged, renderer, sessions_of, site, write_run
from render_checks import decode

from composer_replication.runs.files import LoggedPair
from composer_replication.trainer.sessions.dataset import LoggedSessions
from composer_replication.trainer.sessions.rendering import LoggedSession, good_turns
from session_pieces import Session


def of_kind(conversation, kind, blame, turn_id="t1", call_id="c1-0"):
    return replace(
        site(conversation, turn_id, kind, is_kept=False), blame=blame, call_id=call_id, id=f"{turn_id}-{kind}"
    )


def one_call(text="ok", **fields):
    """A call (turn t1), its result, an answer (turn t3)."""
    session = Session().user("Go.")
    session.call("bash", text, command="make", **fields)
    return session.says("Done.").conversation()


@pytest.mark.parametrize(
    ("kind", "blame", "reason"),
    [
        ("user_rejected", "user", "refused_call"),
        ("permission_denied", "harness", "refused_call"),
        ("hook_blocked", "harness", "blocked_call"),
        ("user_interrupt", "user", "interrupted"),
        ("edit_no_match", "model", "failed_call"),
        ("sibling_cancelled", "harness", "failed_call"),
        ("other", "unknown", "failed_call"),
        ("test_failure", "task", "call_failed_as_part_of_the_work"),
    ],
)
def test_a_turn_with_a_site_kept_or_not_is_not_good(kind, blame, reason):
    conversation = one_call("FAIL", is_error=True)
    found = good_turns(LoggedSession(conversation=conversation, sites=[(of_kind(conversation, kind, blame), None)]))
    assert found.not_good == {"t1": reason}
    assert found.good == {"t3"}


def test_a_failed_call_that_no_site_speaks_of_is_known_by_its_results_flag():
    assert good_turns(LoggedSession(conversation=one_call("boom", is_error=True))).not_good == {"t1": "failed_call"}
    assert good_turns(LoggedSession(conversation=one_call("fine", is_error=False))).good == {"t1", "t3"}


def test_what_looked_like_a_failure_and_is_none_speaks_against_nothing():
    conversation = one_call("0 errors")
    found = good_turns(
        LoggedSession(conversation=conversation, sites=[(of_kind(conversation, "no_failure", "unknown"), None)])
    )
    assert found.good == {"t1", "t3"}


def test_work_that_failed_is_a_choice_and_covers_its_own_call_alone():
    session = Session().user("Go.")
    session.calls(
        [("bash", {"command": "pytest"}, "1 failed", True, None), ("bash", {"command": "x"}, "?", True, None)]
    )
    conversation = session.conversation()
    work = [(of_kind(conversation, "test_failure", "task", call_id="c1-0"), None)]
    both = [*work, (of_kind(conversation, "compile_error", "task", call_id="c1-1"), None)]
    assert good_turns(LoggedSession(conversation=conversation, sites=both), work_failures=True).good == {"t1"}
    found = good_turns(LoggedSession(conversation=conversation, sites=work), work_failures=True)
    assert found.not_good == {"t1": "failed_call"}


def test_a_turn_that_the_user_interrupted_is_not_good_with_or_without_a_call():
    session = Session().user("Go.").says("I was about to")
    conversation = session.user("[Request interrupted by user]").user("Stop.").says("Yes.").conversation()
    assert good_turns(LoggedSession(conversation=conversation)).not_good == {"t1": "interrupted"}


def test_the_rejected_side_of_a_pair_is_not_good():
    conversation = one_call()
    found = good_turns(LoggedSession(conversation=conversation, pairs=[LoggedPair("s::1", 1, "Better.")]))
    assert found.not_good == {"t3": "rejected_side_of_a_pair"}


def test_turns_behind_an_image_or_behind_what_was_not_logged_are_not_good_for_a_text_model():
    session = Session().user("Look.").says("I see nothing yet.").user("Here.", extra={"images": 1})
    conversation = session.says("A cat.").says("Still a cat.").conversation()
    seen = {"t3": "image_before_it", "t4": "image_before_it"}
    assert good_turns(LoggedSession(conversation=conversation)).not_good == seen
    session = Session().user("Look.").says("Right.", extra={"unseen_context": True})
    assert good_turns(LoggedSession(conversation=session.conversation())).not_good == {"t1": "unseen_context_before_it"}


def test_copied_turns_are_neither():
    session = Session().user("Go.")
    session.call("bash", "boom", is_error=True, origin="copied", command="make")
    found = good_turns(LoggedSession(conversation=session.conversation()))
    assert (found.good, found.not_good) == (frozenset(), {})


def test_the_reasons_are_counted_among_the_drops_of_channel_one():
    failed = logged(0, with_pair=False)
    refused = one_call("no", is_error=True)
    sites = [(of_kind(refused, "user_rejected", "user"), None)]
    found = sessions_of(made=[failed, LoggedSession(conversation=refused, sites=sites)])
    drops = {name: number for name, number in found.drops.items() if name.startswith("lm_ce")}
    assert drops == {"lm_ce: failed_call": 1, "lm_ce: refused_call": 1}
    assert found.counts["good_turns"] == 3


def test_a_turn_that_speaks_behind_its_call_is_no_target_of_any_channel():
    session = logged(0)
    turns = list(session.conversation.turns)
    for index in (1, 5):  # the erring turn, which has a site and a pair; and the answer, which has no call
        blocks = [*[["call", 0] for _ in turns[index].calls], ["text", len("And then.")]]
        turns[index] = replace(turns[index], text="And then.", extra={"blocks": blocks})
    odd = replace(session, conversation=replace(session.conversation, turns=tuple(turns)))
    found = sessions_of(made=[odd])
    assert {name for name in found.drops if "text_follows_call" in name} == {
        "sdpo_jsd: text_follows_call",
        "trace_replay_dpo: text_follows_call",
    }
    assert found.counts["good_turns"] == 2
    only_said = replace(odd, sites=[], pairs=[])
    assert sessions_of(made=[only_said], responses="all").drops["lm_ce: text_follows_call"] == 1


def test_pairs_of_the_run_keep_their_turns_out_of_channel_one_where_channel_three_is_off(tmp_path):
    pair = LoggedPair("s0::1", 2, "Nothing passed.")
    run = write_run(tmp_path / "run", [replace(logged(0), pairs=[pair])])
    found = LoggedSessions.from_run(run, renderer(), budget=512, use_pairs=False)
    assert found.drops["lm_ce: rejected_side_of_a_pair"] == 1
    assert found.channels["trace_replay_dpo"] == 0


def test_good_turns_hold_the_tokens_of_no_erring_one():
    found = sessions_of(0)
    (batch,) = found.batches()
    shown = decode(renderer(), batch.response.targets.tolist())
    assert "pytset" not in shown
    assert "pytest -q" in shown


def test_a_turn_that_acted_at_once_is_chosen_and_stays_good():
    conversation = one_call()
    for source, good in (("acted_at_once", {"t1", "t3"}), ("correction", {"t3"})):
        pair = LoggedPair("s::0000.0", 0, "", source=source)
        assert good_turns(LoggedSession(conversation=conversation, pairs=[pair])).good == good
