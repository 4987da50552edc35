"""Whoever may write to the bucket can spoil a model. They cannot have a token sent, a process signalled or code run."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from composer_replication.cli.main import main
from composer_replication.diloco.store import open_store
from output_facts import lines_with

ENTRYPOINT = "composer_replication.diloco.serverless.replica_entrypoint"
VERBS = {
    "watch once": ["watch", "{}", "--once"],
    "watch and relaunch": ["watch", "{}", "--once", "--relaunch", "3"],
    "cancel": ["cancel", "{}"],
    "collect": ["collect", "{}", "-o", "{}-out"],
}


@pytest.fixture
def bucket(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HF_TOKEN", "hf_" + "the" + "OperatorsOwnToken0123456789abcdef")
    return tmp_path / "bucket"


@pytest.fixture
def listener(monkeypatch):
    """An address of somebody else's; what it gets is kept."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(f"{self.path} {self.headers.get('Authorization')}")
            self.send_response(500)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            """Nobody reads it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", requests
    server.shutdown()
    server.server_close()
    thread.join(30)


def forge(bucket: Path, *, executor: str, options: dict, handle: dict, is_notice: bool = True) -> None:
    """A launch and a handle in the bucket with everything that somebody may want; as a notice, or as they once were."""
    store = open_store(str(bucket))
    launch = {
        "number": 0,
        **({"id": "0" * 32} if is_notice else {}),
        "bucket": str(bucket),
        "executor": executor,
        "options": options,
        "replicas": 1,
        "commits": 4,
        "started": 0.0,
        "entrypoint": ENTRYPOINT,
        "args": {
            "rendezvous_uri": str(bucket),
            "world_size": 1,
            "trainer_module": "evil",
            "trainer_kwargs": {},
            "settings": {},
        },
        "gpu": None,
        "timeout_s": None,
    }
    store.put("launch/000000/launch.json", json.dumps(launch).encode())
    store.put("launch/000000/replica/000.00", json.dumps(handle).encode())


@pytest.mark.parametrize("is_notice", [True, False])
@pytest.mark.parametrize("verb", VERBS)
def test_a_bucket_has_no_token_sent_anywhere(bucket, listener, verb, is_notice):
    address, requests = listener
    job = {"rank": 0, "backend_name": "hf_jobs", "metadata": {"job": "1", "namespace": "x", "endpoint": address}}
    forge(bucket, executor="hf_jobs", options={"endpoint": address, "packages": []}, handle=job, is_notice=is_notice)
    main(["diloco", *(each.format(bucket) for each in VERBS[verb])])
    assert requests == []


@pytest.mark.parametrize("is_notice", [True, False])
@pytest.mark.parametrize("verb", VERBS)
def test_a_bucket_has_no_process_signalled(bucket, tmp_path, verb, is_notice):
    folder = tmp_path / "replica"
    folder.mkdir()
    hold = "import fcntl, sys, time; fcntl.flock(0, fcntl.LOCK_EX); print('held', flush=True); time.sleep(60)"
    with (folder / "alive").open("wb") as alive:
        somebody = subprocess.Popen([sys.executable, "-c", hold], stdin=alive, stdout=subprocess.PIPE)
    try:
        assert somebody.stdout is not None
        assert somebody.stdout.readline() == b"held\n"
        place = {"pid": somebody.pid, "folder": str(folder), "host": socket.gethostname()}
        handle = {"rank": 0, "backend_name": "local_process", "metadata": place}
        forge(bucket, executor="local", options={}, handle=handle, is_notice=is_notice)
        given = [each.format(bucket) for each in VERBS[verb]]
        main(["diloco", *given, *(["--timeout", "0"] if verb == "collect" else [])])
        assert somebody.poll() is None
    finally:
        somebody.kill()
        somebody.communicate()


@pytest.mark.parametrize("is_notice", [True, False])
def test_a_bucket_has_no_code_run(bucket, tmp_path, monkeypatch, capsys, is_notice):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef train(**_): raise SystemExit(1)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "replica"
    folder.mkdir()
    (folder / "log.txt").touch()
    place = {"pid": 2**22, "folder": str(folder), "host": socket.gethostname(), "attempt": 0}
    handle = {"rank": 0, "backend_name": "local_process", "metadata": place}
    forge(bucket, executor="local", options={}, handle=handle, is_notice=is_notice)
    assert main(["diloco", "watch", str(bucket), "--relaunch", "1"]) == 1
    assert not (tmp_path / "ran").exists()
    assert "--launch-file" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["cancel", "collect", "watch and relaunch"])
def test_another_machine_needs_the_launch_s_file_and_is_told_so(bucket, capsys, verb):
    forge(bucket, executor="local", options={}, handle={"rank": 0, "backend_name": "local_process", "metadata": {}})
    assert main(["diloco", *(each.format(bucket) for each in VERBS[verb])]) == 1
    assert lines_with(capsys.readouterr().err, bucket, "replicas", "--launch-file FILE")


def test_rounds_may_be_watched_by_the_bucket_s_word_and_are_said_to_be(bucket, capsys):
    forge(bucket, executor="modal", options={}, handle={"rank": 0, "backend_name": "modal", "metadata": {}})
    assert main(["diloco", "watch", str(bucket)]) == 0
    shown = capsys.readouterr()
    assert "unknown" in shown.out
    assert lines_with(shown.err, "bucket", "--launch-file FILE")


HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202e[bold red]"


@pytest.mark.parametrize(
    "change",
    [
        {"executor": HOSTILE},
        {"replicas": 10**9},
        {"replicas": True},
        {"commits": HOSTILE},
        {"number": 7},
        {"started": "now"},
        {"id": f"{HOSTILE}x"},
    ],
)
def test_a_notice_that_is_none_is_refused_and_nothing_of_it_reaches_the_terminal(bucket, capsys, change):
    forge(bucket, executor="local", options={}, handle={"rank": 0, "backend_name": "local_process", "metadata": {}})
    path = bucket / "launch" / "000000" / "launch.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert main(["diloco", "watch", str(bucket), "--once"]) == 1
    shown = capsys.readouterr()
    assert lines_with(shown.err, "launch.json", next(iter(change)))
    assert not {"\x1b", "\x07", "\u202e"} & {*shown.out, *shown.err}


def test_where_tokens_go_is_said_by_the_environment_alone(bucket, capsys):
    given = ["launch", str(bucket), "--replicas", "1", "--executor", "ray", "--trainer-module", "x"]
    assert main(["diloco", *given, "--option", "endpoint=http://127.0.0.1:9"]) == 1
    assert lines_with(capsys.readouterr().err, "endpoint", "ray", "HF_ENDPOINT")
    assert not bucket.exists()
