"""S3, Azure and GCS servers of others, each a process on loopback with a bucket named `box`."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path

import pytest

AZURE_ACCOUNT = "devstoreaccount1"
# Azurite's own, printed in its manual.
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
AZURITE = Path(__file__).resolve().parents[2] / ".azurite" / "node_modules" / ".bin" / "azurite-blob"

# moto looks for a key and then writes it, in threads: of 1,000 rounds with two racers 2 had two winners. One at a time.
_MOTO = """
import sys, threading
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple
application, lock = DomainDispatcherApplication(create_backend_app), threading.Lock()
def one_at_a_time(environment, start):
    with lock:
        return application(environment, start)
run_simple("127.0.0.1", int(sys.argv[1]), one_at_a_time, threaded=True)
"""
# The emulator answers without an ETag, which every client in Rust asks for.
_GCS = """
import sys, time
from http.server import BaseHTTPRequestHandler
end_headers = BaseHTTPRequestHandler.end_headers
def with_a_tag(handler):
    handler.send_header("ETag", '"x"')
    end_headers(handler)
BaseHTTPRequestHandler.end_headers = with_a_tag
from gcp_storage_emulator.server import create_server
server = create_server("127.0.0.1", int(sys.argv[1]), in_memory=True, default_bucket="box")
server.start()
time.sleep(600)
"""


@contextmanager
def moto() -> Iterator[tuple[str, dict[str, str]]]:
    pytest.importorskip("moto")
    with _process([sys.executable, "-c", _MOTO]) as port:
        _ask(urllib.request.Request(f"http://127.0.0.1:{port}/box", method="PUT"))
        signed = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}
        yield "s3://box/p", {"endpoint": f"http://127.0.0.1:{port}", "allow_http": "true", **signed}


@contextmanager
def azurite() -> Iterator[tuple[str, dict[str, str]]]:
    program = os.environ.get("AZURITE") or (str(AZURITE) if AZURITE.exists() else shutil.which("azurite-blob"))
    if not program:
        pytest.skip("no azurite-blob: npm install --prefix .azurite azurite")
    # Its telemetry is on by itself, and where there is no network keeps it from ending for 5 to more than 20 s.
    options = ["--silent", "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--blobPort"]
    with _process([program, *options]) as port:
        url = f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}"
        _ask(_container(url))
        yield (
            "az://box/p",
            {"endpoint": url, "allow_http": "true", "account_name": AZURE_ACCOUNT, "account_key": AZURE_KEY},
        )


@contextmanager
def gcs() -> Iterator[tuple[str, dict[str, str]]]:
    pytest.importorskip("gcp_storage_emulator")
    with _process([sys.executable, "-c", _GCS]) as port:
        account = f'{{"gcs_base_url": "http://127.0.0.1:{port}", "disable_oauth": true, "client_email": "", '
        key = f'{account}"private_key": "", "private_key_id": ""}}'
        yield "gs://box/p", {"service_account_key": key, "allow_http": "true"}


def _container(url: str) -> urllib.request.Request:
    """The request that makes a container, signed as Azure wants it; obstore makes none."""
    date, version = formatdate(usegmt=True), "2021-12-02"
    place = f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/box\nrestype:container"
    text = f"PUT{chr(10) * 12}x-ms-date:{date}\nx-ms-version:{version}\n{place}"
    signature = base64.b64encode(hmac.digest(base64.b64decode(AZURE_KEY), text.encode(), hashlib.sha256)).decode()
    headers = {"x-ms-date": date, "x-ms-version": version, "Authorization": f"SharedKey {AZURE_ACCOUNT}:{signature}"}
    return urllib.request.Request(f"{url}/box?restype=container", method="PUT", headers=headers)


def _ask(request: urllib.request.Request) -> None:
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status in (200, 201)


@contextmanager
def _process(command: list[str]) -> Iterator[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*command, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port, process)
        yield port
    finally:
        process.terminate()
        process.wait(timeout=20)


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        if process.poll() is not None:
            pytest.fail(f"the server ended with {process.returncode}")
        with socket.socket() as attempt:
            if not attempt.connect_ex(("127.0.0.1", port)):
                return
        time.sleep(0.1)
    pytest.fail("the server did not start")
