"""Which steps `crf run` makes again, and why; and when there is nothing to learn from."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace

import pytest
from claude_records import Log, call, text
from run_pieces import ingested, write_session

from composer_replication.cli.pairs import write_pairs
from composer_replication.cli.pipeline import (
    STEPS,
    _evaluation_inputs,
    _record_hashes,
    _why_output_stale,
)
from composer_replication.cli.run_checks import (
    TrainingDataCounts,
    _SessionCounts,
    check_enough_training_data,
    count_training_data,
)
from composer_replication.cli.sites import write_sites
from composer_replication.cli.split import write_split
from composer_replication.config import CrfConfig, EvaluationConfig, PairsConfig, RunConfig, SitesConfig, SplitConfig
from composer_replication.errors import InputError, StaleArtefactError
from composer_replication.runs.artefacts import NOT_WRITTEN_YET
from composer_replication.runs.files import mark_rejected, read_sites
from composer_replication.trainer.sessions.rendering import read_sessions
from refusals import refusal

NOT_READ = "<tool_use_error>File has not been read yet. Read it first before writing to it.</tool_use_error>"
NAMES = ("split", "sites", "pairs")


def erring(folder, name, day):
    log = Log(session=name)
    log.user(f"fix what {name} has")
    edit = {"file_path": "/repo/a.py", "old_string": "return 1", "new_string": "return 2"}
    log.assistant("m1", call("c1", "Edit", **edit))
    log.result("c1", NOT_READ, is_error=True)
    log.assistant("m2", call("c2", "Read", file_path="/repo/a.py"))
    log.result("c2", "     1→return 1")
    log.assistant("m3", text("Done."))
    records = [{**each, "timestamp": f"2026-02-{day:02}T10:00:00.000Z"} for each in log.records]
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))


@pytest.fixture
def run(tmp_path):
    for day, name in enumerate("abcde", start=1):
        erring(tmp_path / "logs", name, day)
    return ingested(tmp_path / "run", tmp_path / "logs")[0]


def made(run, config=None):
    config = config or CrfConfig()
    write_split(config.split, run)
    write_sites(config.sites, run)
    write_pairs(config.pairs, run)


def whys(run, config=None):
    return [STEPS[name].why_stale(config or CrfConfig(), run) for name in NAMES]


def named_in(why):
    """The artefacts and notes that a reason names."""
    return re.findall(r"\b(conversations|tools|split|sites|evaluation|after|gsm8k)\b", why)


def test_what_is_there_and_holds_is_not_made_again(run):
    assert whys(run) == [NOT_WRITTEN_YET] * 3
    made(run)
    assert whys(run) == ["", "", ""]
    made(run)
    assert whys(run) == ["", "", ""]


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"split": SplitConfig(test=0.4)}, ["test: 0.2 -> 0.4", "", ""]),
        ({"sites": SitesConfig(min_confidence=0.9)}, ["", "min_confidence: 0.5 -> 0.9", ""]),
        ({"pairs": PairsConfig(corrections=False)}, ["", "", "corrections: True -> False"]),
    ],
)
def test_another_setting_is_named(run, section, expected):
    made(run)
    assert whys(run, replace(CrfConfig(), **section)) == expected


def test_what_comes_after_something_that_changed_is_made_again(run, tmp_path):
    made(run)
    erring(tmp_path / "logs", "f", 20)
    ingested(run.root, tmp_path / "logs")
    assert named_in(whys(run)[0]) == ["conversations"]
    write_split(SplitConfig(), run)
    assert named_in(whys(run)[1]) == ["conversations", "tools", "split"]
    (run.root / "split.jsonl").write_text("{}\n")
    assert whys(run)[0] not in ("", NOT_WRITTEN_YET)
    assert named_in(whys(run)[0]) == []


def test_a_hint_that_is_struck_out_makes_pairs_old_and_the_reason_is_the_right_one(run):
    made(run)
    site = next(site for site, _ in read_sites(run))
    mark_rejected(run, [site.id])
    split_why, sites_why, pairs_why = whys(run)
    assert (split_why, sites_why, named_in(pairs_why)) == ("", "", ["sites"])
    with refusal(StaleArtefactError, what="pairs.jsonl", got="sites", fix=f"`crf pairs {run.root}`"):
        list(read_sessions(run, with_sites=True, with_pairs=True))
    write_pairs(PairsConfig(), run)
    mark_rejected(run, [site.id], is_rejected=False)
    assert whys(run)[1].startswith("struck: ")


def test_an_evaluation_is_made_again_when_what_it_was_made_of_is_another(run):
    assert _why_output_stale("evaluate", run, {"sites": "1"}) == NOT_WRITTEN_YET
    run.path("evaluation").write_text("{}")
    assert "`crf run`" in _why_output_stale("evaluate", run, {"sites": "1"})
    _record_hashes("evaluate", run, {"sites": "1", "after": "x"})
    assert _why_output_stale("evaluate", run, {"sites": "1", "after": "x"}) == ""
    assert named_in(_why_output_stale("evaluate", run, {"sites": "1", "after": "y"})) == ["after"]


def test_an_option_of_an_evaluation_that_changed_is_named_with_both_values(run):
    weights = {"after": None}
    run.path("evaluation").write_text("{}")
    _record_hashes("evaluate", run, _evaluation_inputs(CrfConfig(), run, weights))
    other = CrfConfig(evaluation=EvaluationConfig(samples=1, seed=3))
    assert _why_output_stale("evaluate", run, _evaluation_inputs(other, run, weights)) == (
        "evaluation.samples: 4 -> 1; evaluation.seed: 0 -> 3"
    )


def test_an_evaluation_that_somebody_replaced_is_made_again(run):
    run.path("evaluation").write_text("{}")
    _record_hashes("evaluate", run, {})
    run.path("evaluation").write_text('{"models": "others"}')
    assert named_in(_why_output_stale("evaluate", run, {})) == ["evaluation"]


def test_other_bytes_of_weights_and_of_files_for_damage_are_seen(run, tmp_path):
    weights, tasks = tmp_path / "adapter", tmp_path / "tasks.jsonl"
    weights.mkdir()
    (weights / "adapter_model.safetensors").write_bytes(b"one")
    tasks.write_text("{}")
    config = CrfConfig(evaluation=EvaluationConfig(gsm8k=str(tasks)))
    run.path("evaluation").write_text("{}")
    inputs = _evaluation_inputs(config, run, {"after": weights, "control": None})
    _record_hashes("evaluate", run, inputs)
    assert _why_output_stale("evaluate", run, inputs) == ""
    (weights / "adapter_model.safetensors").write_bytes(b"two")
    tasks.write_text("[]")
    now = _evaluation_inputs(config, run, {"after": weights, "control": None})
    assert named_in(_why_output_stale("evaluate", run, now)) == ["after", "gsm8k"]


def numbers_of(text):
    return [int(number) for number in re.findall(r"\d+", text)]


def test_what_there_is_to_learn_from_is_counted_without_the_test(run):
    made(run)
    there = count_training_data(run)
    assert there == TrainingDataCounts(_SessionCounts(4, 4, 4), 4, Counter(model=5))
    assert there.failures.total() == sum(site.kind != "no_failure" for site, _ in read_sites(run))
    with refusal(InputError, got="5 model", expected="10") as caught:
        check_enough_training_data(CrfConfig(), there)
    assert numbers_of(caught.value.got) == [4, 4, 4, 4, 5, 5]  # errors, sessions with one, sessions, pairs, failures
    assert "run.fewest" in caught.value.expected


def test_sessions_without_any_error_have_nothing_to_teach(tmp_path):
    for number in range(5):
        write_session(tmp_path / "logs", f"s-{number}")
    run, _ = ingested(tmp_path / "run", tmp_path / "logs")
    made(run)
    with refusal(InputError, expected="run.fewest") as caught:
        check_enough_training_data(CrfConfig(run=RunConfig(fewest=0)), count_training_data(run))
    assert numbers_of(caught.value.got) == [0, 0, 4, 0]
