"""Scrub whole conversations. The settings are passed to every worker process, but never written to a file."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

from composer_replication.action_text import recut_blocks
from composer_replication.canonical_json import encode
from composer_replication.privacy import Scope, Scrubber, kingfisher_rule
from composer_replication.privacy.answers import (
    answer_spans,
    asks_for_phrase,
    asks_for_secret,
    chat_spans,
    may_contain_answer,
    printed_spans,
    prints_secret,
)
from composer_replication.privacy.outgoing import arguments_as_data, rewritten
from composer_replication.privacy.rules import Span
from composer_replication.types import Conversation, Link, ToolCall, ToolResult, Turn


class _ScrubScope(Protocol):
    """A shared numbering of placeholders for linked conversations."""

    def text(self, text: str) -> str: ...

    def value(self, value: Any) -> Any: ...

    def answer(self, text: str, spans: Callable[[str], Iterable[Span]]) -> str: ...


HoldsSecret = Callable[[str], bool]
"""A function that returns whether a rule matches an id. The entropy rules are excluded, since ids are random."""


def scrub_conversation(
    conversation: Conversation, scope: _ScrubScope, *, holds_secret: HoldsSecret | None = None
) -> Conversation:
    """Return the conversation with every text, argument, path, title and name scrubbed.

    Ids may contain file names, so an id is scrubbed as well if `holds_secret` returns True for it; equal ids stay equal
    within a scope. Token ids are removed from changed texts, since they would reveal the redacted text.
    """
    scrubber = _ConversationScrubber(scope, holds_secret or (lambda _: False))
    return replace(
        conversation,
        id=scope.text(conversation.id),
        session_id=scrubber.text(conversation.session_id),
        parent=scrubber.link(conversation.parent),
        agent_version=scrubber.text(conversation.agent_version),
        turns=tuple(scrubber.turn(turn) for turn in conversation.turns),
        title=scrubber.text(conversation.title),
        cwd=scrubber.text(conversation.cwd),
        extra=scope.value(dict(conversation.extra)),
    )


class _ConversationScrubber:
    """A scrubber for the turns of one conversation, which must be passed in order."""

    def __init__(self, scope: _ScrubScope, holds_secret: HoldsSecret) -> None:
        self._scope, self._holds_secret = scope, holds_secret
        self._question = ""  # the previous message, which may ask for a secret
        self._secret_printing_calls: set[str] = set()  # ids of calls whose results may contain a secret
        self._is_changed = False  # whether any text changed so far: token ids of a prompt encode all texts before it

    def text(self, text: str | None) -> str | None:
        return None if text is None else self._scope.text(text)

    def id(self, identity: str) -> str:
        """Return an id, scrubbed if it contains a secret."""
        return self._scope.text(identity) if self._holds_secret(identity) else identity

    def link(self, link: Link | None) -> Link | None:
        if link is None:
            return None
        return replace(
            link,
            conversation_id=self._scope.text(link.conversation_id),
            turn_id=None if link.turn_id is None else self.id(link.turn_id),
            call_id=None if link.call_id is None else self.id(link.call_id),
        )

    def turn(self, turn: Turn) -> Turn:
        """Return a turn with all its texts scrubbed, and without token ids for changed texts."""
        scope = self._scope
        text, thinking = self._message(turn), scope.answer(turn.thinking, _no_spans)
        calls = tuple(self._call(call) for call in turn.calls)
        results = tuple(self._result(result) for result in turn.results)
        # Scrubbed text is enough to recognize a question, and keeps secrets out of `_question`.
        self._note_questions(text, calls, results)
        is_same = (text, thinking) == (turn.text, turn.thinking)
        extra = dict(turn.extra) if is_same or "blocks" not in turn.extra else recut_blocks(turn, text, thinking)
        is_turn_changed = (text, thinking, calls) != (turn.text, turn.thinking, turn.calls)
        self._is_changed = self._is_changed or is_turn_changed or results != turn.results
        # The token ids of a prompt encode every turn before it.
        if self._is_changed and isinstance(extra.get("atif"), dict):
            extra["atif"] = {key: value for key, value in extra["atif"].items() if key != "prompt_token_ids"}
        return replace(
            turn,
            id=self.id(turn.id),
            parent_id=None if turn.parent_id is None else self.id(turn.parent_id),
            text=text,
            thinking=thinking,
            calls=calls,
            results=results,
            model=self.text(turn.model),
            timestamp=None if turn.timestamp is None else self.id(turn.timestamp),
            provenance=replace(turn.provenance, file=scope.text(turn.provenance.file)),
            token_ids=None if is_turn_changed else turn.token_ids,
            logprobs=None if is_turn_changed else turn.logprobs,
            extra=scope.value(extra),
        )

    def _message(self, turn: Turn) -> str:
        """Return the scrubbed text of a turn.

        If the previous message asked for a secret, the answer is removed as well.
        """
        spans = chat_spans
        if self._question and may_contain_answer(turn.text) and asks_for_secret(self._question):
            spans = partial(answer_spans, of_phrase=asks_for_phrase(self._question))
        return self._scope.answer(turn.text, spans)

    def _note_questions(self, text: str, calls: Iterable[ToolCall], results: Sequence[ToolResult]) -> None:
        """Note whether a scrubbed turn asks for a secret, and which of its calls print one."""
        if text.strip():
            self._question = text
        elif results:
            # A program may end its output with a question, which the next message answers.
            prompt = results[-1].text[-_MAX_PROMPT_LENGTH:].rstrip()
            self._question = prompt if prompt.endswith((":", "?")) else ""
        # `gh auth token`, for example.
        commands = ((call.id, _arguments_text(call)) for call in calls)
        self._secret_printing_calls |= {identity for identity, command in commands if prints_secret(command)}

    def _call(self, call: ToolCall) -> ToolCall:
        return replace(
            call,
            id=self.id(call.id),
            name=self._scope.text(call.name),
            arguments=self._scope.value(dict(call.arguments)),
            raw_arguments=None if call.raw_arguments is None else self._raw_arguments(call.raw_arguments),
        )

    def _raw_arguments(self, raw: str) -> str:
        """Return arguments as a model wrote them, scrubbed both as parsed data and as text.

        The check before a request is sent also scans both. A placeholder may change how the text parses, so scrubbing
        is repeated until the text no longer changes.
        """
        for _ in range(_MAX_ROUNDS):
            data = arguments_as_data(raw)
            if isinstance(data, str):  # invalid or truncated JSON
                return self._scope.text(raw)
            clean = self._scope.value(data)
            scrubbed = self._scope.text(raw if clean is data else rewritten(raw, data, clean))
            if scrubbed == raw:
                break
            raw = scrubbed
        return raw

    def _result(self, result: ToolResult) -> ToolResult:
        is_printed = result.call_id in self._secret_printing_calls
        text = self._scope.answer(result.text, printed_spans if is_printed else chat_spans)
        return replace(result, call_id=self.id(result.call_id), text=text)


def _no_spans(_: str) -> Iterable[Span]:
    """Return no spans. It is used for thinking, which never answers a question but may repeat an earlier answer."""
    return ()


def _arguments_text(call: ToolCall) -> str:
    """Return the strings in the arguments of a call, one per line: a command, a path, a question."""
    return "\n".join(value for value in call.arguments.values() if isinstance(value, str))


_MAX_NAME_LENGTH = 200
_MAX_PROMPT_LENGTH = 200  # for prompts of programs that wait for an answer: `[sudo] password for ada:`
_MAX_ROUNDS = 3
# The code that determines the content of rows. If it changes, stored rows are scrubbed or read again.
_CODE = (
    *("types.py", "canonical_json.py", "runs/files.py"),
    *("messages.py", "action_text.py"),
    *("ingestion", "privacy"),
)


@dataclass(frozen=True, kw_only=True)
class ScrubSettings:
    """The settings for a `Scrubber`. Its repr shows no secret values."""

    env_values: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    home_dirs: tuple[str, ...] = field(default=(), repr=False)
    user_names: tuple[str, ...] = field(default=(), repr=False)
    kingfisher: bool = False
    people: bool = False  # also redact e-mail addresses, phone numbers and names of other people

    def scrubber(self, *, entropy: bool = True) -> Scrubber:
        extra = (kingfisher_rule(),) if self.kingfisher else ()
        return Scrubber(
            env_values=self.env_values,
            home_dirs=self.home_dirs,
            user_names=self.user_names,
            extra_rules=extra,
            entropy=entropy,
            people=self.people,
        )

    def session_scrubber(self) -> SessionScrubber:
        return SessionScrubber(self)


class SessionScrubber:
    """The scrubbers of one worker process: one for texts, and one that detects secrets in ids."""

    def __init__(self, settings: ScrubSettings) -> None:
        self._texts, self._ids = settings.scrubber(), settings.scrubber(entropy=False).scope()

    def scope(self) -> Scope:
        """Return a new numbering of placeholders for one session."""
        return self._texts.scope()

    def scrub(self, conversation: Conversation, scope: Scope) -> Conversation:
        return scrub_conversation(conversation, scope, holds_secret=lambda text: self._ids.text(text) != text)


def printable(text: str, scope: Scope | None) -> str:
    """Return a skip reason or file name for an artifact. It may quote a log, so it is scrubbed and truncated."""
    text = text if scope is None else scope.text(text)
    # Control characters in a file name could corrupt the display of a terminal.
    plain = "".join(character if character.isprintable() else "\ufffd" for character in text)
    return plain if len(plain) <= _MAX_NAME_LENGTH else plain[: _MAX_NAME_LENGTH - 1] + "…"


@dataclass(frozen=True)
class ScrubFingerprint:
    """A fingerprint of the scrub rules and the known secret values that does not reveal the values.

    A short password can be guessed from its plain hash. This hash is salted and slow, and covers all values together.
    """

    salt: str
    digest: str

    @staticmethod
    def of(settings: ScrubSettings | None, salt: str | None = None) -> ScrubFingerprint:
        """Return the fingerprint of settings, with a new salt unless one is passed."""
        salt = secrets.token_hex(16) if salt is None else salt
        secret_values: list[object] | None = None
        if settings is not None:
            secret_values = [dict(settings.env_values), sorted(settings.home_dirs), sorted(settings.user_names)]
        kingfisher = settings is not None and settings.kingfisher
        people = settings is not None and settings.people
        data = encode([_code_hash(), kingfisher, people, secret_values], where="scrub settings")
        # These parameters require 16 MB of memory per guess.
        digest = hashlib.scrypt(data, salt=salt.encode(), n=2**14, r=8, p=1, dklen=16)
        return ScrubFingerprint(salt, digest.hex())


def _code_files() -> list[Path]:
    """Return the paths of the code and word lists that determine the content of rows."""
    root = Path(__file__).parents[1]
    return [
        file
        for path in _CODE
        for file in ([root / path] if path.endswith(".py") else sorted((root / path).rglob("*")))
        if file.suffix in (".py", ".txt")
    ]


@cache
def _code_hash() -> str:
    digest = hashlib.sha256()
    for file in _code_files():
        digest.update(file.read_bytes())
    return digest.hexdigest()
