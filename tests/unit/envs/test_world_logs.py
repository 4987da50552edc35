"""Sessions of scripted agents, read back: the ingesters, sites and pairs find exactly what was scripted."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace
from typing import get_args

import pytest

from composer_replication.cli.ingest import ingest as ingest_step
from composer_replication.cli.pairs import write_pairs
from composer_replication.cli.sites import write_sites
from composer_replication.config import IngestConfig, PairsConfig, SitesConfig
from composer_replication.envs.logs import log_lines, session_id, to_atif, to_conversation
from composer_replication.envs.policies import CARELESS, MISTAKES, RememberingRunner, expected_findings, play
from composer_replication.envs.workspace import Difficulty, generate_task
from composer_replication.ingestion import IngestReport, ingest
from composer_replication.pairs.corrections import ACTED, find_session_pairs
from composer_replication.runs import RunDir
from composer_replication.runs.files import read_pairs, read_sites
from composer_replication.sites import find_error_sites

IS_FULL = os.environ.get("CRF_TEST_PROFILE") == "full"
DIFFICULTIES = get_args(Difficulty)
# A mistake in most turns, so that a few hundred episodes hold every one of them at every difficulty.
CLUMSY = replace(CARELESS, name="clumsy", rates={**dict.fromkeys(MISTAKES, 1 / 15), "repeat": 0.3}, corrects=0.8)


@pytest.fixture(scope="module")
def runner():
    return RememberingRunner()


@pytest.fixture(scope="module")
def episodes(runner):
    number, num_tasks = (1000, 150) if IS_FULL else (60, 60)  # runs of the tests are what takes long
    return [
        play(generate_task(seed % num_tasks, difficulty=difficulty), CLUMSY, seed, runner=runner)
        for difficulty in DIFFICULTIES
        for seed in range(number)
    ]


def scripted_sites(episode):
    return [(each.turn, each.kind, True, each.repeats) for each in expected_findings(episode)]


def scripted_corrections(episode):
    return [
        (each.turn, each.how, each.chosen.tool, dict(each.chosen.arguments))
        for each in expected_findings(episode)
        if each.chosen is not None
    ]


def sites_of(conversation):
    turns = [turn.id for turn in conversation.turns if turn.role == "assistant"]
    sites = find_error_sites(conversation)
    return sites, [(turns.index(each.turn_id), each.kind, each.is_kept, each.repeats) for each in sites]


def test_sites_and_corrections_are_exactly_those_of_the_script(episodes, note):
    mistakes = Counter()
    for episode in episodes:
        conversation = to_conversation(episode)
        sites, shown = sites_of(conversation)
        assert shown == scripted_sites(episode), (episode.task.difficulty, episode.seed)
        corrections = [
            (each.turn_number, each.how, each.chosen.name, dict(each.chosen.arguments))
            for each in find_session_pairs(conversation, sites)
            if each.source != ACTED
        ]
        assert corrections == scripted_corrections(episode), (episode.task.difficulty, episode.seed)
        mistakes.update(each.mistake for each in episode.script)
    assert set(mistakes) == set(MISTAKES)
    note(f"scripted mistakes found again, kind and correction: {mistakes.total()} in {len(episodes)} episodes")


def test_the_ingester_reads_the_log_as_the_conversation(episodes, tmp_path):
    for episode in episodes[::10]:
        place = tmp_path / "-workspace" / f"{session_id(episode)}.jsonl"
        place.parent.mkdir(exist_ok=True)
        place.write_text("\n".join(log_lines(episode)) + "\n", encoding="utf-8")
    read = {each.id: each for each in ingest([tmp_path], IngestReport(), scrubber=None)}
    assert len(read) == len(episodes[::10])
    for episode in episodes[::10]:
        assert read[session_id(episode)] == to_conversation(episode)


def test_an_atif_document_gives_the_same_sites_and_corrections(episodes, tmp_path):
    for episode in episodes[::10]:
        (tmp_path / f"{session_id(episode)}.json").write_text(json.dumps(to_atif(episode)), encoding="utf-8")
    read = {each.session_id: each for each in ingest([tmp_path], IngestReport(), scrubber=None)}
    for episode in episodes[::10]:
        conversation = read[session_id(episode)]
        assert conversation.format == "atif"
        sites, shown = sites_of(conversation)
        assert shown == scripted_sites(episode)
        corrections = [each for each in find_session_pairs(conversation, sites) if each.source != ACTED]
        assert [each.turn_number for each in corrections] == [each[0] for each in scripted_corrections(episode)]


def test_a_run_of_the_logs_holds_the_script(episodes, tmp_path):
    shown = episodes[::4]
    for episode in shown:
        place = tmp_path / "logs" / "-workspace" / f"{session_id(episode)}.jsonl"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("\n".join(log_lines(episode)) + "\n", encoding="utf-8")
    run = RunDir.create(tmp_path / "run")
    ingest_step(IngestConfig(paths=[str(tmp_path / "logs")], workers=1), run)
    write_sites(SitesConfig(), run)
    write_pairs(PairsConfig(filters="none"), run)
    sites, pairs = Counter(), Counter()
    for site, hint in read_sites(run):
        sites[site.conversation_id, site.kind] += 1
        assert site.is_kept
        assert hint is not None
    for conversation_id, pair in read_pairs(run):
        if pair.source == "correction":
            (call,) = pair.action.calls
            pairs[conversation_id, pair.turn_number, call.name, json.dumps(call.arguments, sort_keys=True)] += 1
    assert sites == Counter((session_id(each), kind) for each in shown for _, kind, _, _ in scripted_sites(each))
    expected = (
        (session_id(each), turn, tool, json.dumps(arguments, sort_keys=True))
        for each in shown
        for turn, _, tool, arguments in scripted_corrections(each)
    )
    assert pairs == Counter(expected)


def test_rates_and_corrections_are_those_that_were_set(runner, note):
    """Within two points at the full count; here within four standard errors."""
    could, made, corrected = Counter(), Counter(), 0
    number = 6000 if IS_FULL else 400
    for seed in range(number):
        episode = play(generate_task(seed % 40), CARELESS, seed, runner=runner)
        could.update(name for turn in episode.turns for name in turn.could)
        made.update(each.mistake for each in episode.script)
        first = [each for each in episode.script if each.mistake != "repeat"]
        corrected += sum(each.corrected_at is not None for each in first)
    for name, rate in CARELESS.rates.items():
        error = (rate * (1 - rate) / could[name]) ** 0.5
        assert abs(made[name] / could[name] - rate) <= (0.02 if IS_FULL else 4 * error), name
    share = corrected / (made.total() - made["repeat"])
    assert abs(share - CARELESS.corrects) <= (0.02 if IS_FULL else 0.06)
    worst = max(abs(made[name] / could[name] - rate) for name, rate in CARELESS.rates.items())
    note(
        f"mistakes per opportunity, furthest from its setting: {worst:.3f} in {number} episodes; put right {share:.3f}"
    )
