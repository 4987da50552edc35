"""Serve scripted teachers of adjustable skill over a local OpenAI-compatible API, for states of the workspace.

A request is recognized by its first user message, which is a task's prompt. The server repeats the request's calls in a
fresh workspace and answers with the next call: `world-expert` always with the right one, `world-flawed-0.3` with a
mistake in 30% of the states in which a mistake is possible. Equal requests get equal answers. No tests are executed: a
RunTests call in a request counts as done.
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
# "world-expert", or "world-flawed-0.3" -> rate "0.3"; not "world-flawed-2"
_MODEL = re.compile(r"world-(?:expert|flawed-(?P<rate>0(?:\.\d{1,6})?|1(?:\.0{1,6})?))")
_HOST, _MAX_BODY, _CONTEXT = "127.0.0.1", 16 * 2**20, 200_000
_USD_PER_INPUT, _USD_PER_OUTPUT = 1e-7, 4e-7  # invented prices, so that spending caps can be tried out
_BYTES_PER_TOKEN = 4
# The replay wraps tool results in tags with a random name: "<data-a1>\ntext\n</data-a1>" -> "text"
_FENCE = re.compile(r"<data-(\w+)>\n(.*)\n</data-\1>", re.DOTALL)


class _HttpRefusal(Exception):
    """Raised for a request that cannot be answered; `status` is the HTTP status of the response."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _NoRuns(TestRunner):
    """A test runner that runs no tests and returns empty reports."""

    __test__ = False

    def run_tests(self, files: Mapping[str, str], paths: Sequence[str]) -> TestReport:  # noqa: ARG002
        return TestReport(text="", passed=0, failed=0)

    def values(self, files: Mapping[str, str], expressions: Sequence[tuple[str, str]]) -> list[str]:  # noqa: ARG002
        return []


class _Transcript(NamedTuple):
    """A request's prompt, its tool calls, and the result of each call, which is None if the request does not contain
    it.
    """

    prompt: str
    calls: list[tuple[str, Any]]
    results: list[str | None]


class _ScriptedTeachers:
    """Answers chat requests about the tasks of the given seeds and difficulties."""

    def __init__(self, seeds: Iterable[int], difficulties: Sequence[Difficulty] = DIFFICULTIES) -> None:
        # Hard tasks share a few prompts, so a prompt may belong to many tasks.
        self._tasks_by_prompt: dict[str, list[Task]] = {}
        for seed in seeds:
            for difficulty in difficulties:
                task = generate_task(seed, difficulty=difficulty)
                self._tasks_by_prompt.setdefault(task.prompt.strip(), []).append(task)

    def answer(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the chat completion for a request. Raises _HttpRefusal if it is malformed or its task is unknown."""
        model = body.get("model")
        match = _MODEL.fullmatch(model) if isinstance(model, str) else None
        if match is None:
            raise _HttpRefusal(400, f"{model!r:.100} is not a valid model ID: expected one like {', '.join(MODELS)}")
        if body.get("stream"):
            raise _HttpRefusal(400, "stream: this server does not stream; expected false")
        transcript = _parse_messages(body.get("messages"))
        situation = self._replay(transcript)
        # The transcript seeds the choice of a mistake, so that the same request gets the same answer.
        seed = json.dumps([model, transcript], sort_keys=True)
        move = _choose_move(situation, float(match["rate"] or 0), seed)
        return _completion(str(model), move, len(json.dumps(body)), len(transcript.calls))

    def _replay(self, transcript: _Transcript) -> Situation:
        """Return the situation after the request's calls.

        If several tasks share the prompt, the task whose results match those in the request is chosen.
        """
        tasks = self._tasks_by_prompt.get(transcript.prompt)
        if not tasks:
            raise _HttpRefusal(400, "the first user message is not the prompt of a task of this server")
        task = (
            tasks[0]
            if len(tasks) == 1
            else max(tasks, key=lambda candidate: _num_matching_results(candidate, transcript))
        )
        return retrace(task, transcript.calls, runner=_NoRuns())


def _num_matching_results(task: Task, transcript: _Transcript) -> int:
    """Return how many calls precede the first call whose result in this task differs from that in the request.

    Results of RunTests are not compared, because the server runs no tests.
    """
    workspace = Workspace(task, runner=_NoRuns())
    for number, ((tool, arguments), result) in enumerate(zip(transcript.calls, transcript.results, strict=True)):
        text = workspace.call(tool, arguments).text
        if result is not None and tool != "RunTests" and text != result:
            return number
    return len(transcript.calls)


def _choose_move(situation: Situation, rate: float, seed: str) -> Move:
    random = Random(seed)  # noqa: S311 (an answer, not a secret)
    right_move = expert_move(situation, Style.of(f"{situation.task.difficulty}/{situation.task.seed}"))
    moves = opportunities(situation, right_move, random)
    return moves[random.choice(sorted(moves))] if moves and random.random() < rate else right_move


def _parse_messages(messages: object) -> _Transcript:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise _HttpRefusal(400, "messages: expected a list of messages")
    prompt: str | None = None
    calls: list[tuple[str, Any]] = []
    results: dict[str, str] = {}
    ids: list[str] = []
    for message in cast("list[dict[str, Any]]", messages):
        text = message.get("content")
        if message.get("role") == "user" and prompt is None and isinstance(text, str):
            prompt = text.strip()
        # Results may be in another order than the calls, so they are stored by call id.
        elif message.get("role") == "tool" and isinstance(text, str):
            fenced = _FENCE.fullmatch(text.strip())
            results[str(message.get("tool_call_id"))] = fenced[2] if fenced else text
        tool_calls: Any = message.get("tool_calls") or []
        for call in tool_calls if isinstance(tool_calls, list) else [tool_calls]:
            calls.append(_parse_call(call))
            ids.append(str(call.get("id")))
    return _Transcript(prompt or "", calls, [results.get(call_id) for call_id in ids])


def _parse_call(call: Any) -> tuple[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise _HttpRefusal(400, "tool_calls: expected calls of functions")
    arguments: Any = function.get("arguments")
    try:
        return str(function.get("name")), json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        # Invalid arguments are kept, because the workspace answers them with an error.
        return str(function.get("name")), None


def _completion(model: str, move: Move, num_bytes: int, num_calls: int) -> dict[str, Any]:
    arguments = json.dumps(dict(move.arguments), ensure_ascii=False)
    call = {"id": f"call_{num_calls}", "type": "function", "function": {"name": move.tool, "arguments": arguments}}
    message = {"role": "assistant", "content": move.text, "tool_calls": [call]}
    prompt_tokens = num_bytes // _BYTES_PER_TOKEN + 1
    completion_tokens = (len(move.text) + len(arguments)) // _BYTES_PER_TOKEN + 1
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "cost": prompt_tokens * _USD_PER_INPUT + completion_tokens * _USD_PER_OUTPUT,
    }
    choice = {"index": 0, "finish_reason": "tool_calls", "message": message}
    # "created" is 0 instead of the time, so that answers are reproducible.
    answer = {"id": f"{model}-{num_calls}", "object": "chat.completion", "created": 0, "model": model}
    return {**answer, "choices": [choice], "usage": usage}


def _model_entry(model: str) -> dict[str, Any]:
    pricing = {"prompt": f"{_USD_PER_INPUT:.9f}", "completion": f"{_USD_PER_OUTPUT:.9f}"}
    return {"id": model, "context_length": _CONTEXT, "pricing": pricing, "supported_parameters": ["tools"]}


class AdviserServer:
    """Context manager that serves scripted teachers at `base_url` to clients on this machine.

    With port 0, a free port is chosen.
    """

    models = MODELS

    def __init__(
        self, seeds: Iterable[int], difficulties: Sequence[Difficulty] = DIFFICULTIES, *, port: int = 0
    ) -> None:
        teachers = _ScriptedTeachers(seeds, difficulties)
        handler = type("Handler", (_Handler,), {"teachers": teachers})
        self._server = _TeacherServer((_HOST, port), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def base_url(self) -> str:
        return f"http://{_HOST}:{self._server.server_port}/v1"

    def wait(self) -> None:
        """Block until the process is interrupted."""
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
    request_queue_size = 256  # a replay opens all its connections at once


class _Handler(BaseHTTPRequestHandler):
    teachers: _ScriptedTeachers
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds; a silent client must not occupy a thread forever

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._reply(200, {"data": [_model_entry(model) for model in MODELS]})
        else:
            self._refuse(404, f"unknown path: GET {self.path:.100}")

    def do_POST(self) -> None:
        length = self.headers.get("content-length", "")
        if not length.isdecimal() or int(length) > _MAX_BODY:
            self.close_connection = True  # the body stays unread, so the connection cannot be reused
            self._refuse(413, f"content-length: expected at most {_MAX_BODY} bytes")
            return
        raw = self.rfile.read(int(length))
        try:
            if self.path != "/v1/chat/completions":
                raise _HttpRefusal(404, f"unknown path: POST {self.path:.100}")
            self._reply(200, self.teachers.answer(_parse_object(raw)))
        except _HttpRefusal as refusal:
            self._refuse(refusal.status, str(refusal))
        except RecursionError:
            self._refuse(400, "the body is nested too deeply")

    def log_message(self, format: str, *args: Any) -> None:
        """Discard log messages."""

    def _refuse(self, status: int, message: str) -> None:
        self._reply(status, {"error": {"code": status, "message": message}})

    def _reply(self, status: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _parse_object(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _HttpRefusal(400, "the body is not JSON") from error
    if not isinstance(body, dict):
        raise _HttpRefusal(400, "the body is not a JSON object")
    return body
