"""A chat endpoint on this machine, answered by the policy being trained.

An engine with its own loop calls a model over HTTP, with a different model name for each episode. Requests wait until
every running episode has one; then a single call of the trainer's generation answers all of them. An episode is
recorded as token ids: a later request continues the recorded ids verbatim, and only the messages between two turns are
rendered.

An episode has a maximum number of tokens after its prompt. A turn that reaches it is cut there (`finish_reason`
"length"). A request with no room left for even one token is refused, after a call of `on_full`. How engines treat the
refusal varies, but the episode has ended rather than failed.
"""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from composer_replication.action_text import parse_reply
from composer_replication.errors import InputError, UnsupportedModelError, explain

Generate = Callable[[list[list[int]]], tuple[list[list[int]], list[list[float]] | None]]
"""A function from prompts as ids to the ids sampled after each of them and, if the engine has them, their log-probs."""
# A marker for the end of a turn in a rendering; the text after it precedes the next turn.
_MARKER, SECONDS = "said here", 3600.0
MAX_BYTES, READ_SECONDS = 64 * 2**20, 60.0
"""Limits on the bytes and the reading time of one request, which contains the whole conversation."""


class SpokenEpisode:
    """The token ids of one episode, to which requests and the policy's turns are appended.

    `sampled` is 1 for the policy's ids. `budget` limits the tokens after the prompt, and `context` limits all tokens.
    """

    def __init__(self, tokenizer: Any, template: dict[str, Any], budget: int, *, context: int | None = None) -> None:
        self._tokenizer, self._template, self._budget, self._context = tokenizer, template, budget, context
        self.is_full, self.finish_reason = False, "stop"
        self.on_full: Callable[[], None] = lambda: None
        self.usage: dict[str, int] = {}
        self.prompt_ids: list[int] = []
        self.ids: list[int] = []
        self.sampled: list[int] = []
        self.logprobs: list[float] = []
        self.messages: list[dict[str, Any]] = []
        self.tools: list[Any] = []
        self._num_heard = 0
        self.requests: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.answers: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def take(self, request: dict[str, Any]) -> bool:
        """Append a request's ids to the episode, and return whether there is room left for a turn."""
        messages: list[dict[str, Any]] = request["messages"]
        if not self.prompt_ids:
            self.tools = request.get("tools") or []
            self.prompt_ids = self._encode(self._render(messages))
        else:
            # Earlier turns are recorded as ids; a request may only add messages from users and tools.
            new = messages[self._num_heard :]
            if len(messages) < self._num_heard or any(message["role"] == "assistant" for message in new):
                got = f"{len(messages)} messages after {self._num_heard}"
                expected = "the earlier messages, followed by messages of users and tools only"
                raise InputError(explain("later request in an episode", got=got, expected=expected))
            self._add(self._encode(self._between(new)), 0, None)
            self.messages += new
        self._num_heard = len(messages) + 1  # including the turn that will answer this request
        return self.room() > 0

    @property
    def limit(self) -> int:
        """The maximum number of tokens after the prompt."""
        return self._budget if self._context is None else min(self._budget, self._context - len(self.prompt_ids))

    def room(self) -> int:
        """Return how many more tokens fit into the episode; 0 or less if it is full."""
        return self.limit - len(self.ids)

    def hear(self, turn_ids: list[int], logprobs: list[float] | None) -> dict[str, Any]:
        """Record a turn's ids, truncated to the remaining room, and return the reply message."""
        room = self.room()
        turn_ids, logprobs = turn_ids[:room], None if logprobs is None else logprobs[:room]
        before = len(self.prompt_ids) + len(self.ids)
        self.usage = {
            "prompt_tokens": before,
            "completion_tokens": len(turn_ids),
            "total_tokens": before + len(turn_ids),
        }
        self._add(turn_ids, 1, logprobs)
        text = self._tokenizer.decode(turn_ids, skip_special_tokens=True)
        action = parse_reply(text)
        calls = [
            {
                "id": f"call-{self._num_heard}-{number}",
                "type": "function",
                "function": {
                    "name": call.name,
                    # Malformed arguments are passed on as the policy wrote them.
                    "arguments": call.raw_arguments or json.dumps(call.arguments, ensure_ascii=False),
                },
            }
            for number, call in enumerate(action.calls)
        ]
        # A model may have several end tokens, or its sampler may drop them, so a turn only counts as truncated if the
        # episode is full and the turn does not end with the usual token.
        is_cut = len(turn_ids) >= room and (not turn_ids or turn_ids[-1] != self._tokenizer.eos_token_id)
        self.finish_reason = "length" if is_cut else "tool_calls" if calls else "stop"
        message: dict[str, Any] = {"role": "assistant", "content": action.text if calls else text}
        self.messages.append({**message, "tool_calls": calls} if calls else message)
        return self.messages[-1]

    def _add(self, ids: Sequence[int], sampled: int, logprobs: Sequence[float] | None) -> None:
        self.ids += ids
        self.sampled += [sampled] * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else list(logprobs)

    def _render(self, messages: list[dict[str, Any]]) -> str:
        options: dict[str, Any] = {"add_generation_prompt": True, "tokenize": False, **self._template}
        return self._tokenizer.apply_chat_template(_read_calls(messages), tools=self.tools or None, **options)

    def _between(self, new: list[dict[str, Any]]) -> str:
        """Return the text that the template writes between the end of a turn and the start of the next turn."""
        # Some templates need the name of a tool message, but chat APIs send only the id of its call.
        names = {
            call["id"]: call["function"]["name"] for message in self.messages for call in message.get("tool_calls", ())
        }
        named_messages = [
            {**message, "name": message.get("name") or names.get(message.get("tool_call_id", ""), "")}
            for message in new
        ]
        # Render the messages after a dummy turn and cut at its end: the template writes the same after the real turn.
        dummy = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _MARKER}]
        before, end, after = self._render([*dummy, *named_messages]).partition(_MARKER + str(self._tokenizer.eos_token))
        if not end or _MARKER in before:
            expected = "turns that end with their text and the end token"
            raise UnsupportedModelError(explain("chat template", got="turns with another ending", expected=expected))
        return after

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _read_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with call arguments parsed from JSON text into mappings, as chat templates expect."""
    parsed_messages: list[dict[str, Any]] = []
    for message in messages:
        calls = [
            {**call, "function": {**call["function"], "arguments": _mapping(call["function"]["arguments"])}}
            for call in message.get("tool_calls") or ()
        ]
        parsed_messages.append(
            {**message, "content": message.get("content") or "", **({"tool_calls": calls} if calls else {})}
        )
    return parsed_messages


def _mapping(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:  # the policy's own malformed arguments, which the template gets unchanged
        return arguments


def speak(episodes: Sequence[SpokenEpisode], generate: Generate) -> None:
    """Answer rounds of requests until all episodes are over. None in an episode's `requests` marks its end."""
    live = list(episodes)
    while live:
        waiting: list[SpokenEpisode] = []
        for episode in list(live):
            # Every running episode sends a request, so this waits for the slowest of them.
            request = episode.requests.get(timeout=SECONDS)
            if request is None:
                live.remove(episode)
            elif not episode.is_full and episode.take(request):
                waiting.append(episode)
            else:
                episode.is_full = True
                episode.on_full()  # before the answer, because the engine acts on it at once
                episode.answers.put(None)
        if not waiting:
            continue
        turns, logprobs = generate([[*episode.prompt_ids, *episode.ids] for episode in waiting])
        for number, episode in enumerate(waiting):
            episode.answers.put(episode.hear(turns[number], None if logprobs is None else logprobs[number]))


@contextmanager
def chat_endpoint(episodes: Mapping[str, SpokenEpisode]) -> Iterator[str]:
    """Serve the endpoint on this machine inside the block, and yield its base URL. Each episode has its own model name.

    The names must be hard to guess, because any local process that knows a name can send requests for that episode.
    """

    class Handler(_ChatHandler):
        by_name = episodes

    # Port 0 means any free port.
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _ChatHandler(BaseHTTPRequestHandler):
    """A handler that passes each request to its episode, and answers with a turn of the policy."""

    by_name: Mapping[str, SpokenEpisode] = {}
    timeout = READ_SECONDS

    def do_POST(self) -> None:
        request = self._read()
        if request is None:
            return
        episode = self.by_name.get(str(request.get("model")))
        if episode is None:
            self._refuse(404, "no such model")
            return
        episode.requests.put(request)
        message = episode.answers.get(timeout=SECONDS)
        if message is None:
            why = "maximum context length: no room for another turn" if episode.is_full else "no turn was generated"
            self._refuse(400, why)
            return
        choice = {"index": 0, "message": message, "finish_reason": episode.finish_reason}
        about = {"id": "-", "object": "chat.completion", "created": 0, "model": request["model"]}
        self._send(200, {**about, "choices": [choice], "usage": episode.usage})

    def _read(self) -> dict[str, Any] | None:
        """Return the request, or None if it was refused."""
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            self._refuse(411, "Content-Length must be a number of bytes")
            return None
        if int(length) > MAX_BYTES:
            self._refuse(413, f"request larger than {MAX_BYTES} bytes")
            return None
        try:
            request = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            request = None
        if not isinstance(request, dict) or not isinstance(request.get("messages"), list):
            self._refuse(400, "request must be a JSON object with messages")
            return None
        return request

    def _refuse(self, status: int, why: str) -> None:
        self._send(status, {"error": {"message": why}})

    def _send(self, status: int, body: dict[str, Any]) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because requests contain whole conversations."""
