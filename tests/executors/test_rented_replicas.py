"""Machines that share a bucket and nothing else: Jobs of the Hub over S3 (moto), processes over Azure (azurite).

Sandboxes of Modal: test_modal.py; actors of Ray: test_ray.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

import pytest

from bucket_servers import servers
from executors.hf_server import TOKEN, HubServer
from executors.rented_launches import check, launch_and_collect, s3_variables

pytestmark = pytest.mark.diloco


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
        assert re.search(r"\brank 1\b.*SIGKILL", found["said"])


def test_four_processes_over_azure(tmp_path, capsys, monkeypatch):
    with servers.azurite() as (uri, options):
        secret, shown = azure_variables(options)
        for name, value in {**secret, **shown}.items():
            monkeypatch.setenv(name, value)
        where = ["--option", f"folder={tmp_path / 'replicas'}"]
        check(launch_and_collect(uri, where, secret, shown, tmp_path, capsys), uri, secret, tmp_path)
