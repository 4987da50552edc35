"""An OpenAI-compatible server on this machine whose models are scripts: model `NAME` makes the calls of that script."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

Turn = Sequence[tuple[str, str]] | None
"""The calls of one turn: names, and arguments as the text that a model writes. None: the context has no room for it."""
OVERFLOW = "This model's maximum context length is 4096 tokens. However, your messages resulted in 4100 tokens."


@contextmanager
def serving(models: Mapping[str, Sequence[Turn]]) -> Iterator[str]:
    """The server's base URL. A model that has said all of its turns says that it is done."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            turns = models[body["model"]]
            number = sum(message["role"] == "assistant" for message in body["messages"])
            turn = turns[number] if number < len(turns) else ()
            refusal = {"error": {"message": OVERFLOW, "code": "context_length_exceeded"}}
            answer = json.dumps(refusal if turn is None else _completion(body["model"], number, turn))
            self.send_response(400 if turn is None else 200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _completion(model: str, number: int, turn: Sequence[tuple[str, str]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": None if turn else "I am done."}
    if turn:
        message["tool_calls"] = [
            {"id": f"call-{number}-{at}", "type": "function", "function": {"name": name, "arguments": text}}
            for at, (name, text) in enumerate(turn)
        ]
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if turn else "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return {
        "id": f"{model}-{number}",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [choice],
        "usage": usage,
    }
