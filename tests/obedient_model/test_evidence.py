"""The evidence's figures: sessions that share nothing, log-probs as the package gives them, tables as printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from obedient_model import build_world, one_thread
from obedient_model.evidence import NUM_SESSIONS, call_logprobs, probe, token_logprobs
from obedient_model.evidence_table import control_holds, interval, table, world_table
from obedient_model.teaching import erring_logprobs

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENT = ROOT / "experiments" / "2026-11-16-hints-and-controls"


@pytest.fixture(scope="module")
def world():
    with one_thread():
        yield build_world(0)


@pytest.mark.parametrize("num_tasks_before", [0, 1, 3])
def test_held_out_sessions_share_no_file_and_no_task_with_those_to_train_on(world, num_tasks_before):
    for seed in range(50):
        split = world.split(seed, NUM_SESSIONS, num_tasks_before=num_tasks_before)
        trained, unseen = (set().union(*(session.tasks for session in sessions)) for sessions in split)
        assert trained & unseen == set()
        assert {file for _, file in trained} & {file for _, file in unseen} == set()
        assert [len(sessions) for sessions in split] == [NUM_SESSIONS, NUM_SESSIONS]
        for session in (*split.training, *split.held_out):
            assert len(session.good_tasks) == num_tasks_before
            assert session.kind not in [good.kind for good in session.good_tasks]


def test_other_seeds_hold_out_other_files(world):
    unseen = [frozenset(session.file for session in world.split(seed, NUM_SESSIONS).held_out) for seed in range(20)]
    assert len(set(unseen)) == len(unseen)


def test_a_split_is_the_same_every_time(world):
    assert world.split(3, 8, num_tasks_before=1) == world.split(3, 8, num_tasks_before=1)


def test_the_decision_is_the_token_that_the_rule_is_about(world):
    for session in world.sessions(5, 12, num_tasks_before=2):
        found = probe(world, session)
        assert world.tokenizer.decode([found.ids[found.erring.decision]]) == session.kind.habit
        said = [world.tokenizer.decode([found.ids[place.decision]]) for place in found.good]
        assert said == [good.kind.right for good in session.good_tasks]


def test_erring_calls_have_the_log_probs_that_the_package_gives_them(world):
    sessions = world.split(0, NUM_SESSIONS, num_tasks_before=1).held_out
    ours = call_logprobs(world.model, [probe(world, session) for session in sessions]).erring_call
    torch.testing.assert_close(ours.float(), erring_logprobs(world, world.model, sessions), rtol=1e-5, atol=1e-5)


def test_log_probs_of_a_sequence_do_not_depend_on_what_it_is_padded_beside(world):
    sequences = [probe(world, session).ids for session in world.sessions(1, 4)]
    sequences.append(sequences[0] * 2)
    together = token_logprobs(world.model, sequences)
    for row, ids in zip(together, sequences, strict=True):
        torch.testing.assert_close(row[: len(ids)], token_logprobs(world.model, [ids])[0], rtol=0, atol=1e-5)
        assert not row[len(ids) :].any()


def test_the_model_makes_the_good_calls_and_the_erring_ones_by_itself(world):
    """A call that the model would not make has no log-prob to lose. This world obeys one rule, of the mode, by half."""
    split = world.split(0, NUM_SESSIONS, num_tasks_before=1)
    found = call_logprobs(world.model, [probe(world, each) for sessions in split for each in sessions])
    for logprobs in (found.good_call, found.erring_call):
        assert int((logprobs.exp() > 0.4).sum()) >= len(logprobs) - 2
        assert float(logprobs.exp().mean()) > 0.6


def test_the_interval_is_students_over_worlds_not_over_runs():
    """Worlds' means 1, 2, 3: standard deviation 1, t(2) = 4.303, divided by the root of 3."""
    centre, half = interval([[0.0, 2.0], [2.0, 2.0], [1.0, 5.0]])
    assert centre == pytest.approx(2.0)
    assert half == pytest.approx(4.303 / 3**0.5)


def test_a_control_holds_where_the_shuffled_hint_does_less_than_a_third_either_way():
    assert control_holds(3.0, 0.9)
    assert control_holds(3.0, -0.9)
    assert not control_holds(3.0, 1.1)
    assert not control_holds(3.0, -1.1)
    assert not control_holds(0.4, 0.0)


def stored_results():
    return json.loads((EXPERIMENT / "results.json").read_text(encoding="utf-8"))


def test_the_printed_tables_are_those_of_the_stored_results():
    results = stored_results()
    page = (EXPERIMENT / "README.md").read_text(encoding="utf-8")
    assert "\n".join(table(results)) in page
    assert "\n".join(world_table(results)) in page
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = table(results, arms=["AdamW"], hints=["right", "shuffled"])
    for line in shown[2:]:
        _, teacher, hint, erring, good, _, _, holds = [cell.strip() for cell in line.strip("|").split("|")]
        row = next(each for each in readme.splitlines() if each.startswith(f"| {teacher} | {hint} | "))
        assert [cell.strip(" *") for cell in row.strip("|").split("|")][2:] == [erring, good, holds]
    assert len(shown) == 6


def test_the_stored_results_are_those_of_the_stored_settings():
    results = stored_results()
    assert results["config"] == json.loads((EXPERIMENT / "config.json").read_text(encoding="utf-8"))
    settings = results["config"]
    per_world = sum(len(arm["hints"]) for arm in settings["arms"].values()) * len(settings["teachers"])
    assert len(settings["worlds"]) >= 3
    assert len(results["runs"]) == per_world * len(settings["worlds"]) * len(settings["training_seeds"])
