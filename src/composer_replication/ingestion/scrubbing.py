"""Scrub whole conversations. The settings are passed to every process, but never written to a file."""

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
    asks,
    asks_for_phrase,
    chat_spans,
    may_answer,
    printed_spans,
    prints_secret,
)
from composer_replication.privacy.outgoing import arguments_as_data, rewritten
from composer_replication.privacy.rules import Span
from composer_replication.types import (
    Conversation,
    Link,
    ToolCall,
    ToolResult,
    Turn,
)


class _ScrubScope(Protocol):
    """One numbering of placeholders; linked conversations share it."""

    def text(self, text: str) -> str: ...

    def value(self, value: Any) -> Any: ...

    def answer(self, text: str, spans: Callable[[str], Iterable[Span]]) -> str: ...


HoldsSecret = Callable[[str], bool]
"""Returns whether a rule matches an id. Randomness is not among the rules: ids are random anyway."""


def scrub_conversation(
    conversation: Conversation, scope: _ScrubScope, *, holds_secret: HoldsSecret | None = None
) -> Conversation:
    """Return the conversation with every text, argument, path, title and name scrubbed.

    Ids may contain file names, so those in which `holds_secret` finds something are scrubbed as well; equal ids stay
    equal within a scope. Token ids of changed text are removed, since they would spell what was redacted.
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
    """Scrubs the turns of one conversation in order."""

    def __init__(self, scope: _ScrubScope, holds_secret: HoldsSecret) -> None:
        self._scope, self._holds_secret = scope, holds_secret
        self._question = ""  # the last message, which may ask for a secret
        self._secret_printing_calls: set[str] = set()  # ids of calls whose result may hold a secret
        self._is_changed = False  # whether any text so far changed: a prompt's token ids spell all of it

    def text(self, text: str | None) -> str | None:
        return None if text is None else self._scope.text(text)

    def id(self, identity: str) -> str:
        """Return an id, scrubbed if it holds a secret."""
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
        """Return a turn with all of its texts scrubbed, and without token ids that spell what changed."""
        scope = self._scope
        text, thinking = self._message(turn), scope.answer(turn.thinking, _no_spans)
        calls = tuple(self._call(call) for call in turn.calls)
        results = tuple(self._result(result) for result in turn.results)
        # Scrubbed text is enough to recognize a question, and never puts a secret into `_question`.
        self._note_questions(text, calls, results)
        is_same = (text, thinking) == (turn.text, turn.thinking)
        extra = dict(turn.extra) if is_same or "blocks" not in turn.extra else recut_blocks(turn, text, thinking)
        is_turn_changed = (text, thinking, calls) != (turn.text, turn.thinking, turn.calls)
        self._is_changed = self._is_changed or is_turn_changed or results != turn.results
        # The ids of a prompt's tokens spell every turn before it.
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
        """Return the scrubbed text of a turn, without the secret if the message before it asked for one."""
        spans = chat_spans
        if self._question and may_answer(turn.text) and asks(self._question):
            spans = partial(answer_spans, of_phrase=asks_for_phrase(self._question))
        return self._scope.answer(turn.text, spans)

    def _note_questions(self, text: str, calls: Iterable[ToolCall], results: Sequence[ToolResult]) -> None:
        """Note what a scrubbed turn may ask the next one for, and which of its calls print a secret."""
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
        """Return arguments as a model wrote them, scrubbed both as the data they mean and as text.

        The outgoing check looks at both. A placeholder may change how text parses, hence the rounds.
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
    """Return nothing: a thought answers no question, but may repeat an answer."""
    return ()


def _arguments_text(call: ToolCall) -> str:
    """Return the strings among a call's arguments, one per line: a command, a path, a question."""
    return "\n".join(value for value in call.arguments.values() if isinstance(value, str))


_MAX_NAME_LENGTH = 200
_MAX_PROMPT_LENGTH = 200  # of a program that waits for an answer: `[sudo] password for ada:`
_MAX_ROUNDS = 3
# The code that determines the content of rows. If it changes, stored rows are scrubbed or read again.
_CODE = (
    *("types.py", "canonical_json.py", "runs/files.py"),
    *("messages.py", "action_text.py"),
    *("ingestion", "privacy"),
)


@dataclass(frozen=True, kw_only=True)
class ScrubSettings:
    """The settings of a `Scrubber`. Its repr shows no value."""

    env_values: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    home_dirs: tuple[str, ...] = field(default=(), repr=False)
    user_names: tuple[str, ...] = field(default=(), repr=False)
    kingfisher: bool = False
    people: bool = False  # also e-mail addresses, phone numbers and names of other people

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

    def family_scrubber(self) -> FamilyScrubber:
        return FamilyScrubber(self)


class FamilyScrubber:
    """The scrubbers of one process: one for texts, and one that finds out whether an id holds something."""

    def __init__(self, settings: ScrubSettings) -> None:
        self._texts, self._ids = settings.scrubber(), settings.scrubber(entropy=False).scope()

    def scope(self) -> Scope:
        """Return a new numbering of placeholders, for one family."""
        return self._texts.scope()

    def scrub(self, conversation: Conversation, scope: Scope) -> Conversation:
        return scrub_conversation(conversation, scope, holds_secret=lambda text: self._ids.text(text) != text)


def printable(text: str, scope: Scope | None) -> str:
    """Return a reason or file name fit for an artifact: scrubbed, printable and short. Both may quote a log."""
    text = text if scope is None else scope.text(text)
    # Control characters in a file name could change what a terminal shows.
    plain = "".join(character if character.isprintable() else "\ufffd" for character in text)
    return plain if len(plain) <= _MAX_NAME_LENGTH else plain[: _MAX_NAME_LENGTH - 1] + "…"


@dataclass(frozen=True)
class ScrubFingerprint:
    """A fingerprint of the scrub rules and the secret values they were given, which does not reveal the values.

    The plain hash of a short password can be guessed. This one is salted and slow, over all values together.
    """

    salt: str
    digest: str

    @staticmethod
    def of(settings: ScrubSettings | None, salt: str | None = None) -> ScrubFingerprint:
        """Return the fingerprint of settings; without a salt, with a new one."""
        salt = secrets.token_hex(16) if salt is None else salt
        secret_values: list[object] | None = None
        if settings is not None:
            secret_values = [dict(settings.env_values), sorted(settings.home_dirs), sorted(settings.user_names)]
        kingfisher = settings is not None and settings.kingfisher
        people = settings is not None and settings.people
        data = encode([_code_hash(), kingfisher, people, secret_values], where="scrub settings")
        # These parameters take 16 MB of memory per guess.
        digest = hashlib.scrypt(data, salt=salt.encode(), n=2**14, r=8, p=1, dklen=16)
        return ScrubFingerprint(salt, digest.hex())


def code_files() -> list[Path]:
    """Return the code and word lists that determine the content of rows."""
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
    for file in code_files():
        digest.update(file.read_bytes())
    return digest.hexdigest()
