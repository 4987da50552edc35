"""Advisers of adjustable skill behind an OpenAI-compatible address on this machine, for states of the workspace.

A request is recognised by its first user message, which is a task's prompt; its calls are made again in a fresh
workspace, and the adviser says what it would do there. `world-expert` is always right; `world-flawed-0.3` makes, where
one can be made, a mistake in three of ten answers. The same question has the same answer. Nothing is executed: a run of
the tests that a state shows is taken as made.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from types import TracebackType
from typing import Any, NamedTuple, cast, get_args

from composer_replication.envs.policies.episode import retrace
from composer_replication.envs.policies.flawed import Style, expert_move, opportunities
from composer_replication.envs.policies.situation import Move, Situation
from composer_replication.envs.workspace.generate import generate_task
from composer_replication.envs.workspace.sandbox import TestReport, TestRunner
from composer_replication.envs.workspace.task import Difficulty, Task
from composer_replication.envs.workspace.workspace import Workspace

MODELS = ("world-expert", "world-flawed-0.1", "world-flawed-0.3", "world-flawed-0.6")
DIFFICULTIES = cast("tuple[Difficulty, ...]", get_args(Difficulty))
_MODEL = re.compile(r"world-(?:expert|flawed-(?P<rate>0(?:\.\d{1,6})?|1(?:\.0{1,6})?))")
_HOST, _MAX_BODY, _CONTEXT = "127.0.0.1", 16 * 2**20, 200_000
_USD_PER_INPUT, _USD_PER_OUTPUT = 1e-7, 4e-7  # a price, so that a cap has something to hold
_BYTES_PER_TOKEN = 4
_FENCE = re.compile(r"<data-(\w+)>\n(.*)\n</data-\1>", re.DOTALL)


class HttpRefusal(Exception):
    """A request that has no answer, with the HTTP status that says so."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _NoRuns(TestRunner):
    __test__ = False

    def run_tests(self, files: Mapping[str, str], paths: Sequence[str]) -> TestReport:  # noqa: ARG002
        return TestReport(text="", passed=0, failed=0)

    def values(self, files: Mapping[str, str], expressions: Sequence[tuple[str, str]]) -> list[str]:  # noqa: ARG002
        return []


class _Shown(NamedTuple):
    """What the messages of a request show: the task's words, the calls, and what came back for each."""

    prompt: str
    calls: list[tuple[str, Any]]
    results: list[str | None]


class Advisers:
    """Answers chat requests about the tasks of these seeds; many hard ones have the same prompt."""

    def __init__(self, seeds: Iterable[int], difficulties: Sequence[Difficulty] = DIFFICULTIES) -> None:
        self._tasks: dict[str, list[Task]] = {}
        for seed in seeds:
            for difficulty in difficulties:
                task = generate_task(seed, difficulty=difficulty)
                self._tasks.setdefault(task.prompt.strip(), []).append(task)

    def answer(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The chat completion for a request."""
        model = body.get("model")
        match = _MODEL.fullmatch(model) if isinstance(model, str) else None
        if match is None:
            raise HttpRefusal(400, f"{model!r:.100} is not a valid model ID: expected one like {', '.join(MODELS)}")
        if body.get("stream"):
            raise HttpRefusal(400, "stream: this server answers whole replies only")
        transcript = _shown(body.get("messages"))
        situation = self._situation(transcript)
        name = json.dumps([model, transcript], sort_keys=True)
        move = _advice(situation, float(match["rate"] or 0), name)
        return _completion(str(model), move, len(json.dumps(body)), len(transcript.calls))

    def _situation(self, request: _Shown) -> Situation:
        """Where the request stands; of several tasks with the same words, the one in which the same came back."""
        tasks = self._tasks.get(request.prompt)
        if not tasks:
            raise HttpRefusal(400, "the first user message is no task of this world")
        task = tasks[0] if len(tasks) == 1 else max(tasks, key=lambda candidate: _num_alike(candidate, request))
        return retrace(task, request.calls, runner=_NoRuns())


def _num_alike(task: Task, request: _Shown) -> int:
    """After how many of the calls the task has shown the same as the request; of a run of the tests nobody asks."""
    workspace = Workspace(task, runner=_NoRuns())
    for number, ((tool, arguments), result) in enumerate(zip(request.calls, request.results, strict=True)):
        text = workspace.call(tool, arguments).text
        if result is not None and tool != "RunTests" and text != result:
            return number
    return len(request.calls)


def _advice(situation: Situation, rate: float, name: str) -> Move:
    random = Random(name)  # noqa: S311 (an answer, not a secret)
    right = expert_move(situation, Style.of(f"{situation.task.difficulty}/{situation.task.seed}"))
    moves = opportunities(situation, right, random)
    return moves[random.choice(sorted(moves))] if moves and random.random() < rate else right


def _shown(messages: object) -> _Shown:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise HttpRefusal(400, "messages: expected a list of messages")
    prompt: str | None = None
    calls: list[tuple[str, Any]] = []
    results: dict[str, str] = {}
    ids: list[str] = []
    for message in cast("list[dict[str, Any]]", messages):
        text = message.get("content")
        if message.get("role") == "user" and prompt is None and isinstance(text, str):
            prompt = text.strip()
        elif message.get("role") == "tool" and isinstance(text, str):
            fenced = _FENCE.fullmatch(text.strip())
            results[str(message.get("tool_call_id"))] = fenced[2] if fenced else text
        tool_calls: Any = message.get("tool_calls") or []
        for call in tool_calls if isinstance(tool_calls, list) else [tool_calls]:
            calls.append(_call(call))
            ids.append(str(call.get("id")))
    return _Shown(prompt or "", calls, [results.get(call_id) for call_id in ids])


def _call(call: Any) -> tuple[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise HttpRefusal(400, "tool_calls: expected calls of functions")
    arguments: Any = function.get("arguments")
    try:
        return str(function.get("name")), json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return str(function.get("name")), None


def _completion(model: str, move: Move, num_bytes: int, number: int) -> dict[str, Any]:
    arguments = json.dumps(dict(move.arguments), ensure_ascii=False)
    call = {"id": f"call_{number}", "type": "function", "function": {"name": move.tool, "arguments": arguments}}
    message = {"role": "assistant", "content": move.text, "tool_calls": [call]}
    prompt = num_bytes // _BYTES_PER_TOKEN + 1
    written = (len(move.text) + len(arguments)) // _BYTES_PER_TOKEN + 1
    cost = prompt * _USD_PER_INPUT + written * _USD_PER_OUTPUT
    usage = {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written, "cost": cost}
    choice = {"index": 0, "finish_reason": "tool_calls", "message": message}
    answer = {"id": f"{model}-{number}", "object": "chat.completion", "created": 0, "model": model}
    return {**answer, "choices": [choice], "usage": usage}


def _listed(model: str) -> dict[str, Any]:
    pricing = {"prompt": f"{_USD_PER_INPUT:.9f}", "completion": f"{_USD_PER_OUTPUT:.9f}"}
    return {"id": model, "context_length": _CONTEXT, "pricing": pricing, "supported_parameters": ["tools"]}


class AdviserServer:
    """Serves advisers at `base_url` while it is entered; on this machine only."""

    models = MODELS

    def __init__(
        self, seeds: Iterable[int], difficulties: Sequence[Difficulty] = DIFFICULTIES, *, port: int = 0
    ) -> None:
        advisers = Advisers(seeds, difficulties)
        handler = type("Handler", (_Handler,), {"advisers": advisers})
        self._server = _TeacherServer((_HOST, port), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def base_url(self) -> str:
        return f"http://{_HOST}:{self._server.server_port}/v1"

    def wait(self) -> None:
        """Until the process is interrupted."""
        self._thread.join()

    def __enter__(self) -> AdviserServer:
        self._thread.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _TeacherServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256  # a replay opens its connections all at once


class _Handler(BaseHTTPRequestHandler):
    advisers: Advisers
    protocol_version = "HTTP/1.1"
    timeout = 60  # a caller that says nothing does not keep a thread

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._reply(200, {"data": [_listed(model) for model in MODELS]})
        else:
            self._refuse(404, f"no GET {self.path:.100} here")

    def do_POST(self) -> None:
        length = self.headers.get("content-length", "")
        if not length.isdecimal() or int(length) > _MAX_BODY:
            self.close_connection = True
            self._refuse(413, f"the body: expected a length of at most {_MAX_BODY} bytes")
            return
        raw = self.rfile.read(int(length))
        try:
            if self.path != "/v1/chat/completions":
                raise HttpRefusal(404, f"no POST {self.path:.100} here")
            self._reply(200, self.advisers.answer(_object(raw)))
        except HttpRefusal as refused:
            self._refuse(refused.status, str(refused))
        except RecursionError:
            self._refuse(400, "the body is nested too deeply")

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not written down."""

    def _refuse(self, status: int, message: str) -> None:
        self._reply(status, {"error": {"code": status, "message": message}})

    def _reply(self, status: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _object(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise HttpRefusal(400, "the body is not JSON") from error
    if not isinstance(body, dict):
        raise HttpRefusal(400, "the body is not a JSON object")
    return body
