"""What `crf run` is told: refused before anything heavy is loaded, and remembered for the next call."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from run_pieces import ingested, write_session

from composer_replication.cli.main import main
from composer_replication.cli.run_checks import (
    check_inputs,
    drop_missing_logs,
    list_reused_options,
    resolve_paths,
    save_options,
    saved_options_path,
)
from composer_replication.config import CrfConfig
from composer_replication.config.presets import load_with_preset
from composer_replication.envs.student import student_folder
from composer_replication.errors import InputError
from composer_replication.runs import RunDir
from refusals import refusal
from warm_crf import SRC


def given(*overrides):
    return resolve_paths(load_with_preset(overrides=overrides))


def test_what_a_run_was_told_is_what_the_next_call_begins_with(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    run = RunDir.create(tmp_path / "run")
    assert saved_options_path(run.root) is None
    config = given("ingest.paths=['logs']", "train.model=student", "train.optimiser.steps=7", "run.control=true")
    save_options(config, run)
    monkeypatch.chdir("/")
    path = saved_options_path(run.root)
    assert load_with_preset(path) == config
    assert config.ingest.paths == (str(tmp_path / "logs"),)
    assert config.train.model == str(student_folder())
    assert list_reused_options(path, ["train.model", "ingest.paths"]) == [
        "train.optimiser.steps = 7",
        "run.control = true",
    ]
    assert load_with_preset(path, ["run.control=false"]).run.control is False


@pytest.mark.parametrize("preset", ["composer", "dapo", "none"])
def test_a_preset_is_remembered_with_what_lies_above_it(tmp_path, preset):
    run = RunDir.create(tmp_path / "run")
    config = given(f"train.preset={preset}", "loss.alpha_sdpo=0.3")
    save_options(config, run)
    assert load_with_preset(saved_options_path(run.root)) == config


def test_logs_that_are_gone_are_left_out_and_named(tmp_path):
    (tmp_path / "here").mkdir()
    paths = (str(tmp_path / "here"), str(tmp_path / "gone"))
    config = replace(CrfConfig(), ingest=replace(CrfConfig().ingest, paths=paths))
    kept, lost = drop_missing_logs(config)
    assert (kept.ingest.paths, lost) == (paths[:1], [paths[1]])


def test_other_logs_do_not_join_a_run_unless_its_own_are_named_too(tmp_path):
    for name in ("a", "b"):
        write_session(tmp_path / name, f"s-{name}")
    run, _ = ingested(tmp_path / "run", tmp_path / "a")
    model = f"train.model='{student_folder()}'"
    for saves_options in (False, True):
        check_inputs(given(f"ingest.paths=['{tmp_path}/a', '{tmp_path}/b']", model), run.root)
        with refusal(InputError, what="PATH", got=str(tmp_path / "a"), fix="`-o RUN2`") as caught:
            check_inputs(given(f"ingest.paths=['{tmp_path}/b']", model), run.root)
        assert str(run.root) in caught.value.got
        if not saves_options:
            save_options(given(f"ingest.paths=['{tmp_path}/a']", model), run)


WRONG = {
    "no logs": (["run"], r"\bPATH\b.*`crf run PATH"),
    "no model": (["run", "logs"], r"--model\b.*`student`.*`--model Qwen/"),
    "a model that is nowhere": (["run", "logs", "--model", "nope"], r"--model nope\b.*HF_HUB_OFFLINE.*`student`"),
    "logs that are nowhere": (["run", "nowhere", "--model", "student"], r"\bnowhere\b.*~/\.claude/projects"),
    "a key that is not": (["run", "logs", "--set", "train.optimizer.lr=1"], r"train\.optimizer\b.*train\.optimiser\b"),
    "a table out of its place": (["run", "logs", "--set", "optimizer.lr=1"], r"\boptimizer\b.*train\.optimiser\b"),
    "a folder in the way": (["run", "logs", "--model", "student", "-o", "logs"], r"\blogs\b.*run\.json"),
    "one session": (["run", "logs", "--model", "student", "-o", "one"], r"\bsplit\b.*\b1 session\b.*split\.test=0"),
    "all held out": (
        ["run", "more", "--model", "student", "-o", "all", "--set", "split.test=0.99"],
        r"\b10% .*\b99% .*`--set split\.test=0 --set split\.validation=0`",
    ),
    "a model without a template": (["run", "logs", "--model", "bare"], r"/bare\b.*render\.chat_template"),
    "a folder that is no model": (["run", "logs", "--model", "more"], r"/more\b.*config\.json"),
    "no errors at all": (
        ["run", "more", "--model", "student", "-o", "none"],
        r"\b0\b.*\b0 of 6 sessions\b.*run\.fewest",
    ),
    "a run that was one session": (["run", "one"], r"\bsplit\b.*\b1 session\b.*split\.test=0"),
    "a run among logs": (["run", "logs", "one"], r"\bPATH\b.*\bone\b.* -o\b.*`crf run RUN`"),
    "chat with nobody": (["chat", "nope"], r"\bnope\b.*HF_HUB_OFFLINE.*\bstudent\b"),
    "weights of nobody": (["export", "nope", "--to", "out"], r"\bweights\b.*'nope'"),
    "weights of a run without": (
        ["export", "one", "--to", "out"],
        r"\bweights\b.*\bone\b.*`crf train .*--adapter FOLDER",
    ),
    "an evaluation of nothing": (["evaluate", "one"], r"--after\b.*\bweights\b.*`crf train`"),
    "a run that is none": (["evaluate", "logs"], r"\blogs\b.*run\.json"),
    "a training without a model": (["train", "--set", "train.run=one"], r"train\.model\b.*`--set train\.model=NAME`"),
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
    assert re.search(WRONG[name][1], said.splitlines()[-1])
    assert seconds < 2


def test_nothing_of_a_model_is_loaded_for_it(refused):
    assert refused[1] == []


def test_a_half_made_training_says_how_far_it_is_and_what_goes_on(tmp_path, capsys):
    write_session(tmp_path / "logs", "s-1")
    run, _ = ingested(tmp_path / "run", tmp_path / "logs")
    (run.root / "checkpoints" / "checkpoint-118").mkdir(parents=True)
    (run.root / "config.resolved.toml").write_text("[train.optimiser]\nsteps = 200\n")
    facts = rf"\b118\b.*\b200\b.*`crf run {re.escape(str(run.root))}`"
    for given_words in (
        ["evaluate", str(run.root)],
        ["chat", str(run.root)],
        ["export", str(run.root), "--to", str(tmp_path / "out")],
    ):
        assert main(given_words) == 1
        assert re.search(facts, capsys.readouterr().err)
    assert main(["report", str(run.root)]) == 0
    assert re.search(facts, capsys.readouterr().err)
