"""Whether a model heeds hints: scripted models that are obedient, deaf, or set against everything are told apart."""

from __future__ import annotations

import zlib

import pytest
import torch
from offline_pieces import HINTS, logged, renderer, sessions_of, tiny, write_run

from composer_replication.objective import hint_proof
from composer_replication.objective.hint_proof import HintProof, count_reasons, verdict
from composer_replication.runs import RunDir
from composer_replication.sessions.dataset import LoggedSessions
from composer_replication.sessions.proof import SCHEMA, VERSION
from composer_replication.trainer.from_config.offline import tell_proof

NUMBER = 24


def obedient(hint, own, is_good, session):
    """A rule about the error at hand is obeyed; any other text lowers everything a little."""
    return 0.0 if not hint else 2.0 if hint == own and not is_good else 0.2


def deaf(hint, own, is_good, session):
    """A text moves a call this way or that, and what it says makes no difference."""
    return zlib.crc32(f"{hint}{is_good}{session}".encode()) % 1000 / 1000 if hint else 0.0


def set_against_everything(hint, own, is_good, session):
    """A rule about the error at hand lowers whatever comes next."""
    return 0.0 if not hint else 2.0 if hint == own else 0.2


def scripted(drop):
    """Log-probs of a model that is nothing but these drops, each token -1 without a hint."""

    def score(_model, responses):
        return torch.tensor([each(*response) for response in responses], dtype=torch.float64)

    def each(ids, start):
        text = renderer().tokenizer.decode(ids)
        hint = next((hint for hint in HINTS.values() if hint in text), "")
        session = int(text.partition("Run test ")[2].partition(".")[0])
        own = HINTS[tuple(HINTS)[session % 2]]
        return -(1.0 + drop(hint, own, "error: not found" in text, session)) * (len(ids) - start)

    return score


def proved(monkeypatch, drop, sessions=None):
    monkeypatch.setattr(hint_proof, "response_logprobs", scripted(drop))
    return (sessions or sessions_of(*range(NUMBER))).prove(tiny())


@pytest.mark.parametrize(
    ("drop", "heeds", "kept"), [(obedient, True, NUMBER), (deaf, False, None), (set_against_everything, False, 0)]
)
def test_a_model_heeds_hints_where_its_own_lower_the_erring_decision_and_nothing_else(monkeypatch, drop, heeds, kept):
    sessions = proved(monkeypatch, drop)
    found = verdict(sessions.proofs)
    assert found.heeds is heeds
    assert {proof.num_good_calls for proof in sessions.proofs} == {1}
    if kept is not None:
        assert sessions.counts["sites"] == kept
    if drop is set_against_everything:
        assert found.over_other == NUMBER
        assert count_reasons(sessions.proofs) == {hint_proof.LOWERS_GOOD_CALLS: NUMBER}


def test_figures_are_means_a_token_and_differences_of_differences(monkeypatch):
    for proof in proved(monkeypatch, obedient).proofs:
        assert (proof.without_hint, proof.with_hint, proof.with_other_hint) == pytest.approx((-1.0, -3.0, -1.2))
        assert (proof.good_without_hint, proof.good_with_hint) == pytest.approx((-1.0, -1.2))
        assert proof.advantage == pytest.approx(1.8)
        assert proof.good_effect == pytest.approx(-0.2)
        assert proof.advantage_over_good == pytest.approx(2.0 - 0.2)


def test_the_sentence_says_whether_it_heeds_by_which_figures_and_what_to_do(monkeypatch):
    said = []
    tell_proof(proved(monkeypatch, obedient), said.append)
    assert said == [
        "hint proof: 24 of 24 sites teach",
        "this model heeds hints on these logs: own hints lower the erring decision more than another kind's at 100% of"
        " 24 sites, and more than they lower good calls of the same sessions at 100% of 24 sites, which they move by"
        " -0.20 nats a token",
    ]
    sessions = proved(monkeypatch, set_against_everything)
    for can_warm_up in (False, True):
        told = verdict(sessions.proofs).in_words(can_warm_up=can_warm_up)
        assert told.startswith("this model does not heed hints on these logs: own hints lower")
        assert "at 100% of 24 sites, and more than they lower good calls of the same sessions at 0% of 24" in told
        assert "which they move by -2.00 nats a token" in told
        assert told.endswith("use a larger model, or rely on pairs (channel 3)")
        assert ("warm up first (train.warmup)" in told) is can_warm_up
    assert "cannot be told from 2 sites" in verdict(sessions.proofs[:2]).in_words()
    assert "cannot be told from 0 sites" in verdict([]).in_words()


@pytest.mark.parametrize(
    ("number", "wins", "good", "heeds"),
    [
        (146, 86, None, True),
        (146, 85, None, False),
        (146, 74, -1.0, True),
        (146, 73, -1.0, False),
        (12, 8, -1.0, True),
        (12, 7, -1.0, False),
        (4, 4, None, True),
        (3, 3, -1.0, None),
    ],
)
def test_more_than_half_has_to_be_more_than_chance(number, wins, good, heeds):
    common = {"basis": "call", "num_tokens": 3, "without_hint": -1.0, "other_kind": "k", "num_good_calls": 0}
    rest = {"good_without_hint": good, "good_with_hint": good, "is_kept": False, "reason": ""}
    proofs = [
        HintProof(site_id=str(at), with_hint=-2.0, with_other_hint=-1.0 if at < wins else -3.0, **common, **rest)
        for at in range(number)
    ]
    assert verdict(proofs).heeds is heeds


def test_a_right_call_from_a_pair_moves_the_question_to_the_token_that_is_wrong():
    """`pytset` against `pytest`: the pair that answers the erring turn knows the right call."""
    for with_pair, basis in ((True, "correction"), (False, "first_argument")):
        made = [logged(number, with_pair=with_pair) for number in range(4)]
        sessions = LoggedSessions.from_sessions(made, renderer(), budget=512)
        assert {each.decision.basis for one in sessions.rendered for each in one.sites} == {basis}
        (stretches,) = {len(each.decision.stretches) for one in sessions.rendered for each in one.sites}
        assert stretches == 2


def test_the_artefact_has_both_differences_and_other_decisions_are_proved_anew(monkeypatch, tmp_path):
    run = write_run(tmp_path, [logged(number) for number in range(NUMBER)])
    sessions = LoggedSessions.from_run(run, renderer(), budget=512)
    monkeypatch.setattr(hint_proof, "response_logprobs", scripted(obedient))
    model = tiny()
    found = sessions.prove(model)
    rows = list(RunDir.open(tmp_path).read_jsonl("hint_proof", schema=SCHEMA, version=VERSION))
    assert [row["advantage_over_good"] for row in rows] == [proof.advantage_over_good for proof in found.proofs]
    assert {row["basis"] for row in rows} == {"correction"}
    meta = run.meta("hint_proof")
    assert meta.counts["lowered_more_than_by_another_kind"] == meta.counts["lowered_more_than_good_calls"] == NUMBER
    monkeypatch.setattr(hint_proof, "response_logprobs", scripted(set_against_everything))
    assert sessions.prove(model).proofs == found.proofs  # taken from there
    without_pairs = LoggedSessions.from_run(run, renderer(), budget=512, use_pairs=False, responses="none")
    assert without_pairs.prove(model).counts["sites"] == 0
