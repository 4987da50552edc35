"""What `crf run` is told: refused before anything heavy is loaded, and remembered for the next call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from run_pieces import ingested, write_session

from composer_replication.cli.main import main
from composer_replication.config import CrfConfig
from composer_replication.config.presets import load_with_preset
from composer_replication.envs.student import student_folder
from composer_replication.errors import InputError
from composer_replication.runs import RunDir
from composer_replication.steps.running.options import (
    check_given,
    remember,
    reused,
    settled,
    told_before,
    without_lost_logs,
)
from warm_crf import SRC


def given(*overrides):
    return settled(load_with_preset(overrides=overrides))


def test_what_a_run_was_told_is_what_the_next_call_begins_with(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    run = RunDir.create(tmp_path / "run")
    assert told_before(run.root) is None
    config = given("ingest.paths=['logs']", "train.model=student", "train.optimiser.steps=7", "run.control=true")
    remember(config, run)
    monkeypatch.chdir("/")
    path = told_before(run.root)
    assert load_with_preset(path) == config
    assert config.ingest.paths == (str(tmp_path / "logs"),)
    assert config.train.model == str(student_folder())
    assert reused(path, ["train.model", "ingest.paths"]) == ["train.optimiser.steps = 7", "run.control = true"]
    assert load_with_preset(path, ["run.control=false"]).run.control is False


@pytest.mark.parametrize("preset", ["composer", "dapo", "none"])
def test_a_preset_is_remembered_with_what_lies_above_it(tmp_path, preset):
    run = RunDir.create(tmp_path / "run")
    config = given(f"train.preset={preset}", "loss.alpha_sdpo=0.3")
    remember(config, run)
    assert load_with_preset(told_before(run.root)) == config


def test_logs_that_are_gone_are_left_out_and_named(tmp_path):
    (tmp_path / "here").mkdir()
    paths = (str(tmp_path / "here"), str(tmp_path / "gone"))
    config = replace(CrfConfig(), ingest=replace(CrfConfig().ingest, paths=paths))
    kept, lost = without_lost_logs(config)
    assert (kept.ingest.paths, lost) == (paths[:1], [paths[1]])


def test_other_logs_do_not_join_a_run_unless_its_own_are_named_too(tmp_path):
    for name in ("a", "b"):
        write_session(tmp_path / name, f"s-{name}")
    run, _ = ingested(tmp_path / "run", tmp_path / "a")
    model = f"train.model='{student_folder()}'"
    for is_remembered in (False, True):
        check_given(given(f"ingest.paths=['{tmp_path}/a', '{tmp_path}/b']", model), run.root)
        with pytest.raises(InputError, match=r"PATH: got logs without .*/a.*, of which .*/run was made.*`-o RUN2`"):
            check_given(given(f"ingest.paths=['{tmp_path}/b']", model), run.root)
        if not is_remembered:
            remember(given(f"ingest.paths=['{tmp_path}/a']", model), run)


WRONG = {
    "no logs": (["run"], "PATH: got none, and no run to go on with"),
    "no model": (["run", "logs"], "--model: got none, expected a folder with weights, a name on the hub, or `student`"),
    "a model that is nowhere": (["run", "logs", "--model", "nope"], "--model nope: got no folder of that name here"),
    "logs that are nowhere": (["run", "nowhere", "--model", "student"], "nowhere: got no such file or folder"),
    "a key that is not": (["run", "logs", "--set", "train.optimizer.lr=1"], "Did you mean train.optimiser?"),
    "a table out of its place": (["run", "logs", "--set", "optimizer.lr=1"], "Did you mean train.optimiser?"),
    "a folder in the way": (["run", "logs", "--model", "student", "-o", "logs"], "logs is not a run directory"),
    "one session": (["run", "logs", "--model", "student", "-o", "one"], "got 1 session, and none left to train on"),
    "all held out": (
        ["run", "more", "--model", "student", "-o", "all", "--set", "split.test=0.99"],
        "to train on, 10% for validation, 99% for test. Read more logs. To learn from all there is, with nothing held "
        "out to judge by: `--set split.test=0 --set split.validation=0`",
    ),
    "a model without a template": (["run", "logs", "--model", "bare"], "bare: got no chat template"),
    "a folder that is no model": (["run", "logs", "--model", "more"], "more: got a folder without config.json"),
    "no errors at all": (["run", "more", "--model", "student", "-o", "none"], "nothing to learn: got 0 mistakes"),
    "a run that was one session": (["run", "one"], "got 1 session, and none left to train on"),
    "a run among logs": (["run", "logs", "one"], "PATH: got the run one among others, or with -o"),
    "chat with nobody": (["chat", "nope"], "nope: got no folder of that name here, nothing in the cache, and "),
    "weights of nobody": (["export", "nope", "--to", "out"], "got 'nope', no folder here"),
    "weights of a run without": (["export", "one", "--to", "out"], "trained weights of one: got none"),
    "an evaluation of nothing": (["evaluate", "one"], "--after: got no name, and no trained weights in the run"),
    "a run that is none": (["evaluate", "logs"], "logs is not a run directory"),
    "a training without a model": (["train", "--set", "train.run=one"], "train.model: got none"),
}
ASK = """
import contextlib, io, json, sys, time
sys.path.insert(0, {src!r})
from composer_replication.cli.main import main
asked = {{}}
for name, words in {cases!r}.items():
    began, said = time.process_time(), io.StringIO()
    with contextlib.redirect_stderr(said):
        status = main(words)
    asked[name] = [status, said.getvalue(), time.process_time() - began]
print(json.dumps([asked, sorted({{"torch", "transformers", "trl", "peft"}} & set(sys.modules))]))
"""


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """Every wrong input, in one new process: status, words and seconds of each; and what was loaded."""
    folder = tmp_path_factory.mktemp("wrong")
    write_session(folder / "logs", "s-1")
    for number in range(8):
        write_session(folder / "more", f"s-{number}")
    (folder / "bare").mkdir()
    (folder / "bare" / "config.json").write_text("{}")
    script = ASK.format(src=str(SRC), cases={name: words for name, (words, _) in WRONG.items()})
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, env=environment, capture_output=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_input_is_a_sentence_within_two_seconds(refused, name):
    status, said, seconds = refused[0][name]
    assert status == 1
    assert WRONG[name][1] in said
    assert seconds < 2


def test_nothing_of_a_model_is_loaded_for_it(refused):
    assert refused[1] == []


def test_a_half_made_training_says_how_far_it_is_and_what_goes_on(tmp_path, capsys):
    write_session(tmp_path / "logs", "s-1")
    run, _ = ingested(tmp_path / "run", tmp_path / "logs")
    (run.root / "checkpoints" / "checkpoint-118").mkdir(parents=True)
    (run.root / "config.resolved.toml").write_text("[train.optimiser]\nsteps = 200\n")
    words = f"a training that stands at step 118 of 200; `crf run {run.root}` goes on with it"
    for given_words in (
        ["evaluate", str(run.root)],
        ["chat", str(run.root)],
        ["export", str(run.root), "--to", str(tmp_path / "out")],
    ):
        assert main(given_words) == 1
        assert words in capsys.readouterr().err
    assert main(["report", str(run.root)]) == 0
    assert words in capsys.readouterr().err
