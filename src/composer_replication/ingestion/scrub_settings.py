"""What a run knows about secrets and people: handed to every process, written nowhere."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from composer_replication.canonical_json import encode
from composer_replication.ingestion.scrubbing import scrub_conversation
from composer_replication.privacy import Scope, Scrubber, kingfisher_rule
from composer_replication.types import Conversation

_CODE = (
    *("types.py", "canonical_json.py", "runs/conversations.py"),
    *("actions/calls.py", "actions/messages.py", "actions/write.py"),
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
        return scrub_conversation(conversation, scope, holds_secret=lambda each: self._ids.text(each) != each)


@dataclass(frozen=True)
class Fingerprint:
    """Tells whether rows were made with the same rules and the same known values, without telling the values.

    A plain hash of a short password can be guessed. This one is salted and slow, over all values together.
    """

    salt: str
    digest: str

    @staticmethod
    def of(settings: ScrubSettings | None, salt: str | None = None) -> Fingerprint:
        salt = secrets.token_hex(16) if salt is None else salt
        known = None if settings is None else [dict(settings.env_values), *map(list, _people(settings))]
        kingfisher = settings is not None and settings.kingfisher
        people = settings is not None and settings.people
        data = encode([_code_hash(), kingfisher, people, known], where="scrub settings")
        digest = hashlib.scrypt(data, salt=salt.encode(), n=2**14, r=8, p=1, dklen=16)
        return Fingerprint(salt, digest.hex())


def _people(settings: ScrubSettings) -> tuple[list[str], list[str]]:
    return sorted(settings.home_dirs), sorted(settings.user_names)


def code_files() -> list[Path]:
    """The code and the lists of words that say what rows hold: rows made by others are made anew."""
    root = Path(__file__).parents[1]
    return [
        file
        for each in _CODE
        for file in ([root / each] if each.endswith(".py") else sorted((root / each).rglob("*")))
        if file.suffix in (".py", ".txt")
    ]


@cache
def _code_hash() -> str:
    digest = hashlib.sha256()
    for file in code_files():
        digest.update(file.read_bytes())
    return digest.hexdigest()
