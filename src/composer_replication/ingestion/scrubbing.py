"""Secrets out of a whole conversation, with what a run knows of them: handed to every process, written nowhere."""

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
"""Whether a rule knows something in an id, randomness aside: ids are random, and most of them mean nothing."""


def scrub_conversation(
    conversation: Conversation, scope: _ScrubScope, *, holds_secret: HoldsSecret | None = None
) -> Conversation:
    """The conversation with every text, argument, path, title and name scrubbed.

    Ids may be made of file names, so they are scrubbed too, where `holds_secret` says that there is something in them:
    equal ids stay equal within a scope. Token ids that could spell what was taken out are left out.
    """
    work = _Work(scope, holds_secret or (lambda _: False))
    return replace(
        conversation,
        id=scope.text(conversation.id),
        session_id=work.text(conversation.session_id),
        parent=work.link(conversation.parent),
        agent_version=work.text(conversation.agent_version),
        turns=tuple(work.turn(turn) for turn in conversation.turns),
        title=work.text(conversation.title),
        cwd=work.text(conversation.cwd),
        extra=scope.value(dict(conversation.extra)),
    )


class _Work:
    def __init__(self, scope: _ScrubScope, holds_secret: HoldsSecret) -> None:
        self._scope, self._holds_secret = scope, holds_secret
        self._question = ""  # the last message, which may ask for a secret
        self._printing: set[str] = set()  # ids of calls whose result may hold a secret
        self._changed = False  # anything so far: a prompt's token ids spell all that came before

    def text(self, text: str | None) -> str | None:
        return None if text is None else self._scope.text(text)

    def id(self, identity: str) -> str:
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
        scope = self._scope
        text, thinking = self._message(turn), scope.answer(turn.thinking, _no_spans)
        calls = tuple(self._call(call) for call in turn.calls)
        results = tuple(self._result(result) for result in turn.results)
        self._note_questions(text, calls, results)
        is_same = (text, thinking) == (turn.text, turn.thinking)
        extra = dict(turn.extra) if is_same or "blocks" not in turn.extra else recut_blocks(turn, text, thinking)
        own_change = (text, thinking, calls) != (turn.text, turn.thinking, turn.calls)
        self._changed = self._changed or own_change or results != turn.results
        if self._changed and isinstance(extra.get("atif"), dict):
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
            token_ids=None if own_change else turn.token_ids,
            logprobs=None if own_change else turn.logprobs,
            extra=scope.value(extra),
        )

    def _message(self, turn: Turn) -> str:
        """Return the scrubbed text of a turn; of one that was asked for a secret, without the answer."""
        spans = chat_spans
        if self._question and may_answer(turn.text) and asks(self._question):
            spans = partial(answer_spans, of_phrase=asks_for_phrase(self._question))
        return self._scope.answer(turn.text, spans)

    def _note_questions(self, text: str, calls: Iterable[ToolCall], results: Sequence[ToolResult]) -> None:
        """Note what a scrubbed turn may ask the next one for, and which of its calls print a secret."""
        if text.strip():
            self._question = text
        elif results:
            prompt = results[-1].text[-_LONGEST_PROMPT:].rstrip()
            self._question = prompt if prompt.endswith((":", "?")) else ""
        commands = ((call.id, _arguments_text(call)) for call in calls)
        self._printing |= {identity for identity, command in commands if prints_secret(command)}

    def _call(self, call: ToolCall) -> ToolCall:
        return replace(
            call,
            id=self.id(call.id),
            name=self._scope.text(call.name),
            arguments=self._scope.value(dict(call.arguments)),
            raw_arguments=None if call.raw_arguments is None else self._raw_arguments(call.raw_arguments),
        )

    def _raw_arguments(self, raw: str) -> str:
        """Return arguments as a model wrote them, scrubbed as the data that they mean and as text: the outgoing check
        looks at both."""
        for _ in range(_MOST_ROUNDS):
            data = arguments_as_data(raw)
            if isinstance(data, str):  # no JSON, or cut short
                return self._scope.text(raw)
            clean = self._scope.value(data)
            scrubbed = self._scope.text(raw if clean is data else rewritten(raw, data, clean))
            if scrubbed == raw:
                break
            raw = scrubbed
        return raw

    def _result(self, result: ToolResult) -> ToolResult:
        is_printed = result.call_id in self._printing
        text = self._scope.answer(result.text, printed_spans if is_printed else chat_spans)
        return replace(result, call_id=self.id(result.call_id), text=text)


def _no_spans(_: str) -> Iterable[Span]:
    """Return nothing: a thought answers no question, but may repeat an answer."""
    return ()


def _arguments_text(call: ToolCall) -> str:
    """Return the strings among a call's arguments, a line each: a command, a path, a question."""
    return "\n".join(value for value in call.arguments.values() if isinstance(value, str))


_MAX_SHOWN = 200
_LONGEST_PROMPT = 200  # of a program that waits for an answer: `[sudo] password for ada:`
_MOST_ROUNDS = 3  # a placeholder can bring together what means something else as data
_CODE = (
    *("types.py", "canonical_json.py", "runs/files.py"),
    *("messages.py", "action_text.py"),
    *("ingestion", "privacy"),
)


@dataclass(frozen=True, kw_only=True)
class ScrubSettings:
    """What a `Scrubber` is made of. Its repr shows no value."""

    env_values: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    home_dirs: tuple[str, ...] = field(default=(), repr=False)
    user_names: tuple[str, ...] = field(default=(), repr=False)
    kingfisher: bool = False
    people: bool = False  # e-mail addresses, phone numbers and names of others, too

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
    """The scrubbers of one process: one for texts, and one that tells whether there is something in an id."""

    def __init__(self, settings: ScrubSettings) -> None:
        self._texts, self._ids = settings.scrubber(), settings.scrubber(entropy=False).scope()

    def scope(self) -> Scope:
        """A numbering for one family."""
        return self._texts.scope()

    def scrub(self, conversation: Conversation, scope: Scope) -> Conversation:
        return scrub_conversation(conversation, scope, holds_secret=lambda text: self._ids.text(text) != text)


def shown(text: str, scope: Scope | None) -> str:
    """A reason or a file name as it may be written: both can quote what a stranger put there, at any length."""
    text = text if scope is None else scope.text(text)
    plain = "".join(character if character.isprintable() else "\ufffd" for character in text)
    return plain if len(plain) <= _MAX_SHOWN else plain[: _MAX_SHOWN - 1] + "…"


@dataclass(frozen=True)
class ScrubFingerprint:
    """Tells whether rows were made with the same rules and the same known values, without telling the values.

    A plain hash of a short password can be guessed. This one is salted and slow, over all values together.
    """

    salt: str
    digest: str

    @staticmethod
    def of(settings: ScrubSettings | None, salt: str | None = None) -> ScrubFingerprint:
        salt = secrets.token_hex(16) if salt is None else salt
        known_values: list[object] | None = None
        if settings is not None:
            known_values = [dict(settings.env_values), sorted(settings.home_dirs), sorted(settings.user_names)]
        kingfisher = settings is not None and settings.kingfisher
        people = settings is not None and settings.people
        data = encode([_code_hash(), kingfisher, people, known_values], where="scrub settings")
        digest = hashlib.scrypt(data, salt=salt.encode(), n=2**14, r=8, p=1, dklen=16)
        return ScrubFingerprint(salt, digest.hex())


def code_files() -> list[Path]:
    """The code and the lists of words that say what rows hold: rows made by others are made anew."""
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
