"""`crf diloco launch` says what is wrong before anything is sent, and `--dry-run` says the same and leaves nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from composer_replication.cli.main import main
from composer_replication.cli.replicas.launches import (
    LaunchFile,
    canonical_bucket,
    create_launch,
    launch_path,
    list_launch_numbers,
)
from composer_replication.diloco.serverless import LocalProcessExecutor
from composer_replication.diloco.store import open_store
from composer_replication.errors import ConfigError, InputError
from composer_replication.runs import RunDir
from output_facts import lines_with
from refusals import refusal

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


# What is named, by what was typed:
REFUSED = [
    (["--round", "sync_evry=5"], ["--round", "sync_evry", "sync_every", "outer_lr"]),
    (["--round", "generation=5"], ["--round", "generation", "sync_every", "outer_lr"]),
    (["--round", "payload=int7"], ["--round payload", "'int7'", "fp32", "bf16", "int8", "int4"]),
    (["--round", "grace_s=-1"], ["--round grace_s", "-1", 0]),
    (["--round", "sync_every=2.5"], ["--round sync_every", 2.5, 1]),
    (["--round", "nesterov=False"], ["--round nesterov", "'False'", "true", "false"]),
    (["--round", "min_replicas=3"], ["--round min_replicas", 3, 1, 2]),
    (["--secret", "CRF_NOT_SET"], ["secrets", "CRF_NOT_SET"]),
    (["--option", "hard=1"], ["LocalProcessExecutor", "'hard'"]),
    (["--timeout", "0"], ["timeout", "0.0"]),
    (["--launch-file", "taken.json"], ["taken.json"]),
    (["--env", "X=hf_" + "abcdefghijklmnopqrstuvwxyzABCDEFGH"], ["secret", "HUGGINGFACE_TOKEN x1", "--secret NAME"]),
    (["--trainer-kwargs-json", json.dumps({"x": "y" * 120_000})], ["entrypoint_args"]),
]


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["launch", "dry run"])
@pytest.mark.parametrize(("given", "facts"), REFUSED, ids=[" ".join(given)[:30] for given, _ in REFUSED])
def test_a_dry_run_refuses_what_a_launch_refuses_and_neither_leaves_anything(
    bucket, tmp_path, capsys, dry, given, facts
):
    (tmp_path / "taken.json").touch()
    assert main(["diloco", "launch", str(bucket), "--replicas", "2", *TRAINER, *given, *dry]) == 1
    assert lines_with(capsys.readouterr().err, *facts)
    assert everything_in(tmp_path) == ["taken.json"]


def test_a_dry_run_that_is_right_leaves_nothing_either(bucket, tmp_path, capsys):
    assert main(["diloco", "launch", str(bucket), "--replicas", "2", *TRAINER, "--dry-run"]) == 0
    assert lines_with(capsys.readouterr().err, "launch 0", bucket.as_uri())
    assert everything_in(tmp_path) == []


@pytest.mark.parametrize("verb", [["watch", "--once"], ["cancel"], ["collect", "-o", "out"]])
@pytest.mark.parametrize("place", ["none", "s3:/x", "gcs://box/a"])
def test_who_looks_makes_no_folder_and_a_place_that_is_none_is_refused(bucket, tmp_path, capsys, verb, place):
    assert main(["diloco", verb[0], place, *verb[1:]]) == 1
    facts = ["none", "--launch-file FILE"] if place == "none" else [f"'{place}'", "s3://"]
    assert lines_with(capsys.readouterr().err, *facts)
    assert everything_in(tmp_path) == []


def test_a_launch_into_a_place_that_is_none_is_refused(bucket, tmp_path, capsys):
    assert main(["diloco", "launch", "s3:/x", "--replicas", "2", *TRAINER]) == 1
    assert lines_with(capsys.readouterr().err, "'s3:/x'", "s3://")
    assert everything_in(tmp_path) == []


class TestOneThatRuns:
    """A launch of the bucket whose replicas are processes that sleep."""

    @pytest.fixture
    def file(self, bucket, tmp_path):
        store = open_store(str(bucket))
        about = {"bucket": str(bucket), "executor": "local", "options": {"tied": False}, "replicas": 2, "commits": 4}
        launch = create_launch(store, **about, entrypoint=SLEEPS, args={"trainer_kwargs": {}, "settings": {}})
        file = LaunchFile.create(launch_path(canonical_bucket(str(bucket)), launch.number), launch)
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
            cancel = f"`crf diloco cancel {bucket} --launch 0`"
            assert lines_with(capsys.readouterr().err, "launch 0", "rank 0", cancel, "--beside")
        assert list_launch_numbers(open_store(str(bucket))) == [0]
        assert main([*given, "--dry-run", "--beside"]) == 0
        assert lines_with(capsys.readouterr().err, "launch 0", "`--launch 0`")

    def test_collecting_too_early_says_so_and_has_an_exit_status_of_its_own(self, bucket, file, tmp_path, capsys):
        asked = ["diloco", "collect", str(bucket), "-o", str(tmp_path / "out"), "--timeout", "0"]
        assert main(asked) == 3
        shown = capsys.readouterr()
        assert "None" not in shown.out
        assert lines_with(shown.err, "rank 0", f"`crf diloco watch {bucket} --launch 0`")
        assert main([*asked, "--json"]) == 3
        assert json.loads(capsys.readouterr().out)["still_running"] == [0]

    def test_who_waits_is_told_for_whom(self, bucket, file, tmp_path, capsys):
        assert main(["diloco", "collect", str(bucket), "-o", str(tmp_path / "out"), "--timeout", "0.1"]) == 3
        assert lines_with(capsys.readouterr().err, "0.1 s", "rank 0", "Ctrl-C", "--timeout 0")

    def test_a_launch_of_this_bucket_that_has_ended_is_in_nobody_s_way(self, bucket, file, capsys):
        assert main(["diloco", "cancel", str(bucket), "--launch", "0"]) == 0
        assert main(["diloco", "launch", str(bucket), "--replicas", "1", *TRAINER, "--dry-run"]) == 0
        assert lines_with(capsys.readouterr().err, "launch 1", bucket.as_uri())


def test_a_launch_of_another_machine_that_may_run_is_said(bucket, capsys):
    store = open_store(str(bucket))
    about = {"bucket": str(bucket), "executor": "modal", "options": {}, "replicas": 2, "commits": 4}
    launch = create_launch(store, **about, entrypoint=SLEEPS, args={"trainer_kwargs": {}, "settings": {}})
    store.put(launch.key("output", "000", "done.json"), b"{}")
    given = ["diloco", "launch", str(bucket), "--replicas", "1", *TRAINER, "--dry-run"]
    assert main(given) == 0
    assert lines_with(capsys.readouterr().err, "launch 0", store.uri, 1, 2, "replicas")
    store.put(launch.key("output", "001", "done.json"), b"{}")
    assert main(given) == 0
    assert "launch 0" not in capsys.readouterr().err


def test_the_error_about_steps_names_the_option(tmp_path, monkeypatch, capsys):
    from composer_replication.cli.replicas import request

    class Enough(Exception):
        pass

    monkeypatch.setattr(RunDir, "open", lambda _root: (_ for _ in ()).throw(Enough))
    given = ["train.run=run", "train.model=student", "train.mode=offline", "train.optimiser.steps=20"]
    with refusal(ConfigError, got="20", expected="sync_every=100", fix="--round sync_every=N"):
        request.training_request(None, given, {}, no_scrub=False, allowed=())
    with pytest.raises(Enough):
        request.training_request(None, given, {"sync_every": 10}, no_scrub=False, allowed=())
    with refusal(InputError, what="--round sync_every", got="10", expected="3"):
        request.training_request(None, given, {"sync_every": 10, "num_fragments": 3}, no_scrub=False, allowed=())


def test_the_keys_of_round_are_those_of_the_loop_and_the_manager():
    import inspect
    from dataclasses import fields

    from composer_replication.cli.replicas.request import MANAGER_KEYS, OUTER_KEYS
    from composer_replication.diloco.rounds.manager import ObjectStoreManager
    from composer_replication.diloco.serverless.replica_entrypoint import SETTINGS
    from composer_replication.diloco.training import OuterLoop

    assert {each.name: each.default for each in OUTER_KEYS} == {each.name: each.default for each in fields(OuterLoop)}
    by_launch = {"generation", "takeover"}  # which a launch sets itself
    assert {each.name for each in MANAGER_KEYS} == SETTINGS.keys() - by_launch
    taken = inspect.signature(ObjectStoreManager).parameters
    by_store = {"timeout_s": 1800.0, "poll_s": 1.0}  # None in the signature: as the store's own, or these
    for each in MANAGER_KEYS:
        assert each.default == by_store.get(each.name, taken[each.name].default), each.name
