"""`crf diloco`: replicas as processes of this machine over a folder; one dies, is started again, and heals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from composer_replication.cli.main import main
from composer_replication.cli.replicas.launches import (
    LaunchFile,
    canonical_bucket,
    create_launch,
    launch_key,
    launch_path,
    list_launch_numbers,
    local_launch_numbers,
    read_notice,
)
from composer_replication.diloco.serverless import LocalProcessExecutor
from composer_replication.diloco.serverless.executor import ReplicaHandle
from composer_replication.diloco.store import open_store
from output_facts import lines_with

TRAINER = ["--trainer-module", "composer_replication.diloco.tiny_trainer"]
QUICK = ["--round", "grace_s=5", "--round", "poll_s=0.05", "--round", "state_every=1"]


@pytest.fixture
def bucket(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "bucket"


def test_a_killed_replica_is_started_again_and_ends_with_the_weights_of_the_others(bucket, tmp_path, capsys):
    from safetensors.torch import load_file

    arguments = {"exchanges": 6, "kill": str(tmp_path / "killed")}
    given = [str(bucket), "--replicas", "2", *TRAINER, "--trainer-kwargs-json", json.dumps(arguments), *QUICK]
    assert main(["diloco", "launch", *given, "--option", f"folder={tmp_path / 'logs'}", "--json"]) == 0
    told = capsys.readouterr()
    sight = json.loads(told.out)
    assert [(each["rank"], each["status"], each["attempt"]) for each in sight["replicas"]] == [
        (0, "succeeded", 0),
        (1, "succeeded", 1),
    ]
    assert sight["commits"] == 6
    assert lines_with(told.err, "rank 1", 9, "SIGKILL")
    assert main(["diloco", "watch", str(bucket), "--once"]) == 0
    assert "round 6" in capsys.readouterr().out
    assert main(["diloco", "collect", str(bucket), "-o", str(tmp_path / "out"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["status"] for each in found["outcomes"]] == ["succeeded", "succeeded"]
    # Both left the same bytes, or `collect` would have refused.
    weights = load_file(Path(found["weights"]) / "model.safetensors")
    assert weights["weight"].item() == pytest.approx(3, abs=0.2)
    assert weights["bias"].item() == pytest.approx(1, abs=0.1)
    assert lines_with((tmp_path / "out" / "logs" / "rank-001.txt").read_text(), "rank 1", 6)
    assert main(["diloco", "cancel", str(bucket)]) == 0  # of one that is over: nothing happens
    assert "succeeded" in capsys.readouterr().out


def test_weights_that_differ_are_refused(bucket, tmp_path, capsys):
    store = open_store(str(bucket))
    launch = begun(bucket).read().launch
    for rank, digest in ((0, "a" * 64), (1, "b" * 64)):
        done = {"files": {"model.safetensors": digest}, "answer": {}}
        store.put(launch.key("output", f"{rank:03d}", "done.json"), json.dumps(done).encode())
    assert main(["diloco", "collect", str(bucket), "-o", str(tmp_path / "out")]) == 1
    assert lines_with(capsys.readouterr().err, "weights", store.uri, "rank 0", "rank 1")
    assert not (tmp_path / "out" / "weights").exists()


def test_a_dry_run_starts_nothing(bucket, capsys):
    assert main(["diloco", "launch", str(bucket), "--replicas", "2", *TRAINER, "--dry-run"]) == 0
    assert lines_with(capsys.readouterr().err, "launch 0", 2, "replicas")
    assert not bucket.exists()
    assert list_launch_numbers(open_store(str(bucket))) == []


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        (["launch", "{}", "--replicas", "0", *TRAINER], ["--replicas", 0, 1000]),
        (["launch", "{}", "--replicas", "2", "--executor", "modal", *TRAINER], ["modal", "s3://", "hf://"]),
        (["launch", "{}", "--replicas", "1", "--option", "hard=1", *TRAINER], ["LocalProcessExecutor", "'hard'"]),
        (["launch", "{}", "--replicas", "1", "--secret", "CRF_NOT_SET", *TRAINER], ["secrets", "CRF_NOT_SET"]),
        (["watch", "{}"], ["--launch-file"]),
        (["cancel", "{}", "--launch", "3"], ["launch 3", "--launch-file"]),
    ],
)
def test_what_cannot_be_done_is_said(bucket, capsys, given, facts):
    assert main(["diloco", *(each.format(bucket) for each in given)]) == 1
    assert lines_with(capsys.readouterr().err, *facts)
    assert list_launch_numbers(open_store(str(bucket))) == local_launch_numbers(canonical_bucket(str(bucket))) == []


def test_launches_are_numbered_and_the_bucket_shows_no_more_than_anybody_may_know(bucket):
    store = open_store(str(bucket))
    files = [begun(bucket) for _ in range(3)]
    launch = files[-1].read().launch
    assert (
        [file.read().launch.number for file in files]
        == list_launch_numbers(store)
        == local_launch_numbers(canonical_bucket(str(bucket)))
    )
    assert launch.entrypoint_args(takeover=True)["settings"] == {"takeover": True, "generation": 2}
    assert launch.entrypoint_args()["trainer_kwargs"]["launch"] == 2
    assert read_notice(store, 2) is not None
    shown = json.loads(store.get(launch_key(2, "launch.json"), most_bytes=1 << 20))
    assert shown.keys() == {"number", "id", "executor", "replicas", "commits", "started"}


def test_a_number_is_not_used_again_in_a_bucket_that_was_emptied(bucket):
    store = open_store(str(bucket))
    begun(bucket)
    store.delete(store.keys(""))
    assert begun(bucket).read().launch.number == 1


def test_a_launch_of_another_machine_under_the_same_number_is_told_from_ours(bucket, tmp_path, monkeypatch, capsys):
    store = open_store(str(bucket))
    ours = begun(bucket).read().launch
    store.delete(store.keys(""))
    create_launch(store, **asked(bucket))  # whose file is elsewhere
    assert main(["diloco", "collect", str(bucket), "-o", str(tmp_path / "out")]) == 1
    assert lines_with(capsys.readouterr().err, "launch 0", store.uri, ours.id[:12])
    assert main(["diloco", "watch", str(bucket), "--once"]) == 0
    assert ours.id[:12] in capsys.readouterr().out
    assert main(["diloco", "cancel", str(bucket)]) == 0  # which asks no bucket


def test_the_launch_s_file_may_be_anywhere_and_is_named_then(bucket, tmp_path, capsys):
    file, arguments = tmp_path / "mine.json", json.dumps({"exchanges": 1})
    given = [str(bucket), "--launch-file", str(file)]
    trained = ["--replicas", "1", *TRAINER, "--trainer-kwargs-json", arguments, *QUICK]
    assert main(["diloco", "launch", *given, *trained, "--option", f"folder={tmp_path / 'logs'}", "--json"]) == 0
    assert lines_with(capsys.readouterr().err, file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert local_launch_numbers(canonical_bucket(str(bucket))) == []
    assert main(["diloco", "collect", *given, "-o", str(tmp_path / "out")]) == 0
    assert main(["diloco", "collect", str(bucket), "-o", str(tmp_path / "out")]) == 1
    assert main(["diloco", "launch", *given, *trained]) == 1
    assert lines_with(capsys.readouterr().err, "crf diloco", file)
    assert list_launch_numbers(open_store(str(bucket))) == [0]  # the second was refused before it took a number
    assert main(["diloco", "cancel", str(tmp_path / "other"), "--launch-file", str(file)]) == 1
    assert lines_with(capsys.readouterr().err, file, bucket.as_uri(), (tmp_path / "other").as_uri())


@pytest.mark.parametrize(
    ("files", "shown"),
    [
        ({"../model.safetensors": "a" * 64}, repr("../model.safetensors")),
        ({"model.pt": "a" * 64}, repr("model.pt")),
        ({"\x1b[2J.json": "a" * 64}, repr("\x1b[2J.json")),
        ({f"{number}.json": "a" * 64 for number in range(1001)}, 1001),
        ({"model.safetensors": "no sum"}, "ValueError"),
        (["model.safetensors"], "ValueError"),
    ],
)
def test_what_replicas_are_said_to_have_left_is_looked_at_first(bucket, tmp_path, capsys, files, shown):
    launch = begun(bucket).read().launch
    key = launch.key("output", "000", "done.json")
    open_store(str(bucket)).put(key, json.dumps({"files": files, "answer": {}}).encode())
    assert main(["diloco", "collect", str(bucket), "-o", str(tmp_path / "out")]) == 1
    messages = capsys.readouterr().err
    assert lines_with(messages, key, shown)
    assert "\x1b" not in messages
    assert not (tmp_path / "out" / "weights").exists()


def test_cancel_ends_those_that_it_can_and_fails_with_the_names_of_the_others(bucket, tmp_path, capsys):
    file = begun(bucket)
    executor = LocalProcessExecutor(folder=tmp_path / "replicas", tied=False)
    handle = executor.launch_replicas(1, "time.sleep", {})[0]  # which fails, for want of an argument
    executor.collect([handle])
    for rank, changes in ((0, {"host": "elsewhere"}), (1, {})):
        file.begin(rank, 0)
        file.note(ReplicaHandle(rank, "local_process", {**handle.metadata, **changes}))
    assert main(["diloco", "cancel", str(bucket)]) == 1
    shown = capsys.readouterr()
    (line,) = lines_with(shown.err, "rank 0", "RunError", "elsewhere")
    assert lines_with(line, "`crf diloco cancel`", f"`pgrep -f {file.read().launch.id}`")
    assert "rank 1" not in line
    assert lines_with(shown.err, "rank 1", 1, "TypeError: time.sleep()")  # how it had ended
    assert [line.split()[:2] for line in shown.out.splitlines() if "pid" in line] == [["0", "unknown"], ["1", "failed"]]


def begun(bucket: Path) -> LaunchFile:
    place = canonical_bucket(str(bucket))
    launch = create_launch(open_store(str(bucket)), above=max(local_launch_numbers(place), default=-1), **asked(bucket))
    return LaunchFile.create(launch_path(place, launch.number), launch)


def asked(bucket: Path) -> dict:
    return {
        "bucket": str(bucket),
        "executor": "local",
        "options": {"secrets": ["AWS_SECRET_ACCESS_KEY"]},
        "replicas": 2,
        "commits": 4,
        "entrypoint": "composer_replication.diloco.serverless.replica_entrypoint",
        "args": {"trainer_kwargs": {}, "settings": {}},
    }
