"""The check before training counts the errors that the evaluation then measures, whatever it leaves out."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace

import pytest
from evaluation_runs import config, write_sites

from composer_replication.cli.run_checks import (
    TrainingDataCounts,
    _SessionCounts,
    check_verdict_possible,
    count_measurable,
)
from composer_replication.cli.split import write_split
from composer_replication.config import CrfConfig, RunConfig, SplitConfig
from composer_replication.errors import InputError
from composer_replication.evaluation.evaluate import Measurable, evaluate
from composer_replication.runs.files import read_conversations, read_rows
from composer_replication.runs.split import read_split_rows
from refusals import refusal

PRIMARIES = ("forced_gap", "forced_correction", "forced_erring", "sampled_failures")


def damage(run, seed):
    """Hold out a random share; mark near-duplicates, take hints and good calls from some of the sessions."""
    draw = random.Random(seed)
    sites = list(run.read_jsonl("sites", schema="error_site"))
    write_split(SplitConfig(test=draw.choice((0.4, 0.6, 0.9)), validation=0.0), run)
    rows = [{**row._asdict(), "near_duplicates": []} for row in read_split_rows(run)]
    turns = {each.id: [turn.id for turn in each.turns if turn.calls] for each in read_conversations(run)}
    for row in rows:
        row["project"] = draw.choice(("/a", "/b", "/c"))
        fate = draw.choice(("whole", "whole", "erring", "good", "no_hint", "not_kept")) if row["side"] == "test" else ""
        erring = {site["turn_id"] for site in sites if site["conversation_id"] == row["conversation_id"]}
        row["near_duplicates"] = [
            turn
            for turn in turns[row["conversation_id"]]
            if {"erring": turn in erring, "good": turn not in erring}.get(fate)
        ]
        for site in (each for each in sites if each["conversation_id"] == row["conversation_id"]):
            site |= {"no_hint": {"hint": None}, "not_kept": {"is_kept": False}}.get(fate, {})
    settings = {**run.meta("split").settings, "by": draw.choice(("time", "project"))}
    run.write_jsonl("split", rows, schema="split", version=1, sources=["conversations"], settings=settings)
    write_sites(run, sites)
    return draw


@pytest.mark.parametrize("seed", range(8))
def test_what_is_counted_before_is_what_the_evaluation_has_a_value_of(run, folder, other, seed):
    draw = damage(run, seed)
    primary, budget = PRIMARIES[seed % 4], draw.choice((300, 32_768))
    samples = int(primary == "sampled_failures")
    lines = {"context": draw.choice((16, 8192)), "states": draw.choice((1, 40)), "samples": samples, "new_tokens": 2}
    told = config(f'primary = "{primary}"\n' + "".join(f"{name} = {value}\n" for name, value in lines.items()))
    batch = replace(told.train.batch, budget=budget)
    told = replace(told, train=replace(told.train, model=str(folder / "model"), batch=batch))
    before = count_measurable(told, run)
    record = evaluate(told, run, before=str(folder / "model"), after=str(other))
    assert (before.values, before.units) == (record["power"]["sites"], record["power"]["sessions"])
    assert before.over == record["split"]["over"]
    measured = {row["site_id"] for row in read_rows(run, "evaluated")}
    kept = [row for row in run.read_jsonl("sites", schema="error_site") if row["is_kept"]]
    held_out = {row.conversation_id for row in read_split_rows(run) if row.side == "test"}
    lost = [row for row in kept if row["conversation_id"] in held_out and row["id"] not in measured]
    assert len(lost) <= sum(before.left_out.values()), "each error that is not measured is named before"


def gate(judged, learnt, **options):
    told, said = CrfConfig(run=RunConfig(**options)), []
    check_verdict_possible(told, TrainingDataCounts(learnt, 4, Counter()), judged, said.append)
    return said


def test_a_training_that_nobody_could_judge_does_not_begin_unless_that_is_asked_for():
    judged, learnt = Measurable(values=1, units=1, held_out=1, sessions=1), _SessionCounts(4, 4, 4)
    with refusal(InputError, expected="evaluation.fewest_sessions", fix="`--set run.without_verdict=true`") as refused:
        gate(judged, learnt)
    assert re.search(r"\b1\b.*\b1 of 1\b.*\bsessions\b", refused.value.got)
    assert re.search(r"\b5\b.*\bsessions\b", refused.value.expected)
    assert re.search(r"\b25\b", refused.value.fix)
    assert "split.test" not in refused.value.fix  # a larger share would not be enough
    [told] = gate(judged, learnt, without_verdict=True)
    assert re.search(r"\b1\b.*\b1 of 1\b.*\bsessions\b.*\b5 sessions\b", told)


def test_what_there_is_to_judge_by_is_said_with_what_is_left_out_and_how_large_an_effect_must_be():
    with refusal(InputError, fix="`--set split.test=0.25`"):
        gate(Measurable(values=4, units=4, held_out=4, sessions=4), _SessionCounts(16, 16, 16))
    left_out = {"near_duplicate": 1, "sdpo_jsd: without_hint": 2, "no_good_call_in_the_session": 1}
    judged = Measurable(values=6, units=5, held_out=9, sessions=9, over="project", left_out=left_out)
    [told] = gate(judged, _SessionCounts(16, 16, 16))
    assert re.search(r"\b6\b.*\b5 of 9\b.*\bprojects\b", told)
    assert re.search(r"\b1\b[^,]*\btraining\b[^,]*, 2\b[^,]*\bhint\b[^,]*, 1\b[^,]*\bgood\b[^,]*\b1\.3\b", told)


def test_the_advice_is_by_what_can_be_measured_and_not_by_what_could_be_taught():
    judged = Measurable(values=2, units=2, held_out=6, sessions=6, left_out={"no_good_call_in_the_session": 4})
    with refusal(InputError, fix="`--set split.test=0.5`") as refused:
        gate(judged, _SessionCounts(24, 24, 24))
    assert re.search(r"\b75\b", refused.value.fix)
