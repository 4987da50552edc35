"""Machines that share a bucket and nothing else: Jobs of the Hub over S3 (moto), processes over Azure (azurite)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from bucket_servers import servers
from composer_replication.cli.main import main
from composer_replication.diloco.store import open_store
from executors.hf_server import TOKEN, HubServer

pytestmark = pytest.mark.diloco

QUICK = ["--round", "grace_s=20", "--round", "poll_s=0.1", "--round", "state_every=1"]
EXCHANGES = 4


def s3_variables(options: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """What is secret, and what anybody may see."""
    secret = {
        "AWS_ACCESS_KEY_ID": options["access_key_id"],
        "AWS_SECRET_ACCESS_KEY": f"{options['secret_access_key']}-hush",
    }
    return secret, {"AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": options["endpoint"], "AWS_ALLOW_HTTP": "true"}


def azure_variables(options: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    secret = {"AZURE_STORAGE_ACCOUNT_KEY": options["account_key"]}
    shown = {"AZURE_STORAGE_ACCOUNT_NAME": options["account_name"], "AZURE_STORAGE_ENDPOINT": options["endpoint"]}
    return secret, {**shown, "AZURE_ALLOW_HTTP": "true"}


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        patch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", os.devnull)
        patch.setenv("HF_TOKEN", TOKEN)
        server = HubServer()
        patch.setattr("huggingface_hub.constants.ENDPOINT", server.url)  # what HF_ENDPOINT says, read at import
        yield server
        server.close()


def launch_and_collect(uri, where, secret, shown, tmp_path, capsys, **arguments) -> dict:
    file = ["--launch-file", str(tmp_path / "launch.json")]
    given = [
        uri,
        *file,
        "--replicas",
        "4",
        *where,
        "--trainer-module",
        "composer_replication.diloco.tiny_trainer",
        *QUICK,
        "--json",
    ]
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


def test_four_jobs_of_the_hub_over_s3_one_of_which_dies(hub, tmp_path, capsys, monkeypatch):
    with servers.moto() as (uri, options):
        secret, shown = s3_variables(options)
        for name, value in {**secret, **shown}.items():
            monkeypatch.setenv(name, value)
        where = ["--executor", "hf_jobs", "--option", "packages=[]"]
        kill = str(tmp_path / "killed")
        found = launch_and_collect(uri, where, secret, shown, tmp_path, capsys, kill=kill)
        check(found, uri, secret, tmp_path)
        assert [each["attempt"] for each in found["replicas"]] == [0, 1, 0, 0]
        assert re.search(r"rank 1: .*SIGKILL", found["said"])


def test_four_processes_over_azure(tmp_path, capsys, monkeypatch):
    with servers.azurite() as (uri, options):
        secret, shown = azure_variables(options)
        for name, value in {**secret, **shown}.items():
            monkeypatch.setenv(name, value)
        where = ["--option", f"folder={tmp_path / 'replicas'}"]
        check(launch_and_collect(uri, where, secret, shown, tmp_path, capsys), uri, secret, tmp_path)
