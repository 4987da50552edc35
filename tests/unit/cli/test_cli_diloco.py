"""`crf diloco`: replicas as processes of this machine over a folder; one dies, is started again, and heals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from composer_replication.cli.main import main
from composer_replication.diloco.store import open_store
from composer_replication.steps.replicas.launches import Launch, create_launch, numbers, read_launch

ROOT = Path(__file__).resolve().parents[3]
TRAINER = ["--trainer-module", "tiny_trainer"]
QUICK = ["--round", "grace_s=5", "--round", "poll_s=0.05", "--round", "state_every=1"]


@pytest.fixture
def bucket(tmp_path, monkeypatch) -> Path:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "diloco"))
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
    assert "rank 1: ended by SIGKILL" in told.err
    assert main(["diloco", "watch", str(bucket), "--once"]) == 0
    assert "round 6" in capsys.readouterr().out
    assert main(["diloco", "collect", str(bucket), "-o", str(tmp_path / "out"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["status"] for each in found["outcomes"]] == ["succeeded", "succeeded"]
    # Both left the same bytes, or `collect` would have refused.
    weights = load_file(Path(found["weights"]) / "model.safetensors")
    assert weights["weight"].item() == pytest.approx(3, abs=0.2)
    assert weights["bias"].item() == pytest.approx(1, abs=0.1)
    assert "rank 1: 6 exchanges" in (tmp_path / "out" / "logs" / "rank-001.txt").read_text()
    assert main(["diloco", "cancel", str(bucket)]) == 0  # of one that is over: nothing happens
    assert "succeeded" in capsys.readouterr().out


def test_weights_that_differ_are_refused(bucket, tmp_path, capsys):
    store = open_store(str(bucket))
    launch = create_launch(store, **asked(bucket))
    for rank, digest in ((0, "a" * 64), (1, "b" * 64)):
        done = {"files": {"model.safetensors": digest}, "answer": {}}
        store.put(launch.key("output", f"{rank:03d}", "done.json"), json.dumps(done).encode())
    assert main(["diloco", "collect", str(bucket), "-o", str(tmp_path / "out")]) == 1
    assert "other weights at rank 1 than at rank 0" in capsys.readouterr().err


def test_a_dry_run_starts_nothing(bucket, capsys):
    assert main(["diloco", "launch", str(bucket), "--replicas", "2", *TRAINER, "--dry-run"]) == 0
    assert "nothing was sent, and nothing started" in capsys.readouterr().err
    assert numbers(open_store(str(bucket))) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["launch", "{}", "--replicas", "0", *TRAINER], "--replicas: got 0"),
        (["launch", "{}", "--replicas", "2", "--executor", "modal", *TRAINER], "a folder of this machine"),
        (["launch", "{}", "--replicas", "1", "--option", "hard=1", *TRAINER], "options of LocalProcessExecutor"),
        (["launch", "{}", "--replicas", "1", "--secret", "CRF_NOT_SET", *TRAINER], "CRF_NOT_SET, which is not set"),
        (["watch", "{}"], "no launch"),
        (["cancel", "{}", "--launch", "3"], "no launch"),
    ],
)
def test_what_cannot_be_done_is_said(bucket, capsys, given, words):
    assert main(["diloco", *(each.format(bucket) for each in given)]) == 1
    assert words in capsys.readouterr().err
    assert numbers(open_store(str(bucket))) == []


def test_launches_are_numbered_and_hold_no_secret(bucket, monkeypatch):
    store = open_store(str(bucket))
    for number in range(3):
        assert create_launch(store, **asked(bucket)).number == number
    launch = read_launch(store)
    assert isinstance(launch, Launch)
    assert launch.number == 2
    assert launch.entrypoint_args(takeover=True)["settings"] == {"takeover": True, "generation": 2}
    assert launch.entrypoint_args()["trainer_kwargs"]["launch"] == 2


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
