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
    assert [line.partition(":")[0] for line in said.err.splitlines() if line.endswith("reads what is new")] == [
        "ingest"
    ]
    assert "train: " not in said.err
    assert said.out.splitlines()[-1] == "report: run/report.html"
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert main(["run", "run"]) == 0  # as it was told before
    said = capsys.readouterr().err
    assert "as run/options.toml says from before: ingest.paths = " in said
    assert "train: " not in said
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
    rows = [line.split()[:2] for line in said.out.splitlines() if " make " in line]
    assert [name for name, _ in rows] == ["ingest", "split", "sites", "pairs", *TRAINED]
    assert "4 steps see each of 12 windows 0.33 times: once is train.optimiser.steps = 12" in said.err
    assert "price: nothing; no adviser is named" in said.err
    parts = [line.split()[0] for line in said.out[said.out.index("Time, roughly") :].splitlines()[3:] if line.strip()]
    assert parts == ["warm-up", "hint", "training", "control", "control-2", "evaluation", "all"]
    assert "memory of a step:" in said.err
    Path("writer.json").write_text(json.dumps([{"slug": "a/b", "input_per_mtok": 1.0, "output_per_mtok": 1.0}]))
    assert main([*given, "--set", "sites.writer=writer.json", "--set", "sites.max_usd=2.5"]) == 0
    said = capsys.readouterr().err
    assert "price: at most $2.5 (sites.max_usd) for the writer of hints" in said
    assert "price: nothing" not in said
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
    for given, words in (
        (["logs", "--model", "bare"], "template"),
        (["--model", "model"], "PATH: got none, and no run to go on with"),
        (["logs"], "--model: got none"),
        (["one", "--model", "model"], "1 session, and none left to train on"),
        (["logs", "--model", "model", "--set", "run.fewest=1000"], "your data is too thin: got 12 mistakes to teach"),
    ):
        assert main(["run", *given]) == 1
        assert words in capsys.readouterr().err
        shutil.rmtree("run", ignore_errors=True)
