"""Jobs: predictions before the first, one process each, kills gone on from, failures named, budgets held."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ablation_plans import TOY, write_arms

from composer_replication.cli.main import main
from composer_replication.errors import InputError, RunError, StaleArtefactError
from composer_replication.evaluation.ablation.job import pack, packed_path, read_stored
from composer_replication.evaluation.ablation.jobs import (
    JobKey,
    check_ready,
    find_breaches,
    read_results,
    run_jobs,
    select_jobs,
)
from composer_replication.evaluation.ablation.plan import read_plan
from refusals import refusal

HERE = Path(__file__).parent
SLOW = ("[arms.plain]", "[world]\nseconds = 0.15\n[arms.plain]")


@pytest.fixture(autouse=True)
def toy_on_the_path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))


def run_toy(folder: Path, *changes: tuple[str, str], **options):
    plan = read_plan(write_arms(folder, *changes, text=TOY))
    return run_jobs(plan, folder, select_jobs(plan, **options), workers=2)


@pytest.fixture(scope="module")
def toy_results(tmp_path_factory):
    """All six jobs, once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
        folder = tmp_path_factory.mktemp("toy")
        run_toy(folder)
        yield folder


def results_of(folder: Path) -> list[dict]:
    """Up to times."""
    results = json.loads((folder / "results.json").read_text())["results"]
    for each in results:
        del each["spent"]["seconds"]
    return results


def test_every_arm_has_a_result_with_every_seed(toy_results):
    found = read_results(toy_results)
    assert [(each.arm, each.seed) for each in found.results] == [
        (arm, seed) for arm in ("plain", "helped", "placebo") for seed in (1, 2)
    ]
    assert not found.missing
    assert not found.failed
    assert not find_breaches(found)


def test_predictions_are_older_than_the_first_job(toy_results):
    written = (toy_results / "predictions.json").stat().st_mtime_ns
    jobs = [path.stat().st_mtime_ns for path in toy_results.glob("jobs/*/*/job.json")]
    assert len(jobs) == 6
    assert written < min(jobs)


def test_jobs_stay_out_of_the_repository(toy_results):
    assert (toy_results / "jobs" / ".gitignore").read_text() == "*\n"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (('predict = "As plain."', 'predict = "Better."'), ["'placebo'", "predict"]),
        (("world.effect = 0.5", "world.effect = 0.6"), ["'helped'", "setting"]),
        (('primary = "failing"', 'primary = "solved"'), ["ablate.primary", "'solved'", "'failing'"]),
        (("steps = 3", "steps = 4"), ["ablate.budget", "steps=4", "steps=3"]),
        (
            ("[base.train]", "[base.loss]\nalpha_sdpo = 0.3\n[base.train]"),
            ["'plain'", "'helped'", "'placebo'", "setting"],
        ),
    ],
)
def test_a_plan_that_has_begun_stays_as_it_was(toy_results, tmp_path, change, named):
    plan = read_plan(write_arms(tmp_path, change, text=TOY))
    with refusal(StaleArtefactError, what="predictions.json") as caught:
        run_jobs(plan, toy_results, [])
    assert all(name in caught.value.got for name in named), caught.value.got


def test_an_arm_that_has_begun_cannot_be_left_out_of_the_plan(toy_results, tmp_path):
    text = TOY[: TOY.index("[arms.placebo]")]
    with refusal(StaleArtefactError, what="predictions.json", got="'placebo'") as caught:
        run_jobs(read_plan(write_arms(tmp_path, text=text)), toy_results, [])
    assert "--only" in caught.value.got


def test_before_the_first_job_a_prediction_may_change(tmp_path):
    plan = read_plan(write_arms(tmp_path, text=TOY))
    run_jobs(plan, tmp_path, [])
    changed = ('predict = "As plain."', 'predict = "Better."')
    found = run_jobs(read_plan(write_arms(tmp_path, changed, text=TOY)), tmp_path, [])
    assert found.frozen.arms["placebo"].predict == "Better."


def words_of(log, arm, *, seed):
    """The lines about one job, without its name and numbers."""
    lines = [line for line in log.splitlines() if re.search(rf"\b{arm}\b.*\bseed {seed}\b", line)]
    return [re.sub(rf"\b{arm}\b|\d", "", line) for line in lines]


def test_a_killed_command_goes_on_and_ends_with_the_same_results(toy_results, tmp_path):
    path = write_arms(tmp_path, SLOW, text=TOY)
    command = [sys.executable, "-m", "composer_replication", "ablate", "--config", str(path), "--seeds", "1"]
    with (tmp_path / "said.txt").open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
        steps = tmp_path / "jobs" / "helped" / "1" / "steps.txt"
        deadline = time.monotonic() + 60
        while not steps.exists():
            is_alive = time.monotonic() < deadline and process.poll() is None
            assert is_alive, (tmp_path / "said.txt").read_text()
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    was_there = steps.read_text().splitlines()
    assert 1 <= len(was_there) < 3  # in the middle of a job
    assert not (steps.parent / "result.json").exists()
    done = (tmp_path / "jobs" / "plain" / "1" / "result.json").stat().st_mtime_ns
    again = subprocess.run(command, capture_output=True, check=True, text=True)
    killed, untouched = (words_of(again.stderr, arm, seed=1) for arm in ("helped", "placebo"))
    assert killed[0] != untouched[0]  # that a job goes on is said in other words than that it begins
    assert (tmp_path / "jobs" / "plain" / "1" / "result.json").stat().st_mtime_ns == done
    assert steps.read_text().splitlines() == ["0", "1", "2"]  # its process was gone, and nothing was made twice
    never_killed = [each for each in results_of(toy_results) if each["seed"] == 1]
    assert results_of(tmp_path) == never_killed


def test_a_job_that_fails_is_named_and_the_rest_goes_on(tmp_path, capfd):
    path = write_arms(tmp_path, ("world.effect = 0.5", "world.fail = true"), text=TOY)
    assert main(["ablate", "--config", str(path), "--seeds", "2", "--workers", "3"]) == 1
    said = capfd.readouterr().err
    assert re.search(r"\bhelped\b.*\bseed 2\b.*\bfail", said)
    assert f"RuntimeError: the toy broke in {tmp_path}" in said
    found = read_results(tmp_path)
    assert [each.arm for each in found.results] == ["plain", "placebo"]
    assert found.failed[0].last_lines == ["RuntimeError: the toy broke in 2"]  # results are published, folders not
    assert str(tmp_path) not in (tmp_path / "results.json").read_text()
    assert JobKey("helped", 1) in found.missing
    page = (tmp_path / "table.md").read_text()
    assert re.search(r"\bhelped\b.*\bseed 2\b.*RuntimeError: the toy broke in 2", page)


def test_another_budget_is_said_beside_the_arm_and_ends_with_1(tmp_path, capfd):
    path = write_arms(tmp_path, ("world.effect = 0.5", "world = { effect = 0.5, steps = 4 }"), text=TOY)
    assert main(["ablate", "--config", str(path), "--seeds", "1", "--workers", "3"]) == 1
    assert re.search(r"\bhelped\b.*\bseed 1\b.*\b4 steps\b.*\b3\b", capfd.readouterr().err)
    page = (tmp_path / "table.md").read_text()
    assert re.search(r"\bhelped\b.*\bseed 1\b.*\b40 rollouts\b.*\b30\b", page)
    spent = {"helped": "| helped | 1 | 40 | 4 | 1,000 |", "plain": "| plain | 1 | 30 | 3 | 1,000 |"}
    rows = {arm: line for arm, start in spent.items() for line in page.splitlines() if line.startswith(start)}
    assert rows["helped"].endswith("** |")
    assert not rows["plain"].endswith("** |")
    assert main(["ablate", "--table", "-o", str(tmp_path)]) == 1


def copied(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    return target


def test_a_clone_s_results_are_not_emptied(toy_results, tmp_path):
    """jobs/ is not in a repository: what results.json holds could not be made again from nothing."""
    folder = copied(toy_results, tmp_path / "clone")
    shutil.rmtree(folder / "jobs")
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".json"}
    plan = read_plan(write_arms(tmp_path, ('predict = "As plain."', 'predict = "Better."'), text=TOY))
    with refusal(RunError, what="results.json", got="plain 1, plain 2, helped 1, ...", fix="-o FOLDER") as caught:
        run_jobs(plan, folder, select_jobs(plan, seeds=[1]))
    assert "6 jobs" in caught.value.got
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".json"} == before


def test_packed_results_are_neither_emptied_in_a_clone_nor_left_beside_newer_ones(toy_results, tmp_path):
    folder = copied(toy_results, tmp_path / "packed")
    plain, packed = folder / "results.json", packed_path(folder / "results.json")
    packed.write_bytes(pack(read_stored(plain)))
    plain.unlink()
    before = packed.read_bytes()
    (folder / "jobs").rename(tmp_path / "elsewhere")
    plan = read_plan(write_arms(tmp_path, text=TOY))
    with refusal(RunError, what=str(packed), got="6 jobs"):
        run_jobs(plan, folder, select_jobs(plan))
    assert packed.read_bytes() == before
    (tmp_path / "elsewhere").rename(folder / "jobs")
    run_jobs(plan, folder, select_jobs(plan))
    assert plain.read_bytes() == (toy_results / "results.json").read_bytes()
    assert not packed.exists()


def test_predictions_that_are_gone_are_not_written_after_the_jobs(toy_results, tmp_path):
    folder = copied(toy_results, tmp_path / "gone")
    (folder / "predictions.json").unlink()
    with refusal(StaleArtefactError, what=str(folder / "predictions.json"), got="jobs"):
        run_jobs(read_plan(write_arms(tmp_path, text=TOY)), folder, [])
    assert not (folder / "predictions.json").exists()


@pytest.mark.parametrize("text", ["", "[]", '{"schema"', "{}", '{"schema": "composer_replication.predictions"}'])
@pytest.mark.parametrize("name", ["results.json", "predictions.json", "jobs/plain/1/result.json"])
def test_a_damaged_file_is_named(toy_results, tmp_path, capfd, name, text):
    folder = copied(toy_results, tmp_path / "damaged")
    (folder / name).write_text(text)
    path = write_arms(tmp_path, text=TOY)
    command = ["ablate", "--config", str(path), "-o", str(folder)]
    is_made_anew = name == "results.json"
    for asked in [["ablate", "--table", "-o", str(folder)]] if is_made_anew else [command]:
        assert main(asked) == 1
        said = capfd.readouterr().err
        assert re.search(rf"{re.escape(str(folder / name))}\b.*Error", said)
        assert "CRF_DEBUG" not in said  # which is asked for where nobody foresaw what happened
    if name.endswith("result.json"):
        (folder / name).unlink()  # as the message says
        is_made_anew = True
    if is_made_anew:  # of its jobs
        assert main(command) == 0
        assert results_of(folder) == results_of(toy_results)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (('predict = "As plain."', 'predict = "Better."'), StaleArtefactError),
        (('primary = "failing"', 'primary = "solved"'), StaleArtefactError),
    ],
)
def test_a_dry_run_refuses_what_the_run_would(toy_results, tmp_path, change, error):
    path = write_arms(tmp_path, change, text=TOY)
    with pytest.raises(error):
        check_ready(read_plan(path), toy_results)
    assert main(["ablate", "--config", str(path), "-o", str(toy_results), "--dry-run"]) == 1


def test_what_a_world_lacks_is_said_once_and_before_any_job(tmp_path, capfd):
    path = write_arms(tmp_path)  # the world of logs
    for more, said in (([], ["ablate.run", "--run"]), (["--run", str(tmp_path / "no")], [str(tmp_path / "no")])):
        for dry in ([], ["--dry-run"]):
            assert main(["ablate", "--config", str(path), "-o", str(tmp_path / "out"), *more, *dry]) == 1
            (line,) = capfd.readouterr().err.splitlines()
            assert all(name in line for name in said)
    assert not (tmp_path / "out" / "jobs").exists()


def test_other_options_beside_a_table_and_words_for_numbers_are_refused(toy_results, capfd):
    assert main(["ablate", "--table", "-o", str(toy_results), "--only", "plain"]) == 1
    assert re.search(r"--table\b.*--only\b", capfd.readouterr().err)
    with pytest.raises(SystemExit):
        main(["ablate", "--table", "-o", str(toy_results), "--seeds", "x"])
    assert re.search(r"--seeds\b.*'x'.*\b1,2\b", capfd.readouterr().err)
    assert main(["ablate", "--config", str(toy_results / "nope.toml")]) == 1
    assert re.search(r"--config\b.*\bnope\.toml\b.*\barms\.toml\b", capfd.readouterr().err)


def test_what_is_asked_for_has_to_be_in_the_plan(tmp_path):
    plan = read_plan(write_arms(tmp_path, text=TOY))
    assert select_jobs(plan, only=["placebo"], seeds=[2]) == [JobKey("placebo", 2)]
    with refusal(InputError, what="--only", got="'x'", expected="plain, helped, placebo"):
        select_jobs(plan, only=["x"])
    with refusal(InputError, what="--seeds", got="3", expected="1, 2"):
        select_jobs(plan, seeds=[3])
