"""A tokenizer's chat template as a function from messages to text, run in a process of its own.

A chat template is an untrusted program. Jinja's sandbox denies it access to files and to Python internals, but does not
prevent `'a' * 10**10`, and a list of dangerous operators, filters, methods and loops would never be complete. So
templates run in a process (`template_server`) that the operating system stops at limits of memory and time.
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


# Qwen3 shows thinking only after the last user message, and an empty block in the very last turn, so the text of a turn
# changes once another turn follows. With these conditions replaced by `true`, a session is one sequence.
_HISTORY_RULES = (
    ("loop.index0 > ns.last_query_index", "true"),
    ("loop.last or (not loop.last and reasoning_content)", "true"),
)
# The longest published chat templates have 0.1 MB.
MAX_TEMPLATE_CHARS = 2**20
# The CPU time in seconds that a template may use, and the time that it regains per rendering and per byte of it. A
# rendering takes about a millisecond, or half a second for 10 MB, so a template that uses up this credit is too slow
# for any session.
_CREDIT_S, _CREDIT_S_PER_RENDERING, _CREDIT_S_PER_BYTE = 5.0, 0.01, 2e-6
ENDED = b"E"
"""The process ended without an answer. Extends the kinds of answers in `template_server`."""
_EXCESS = {
    server.TOO_LARGE: "a text that is too long or needs too much memory",
    ENDED: "a rendering that took too long or ended its process",
}
_FIX = "Do not use this model's template: set render.chat_template to another one, or use another model."


class ChatTemplate:
    """Renders messages with a chat template.

    Raises InputError, which lists the roles of the messages, for any error in the template. Raises SandboxError if the
    template uses more time or memory, or writes more text, than a legitimate template does.
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
        """The tokenizer's name, for error messages."""
        return f"the chat template of {self._tokenizer.name_or_path or type(self._tokenizer).__name__}"

    @property
    def names(self) -> set[str]:
        """All identifiers in the template's code: variables, attributes, and keywords."""
        lexed = _jinja().Environment().lex(self.source)
        return {text for _, kind, text in lexed if kind == "name"}

    def with_options(self, options: Mapping[str, Any]) -> ChatTemplate:
        """Return a copy of the template with these variables added or replaced."""
        return ChatTemplate(self._tokenizer, self.source, {**self.options, **options})

    def render(
        self, messages: Sequence[Message], *, prompt: bool = False, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """Render messages to text; `prompt` says whether to append the generation prompt."""
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
            expected = "no more time, memory and text than a legitimate template needs"
            raise SandboxError(explain(self.name, got=_EXCESS[kind], expected=expected, fix=_FIX))
        if kind == server.REFUSED:
            what, roles = "chat template", [message["role"] for message in messages]
            roles_text = f"{roles[:8]}..." if len(roles) > 8 else str(roles)
            raise InputError(
                explain(what, got=f"{text} on roles {roles_text}", expected="a rendering of these messages")
            )
        return text


def _as_json(value: Any) -> bytes:
    """Encode a value as JSON; a value that is not JSON becomes the name of its type."""
    # The default `ensure_ascii` also escapes lone surrogates, which UTF-8 could not encode.
    return json.dumps(value, default=lambda unknown: f"<{type(unknown).__name__}>").encode()


def _jinja() -> Any:
    """Return the jinja2 module, an optional dependency that transformers has loaded."""
    from transformers.utils import chat_template_utils

    return getattr(chat_template_utils, "jinja2", None)


def template_source(
    tokenizer: PreTrainedTokenizerBase, chat_template: str | None, tools: Sequence[Mapping[str, Any]] | None
) -> str:
    """Return `chat_template` if given; otherwise the source of the tokenizer's own template, preferably its variant
    for tools.
    """
    if chat_template is not None:
        return chat_template
    if not tokenizer.chat_template:
        what = f"tokenizer {tokenizer.name_or_path or type(tokenizer).__name__!r}"
        fix = (
            "Use the tokenizer of an instruct model, or set a template: render.chat_template in a config,"
            " --chat-template in `crf inspect`, or its text as chat_template= in Python."
        )
        raise InputError(explain(what, got="no chat template", expected="a chat template", fix=fix))
    return tokenizer.get_chat_template(tools=list(tools) if tools else None)  # pyright: ignore[reportArgumentType]


def prefix_preserving(source: str) -> str | None:
    """Return the variant of a known template that never rewrites history; None for other templates."""
    if not all(rule in source for rule, _ in _HISTORY_RULES):
        return None
    for rule, always in _HISTORY_RULES:
        source = source.replace(rule, always)
    return source


_PROGRAM = Path(server.__file__)
# The wall-clock limit: a constant, and an amount per second of CPU time. Loading transformers takes a second, but a
# busy or swapping machine may need far longer.
_WALL_S, _WALL_S_PER_SECOND = 120.0, 20.0
# The variables that Python needs to start and a template needs to write a date. API keys must not reach the process.
_ENVIRONMENT = ("HOME", "LANG", "LC_ALL", "LC_TIME", "LD_LIBRARY_PATH", "PATH", "SYSTEMROOT", "TMPDIR", "TZ")


class _TemplateProcess:
    """One process that renders for all threads, started on first use and restarted after it was stopped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)
        # Windows has no fork.
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget_after_fork)

    def render(self, common: bytes, messages: bytes, seconds: float) -> tuple[bytes, str, float]:
        """Return the kind of the answer, its text, and the CPU seconds that it took, at most `seconds`.

        `common` and `messages` are JSON. The kind is ENDED if the process ended or was killed without an answer.
        """
        with self._lock:
            process, can_continue = self._ensure_running(), False
            try:
                answer = self._request(process, common, messages, seconds)
                # After TOO_LARGE the process may not have freed all of its memory.
                can_continue = answer[0] != server.TOO_LARGE
                return answer
            except (OSError, EOFError):
                return ENDED, "", seconds
            finally:
                # Also after Ctrl-C: otherwise the next request would receive the answer to this one.
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

    def _ensure_running(self) -> subprocess.Popen[bytes]:
        """Return the process; start it if it is not running."""
        if self._process is None or self._process.poll() is not None:
            self._stop()
            self._process = _start_process()
        return self._process

    def close(self) -> None:
        """Stop the process; the next rendering starts a new one."""
        with self._lock:
            self._stop()

    def _forget_after_fork(self) -> None:
        """Detach from the process in a forked child, because the parent still uses its pipes."""
        # A thread of the parent may have held the lock; it does not exist in the child and cannot release it.
        self._lock = threading.Lock()
        # With a return code set, Popen does not wait for a process that is not its child.
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


def _start_process() -> subprocess.Popen[bytes]:
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
        fix = "Check `ulimit -u`."
        message = explain("process for chat templates", got=str(error), expected="a process that starts", fix=fix)
        raise SandboxError(message) from error


def _read(process: subprocess.Popen[bytes], count: int, deadline: float) -> bytes:
    """Read `count` bytes of the process's output. Raises TimeoutError at the deadline, EOFError at the end of file."""
    assert process.stdout is not None
    descriptor, parts = process.stdout.fileno(), list[bytes]()
    while count > 0:
        if not _wait_until_readable(descriptor, deadline - time.monotonic()):
            raise TimeoutError
        part = os.read(descriptor, min(count, 2**20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _wait_until_readable(descriptor: int, seconds: float) -> bool:
    """Wait until the pipe is readable, at most this many seconds; return whether it is."""
    # On Windows pipes cannot be polled, so reading blocks without a deadline.
    if not hasattr(select, "poll"):
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


PROCESS = _TemplateProcess()
