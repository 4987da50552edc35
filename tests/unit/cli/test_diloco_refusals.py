"""`crf diloco launch` says what is wrong before anything is sent, and `--dry-run` says the same and leaves nothing."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from composer_replication.cli.main import main
from composer_replication.diloco.serverless import LocalProcessExecutor
from composer_replication.diloco.store import open_store
from composer_replication.errors import ConfigError, InputError
from composer_replication.runs import RunDir
from composer_replication.steps.replicas.launch_file import LaunchFile, path_of
from composer_replication.steps.replicas.launches import create_launch, numbers, place_of

TRAINER = ["--trainer-module", "composer_replication.diloco.tiny_trainer"]
SLEEPS = "time.sleep"


@pytest.fixture
def bucket(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(sys, "path", [*sys.path])  # `launch` adds the folder it is called from
    monkeypatch.chdir(tmp_path)
    return tmp_path / "bucket"


def everything_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


REFUSED = [
    (["--round", "sync_evry=5"], "--round: got sync_evry, expected some of sync_every, outer_lr,"),
    (["--round", "generation=5"], "--round: got generation, expected some of"),
    (["--round", "payload=int7"], "--round payload: got 'int7', expected fp32, bf16, int8 or int4"),
    (["--round", "grace_s=-1"], "--round grace_s: got -1, expected a number, 0 or more"),
    (["--round", "sync_every=2.5"], "--round sync_every: got 2.5, expected a whole number, 1 or more"),
    (["--round", "nesterov=False"], "--round nesterov: got 'False', expected true or false"),
    (["--round", "min_replicas=3"], "--round min_replicas: got 3, expected 1 to 2"),
    (["--secret", "CRF_NOT_SET"], "CRF_NOT_SET, which is not set"),
    (["--option", "hard=1"], "options of LocalProcessExecutor"),
    (["--timeout", "0"], "timeout: got 0.0, expected seconds above 0"),
    (["--launch-file", "taken"], "a file that is there"),
    (["--env", "X=hf_" + "abcdefghijklmnopqrstuvwxyzABCDEFGH"], "what looks like a secret"),
    (["--trainer-kwargs-json", json.dumps({"x": "y" * 120_000})], "entrypoint_args: got"),
]


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["launch", "dry run"])
@pytest.mark.parametrize(("given", "words"), REFUSED, ids=[" ".join(given)[:30] for given, _ in REFUSED])
def test_a_dry_run_refuses_what_a_launch_refuses_and_neither_leaves_anything(
    bucket, tmp_path, capsys, dry, given, words
):
    (tmp_path / "taken").touch()
    assert main(["diloco", "launch", str(bucket), "--replicas", "2", *TRAINER, *given, *dry]) == 1
    assert words in capsys.readouterr().err
    assert everything_in(tmp_path) == ["taken"]


def test_a_dry_run_that_is_right_leaves_nothing_either(bucket, tmp_path, capsys):
    assert main(["diloco", "launch", str(bucket), "--replicas", "2", *TRAINER, "--dry-run"]) == 0
    assert "launch 0 at" in capsys.readouterr().err
    assert everything_in(tmp_path) == []


@pytest.mark.parametrize("verb", [["watch", "--once"], ["cancel"], ["collect", "-o", "out"]])
@pytest.mark.parametrize("place", ["none", "s3:/x", "gcs://box/a"])
def test_who_looks_makes_no_folder_and_a_place_that_is_none_is_refused(bucket, tmp_path, capsys, verb, place):
    assert main(["diloco", verb[0], place, *verb[1:]]) == 1
    said = capsys.readouterr().err
    assert ("no launch" if place == "none" else f"place of a store: got '{place}', expected") in said
    assert everything_in(tmp_path) == []


def test_a_launch_into_a_place_that_is_none_is_refused(bucket, tmp_path, capsys):
    assert main(["diloco", "launch", "s3:/x", "--replicas", "2", *TRAINER]) == 1
    assert "place of a store: got 's3:/x', expected" in capsys.readouterr().err
    assert everything_in(tmp_path) == []


class TestOneThatRuns:
    """A launch of the bucket whose replicas are processes that sleep."""

    @pytest.fixture
    def file(self, bucket, tmp_path):
        store = open_store(str(bucket))
        about = {"bucket": str(bucket), "executor": "local", "options": {"tied": False}, "replicas": 2, "commits": 4}
        launch = create_launch(store, **about, entrypoint=SLEEPS, args={"trainer_kwargs": {}, "settings": {}})
        file = LaunchFile.create(path_of(place_of(str(bucket)), launch.number), launch)
        executor = LocalProcessExecutor(folder=tmp_path / "replicas", tied=False)
        job = executor.job("signal.pause", {}, gpu=None, timeout_s=60, launch=launch.id)
        file.begin(0, 0)
        handle = executor.start(job)
        file.note(handle)
        yield file
        executor.cancel(handle)

    def test_another_launch_has_to_be_asked_for(self, bucket, file, capsys):
        given = ["diloco", "launch", str(bucket), "--replicas", "1", *TRAINER]
        for dry in ([], ["--dry-run"]):
            assert main([*given, *dry]) == 1
            said = capsys.readouterr().err
            assert "got one that runs (rank 0), expected none that runs" in said
            assert "`crf diloco cancel " in said
            assert said.rstrip().endswith("--beside.")
        assert numbers(open_store(str(bucket))) == [0]
        assert main([*given, "--dry-run", "--beside"]) == 0
        assert "`--launch 0` behind watch, cancel and collect means that one" in capsys.readouterr().err

    def test_collecting_too_early_says_so_and_has_an_exit_status_of_its_own(self, bucket, file, tmp_path, capsys):
        asked = ["diloco", "collect", str(bucket), "-o", str(tmp_path / "out"), "--timeout", "0"]
        assert main(asked) == 3
        shown = capsys.readouterr()
        assert "None" not in shown.out
        assert "still running: rank 0; wait (`crf diloco watch " in shown.err
        assert main([*asked, "--json"]) == 3
        assert json.loads(capsys.readouterr().out)["still_running"] == [0]

    def test_who_waits_is_told_for_whom(self, bucket, file, tmp_path, capsys):
        assert main(["diloco", "collect", str(bucket), "-o", str(tmp_path / "out"), "--timeout", "0.1"]) == 3
        assert "waiting for 0.1 s at most for rank 0; Ctrl-C ends the waiting, not them" in capsys.readouterr().err

    def test_a_launch_of_this_bucket_that_has_ended_is_in_nobody_s_way(self, bucket, file, capsys):
        assert main(["diloco", "cancel", str(bucket), "--launch", "0"]) == 0
        assert main(["diloco", "launch", str(bucket), "--replicas", "1", *TRAINER, "--dry-run"]) == 0
        assert "launch 1 at" in capsys.readouterr().err


def test_a_launch_of_another_machine_that_may_run_is_said(bucket, capsys):
    store = open_store(str(bucket))
    about = {"bucket": str(bucket), "executor": "modal", "options": {}, "replicas": 2, "commits": 4}
    launch = create_launch(store, **about, entrypoint=SLEEPS, args={"trainer_kwargs": {}, "settings": {}})
    store.put(launch.key("output", "000", "done.json"), b"{}")
    given = ["diloco", "launch", str(bucket), "--replicas", "1", *TRAINER, "--dry-run"]
    assert main(given) == 0
    assert re.search(
        r"launch 0 at \S+, whose file is not here, has 1 of 2 replicas at the end", capsys.readouterr().err
    )
    store.put(launch.key("output", "001", "done.json"), b"{}")
    assert main(given) == 0
    assert "whose file is not here" not in capsys.readouterr().err


def test_the_error_about_steps_names_the_option(tmp_path, monkeypatch, capsys):
    from composer_replication.steps.replicas import asking

    class Enough(Exception):
        pass

    monkeypatch.setattr(RunDir, "open", lambda _root: (_ for _ in ()).throw(Enough))
    given = ["train.run=run", "train.model=student", "train.mode=offline", "train.optimiser.steps=20"]
    with pytest.raises(ConfigError) as caught:
        asking.training(None, given, {}, no_scrub=False, allowed=())
    assert "expected a multiple of 100, the steps between two exchanges (sync_every=100)" in str(caught.value)
    assert "Set --round sync_every=N, so that it divides 20" in str(caught.value)
    with pytest.raises(Enough):
        asking.training(None, given, {"sync_every": 10}, no_scrub=False, allowed=())
    with pytest.raises(InputError, match="--round sync_every: got 10, expected a multiple of the number of frag"):
        asking.training(None, given, {"sync_every": 10, "num_fragments": 3}, no_scrub=False, allowed=())


def test_the_keys_of_round_are_those_of_the_loop_and_the_manager():
    import inspect
    from dataclasses import fields

    from composer_replication.diloco.rounds.manager import ObjectStoreManager
    from composer_replication.diloco.serverless.replica_entrypoint import SETTINGS
    from composer_replication.diloco.training import OuterLoop
    from composer_replication.steps.replicas.round_keys import MANAGER_KEYS, OUTER_KEYS

    assert {each.name: each.default for each in OUTER_KEYS} == {each.name: each.default for each in fields(OuterLoop)}
    by_launch = {"generation", "takeover"}  # which a launch sets itself
    assert {each.name for each in MANAGER_KEYS} == SETTINGS.keys() - by_launch
    taken = inspect.signature(ObjectStoreManager).parameters
    by_store = {"timeout_s": 1800.0, "poll_s": 1.0}  # None in the signature: as the store's own, or these
    for each in MANAGER_KEYS:
        assert each.default == by_store.get(each.name, taken[each.name].default), each.name
