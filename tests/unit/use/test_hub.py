"""What really goes over the wire with `--push`: the hub's own client against a server on this machine."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import HfApi, constants

from composer_replication.cli.export_weights import _push_folder
from composer_replication.errors import RunError
from refusals import refusal


class _Hub(BaseHTTPRequestHandler):
    """Answers as the hub does where all files are small; `server.status` refuses everything."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append((self.path, body, self.headers.get("Authorization")))
        answer = {"url": "https://huggingface.co/ada/small", "errors": [], "warnings": []}
        if "/preupload/" in self.path:
            files = json.loads(body)["files"]
            answer = {
                "files": [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in files]
            }
        elif "/commit/" in self.path:
            answer = {
                "commitUrl": "https://huggingface.co/ada/small/commit/1",
                "commitOid": "1",
                "pullRequestUrl": None,
            }
        data = json.dumps(answer).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        data = json.dumps({"id": "ada/small", "private": self.server.is_private}).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        server.asked, server.status, server.is_private = [], 200, True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def weights(tmp_path):
    for name in ("README.md", "config.json", "model.safetensors", "notes.pem", "training.log"):
        (tmp_path / name).write_text(f"# {name}")
    return tmp_path


def api(hub):
    return HfApi(endpoint=f"http://127.0.0.1:{hub.server_port}", token="hf_abc")


def test_the_client_makes_a_private_repository_and_sends_weights_and_card_alone(hub, weights):
    address = _push_folder(weights, "ada/small", api=api(hub))
    assert address == "https://huggingface.co/ada/small/commit/1"
    assert {token for _, _, token in hub.asked} == {"Bearer hf_abc"}
    created = json.loads(hub.asked[0][1])
    assert (hub.asked[0][0], created["organization"], created["name"]) == ("/api/repos/create", "ada", "small")
    assert created.get("visibility") == "private" or created.get("private") is True
    path, lines, _ = hub.asked[-1]
    assert path == "/api/models/ada/small/commit/main"
    files = [json.loads(line)["value"] for line in lines.splitlines()[1:]]
    sent = {each["path"]: base64.b64decode(each["content"]).decode() for each in files}
    assert sent == {name: f"# {name}" for name in ("README.md", "config.json", "model.safetensors")}


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_says_what_to_look_at(hub, weights, status):
    hub.status = status
    with refusal(RunError, what="ada/small", got=str(status), fix="`hf auth whoami`"):
        _push_folder(weights, "ada/small", api=api(hub))
    assert len(hub.asked) == 1


def test_a_repository_that_is_there_and_public_gets_nothing_unless_that_is_meant(hub, weights):
    hub.is_private = False
    with refusal(RunError, what="ada/small", got="public", fix="--public"):
        _push_folder(weights, "ada/small", api=api(hub))
    assert [path for path, _, _ in hub.asked] == ["/api/repos/create"]
    assert _push_folder(weights, "ada/small", is_public=True, api=api(hub)).endswith("/commit/1")


def test_offline_means_offline(hub, weights, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with refusal(RunError, what="ada/small", fix="HF_HUB_OFFLINE"):
        _push_folder(weights, "ada/small", api=api(hub))
    assert hub.asked == []
