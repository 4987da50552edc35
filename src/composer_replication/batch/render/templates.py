"""A tokenizer's chat template as a function from messages to text, run in a process of its own.

A chat template is an untrusted program. Jinja's sandbox keeps it away from files and from Python, but not from
`'a' * 10**10`, and a list of the operators, filters, methods and loops to watch would never be complete. So it runs in
a process (`template_server`) that the operating system stops at limits of memory and time.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_replication.batch.render import template_server as server
from composer_replication.errors import InputError, SandboxError, explain
from composer_replication.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Qwen3 shows thinking only in the turns after the last question, and an empty block on the very last turn, so the text
# of a turn changes once another one follows. With these conditions always true, a session is one sequence.
_HISTORY_RULES = (
    ("loop.index0 > ns.last_query_index", "true"),
    ("loop.last or (not loop.last and reasoning_content)", "true"),
)
# The longest templates of published models have 0.1 MB.
MAX_TEMPLATE_CHARS = 2**20
# The processor time in seconds that a template may use, and what it regains with each rendering and each byte of it. A
# rendering takes about a millisecond, or half a second for 10 MB, so a template that uses up the credit is too slow for
# every session.
_CREDIT_S, _CREDIT_S_PER_RENDERING, _CREDIT_S_PER_BYTE = 5.0, 0.01, 2e-6
ENDED = b"E"
"""The kind of an answer that never came: the process ended. Continues the kinds of `template_server`."""
_EXCESS = {
    server.TOO_LARGE: "a text that is too long or needs too much memory",
    ENDED: "a rendering that took too long or ended its process",
}
_FIX = "Do not use this model's template: set render.chat_template to another one, or use another model."


class ChatTemplate:
    """Renders messages with a chat template.

    Raises InputError, with the roles of the messages, for whatever the template raises. Raises SandboxError if the
    template needs more time or memory, or writes more text, than a legitimate template does.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, source: str, options: Mapping[str, Any] | None = None
    ) -> None:
        self.source, self.options = source, dict(options or {})
        self._tokenizer, self._credit_s = tokenizer, _CREDIT_S
        if len(source) > MAX_TEMPLATE_CHARS:
            got, expected = f"{len(source):,} characters", f"at most {MAX_TEMPLATE_CHARS:,}"
            raise InputError(explain(self.name, got=got, expected=expected, fix=_FIX))

    @property
    def name(self) -> str:
        """The template's name for messages: the name of its tokenizer."""
        return f"the chat template of {self._tokenizer.name_or_path or type(self._tokenizer).__name__}"

    @property
    def names(self) -> set[str]:
        """All names in the template's code: variables that it reads or sets, attributes, and keywords."""
        lexed = _jinja().Environment().lex(self.source)
        return {text for _, kind, text in lexed if kind == "name"}

    def with_options(self, options: Mapping[str, Any]) -> ChatTemplate:
        """Return the template with more variables, or with other values for those it has."""
        return ChatTemplate(self._tokenizer, self.source, {**self.options, **options})

    def render(
        self, messages: Sequence[Message], *, prompt: bool = False, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """Return the text of the messages; `prompt` appends the generation prompt."""
        common = {
            **self._tokenizer.special_tokens_map,
            **self.options,
            "chat_template": self.source,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": prompt,
        }
        request = _as_json(common), _as_json(list(messages))
        size = sum(map(len, request))
        self._credit_s = min(_CREDIT_S, self._credit_s + _CREDIT_S_PER_RENDERING + size * _CREDIT_S_PER_BYTE)
        kind, text, used_s = PROCESS.render(*request, max(self._credit_s, _CREDIT_S_PER_RENDERING))
        self._credit_s -= used_s
        if kind in _EXCESS:
            expected = "no more time, memory and text than other templates need"
            raise SandboxError(explain(self.name, got=_EXCESS[kind], expected=expected, fix=_FIX))
        if kind == server.REFUSED:
            what, roles = "chat template", [message["role"] for message in messages]
            roles_text = f"{roles[:8]}..." if len(roles) > 8 else str(roles)
            raise InputError(
                explain(what, got=f"{text} on roles {roles_text}", expected="a rendering of these messages")
            )
        return text


def _as_json(value: Any) -> bytes:
    """Return the value as JSON; a value that JSON cannot hold becomes the name of its type."""
    # The default `ensure_ascii` also escapes lone surrogates, which UTF-8 could not encode.
    return json.dumps(value, default=lambda unknown: f"<{type(unknown).__name__}>").encode()


def _jinja() -> Any:
    """Return the jinja2 module that transformers has loaded; it is an optional dependency of transformers."""
    from transformers.utils import chat_template_utils

    return getattr(chat_template_utils, "jinja2", None)


def template_source(
    tokenizer: PreTrainedTokenizerBase, chat_template: str | None, tools: Sequence[Mapping[str, Any]] | None
) -> str:
    """Return the source of `chat_template`, or of the tokenizer's own one (the variant for tools, if it has one)."""
    if chat_template is not None:
        return chat_template
    if not tokenizer.chat_template:
        what = f"tokenizer {tokenizer.name_or_path or type(tokenizer).__name__!r}"
        fix = (
            "Use the tokenizer of an instruct model, or a file with a template: render.chat_template in a config,"
            " --chat-template of `crf inspect`, or its text as chat_template= in Python."
        )
        raise InputError(explain(what, got="no chat template", expected="one that renders conversations", fix=fix))
    return tokenizer.get_chat_template(tools=list(tools) if tools else None)  # pyright: ignore[reportArgumentType]


def prefix_preserving(source: str) -> str | None:
    """Return a variant of a known template whose renderings are only ever appended to; None for other templates."""
    if not all(rule in source for rule, _ in _HISTORY_RULES):
        return None
    for rule, always in _HISTORY_RULES:
        source = source.replace(rule, always)
    return source


_PROGRAM = Path(server.__file__)
# Wall-clock limit: a constant, and an amount per second of processor time. Loading transformers takes a second, but a
# busy or swapping machine may need far longer for anything.
_WALL_S, _WALL_S_PER_SECOND = 120.0, 20.0
# What Python needs to start and a template to write a date. API keys and tokens must not reach the process.
_ENVIRONMENT = ("HOME", "LANG", "LC_ALL", "LC_TIME", "LD_LIBRARY_PATH", "PATH", "SYSTEMROOT", "TMPDIR", "TZ")


class _TemplateProcess:
    """One process that renders for all threads. It is started on first use, and again after it was stopped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)
        # Windows has no fork.
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget_after_fork)

    def render(self, common: bytes, messages: bytes, seconds: float) -> tuple[bytes, str, float]:
        """Return the kind of the answer, its text, and the processor seconds it took, which are at most `seconds`.

        `common` and `messages` are JSON. The kind is ENDED if the process ended, or was ended, without an answer.
        """
        with self._lock:
            process, can_continue = self._running(), False
            try:
                answer = self._request(process, common, messages, seconds)
                # After TOO_LARGE the process may not have returned all of its memory.
                can_continue = answer[0] != server.TOO_LARGE
                return answer
            except (OSError, EOFError):
                return ENDED, "", seconds
            finally:
                # Also after Ctrl-C: the process would answer this request when the next one is sent.
                if not can_continue:
                    self._stop()

    def _request(
        self, process: subprocess.Popen[bytes], common: bytes, messages: bytes, seconds: float
    ) -> tuple[bytes, str, float]:
        assert process.stdin is not None
        deadline = time.monotonic() + _WALL_S + _WALL_S_PER_SECOND * seconds
        process.stdin.write(server.REQUEST.pack(len(common), len(messages), seconds) + common + messages)
        process.stdin.flush()
        kind, length, used = server.ANSWER.unpack(_read(process, server.ANSWER.size, deadline))
        return kind, _read(process, length, deadline).decode("utf-8", "surrogatepass"), used

    def _running(self) -> subprocess.Popen[bytes]:
        """Return the process, started if necessary."""
        if self._process is None or self._process.poll() is not None:
            self._stop()
            self._process = _start()
        return self._process

    def close(self) -> None:
        """End the process; the next rendering starts another one."""
        with self._lock:
            self._stop()

    def _forget_after_fork(self) -> None:
        """Give up the process in a forked child: it belongs to the parent, which still uses its pipes."""
        # A thread of the parent may have held the lock, and does not exist in the child to release it.
        self._lock = threading.Lock()
        # With a return code, Popen does not try to wait for a process that is not its child.
        if self._process is not None:
            self._process.returncode = 0
        self._process = None

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):
                    pipe.close()
            self._process.wait()
        self._process = None


def _start() -> subprocess.Popen[bytes]:
    """Start `template_server`. Raises SandboxError if the system allows no more processes."""
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    try:
        return subprocess.Popen(  # noqa: S603 (the words are ours)
            [sys.executable, "-P", "-B", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C in the terminal must not reach it
        )
    except OSError as error:
        got = f"no process to run chat templates in ({error})"
        raise SandboxError(explain("rendering", got=got, expected="one", fix="Check `ulimit -u`.")) from error


def _read(process: subprocess.Popen[bytes], count: int, deadline: float) -> bytes:
    """Return `count` bytes of the process's output. Raises TimeoutError after the deadline, EOFError at its end."""
    assert process.stdout is not None
    descriptor, parts = process.stdout.fileno(), list[bytes]()
    while count > 0:
        if not _is_readable(descriptor, deadline - time.monotonic()):
            raise TimeoutError
        part = os.read(descriptor, min(count, 2**20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _is_readable(descriptor: int, seconds: float) -> bool:
    """Wait until there is something to read, and return whether there is."""
    # On Windows pipes cannot be polled, so reading blocks without a deadline.
    if not hasattr(select, "poll"):
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


PROCESS = _TemplateProcess()
