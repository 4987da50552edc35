"""`crf run`, killed in each of its steps and called again, ends with the report of one that nobody killed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import killed_runs
import pytest

from composer_replication.cli.main import main
from output_facts import lines_with
from warm_crf import WarmCall

HERE = Path(__file__).parent
# When something was made, how long it took, and the hash of the one file that says when it was made.
TIME = re.compile(
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?(?:\+00:00|Z| UTC)?|\b[\d.]+ (?:s|min|h)\b|evaluation\.json.*"
)
LATER = pytest.mark.full
TRAINED = ["train", "control", "control-2", "evaluate", "report"]


def ended(folder, *given):
    call = WarmCall("killed_runs:run", str(folder), *given, beside=[HERE])
    status = call.wait(200)
    assert status is not None, "it did not end"
    return status


def steps_named(text):
    """The steps that a run says it makes, or has made."""
    return {line.partition(":")[0] for line in text.splitlines()} & {"ingest", "split", "sites", "pairs", *TRAINED}


def report_of(run):
    """Both pages, without times."""
    return [TIME.sub("", (run / name).read_text(encoding="utf-8")) for name in ("report.html", "report.md")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What a run starts from, and `whole`: one that ran without a stop."""
    root = tmp_path_factory.mktemp("killed")
    killed_runs.prepare(root)
    assert ended(root) == 0
    (root / "run").rename(root / "whole")
    return root


@pytest.mark.parametrize(
    ("step", "seconds"),
    [
        pytest.param("ingest", 0.0, marks=LATER),
        pytest.param("split", 0.0, marks=LATER),
        pytest.param("sites", 0.0, marks=LATER),
        pytest.param("pairs", 0.0, marks=LATER),
        ("train", 0.6),
        pytest.param("train", 0.2, marks=LATER),
        pytest.param("control", 0.4, marks=LATER),
        pytest.param("control-2", 0.4, marks=LATER),
        ("evaluate", 0.2),
        pytest.param("report", 0.1, marks=LATER),
    ],
)
def test_killed_in_a_step_and_called_again_it_ends_with_the_same_report(folder, step, seconds):
    shutil.rmtree(folder / "run", ignore_errors=True)
    assert ended(folder, step, seconds) == -signal.SIGKILL
    assert ended(folder) == 0
    assert report_of(folder / "run") == report_of(folder / "whole")


@pytest.mark.parametrize("phase", ["hint proof", pytest.param("warm-up", marks=LATER)])
def test_killed_when_a_phase_is_made_and_its_time_is_not_written_it_ends_with_the_same_report(folder, phase):
    shutil.rmtree(folder / "run", ignore_errors=True)
    assert ended(folder, "", 0.0, phase) == -signal.SIGKILL
    assert ended(folder) == 0
    assert report_of(folder / "run") == report_of(folder / "whole")


@pytest.mark.full
def test_processes_that_order_their_sets_otherwise_end_with_the_same_report(folder):
    reports = []
    for seed in ("1", "2"):
        shutil.rmtree(folder / "run", ignore_errors=True)
        path = os.pathsep.join(sys.path)
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, killed_runs.__file__, str(folder)], check=True, env=environment)
        reports.append(report_of(folder / "run"))
    assert reports[0] == reports[1]


def test_a_run_that_is_done_makes_nothing_again_and_says_the_same(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    shutil.rmtree("run", ignore_errors=True)
    shutil.copytree("whole", "run")
    before = {
        path: path.stat().st_mtime_ns for path in Path("run").rglob("*") if path.suffix in (".safetensors", ".html")
    }
    given = [f"--set={each}" for each in killed_runs.SETTINGS]
    assert main(["run", "logs", "--model", "model", *given]) == 0
    said = capsys.readouterr()
    assert steps_named(said.err) == {"ingest"}
    assert said.out.splitlines()[-1].endswith(" run/report.html")
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert main(["run", "run"]) == 0  # as it was told before
    said = capsys.readouterr().err
    assert lines_with(said, "run/options.toml", "ingest.paths")
    assert steps_named(said) == {"ingest"}
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert main(["run", "run", "--set", "evaluation.seed=1"]) == 0
    made = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith(("evaluate: ", "report: ", "train: "))
    ]
    assert made[0] == "evaluate: evaluation.seed: 0 -> 1"
    assert [line for line in made if line.startswith("train: ")] == []


def test_a_dry_run_says_what_it_would_make_and_touches_nothing(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    shutil.rmtree("run", ignore_errors=True)
    given = ["run", "logs", "--model", "model", "--dry-run", *(f"--set={each}" for each in killed_runs.SETTINGS)]
    assert main(given) == 0
    said = capsys.readouterr()
    assert not Path("run").exists()
    first_cells = [line.split()[0] for line in said.out.splitlines() if line.strip()]
    assert lines_with(said.err, 4, "steps", 12, "windows", 0.33, "train.optimiser.steps = 12")
    assert lines_with(said.err, "price")
    assert "$" not in said.err
    assert "GiB" in said.err
    assert main([*given, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    steps, parts = [each["name"] for each in plan["steps"] if each["why"]], [each["name"] for each in plan["time"]]
    assert steps == ["ingest", "split", "sites", "pairs", *TRAINED]
    assert parts == ["warm-up", "hint proof", "training", "control", "control-2", "evaluation"]
    assert {name.split()[0] for name in (*steps, *parts)} <= set(first_cells)
    assert (plan["price"], plan["writer_usd"]) == (None, None)
    Path("writer.json").write_text(json.dumps([{"slug": "a/b", "input_per_mtok": 1.0, "output_per_mtok": 1.0}]))
    assert main([*given, "--set", "sites.writer=writer.json", "--set", "sites.max_usd=2.5"]) == 0
    said = capsys.readouterr().err
    assert lines_with(said, "price") == lines_with(said, "price", "$2.5", "sites.max_usd") != []
    assert main([*given, "-o", "whole", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert {step["name"]: step["why"] for step in plan["steps"] if step["why"]} == {}
    assert main([*given, "-o", "whole", "--json", "--set", "loss.beta_replay=0.5"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [step["name"] for step in plan["steps"] if step["why"]] == TRAINED


def test_what_cannot_be_run_is_a_sentence(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    shutil.rmtree("run", ignore_errors=True)
    shutil.copytree("model", "bare", dirs_exist_ok=True)
    Path("bare/chat_template.jinja").unlink()
    Path("one").mkdir(exist_ok=True)
    shutil.copy(next(Path("logs").glob("*.jsonl")), "one")
    for given, facts in (
        (["logs", "--model", "bare"], ["--model", "render.chat_template"]),
        (["--model", "model"], ["PATH", "none"]),
        (["logs"], ["--model", "none"]),
        (["one", "--model", "model"], ["split", "1 session", "`--set split.test=0 --set split.validation=0`"]),
        (["logs", "--model", "model", "--set", "run.fewest=1000"], [12, 1000, "run.fewest = 0"]),
    ):
        assert main(["run", *given]) == 1
        assert lines_with(capsys.readouterr().err, *facts)
        shutil.rmtree("run", ignore_errors=True)
