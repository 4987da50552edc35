"""Logged sessions: what each channel is given, what is dropped and counted, and that storing changes nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from offline_pieces import HINTS, hint_of, logged, renderer, sessions_of, site, tiny, write_run

from composer_replication.batch.session_batch import SiteHint, TokenPair, session_batches
from composer_replication.errors import ArtefactNotFoundError, InputError, StaleArtefactError
from composer_replication.runs import RunDir
from composer_replication.runs.files import LoggedPair, conversation_to_row
from composer_replication.trainer.objective import hint_proof
from composer_replication.trainer.objective.reference import with_reference
from composer_replication.trainer.sessions import proof as offline_proof
from composer_replication.trainer.sessions.dataset import LoggedSessions
from composer_replication.trainer.sessions.rendering import LoggedSession
from refusals import refusal
from session_pieces import Session


def direct(session, **options):
    """What `session_batches` gives for a session with one site at its first turn and one pair there."""
    (rendered,) = renderer().render(session.conversation)
    span = rendered.spans[0]
    chosen = [*rendered.ids[: span.start], *rendered.ids[rendered.spans[1].start : rendered.spans[1].end]]
    pair = TokenPair(
        chosen_ids=chosen, chosen_start=span.start, rejected_ids=rendered.ids[: span.end], rejected_start=span.start
    )
    (_, hint), *_ = session.sites
    sites = [SiteHint(span, hint.text)]
    asked = {"responses": rendered.spans[1:], "sites": sites, "pairs": [pair]}
    return session_batches(renderer(), rendered, **asked, **options)


def assert_same_batch(got, wanted):
    for name in ("input_ids", "position_ids", "enter", "leave"):
        assert torch.equal(getattr(got.tree, name), getattr(wanted.tree, name)), name
    assert got.tree.stretches == wanted.tree.stretches
    pairs = zip(got.tree.rows, wanted.tree.rows, strict=True)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)
    for a, b in ((got.response.rows, wanted.response.rows), (got.response.targets, wanted.response.targets)):
        assert torch.equal(a, b)
    assert torch.equal(got.student_rows, wanted.student_rows)
    assert torch.equal(got.teacher_rows, wanted.teacher_rows)
    assert (got.pairs is None) == (wanted.pairs is None)
    for name in ("rows", "targets", "response", "num_pairs") if wanted.pairs else ():
        a, b = getattr(got.pairs, name), getattr(wanted.pairs, name)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def _but_channel_one(drops):
    """Drops of other channels; which turns are good, and why others are not, has its own tests."""
    return {name: number for name, number in drops.items() if not name.startswith("lm_ce: ")}


@pytest.mark.parametrize("budget", [512, 150])
def test_a_stored_window_is_the_batch_of_the_session(budget):
    session = logged(4)
    found = sessions_of(made=[session], budget=budget)
    wanted = direct(session, budget=budget)
    assert len(found) == len(wanted.batches)
    assert len(found) == (1 if budget == 512 else 2)
    for got, batch in zip(found.batches(), wanted.batches, strict=True):
        assert_same_batch(got, batch)


def test_channel_one_gets_the_turns_that_no_site_blames_kept_or_not():
    session = logged(0)
    (rendered,) = renderer().render(session.conversation)
    first, second, third = (span.end - span.start for span in rendered.spans)
    assert sessions_of(made=[session]).channels["lm_ce"] == second + third
    assert sessions_of(made=[session], responses="all").channels["lm_ce"] == second + third  # first errs
    assert sessions_of(made=[session], responses="none").channels == {
        "lm_ce": 0,
        "sdpo_jsd": first,
        "trace_replay_dpo": 1,
    }
    unsure = replace(session, sites=[(site(session.conversation, "t1", is_kept=False), None)])
    found = sessions_of(made=[unsure])
    assert found.channels["lm_ce"] == second + third
    assert found.channels["sdpo_jsd"] == 0


def test_turns_copied_from_another_conversation_are_not_taught_again():
    session = logged(0)
    turns = [replace(turn, origin="copied") if turn.id == "t3" else turn for turn in session.conversation.turns]
    copied = replace(session, conversation=replace(session.conversation, turns=tuple(turns)))
    (rendered,) = renderer().render(session.conversation)
    last = rendered.spans[2]
    assert sessions_of(made=[copied]).channels["lm_ce"] == last.end - last.start


def test_a_site_without_a_hint_and_one_whose_turn_is_not_there_are_counted():
    session = logged(0, with_site=False)
    sites = [
        (site(session.conversation, "t1"), None),
        (site(session.conversation, "nowhere", "file_not_found"), hint_of("file_not_found")),
    ]
    found = sessions_of(made=[replace(session, sites=sites)])
    assert _but_channel_one(found.drops) == {"sdpo_jsd: without_hint": 1, "sdpo_jsd: turn_not_in_rendering": 1}
    assert found.counts["sites"] == 0


def test_pairs_that_cannot_be_are_dropped_by_name():
    session = logged(0, with_site=False, with_pair=False)
    same = '[TOOL_USE] name=bash input={"command":"pytset 0"}'
    pairs = [LoggedPair("s0::0000", 0, same), LoggedPair("s0::0009", 9, same), LoggedPair("s0::0001", 1, "  ")]
    found = sessions_of(made=[replace(session, pairs=pairs)])
    assert found.channels["trace_replay_dpo"] == 0
    assert _but_channel_one(found.drops) == {
        "trace_replay_dpo: pair_of_equal_answers": 1,
        "trace_replay_dpo: pair_of_no_such_turn": 1,
        "trace_replay_dpo: pair_without_answer": 1,
    }


def test_a_pair_longer_than_the_window_is_dropped_and_counted():
    session = logged(0, with_site=False, with_pair=False)
    pairs = [LoggedPair("s0::0000", 0, "word " * 400), *logged(0).pairs]
    found = sessions_of(made=[replace(session, pairs=pairs)], budget=200)
    assert _but_channel_one(found.drops) == {"trace_replay_dpo: longer_than_window": 1}
    assert found.channels["trace_replay_dpo"] == 1
    assert found.longest_tree <= 200


def test_a_conversation_that_no_template_shows_is_dropped_and_counted():
    empty = LoggedSession(conversation=Session(identity="empty").conversation())
    found = sessions_of(made=[empty, logged(1)])
    assert _but_channel_one(found.drops) == {"conversations: not_rendered": 1}
    assert len(found) == 1


def test_nothing_to_learn_from_is_an_error_that_says_what_was_dropped():
    found = sessions_of(made=[logged(0)], budget=5)
    with pytest.raises(InputError, match=r"longer_than_window.*budget"):
        found.require_items()


def test_packed_windows_share_a_tree_within_the_budget_and_hold_the_same():
    apart, packed = sessions_of(*range(5), budget=400), sessions_of(*range(5), budget=400, pack=True)
    assert len(apart) == 5
    assert len(packed) == 3
    assert packed.longest_tree <= 400
    assert packed.channels == apart.channels
    assert sum(batch.counts()["lm_ce"] for batch in packed.batches()) == apart.channels["lm_ce"]


def test_only_chooses_conversations():
    held_out = sessions_of(0, 1, 2, only=lambda conversation: conversation.id == "s1")
    assert [window.conversation_id for window in held_out.windows] == ["s1"]


def test_references_are_those_of_the_windows_own_contexts(tmp_path):
    model = tiny().double()
    found = sessions_of(0, 1, budget=150)
    path = tmp_path / "ref.safetensors"
    assert not found.has_references
    known = found.with_references(model, path)
    assert known.has_references
    assert path.exists()
    for window, batch in zip(known.windows, found.batches(), strict=True):
        if batch.pairs is None:
            continue
        wanted = with_reference(model, batch).pairs
        got = window.batch().pairs
        torch.testing.assert_close(got.chosen_reference, wanted.chosen_reference, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(got.rejected_reference, wanted.rejected_reference, rtol=1e-6, atol=1e-6)
    with refusal(StaleArtefactError, what=str(path), got="weights"):
        found.with_references(tiny(seed=1).double(), path)


def test_the_proof_drops_sites_whose_hint_does_no_more_than_another_kind_of_hint():
    model = tiny().double()
    found = sessions_of(*range(6))
    proved = found.prove(model)
    advantages = {proof.site_id: min(proof.advantage, proof.advantage_over_good) for proof in proved.proofs}
    assert len(advantages) == 6
    kept = {site_id for site_id, advantage in advantages.items() if advantage > 0}
    assert 0 < len(kept) < 6
    assert {site_id for window in proved.windows for site_id in window.site_ids} == kept
    assert _but_channel_one(proved.drops) == {
        f"sdpo_jsd: {reason}": number
        for reason, number in Counter(proof.reason for proof in proved.proofs).items()
        if reason != "kept"
    }
    for proof in proved.proofs:
        does_nothing = proof.reason == hint_proof.HINT_DOES_NOTHING
        assert proof.reason == "kept" if proof.is_kept else does_nothing == (proof.advantage <= 0)
    # The turn is still one that failed: it does not become a good one.
    assert proved.channels["lm_ce"] == found.channels["lm_ce"]
    assert proved.channels["trace_replay_dpo"] == found.channels["trace_replay_dpo"]
    assert found.prove(model, margin=max(advantages.values())).channels["sdpo_jsd"] == 0


def test_a_run_directory_gives_the_same_windows_as_its_sessions_in_memory(tmp_path):
    made = [logged(number) for number in range(3)]
    run = write_run(tmp_path / "run", made)
    in_memory, on_disk = sessions_of(made=made), LoggedSessions.from_run(run.root, renderer(), budget=512)
    assert on_disk.counts == in_memory.counts
    for got, wanted in zip(on_disk.batches(), in_memory.batches(), strict=True):
        assert_same_batch(got, wanted)


def test_a_proof_is_kept_in_the_run_directory_and_not_made_twice(tmp_path, monkeypatch):
    made = [logged(number) for number in range(4)]
    run = write_run(tmp_path / "run", made)
    model = tiny().double()
    found = LoggedSessions.from_run(run, renderer(), budget=512)
    proved = found.prove(model)
    rows = list(run.read_jsonl("hint_proof", schema="hint_proof", version=3))
    assert [row["site_id"] for row in rows] == [each[0][0].id for each in (s.sites for s in made)]
    for row, proof in zip(rows, proved.proofs, strict=True):
        assert row["advantage"] == proof.advantage == row["with_other_hint"] - row["with_hint"]
        assert (row["is_kept"], row["without_hint"]) == (proof.is_kept, proof.without_hint)
        assert row["kind"] in HINTS
    meta = run.meta("hint_proof")
    assert meta.counts == {
        "sites": 4,
        "kept": sum(proof.is_kept for proof in proved.proofs),
        "lowered_more_than_by_another_kind": sum(proof.advantage > 0 for proof in proved.proofs),
        "lowered_more_than_good_calls": sum(proof.advantage_over_good > 0 for proof in proved.proofs),
        "compared_with_good_calls": 4,
        "compared_with_those_of_other_sessions": 4,
    }
    assert sum(meta.drops.values()) == 4 - meta.counts["kept"]
    asked = []
    again = list(proved.proofs)
    monkeypatch.setattr(offline_proof, "prove_hints", lambda *_, **options: asked.append(options) or again)
    assert found.prove(model).proofs == proved.proofs
    assert asked == []
    found.prove(model, margin=3.0)
    assert [each["margin"] for each in asked] == [3.0]


@pytest.mark.parametrize("left", [[0, 2, 1], [0, 1, 1, 2, 2], [0, 2]])
def test_what_is_left_of_a_proof_goes_to_the_sites_it_is_of(tmp_path, monkeypatch, left):
    """Two runs at once mix their lines, and the next one gave each site the proof with its number."""
    made, model = [logged(number) for number in range(4)], tiny().double()
    run = write_run(tmp_path / "run", made)
    found = LoggedSessions.from_run(run, renderer(), budget=512)
    original, calls = hint_proof.response_logprobs, []

    def third_time_interrupted(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(hint_proof, "response_logprobs", third_time_interrupted)
    with pytest.raises(KeyboardInterrupt):
        found.prove(model)
    partial = run.path("hint_proof").with_name("hint_proof.partial.jsonl")
    lines = partial.read_bytes().splitlines(keepends=True)
    assert len(lines) == 3
    partial.write_bytes(b"".join(lines[number] for number in left))
    monkeypatch.setattr(hint_proof, "response_logprobs", original)
    again = found.prove(model)
    assert [proof.site_id for proof in again.proofs] == [session.sites[0][0].id for session in made]
    partial.unlink(missing_ok=True)
    run.path("hint_proof").unlink()
    assert again.proofs == found.prove(model).proofs


def test_a_run_without_sites_names_the_command_that_finds_them(tmp_path):
    run = RunDir.create(tmp_path / "run")
    made = [logged(0)]
    run.write_jsonl(
        "conversations", (conversation_to_row(s.conversation) for s in made), schema="conversation", version=2
    )
    with pytest.raises(ArtefactNotFoundError, match="crf sites"):
        LoggedSessions.from_run(run, renderer(), budget=512)
    plain = LoggedSessions.from_run(run, renderer(), budget=512, use_sites=False, responses="all")
    assert plain.channels["sdpo_jsd"] == plain.channels["trace_replay_dpo"] == 0
    assert plain.channels["lm_ce"] > 0


def test_sites_older_than_their_conversations_are_refused(tmp_path):
    made = [logged(0), logged(1)]
    run = write_run(tmp_path / "run", made)
    run.write_jsonl("conversations", [conversation_to_row(made[1].conversation)], schema="conversation", version=2)
    with pytest.raises(StaleArtefactError, match="crf sites"):
        LoggedSessions.from_run(run, renderer(), budget=512)


def test_a_contrast_gives_each_site_the_hint_of_another_kind():
    plain, contrasted = sessions_of(0, 1), sessions_of(0, 1, contrast=True)
    for number in (0, 1):
        batch = contrasted[number]
        assert plain[number].contrast is None
        assert batch.sites_without_contrast == 0
        own = batch.tree.input_ids[batch.contrast.rows + 1]
        assert torch.equal(own, batch.target_tokens[batch.contrast.numbers])
        other = HINTS[tuple(HINTS)[1 - number]]
        sequences = [renderer().tokenizer.decode(batch.tree.input_ids[rows]) for rows in batch.tree.rows]
        assert sum(other in text for text in sequences) == 1
    alone = sessions_of(0, contrast=True)
    assert alone[0].contrast is None


def test_bad_settings_are_named():
    with pytest.raises(InputError, match="responses"):
        sessions_of(0, responses="some")
    with pytest.raises(InputError, match="placement"):
        sessions_of(0, placement="nowhere")
    with pytest.raises(InputError, match="part"):
        sessions_of(0, part="half")
