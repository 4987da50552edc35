"""A chat endpoint on this machine behind which the policy in training speaks.

An engine with a loop of its own asks a model over HTTP, each episode under a name of its own. Here requests wait until
every episode that is not over has one; then all of them are answered by one call of the trainer's own generation. The
ids are the record: a later request of an episode continues the ids of the earlier ones verbatim, and only what stands
between two turns is rendered anew.

An episode has room for a number of tokens after its prompt. A turn that reaches it is cut there (`finish_reason`
"length"). A request without room for a single token is refused, and `on_full` is called before the engine gets the
refusal: engines differ in what they make of it, and the episode has ended, not failed.
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
"""Prompts as ids, to what is sampled after each and, where the engine has them, its log-probs."""
_SAID, SECONDS = "said here", 3600.0
MOST_BYTES, READ_SECONDS = 64 * 2**20, 60.0
"""Of one request: a conversation is in each of them, and it has to arrive."""


class SpokenEpisode:
    """What one episode asked and heard, as token ids; `sampled` is 1 on the policy's own.

    `budget` limits the tokens after the prompt, `context` the prompt and these tokens together.
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
        self.asked: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.answers: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def take(self, request: dict[str, Any]) -> bool:
        """Extend the ids by a request. Returns whether there is room for a turn."""
        messages: list[dict[str, Any]] = request["messages"]
        if not self.prompt_ids:
            self.tools = request.get("tools") or []
            self.prompt_ids = self._encode(self._render(messages))
        else:
            new = messages[self._num_heard :]
            if len(messages) < self._num_heard or any(message["role"] == "assistant" for message in new):
                got = f"{len(messages)} messages after {self._num_heard}"
                raise InputError(explain("a later request of an episode", got=got, expected="one that continues it"))
            self._add(self._encode(self._between(new)), 0, None)
            self.messages += new
        self._num_heard = len(messages) + 1
        return self.room() > 0

    @property
    def limit(self) -> int:
        """The number of tokens after the prompt at which the episode is full."""
        return self._budget if self._context is None else min(self._budget, self._context - len(self.prompt_ids))

    def room(self) -> int:
        """Return how many more tokens fit into the episode; 0 or less where it is full."""
        return self.limit - len(self.ids)

    def hear(self, said: list[int], logprobs: list[float] | None) -> dict[str, Any]:
        """Record a turn's ids, cut to the room that is left. Returns the message that the endpoint answers."""
        room = self.room()
        said, logprobs = said[:room], None if logprobs is None else logprobs[:room]
        before = len(self.prompt_ids) + len(self.ids)
        self.usage = {
            "prompt_tokens": before,
            "completion_tokens": len(said),
            "total_tokens": before + len(said),
        }
        self._add(said, 1, logprobs)
        text = self._tokenizer.decode(said, skip_special_tokens=True)
        action = parse_reply(text)
        calls = [
            {
                "id": f"call-{self._num_heard}-{number}",
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": call.raw_arguments or json.dumps(call.arguments, ensure_ascii=False),
                },
            }
            for number, call in enumerate(action.calls)
        ]
        # A model may have several end tokens, or its sampler may drop them: only a full episode is cut.
        is_cut = len(said) >= room and (not said or said[-1] != self._tokenizer.eos_token_id)
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
        """What the template writes from the end of a turn to the beginning of the next."""
        names = {
            call["id"]: call["function"]["name"] for message in self.messages for call in message.get("tool_calls", ())
        }
        named_messages = [
            {**message, "name": message.get("name") or names.get(message.get("tool_call_id", ""), "")}
            for message in new
        ]
        dummy = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _SAID}]
        before, end, after = self._render([*dummy, *named_messages]).partition(_SAID + str(self._tokenizer.eos_token))
        if not end or _SAID in before:
            expected = "a turn's text, then its end token"
            raise UnsupportedModelError(explain("chat template", got="a turn that ends otherwise", expected=expected))
        return after

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _read_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Templates take arguments as a mapping; over HTTP they are text."""
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
    except ValueError:
        return arguments


def speak(episodes: Sequence[SpokenEpisode], generate: Generate) -> None:
    """Answer rounds of requests until all episodes are over (None in `asked`)."""
    live = list(episodes)
    while live:
        waiting: list[SpokenEpisode] = []
        for episode in list(live):
            request = episode.asked.get(timeout=SECONDS)
            if request is None:
                live.remove(episode)
            elif not episode.is_full and episode.take(request):
                waiting.append(episode)
            else:
                episode.is_full = True
                episode.on_full()  # before the answer: the engine acts on it at once
                episode.answers.put(None)
        if not waiting:
            continue
        turns, logprobs = generate([[*episode.prompt_ids, *episode.ids] for episode in waiting])
        for number, episode in enumerate(waiting):
            episode.answers.put(episode.hear(turns[number], None if logprobs is None else logprobs[number]))


@contextmanager
def chat_endpoint(episodes: Mapping[str, SpokenEpisode]) -> Iterator[str]:
    """The endpoint's base URL; each episode is a model of that name. Listens on this machine alone.

    The names are the keys: whoever knows one speaks in that episode, so they are not to be guessed.
    """

    class Handler(_ChatHandler):
        known = episodes

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
    """A request goes to its episode and waits for what the policy says in it."""

    known: Mapping[str, SpokenEpisode] = {}
    timeout = READ_SECONDS

    def do_POST(self) -> None:
        request = self._read()
        if request is None:
            return
        episode = self.known.get(str(request.get("model")))
        if episode is None:
            self._refuse(404, "no such model")
            return
        episode.asked.put(request)
        message = episode.answers.get(timeout=SECONDS)
        if message is None:
            why = "maximum context length: no room for another turn" if episode.is_full else "no turn was generated"
            self._refuse(400, why)
            return
        choice = {"index": 0, "message": message, "finish_reason": episode.finish_reason}
        about = {"id": "-", "object": "chat.completion", "created": 0, "model": request["model"]}
        self._send(200, {**about, "choices": [choice], "usage": episode.usage})

    def _read(self) -> dict[str, Any] | None:
        """The request; None where it is refused already."""
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            self._refuse(411, "Content-Length: a number of bytes")
            return None
        if int(length) > MOST_BYTES:
            self._refuse(413, f"more than {MOST_BYTES} bytes")
            return None
        try:
            request = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            request = None
        if not isinstance(request, dict) or not isinstance(request.get("messages"), list):
            self._refuse(400, "a request is an object with messages")
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
        """Nothing: requests hold whole conversations."""
