"""`crf diloco launch` and `collect` for four machines that share a bucket and nothing else, one of which goes away."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from bucket_servers import servers
from composer_replication.cli.main import main
from composer_replication.cli.replicas.launches import LaunchFile
from composer_replication.diloco.store import open_store
from executors.conformance import ENV, Harness, wait_until

QUICK = ["--round", "grace_s=60", "--round", "poll_s=0.1", "--round", "state_every=1"]
EXCHANGES = 4


def s3_variables(options: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """What is secret, and what anybody may see."""
    secret = {
        "AWS_ACCESS_KEY_ID": options["access_key_id"],
        "AWS_SECRET_ACCESS_KEY": f"{options['secret_access_key']}-hush",
    }
    return secret, {"AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": options["endpoint"], "AWS_ALLOW_HTTP": "true"}


def launch_and_collect(
    uri, where, secret, shown, tmp_path, capsys, *, trainer="composer_replication.diloco.tiny_trainer", **arguments
) -> dict[str, Any]:
    file = ["--launch-file", str(tmp_path / "launch.json")]
    given = [uri, *file, "--replicas", "4", *where, "--trainer-module", trainer, *QUICK, "--json"]
    given += ["--trainer-kwargs-json", json.dumps({"exchanges": EXCHANGES, **arguments})]
    for name in secret:
        given += ["--secret", name]
    for name, value in shown.items():
        given += ["--env", f"{name}={value}"]
    status = main(["diloco", "launch", *given])
    told = capsys.readouterr()
    assert status == 0, told.err
    assert main(["diloco", "collect", uri, *file, "-o", str(tmp_path / "out"), "--json"]) == 0
    return {**json.loads(told.out), **json.loads(capsys.readouterr().out), "said": told.err}


def check(found: dict, uri: str, secret: Mapping[str, str], tmp_path: Path) -> None:
    """All ended with the same bytes (`collect` refuses others), and no secret is where somebody reads."""
    assert [each["status"] for each in found["outcomes"]] == ["succeeded"] * 4
    assert found["commits"] == EXCHANGES
    store = open_store(uri)
    digests = {
        json.loads(store.get(key, most_bytes=1 << 20))["files"]["model.safetensors"]
        for key in store.keys("launch/000000/output")
        if key.endswith("done.json")
    }
    assert len(digests) == 1
    launches = (tmp_path / "launch.json").read_text()
    launches += store.get("launch/000000/launch.json", most_bytes=1 << 20).decode()
    texts = launches + found["said"] + "".join(each.read_text() for each in (tmp_path / "out" / "logs").iterdir())
    assert [name for name, value in secret.items() if len(value) > 4 and value in texts] == []


def check_that_a_killed_machine_is_replaced_and_heals(
    harness: Harness, where: Sequence[str], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Rank 1's machine goes away after two of the exchanges; what was said about it."""
    held, killed = tmp_path / "held", threading.Event()

    def kill() -> None:
        wait_until(held.exists, "two exchanges of rank 1", 180.0)
        handle = LaunchFile(tmp_path / "launch.json").read().latest_starts[1].handle
        assert handle is not None
        assert handle.attempt == 0
        harness.kill(harness.make(), handle)
        killed.set()

    with servers.moto() as (uri, options):
        secret, shown = s3_variables(options)
        for name, value in {**secret, **shown}.items():
            monkeypatch.setenv(name, value)
        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        asked = {"trainer": "executors.held_trainer", "held": str(held)}
        found = launch_and_collect(uri, where, secret, {**shown, **ENV}, tmp_path, capsys, **asked)
        killer.join(10)
        assert killed.is_set()
        check(found, uri, secret, tmp_path)
        assert [each["attempt"] for each in found["replicas"]] == [0, 1, 0, 0]
    return found["said"]
