"""A tokenizer's chat template as a function from messages to text, and variants that never rewrite history."""

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

from composer_replication.batch.render import template_server
from composer_replication.batch.render import template_server as server
from composer_replication.errors import InputError, SandboxError, explain
from composer_replication.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Qwen3 shows the thinking of the turns after the last question only, and an empty block on the very last turn: each
# turn's text changes once another follows. Shown always, what was said stays said, and a session is one sequence.
_HISTORY_RULES = (
    ("loop.index0 > ns.last_query_index", "true"),
    ("loop.last or (not loop.last and reasoning_content)", "true"),
)
# The longest templates of published models have 0.1 MB.
MAX_TEMPLATE_CHARS = 2**20
# Seconds of processor time that a template may use, and gets back with each rendering and byte of it. A rendering takes
# about a millisecond, or half a second for 10 MB: who uses up all of this would do so for every session.
_CREDIT, _CREDIT_PER_RENDERING, _CREDIT_PER_BYTE = 5.0, 0.01, 2e-6


# Renders chat templates in a process of their own, which the system stops at limits of memory and time.
#
# A template is a stranger's program. Jinja's sandbox keeps it from files and from Python, not from `'a' * 10**10`,
# and a list of the operators, filters, methods and loops to watch would never be complete: a limit of the process is.

ENDED = b"E"


_EXCESS = {
    template_server.TOO_LARGE: "a text that is too long, or needs too much memory",
    ENDED: "a rendering that took too long, or ended the process that it ran in",
}
_FIX = "Do not use this model's template: set render.chat_template to another, or take another model."


class ChatTemplate:
    """Renders messages; whatever a template raises becomes an InputError that says what it was given.

    One that needs more time or memory than any template does, or writes more text, raises SandboxError.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, source: str, options: Mapping[str, Any] | None = None
    ) -> None:
        self.source, self.options = source, dict(options or {})
        self._tokenizer, self._credit = tokenizer, _CREDIT
        if len(source) > MAX_TEMPLATE_CHARS:
            got, expected = f"{len(source):,} characters", f"at most {MAX_TEMPLATE_CHARS:,}"
            raise InputError(explain(self.name, got=got, expected=expected, fix=_FIX))

    @property
    def name(self) -> str:
        """For messages: whose template it is."""
        return f"the chat template of {self._tokenizer.name_or_path or type(self._tokenizer).__name__}"

    @property
    def names(self) -> set[str]:
        """Every name in the template's code: variables that it reads or sets, attributes, words of the language."""
        lexed = _jinja().Environment().lex(self.source)
        return {text for _, kind, text in lexed if kind == "name"}

    def with_options(self, options: Mapping[str, Any]) -> ChatTemplate:
        """The same with further variables, or other values of those it has."""
        return ChatTemplate(self._tokenizer, self.source, {**self.options, **options})

    def render(
        self, messages: Sequence[Message], *, prompt: bool = False, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """Text of the messages; `prompt` adds the header after which the model speaks."""
        common = {
            **self._tokenizer.special_tokens_map,
            **self.options,
            "chat_template": self.source,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": prompt,
        }
        request = _as_json(common), _as_json(list(messages))
        size = sum(map(len, request))
        self._credit = min(_CREDIT, self._credit + _CREDIT_PER_RENDERING + size * _CREDIT_PER_BYTE)
        kind, text, used = PROCESS.render(*request, max(self._credit, _CREDIT_PER_RENDERING))
        self._credit -= used
        if kind in _EXCESS:
            expected = "a text that takes no more time, memory and room than those of other templates"
            raise SandboxError(explain(self.name, got=_EXCESS[kind], expected=expected, fix=_FIX))
        if kind == template_server.REFUSED:
            what, roles = "chat template", [message["role"] for message in messages]
            roles_text = f"{roles[:8]}..." if len(roles) > 8 else str(roles)
            raise InputError(
                explain(what, got=f"{text} on roles {roles_text}", expected="a rendering of these messages")
            )
        return text


def _as_json(value: Any) -> bytes:
    """Return JSON in ASCII, which holds lone surrogates too; what JSON cannot hold becomes the name of its type."""
    return json.dumps(value, default=lambda unknown: f"<{type(unknown).__name__}>").encode()


def _jinja() -> Any:
    """The library as transformers has it: that needs it for templates, and we only to ask about them."""
    from transformers.utils import chat_template_utils

    return getattr(chat_template_utils, "jinja2", None)


def template_source(
    tokenizer: PreTrainedTokenizerBase, chat_template: str | None, tools: Sequence[Mapping[str, Any]] | None
) -> str:
    """The template's text: the one given, or the tokenizer's own (its tool variant where it has several)."""
    if chat_template is not None:
        return chat_template
    if not tokenizer.chat_template:
        what = f"tokenizer {tokenizer.name_or_path or type(tokenizer).__name__!r}"
        fix = (
            "Use the tokenizer of an instruct model, or name a file with a template: render.chat_template in a config,"
            " --chat-template of `crf inspect`; in Python, pass chat_template= the text of one."
        )
        raise InputError(explain(what, got="no chat template", expected="one that renders conversations", fix=fix))
    return tokenizer.get_chat_template(tools=list(tools) if tools else None)  # pyright: ignore[reportArgumentType]


def prefix_preserving(source: str) -> str | None:
    """A variant of a known template whose renderings only ever grow; None where we know of none."""
    if not all(rule in source for rule, _ in _HISTORY_RULES):
        return None
    for rule, always in _HISTORY_RULES:
        source = source.replace(rule, always)
    return source


_PROGRAM = Path(server.__file__)
# Loading transformers takes a second; a busy machine, or one that swaps, may take far longer for anything.
_WALL_SECONDS, _WALL_PER_SECOND = 120.0, 20.0
# What Python needs to start and a date to be written; above all no keys and tokens.
_ENVIRONMENT = ("HOME", "LANG", "LC_ALL", "LC_TIME", "LD_LIBRARY_PATH", "PATH", "SYSTEMROOT", "TMPDIR", "TZ")


class _TemplateProcess:
    """One process that renders for all threads; it starts when it is first needed, and again after it was stopped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin_in_fork)

    def render(self, common: bytes, messages: bytes, seconds: float) -> tuple[bytes, str, float]:
        """Return the kind of the answer, its text, and the processor seconds it took, which are at most `seconds`.

        `common` and `messages` are JSON. The kind is ENDED where the process ended, or was ended, without an answer.
        """
        with self._lock:
            process, is_answered = self._running(), False
            try:
                answer = self._ask(process, common, messages, seconds)
                is_answered = answer[0] != server.TOO_LARGE  # whose memory may not all come back
                return answer
            except (OSError, EOFError):
                return ENDED, "", seconds
            finally:
                if not is_answered:  # also after Ctrl-C: the next answer would be that of this request
                    self._stop()

    def _ask(
        self, process: subprocess.Popen[bytes], common: bytes, messages: bytes, seconds: float
    ) -> tuple[bytes, str, float]:
        assert process.stdin is not None
        deadline = time.monotonic() + _WALL_SECONDS + _WALL_PER_SECOND * seconds
        process.stdin.write(server.REQUEST.pack(len(common), len(messages), seconds) + common + messages)
        process.stdin.flush()
        kind, length, used = server.ANSWER.unpack(_read(process, server.ANSWER.size, deadline))
        return kind, _read(process, length, deadline).decode("utf-8", "surrogatepass"), used

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._stop()
            self._process = _start()
        return self._process

    def close(self) -> None:
        """End the process; the next rendering starts another."""
        with self._lock:
            self._stop()

    def _begin_in_fork(self) -> None:
        """Let the process be that of the one that was forked: it has its own use for those pipes."""
        self._lock = threading.Lock()  # a thread that held it is not there to give it back
        if self._process is not None:
            self._process.returncode = 0  # not ours to wait for
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
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    try:
        return subprocess.Popen(  # noqa: S603 (the words are ours)
            [sys.executable, "-P", "-B", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        got = f"no process of its own for chat templates ({error})"
        raise SandboxError(explain("rendering", got=got, expected="one", fix="Look at `ulimit -u`.")) from error


def _read(process: subprocess.Popen[bytes], count: int, deadline: float) -> bytes:
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
    """Wait for something to read; where a pipe cannot be waited for (Windows), reading it waits."""
    if not hasattr(select, "poll"):
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


PROCESS = _TemplateProcess()
