"""Whether a model heeds hints: scripted models that are obedient, deaf, or set against everything are told apart."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from dataclasses import replace

import pytest
import torch
from offline_pieces import HINTS, hint_of, logged, renderer, sessions_of, site, tiny, write_run

from composer_replication.runs import RunDir
from composer_replication.trainer.objective import hint_proof
from composer_replication.trainer.objective.hint_proof import HintProof, verdict
from composer_replication.trainer.sessions.dataset import LoggedSessions
from composer_replication.trainer.sessions.proof import SCHEMA, VERSION, describe_hint_check
from session_pieces import Session

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


def after_a_good_call(number, **options):
    """As `logged` makes one, with a call that worked before the one that failed."""
    session = Session(identity=f"s{number}").user(f"Run test {number}.")
    session.call("bash", "conftest.py", command="ls -a -l tests/unit tests/e2e")
    session.call("bash", "error: not found", command=f"pytset {number}")
    session.call("bash", "passed", command="pytest -q")
    conversation = session.says(f"All {number} passed.").conversation()
    plain, kind = logged(number, **options), tuple(HINTS)[number % 2]
    found = site(conversation, conversation.turns[3].id, kind)
    pairs = [pair._replace(turn_number=1) for pair in plain.pairs]
    return replace(plain, conversation=conversation, sites=[(found, hint_of(kind))], pairs=pairs)


MADE = [after_a_good_call(number) for number in range(NUMBER)]


def scripted(drop):
    """Log-probs of a model that is nothing but these drops, each token -1 without a hint."""

    def score(_model, responses):
        return torch.tensor([each(*response) for response in responses], dtype=torch.float64)

    def each(ids, start):
        text = renderer().tokenizer.decode(ids)
        hint = next((hint for hint in HINTS.values() if hint in text), "")
        session = int(text.partition("Run test ")[2].partition(".")[0])
        own = HINTS[tuple(HINTS)[session % 2]]
        return -(1.0 + drop(hint, own, "conftest.py" not in text, session)) * (len(ids) - start)

    return score


def proved(monkeypatch, drop, sessions=None):
    monkeypatch.setattr(hint_proof, "response_logprobs", scripted(drop))
    return (sessions or sessions_of(made=MADE)).prove(tiny())


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
        assert Counter(proof.reason for proof in sessions.proofs) == {hint_proof.LOWERS_GOOD_CALLS: NUMBER}


def test_figures_are_means_a_token_and_differences_of_differences(monkeypatch):
    for proof in proved(monkeypatch, obedient).proofs:
        assert (proof.without_hint, proof.with_hint, proof.with_other_hint) == pytest.approx((-1.0, -3.0, -1.2))
        assert (proof.good_without_hint, proof.good_with_hint) == pytest.approx((-1.0, -1.2))
        assert proof.advantage == pytest.approx(1.8)
        assert proof.good_effect == pytest.approx(-0.2)
        assert proof.advantage_over_good == pytest.approx(2.0 - 0.2)


def test_the_sentence_says_whether_it_heeds_by_which_figures_and_what_to_do(monkeypatch):
    said = [*describe_hint_check(proved(monkeypatch, obedient).proofs, can_warm_up=True)]
    proof, sentence = said
    assert re.search(r"\b24 of 24 sites\b", proof)
    assert re.search(r"\b100% of 24 sites\b.*\b100% of 24 sites\b.*-0\.20\b", sentence)
    assert "channel 3" not in sentence  # nothing else has to be done
    sessions = proved(monkeypatch, set_against_everything)
    for can_warm_up in (False, True):
        told = verdict(sessions.proofs).summary(can_warm_up=can_warm_up)
        assert re.search(r"\b0 sites\b.*\bchance\b\D*\b8\b.*\b13\b", told)
        assert re.search(r"\b100% of 24 sites\b.*\b0% of 24\b.*-2\.00\b", told)
        assert "channel 3" in told
        assert ("train.warmup" in told) is can_warm_up
    for number in (2, 0):
        sentence = verdict(sessions.proofs[:number]).summary()
        assert re.findall(r"\d+ ?\w*", sentence) == [f"{number} sites"]  # no figure that could mislead


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
    common = {
        "basis": "call",
        "num_tokens": 3,
        "without_hint": -1.0,
        "other_kind": "k",
        "num_good_calls": 0,
        "num_good_elsewhere": 0,
    }
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
    run = write_run(tmp_path, MADE)
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


def asked_of(monkeypatch, made):
    """The responses that each site's pass was asked for, as (text of the context, scored text)."""
    passes, decode = [], renderer().tokenizer.decode

    def score(_model, responses):
        passes.append([(decode(ids[:start]), decode(ids[start:])) for ids, start in responses])
        return torch.zeros(len(responses), dtype=torch.float64)

    monkeypatch.setattr(hint_proof, "response_logprobs", score)
    return LoggedSessions.from_sessions(made, renderer(), budget=512).prove(tiny()), passes


@pytest.mark.parametrize("with_pair", [True, False])
def test_good_calls_are_scored_on_tokens_like_those_of_the_erring_one(monkeypatch, with_pair):
    made = [after_a_good_call(number, with_pair=with_pair) for number in range(4)]
    proved, passes = asked_of(monkeypatch, made)
    tokens = [
        [len(renderer().tokenizer(text, add_special_tokens=False)["input_ids"]) for _, text in one] for one in passes
    ]
    for proof, found in zip(proved.proofs, tokens, strict=True):
        assert (proof.basis, proof.num_good_calls) == ("correction" if with_pair else "first_argument", 1)
        erring, good = found[:6], found[6:]  # without, with its own and with another hint; then the good call
        assert erring == erring[:2] * 3
        assert good == erring[:2] * 2
        assert sum(good[:2]) == proof.num_tokens


def test_a_good_call_after_the_error_is_no_control_it_may_be_what_the_hint_names(monkeypatch):
    proved, passes = asked_of(monkeypatch, MADE[:4])
    for proof, found in zip(proved.proofs, passes, strict=True):
        assert (proof.num_good_calls, proof.num_good_elsewhere) == (1, 0)
        assert not any("error: not found" in context for context, _ in found)


def test_a_site_without_a_good_call_before_it_is_compared_with_those_of_other_sessions_and_that_is_said(monkeypatch):
    made = [after_a_good_call(0), logged(1), logged(2), logged(3), after_a_good_call(4)]
    proved, passes = asked_of(monkeypatch, made)
    assert [(each.num_good_calls, each.num_good_elsewhere) for each in proved.proofs] == [
        (1, 0),
        (2, 2),
        (2, 2),
        (2, 2),
        (1, 0),
    ]
    for number in (1, 2, 3):
        good = [context for context, _ in passes[number][6:]]
        assert len(good) == 8  # two calls, name and argument, with and without the hint
        assert all(f"Run test {number}." not in context for context in good)
        own = HINTS[tuple(HINTS)[number % 2]]
        assert [own in context for context in good] == [False, False, True, True] * 2
    found = verdict(proved.proofs)
    assert (found.num_with_good, found.num_elsewhere) == (5, 3)
    assert re.search(r"\b0% of 5 sites\W+3\b", found.summary())


def test_where_no_session_has_a_good_call_the_sentence_says_that_nothing_was_compared(monkeypatch):
    made = [
        replace(each, conversation=replace(each.conversation, turns=each.conversation.turns[:3]))
        for each in (logged(number) for number in range(5))
    ]
    proved, _ = asked_of(monkeypatch, made)
    assert {proof.num_good_calls for proof in proved.proofs} == {0}
    shares = re.findall(r"(\d+% of )?\b5 sites\b", verdict(proved.proofs).summary())
    assert [bool(share) for share in shares] == [True, False]  # of the second comparison only their number is said
