"""Which steps `crf run` makes again, and why; and when there is nothing to learn from."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
from claude_records import Log, call, text
from run_pieces import ingested, write_session

from composer_replication.config import CrfConfig, EvaluationConfig, PairsConfig, RunConfig, SitesConfig, SplitConfig
from composer_replication.errors import InputError, StaleArtefactError
from composer_replication.runs.sites import read_sites, strike_sites
from composer_replication.sessions.read_run import read_sessions
from composer_replication.steps.pairs import write_pairs
from composer_replication.steps.running.learnable import Learnable, Side, check_learnable, learnable
from composer_replication.steps.sites import write_sites
from composer_replication.steps.split import write_split
from composer_replication.steps.stale import NOT_THERE, evaluated_of, note_files, why_files, why_records

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
    return [why_records(name, config or CrfConfig(), run) for name in NAMES]


def test_what_is_there_and_holds_is_not_made_again(run):
    assert whys(run) == [NOT_THERE] * 3
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
    assert whys(run)[0] == "conversations changed since"
    write_split(SplitConfig(), run)
    assert whys(run)[1] == "conversations and tools and split changed since"
    (run.root / "split.jsonl").write_text("{}\n")
    assert whys(run)[0] == "cannot be read"


def test_a_hint_that_is_struck_out_makes_pairs_old_and_the_reason_is_the_right_one(run):
    made(run)
    site = next(site for site, _ in read_sites(run))
    strike_sites(run, [site.id])
    assert whys(run) == ["", "", "sites changed since"]
    with pytest.raises(StaleArtefactError, match=r"sites changed since.*Run `crf pairs \S+` again"):
        list(read_sessions(run, with_sites=True, with_pairs=True))
    write_pairs(PairsConfig(), run)
    strike_sites(run, [site.id], is_struck=False)
    assert whys(run)[1].startswith("struck: ")


def test_an_evaluation_is_made_again_when_what_it_was_made_of_is_another(run):
    assert why_files("evaluate", run, {"sites": "1"}) == NOT_THERE
    run.path("evaluation").write_text("{}")
    assert why_files("evaluate", run, {"sites": "1"}) == "was not made by `crf run`"
    note_files("evaluate", run, {"sites": "1", "after": "x"})
    assert why_files("evaluate", run, {"sites": "1", "after": "x"}) == ""
    assert why_files("evaluate", run, {"sites": "1", "after": "y"}) == "after changed since"


def test_an_option_of_an_evaluation_that_changed_is_named_with_both_values(run):
    weights = {"after": None}
    run.path("evaluation").write_text("{}")
    note_files("evaluate", run, evaluated_of(CrfConfig(), run, weights))
    other = CrfConfig(evaluation=EvaluationConfig(samples=1, seed=3))
    assert why_files("evaluate", run, evaluated_of(other, run, weights)) == (
        "evaluation.samples: 4 -> 1; evaluation.seed: 0 -> 3"
    )


def test_an_evaluation_that_somebody_replaced_is_made_again(run):
    run.path("evaluation").write_text("{}")
    note_files("evaluate", run, {})
    run.path("evaluation").write_text('{"models": "others"}')
    assert why_files("evaluate", run, {}) == "evaluation changed since"


def test_other_bytes_of_weights_and_of_files_for_damage_are_seen(run, tmp_path):
    weights, tasks = tmp_path / "adapter", tmp_path / "tasks.jsonl"
    weights.mkdir()
    (weights / "adapter_model.safetensors").write_bytes(b"one")
    tasks.write_text("{}")
    config = CrfConfig(evaluation=EvaluationConfig(gsm8k=str(tasks)))
    run.path("evaluation").write_text("{}")
    note_files("evaluate", run, evaluated_of(config, run, {"after": weights, "control": None}))
    assert why_files("evaluate", run, evaluated_of(config, run, {"after": weights, "control": None})) == ""
    (weights / "adapter_model.safetensors").write_bytes(b"two")
    tasks.write_text("[]")
    now = evaluated_of(config, run, {"after": weights, "control": None})
    assert why_files("evaluate", run, now) == "weights of after and gsm8k changed since"


def test_what_there_is_to_learn_from_is_counted_without_the_test(run):
    made(run)
    there = learnable(run)
    assert there == Learnable(Side(4, 4, 4), 4, Counter(model=5))
    assert there.failures.total() == sum(site.kind != "no_failure" for site, _ in read_sites(run))
    with pytest.raises(
        InputError,
        match=r"your data is too thin: got 4 mistakes to teach in 4 of 4 sessions, and 4 pairs; in the whole run 5 "
        r"failures \(whose doing: 5 model\), expected at least 10.*More sessions",
    ):
        check_learnable(CrfConfig(), there)


def test_sessions_without_any_error_have_nothing_to_teach(tmp_path):
    for number in range(5):
        write_session(tmp_path / "logs", f"s-{number}")
    run, _ = ingested(tmp_path / "run", tmp_path / "logs")
    made(run)
    with pytest.raises(InputError, match=r"nothing to learn: got 0 mistakes .*no call failed.*run.fewest"):
        check_learnable(CrfConfig(run=RunConfig(fewest=0)), learnable(run))
