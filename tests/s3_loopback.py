"""A small S3 on loopback that fails on request: what a bucket does when it is ill, without a bucket.

It knows what obstore's client asks: put (also if absent), get (ranges, if-match), head, list, delete, parts.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

Fault = Literal["400", "401", "403", "404", "409", "500", "503", "507", "hang", "cut", "lost", ""]
Judge = Callable[[str, str], Fault]
"""What goes wrong with a request, by its method and key; "" for nothing. `lost` does it and then answers 500."""

_DRIP_BYTES = 1 << 16
OPTIONS = {"access_key_id": "KEY-IN-NO-MESSAGE", "secret_access_key": "SECRET-IN-NO-MESSAGE", "region": "us-east-1"}


class Bucket:
    """The objects, and what was asked of them."""

    def __init__(self, *, ignores_conditions: bool) -> None:
        self.objects: dict[str, tuple[bytes, dict[str, str]]] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.requests: list[tuple[str, str]] = []
        self.judge: Judge = lambda method, key: ""
        self.ignores_conditions = ignores_conditions
        self.lock = threading.Lock()
        self.url = ""
        self.connection_mb_s = 0.0  # as a long line gives to one connection; 0 for no limit
        self.at_once = self.most_at_once = 0  # requests, while there is a limit

    @property
    def options(self) -> dict[str, str]:
        return {**OPTIONS, "endpoint": self.url, "allow_http": "true"}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    bucket: Bucket

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        parts = urlsplit(self.path)
        key, query = unquote(parts.path).partition("/box")[2].strip("/"), parse_qs(parts.query, keep_blank_values=True)
        with self.bucket.lock:
            self.bucket.requests.append((self.command, key))
            fault = self.bucket.judge(self.command, key)
        if fault == "hang":
            time.sleep(0.7)
            self.close_connection = True
            return
        if fault in ("", "cut", "lost"):
            with self.bucket.lock:
                status, headers, data = self._answer(key, query, body)
        else:
            status, headers, data = int(fault), {}, b"<Error><Code>AsAsked</Code></Error>"
        if fault == "lost":
            status, headers, data = 500, {}, b"<Error><Code>Lost</Code></Error>"
        self._send(status, headers, data, received=len(body), cut=fault == "cut")

    do_GET = do_PUT = do_HEAD = do_POST = _serve

    def _send(self, status: int, headers: dict[str, str], data: bytes, *, received: int, cut: bool) -> None:
        mb_s = self.bucket.connection_mb_s  # of the whole request: another test may change it meanwhile
        if not mb_s:
            self._send_now(status, headers, data, cut=cut)
            return
        with self.bucket.lock:
            self.bucket.at_once += 1
            self.bucket.most_at_once = max(self.bucket.most_at_once, self.bucket.at_once)
        try:
            time.sleep(received / 1e6 / mb_s)
            self._send_now(status, headers, data, cut=cut)
        finally:
            with self.bucket.lock:
                self.bucket.at_once -= 1

    def _send_now(self, status: int, headers: dict[str, str], data: bytes, *, cut: bool) -> None:
        self.send_response(status)
        for name, value in ({"content-length": str(len(data))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self._write(data[: len(data) // 2] if cut else data)
        self.close_connection = self.close_connection or cut

    def _write(self, data: bytes) -> None:
        """At the speed of the line, bit by bit."""
        mb_s = self.bucket.connection_mb_s
        for start in range(0, len(data), _DRIP_BYTES if mb_s else max(1, len(data))):
            drip = data[start : start + _DRIP_BYTES] if mb_s else data
            time.sleep(len(drip) / 1e6 / mb_s if mb_s else 0)
            self.wfile.write(drip)

    def _answer(self, key: str, query: dict[str, list[str]], body: bytes) -> tuple[int, dict[str, str], bytes]:
        if self.command == "PUT" and "partNumber" in query:
            self.bucket.parts[query["uploadId"][0]][int(query["partNumber"][0])] = body
            return 200, {"etag": _tag(body)}, b""
        if "delete" in query:
            keys = [unescape(key) for key in re.findall(r"<Key>(.*?)</Key>", body.decode())]
            for each in keys:
                self.bucket.objects.pop(each, None)
            gone = "".join(f"<Deleted><Key>{escape(each)}</Key></Deleted>" for each in keys)
            return 200, {}, f"<DeleteResult>{gone}</DeleteResult>".encode()
        if self.command == "POST":
            return self._upload(key, query)
        if self.command == "PUT":
            return self._put(key, body)
        return self._list(query) if "list-type" in query else self._get(key)

    def _put(self, key: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        conditional = self.headers.get("if-none-match") == "*" and not self.bucket.ignores_conditions
        if conditional and key in self.bucket.objects:
            return 412, {}, b"<Error><Code>PreconditionFailed</Code></Error>"
        kept = {name.lower(): value for name, value in self.headers.items() if name.lower().startswith("x-amz-meta-")}
        self.bucket.objects[key] = (body, kept)
        return 200, {"etag": _tag(body)}, b""

    def _get(self, key: str) -> tuple[int, dict[str, str], bytes]:
        if key not in self.bucket.objects:
            return 404, {}, b"<Error><Code>NoSuchKey</Code></Error>"
        data, kept = self.bucket.objects[key]
        if self.headers.get("if-match", _tag(data)) != _tag(data):
            return 412, {}, b""
        headers = {"etag": _tag(data), "last-modified": "Mon, 16 Nov 2026 12:00:00 GMT", **kept}
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        if match is None:
            return 200, headers | {"content-length": str(len(data))}, data
        first, last = int(match[1]), min(int(match[2]), len(data) - 1)
        if first > last:
            return 416, {}, b"<Error><Code>InvalidRange</Code></Error>"
        return 206, headers | {"content-range": f"bytes {first}-{last}/{len(data)}"}, data[first : last + 1]

    def _list(self, query: dict[str, list[str]]) -> tuple[int, dict[str, str], bytes]:
        prefix, after = query.get("prefix", [""])[0], query.get("continuation-token", [""])[0]
        keys = [key for key in sorted(self.bucket.objects) if key.startswith(prefix) and key > after]
        page, more = keys[:3], len(keys) > 3
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-11-16T12:00:00Z</LastModified>"
            f"<Size>{len(self.bucket.objects[key][0])}</Size><ETag>x</ETag></Contents>"
            for key in page
        )
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        text = f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{entries}</ListBucketResult>"
        return 200, {"content-type": "application/xml"}, text.encode()

    def _upload(self, key: str, query: dict[str, list[str]]) -> tuple[int, dict[str, str], bytes]:
        if "uploads" in query:
            upload = f"u{len(self.bucket.parts)}"
            self.bucket.parts[upload] = {}
            text = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            return 200, {}, text.encode()
        parts = self.bucket.parts.pop(query["uploadId"][0])
        self.bucket.objects[key] = (b"".join(parts[number] for number in sorted(parts)), {})
        text = "<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>"
        return 200, {}, text.encode()

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:  # a client that hung up
        pass


@contextmanager
def serving(*, ignores_conditions: bool = False) -> Iterator[Bucket]:
    """A bucket named `box`; `judge` may be set at any time."""
    bucket = Bucket(ignores_conditions=ignores_conditions)
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"bucket": bucket}))
    bucket.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield bucket
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _tag(data: bytes) -> str:
    return f'"{hashlib.sha256(data).hexdigest()[:16]}"'
