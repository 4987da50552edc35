"""The routes of the Hub that its client uses to commit, list and read files of a repository, on loopback.

A commit on a parent that is not the head is refused with 412, as the Hub does. All files are "regular" ones.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

REPOSITORY = "owner/runs"
_DATE = "2026-11-16T12:00:00.000Z"


class Repository:
    """Snapshots by commit, the newest last, each with its title."""

    def __init__(self) -> None:
        self.commits: list[tuple[str, str, dict[str, bytes]]] = [("1" * 40, "initial", {})]
        self.requests: list[tuple[str, str]] = []
        self.late_commits = 0  # refused because another came first
        self.judge: Callable[[str, str], str] = lambda method, path: ""
        self.ignores_parents = False
        self.lock = threading.Lock()
        self.url = ""

    def at(self, revision: str) -> int:
        shas = [sha for sha, _, _ in self.commits]
        return shas.index(revision) if revision in shas else len(shas) - 1

    def last_commit(self, name: str, revision: str) -> dict:
        """The commit that gave a file the bytes it has there."""
        end = self.at(revision)
        while end and self.commits[end - 1][2].get(name) == self.commits[end][2][name]:
            end -= 1
        return {"id": self.commits[end][0], "title": self.commits[end][1], "date": _DATE}

    def commit(self, lines: list[dict]) -> tuple[int, dict]:
        head, _, files = self.commits[-1]
        header = lines[0]["value"]
        if header.get("parentCommit", head) != head and not self.ignores_parents:
            self.late_commits += 1
            return 412, {"error": "A commit has happened since. Please refresh and try again."}
        files = dict(files)
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                files.pop(value["path"])
        sha = hashlib.sha1(f"{head}{header['summary']}".encode(), usedforsecurity=False).hexdigest()
        self.commits.append((sha, header["summary"], files))
        return 200, {"commitOid": sha, "commitUrl": f"{self.url}/{REPOSITORY}/commit/{sha}", "success": True}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms for the answer to its headers
    repository: Repository

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.headers.get("transfer-encoding") == "chunked":
            body = self._chunks()
        path = unquote(urlsplit(self.path).path)
        with self.repository.lock:
            self.repository.requests.append((self.command, path))
            fault = self.repository.judge(self.command, path)
        if fault == "hang":
            time.sleep(1.2)
            self.close_connection = True
            return
        if fault and fault != "lost":
            status, answer = int(fault), {"error": "as asked"}
        else:
            with self.repository.lock:
                status, answer = self._answer(path, body)
            if fault == "lost":
                status, answer = 500, {"error": "lost"}
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.send_header("content-type", "application/json")
        if status == 404:
            self.send_header("x-error-code", "EntryNotFound" if REPOSITORY in path else "RepoNotFound")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_POST = do_HEAD = _serve

    def _chunks(self) -> bytes:
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _answer(self, path: str, body: bytes) -> tuple[int, object]:
        if REPOSITORY not in path:
            return 404, {"error": "Repository not found"}
        action, _, rest = path.partition(REPOSITORY)[2].strip("/").partition("/")
        revision, _, inside = rest.partition("/")
        sha, _, files = self.repository.commits[self.repository.at(revision)]
        if action == "preupload":
            return 200, {"files": [self._mode(file["path"], files) for file in json.loads(body)["files"]]}
        if action == "commit":
            return self.repository.commit([json.loads(line) for line in body.splitlines() if line])
        if action == "revision":
            return 200, {"id": REPOSITORY, "modelId": REPOSITORY, "sha": sha, "private": True, "siblings": []}
        if action == "paths-info":
            asked = body.decode()
            last = {name: self.repository.last_commit(name, revision) for name in files if _quoted(name, asked)}
            return 200, [_entry(name, files[name]) | {"lastCommit": commit} for name, commit in last.items()]
        if action == "tree":
            entries = [_entry(name, data) for name, data in sorted(files.items()) if name.startswith(inside)]
            return (200, entries) if entries or not inside else (404, {"error": "no such folder"})
        if action == "resolve" and inside in files:
            return 200, files[inside]
        return 404, {"error": "Entry not found"}

    def _mode(self, path: str, files: dict[str, bytes]) -> dict:
        mode = {"path": path, "uploadMode": "regular", "shouldIgnore": False}
        return mode | ({"oid": _blob(files[path])} if path in files else {})

    def log_message(self, *_: object) -> None:
        pass


def _blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _entry(path: str, data: bytes) -> dict:
    return {"type": "file", "path": path, "size": len(data), "oid": _blob(data)}


def _quoted(name: str, asked: str) -> bool:
    """The client sends paths as a form or as JSON, by its version."""
    return name in unquote(asked.replace("+", " ")).replace('"', "&").replace("=", "&").split("&")


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:  # a client that hung up
        pass


@contextmanager
def serving() -> Iterator[Repository]:
    repository = Repository()
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"repository": repository}))
    repository.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield repository
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
