"""Scripted agents: the expert solves, others err as often as they are told to, and the script says all of it."""

from __future__ import annotations

import os
from collections import Counter
from random import Random
from typing import get_args

import pytest

from composer_replication.envs.policies import (
    CARELESS,
    EXPERT,
    MISTAKES,
    FlawedAgent,
    Move,
    PlayedTurn,
    RememberingRunner,
    Situation,
    play,
    retrace,
)
from composer_replication.envs.policies.flawed import Style, expert_move
from composer_replication.envs.workspace import Difficulty, Workspace, generate_task
from composer_replication.errors import InputError
from composer_replication.sites.rule import KINDS
from refusals import refusal

IS_FULL = os.environ.get("CRF_TEST_PROFILE") == "full"
RUNNER = RememberingRunner()
DIFFICULTIES = get_args(Difficulty)


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_the_expert_solves_every_task_without_a_failing_call(difficulty):
    for seed in range(500 if IS_FULL else 12):
        episode = play(generate_task(seed, difficulty=difficulty), EXPERT, seed, runner=RUNNER)
        assert episode.reward.solved, seed
        assert episode.reward.effort.failed_calls == 0, seed
        assert episode.turns[-1].move.tool == "Finish"
        assert all(turn.move.text for turn in episode.turns)
        assert episode.script == ()


def test_every_mistake_has_a_kind_of_the_taxonomy_and_fails_with_it():
    assert {each.kind for each in MISTAKES.values()} <= {*KINDS, ""}
    met = Counter()
    for seed in range(60):
        for turn in play(generate_task(seed, difficulty=DIFFICULTIES[seed % 3]), CARELESS, seed, runner=RUNNER).turns:
            assert turn.outcome.failed == (turn.mistake is not None)
            if turn.mistake not in (None, "repeat"):
                assert turn.outcome.kind == MISTAKES[turn.mistake].kind, turn
                met[turn.mistake] += 1
    assert len(met) >= 10


def test_the_same_seed_plays_the_same_episode():
    one, two = (play(generate_task(5), CARELESS, 8, runner=RUNNER) for _ in range(2))
    assert one == two
    assert one != play(generate_task(5), CARELESS, 9, runner=RUNNER)


def test_a_mistake_can_be_forced_wherever_it_has_an_opportunity():
    task = generate_task(3)
    plain = play(task, EXPERT, runner=RUNNER)
    assert set(plain.opportunities) >= {"guessed_path", "edit_unread", "whitespace", "ambiguous", "noop"}
    for name, turns in plain.opportunities.items():
        for turn in turns:
            episode = play(task, EXPERT, force={turn: name}, runner=RUNNER)
            assert [(each.turn, each.mistake) for each in episode.script] == [(turn, name)]
            assert episode.turns[:turn] == plain.turns[:turn]
            assert episode.script[0].corrected_at == turn + 1
            assert episode.reward.solved
    with refusal(InputError, what="turn 0", got="noop", expected="guessed_path"):
        play(task, EXPERT, force={0: "noop"}, runner=RUNNER)


def test_an_agent_that_never_corrects_itself_gives_up():
    episode = play(generate_task(3), FlawedAgent(corrects=0.0), force={1: "edit_unread", 2: "repeat"}, runner=RUNNER)
    assert [(each.mistake, each.kind, each.corrected_at) for each in episode.script] == [
        ("edit_unread", "edit_not_read", None),
        ("repeat", "edit_not_read", None),
    ]
    assert episode.turns[1].move == episode.turns[2].move
    assert [turn.move.tool for turn in episode.turns[3:]] == ["Finish"]
    assert episode.reward.value == 0


def test_the_expert_goes_on_from_what_anybody_did():
    task = generate_task(4)
    path = f"/workspace/{task.solution[0].path}"
    calls = [
        ("Read", {"file_path": path}),
        ("Write", {"file_path": path, "content": "nonsense = 1\n"}),
        ("Nothing", None),
    ]
    situation = retrace(task, calls, runner=RUNNER)
    edit = situation.next_edit()
    assert edit is not None
    assert (edit.path, edit.old) == (task.solution[0].path, "")
    assert edit.new == task.files[edit.path].replace(task.solution[0].old, task.solution[0].new)


@pytest.mark.parametrize("seed", range(40 if IS_FULL else 6))
def test_the_expert_solves_what_a_fool_has_worked_on(seed):
    task = generate_task(seed, difficulty=DIFFICULTIES[seed % 3])
    workspace, random = Workspace(task, runner=RUNNER, max_calls=100), Random(seed)
    situation = Situation(workspace)

    def do(tool, arguments):
        move = Move(text="", tool=tool, arguments=arguments)
        situation.take(PlayedTurn(move=move, outcome=workspace.call(tool, arguments)))

    for _ in range(15):
        path = f"/workspace/{random.choice(sorted(task.files))}"
        old = random.choice(task.files[path.removeprefix("/workspace/")].split())
        calls = [("Read", {"file_path": path}), ("Write", {"file_path": path, "content": "x = 1   \n\n\n"})]
        calls += [("Edit", {"file_path": path, "old_string": old, "new_string": "y  \n"}), ("RunTests", {})]
        do(*random.choice(calls))
    while not workspace.finished:
        move = expert_move(situation, Style())
        do(move.tool, move.arguments)
        assert not situation.turns[-1].outcome.failed, situation.turns[-1]
    assert workspace.reward().solved
    assert dict(workspace.files).keys() == task.files.keys()


@pytest.mark.parametrize(
    ("rates", "corrects", "named", "got"),
    [
        ({"noop": 1.2}, 1.0, "noop", "1.2"),
        ({"noop": 0.6, "ambiguous": 0.6}, 1.0, "rates", "noop, ambiguous"),
        ({"nothing": 0.1}, 1.0, "rates", "'nothing'"),
        ({}, -0.1, "corrects", "-0.1"),
    ],
)
def test_rates_that_cannot_be_are_refused(rates, corrects, named, got):
    with refusal(InputError, what=named, got=got):
        FlawedAgent(rates=rates, corrects=corrects)
