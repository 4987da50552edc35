"""What an object store promises, how it fails, and which keys there may be.

    StoreError (RuntimeError)
    ├── MissingObject       there is no object of that key
    ├── ObjectTooLarge      there is one, and it is larger than the reader takes
    ├── StoreDenied         the store refuses who we are or what we ask
    ├── StoreFull           no room, or no quota
    ├── StoreUnavailable    no usable answer within the deadline: 5xx, a hang, a cut connection, too few bytes
    └── StoreCannotCreate   the store lets two writers create one key, so that a round could be decided twice

No message holds a credential: a URI is checked for them when the store is opened.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from composer_replication.errors import ComposerError, InputError, MissingExtraError, explain

# No part begins with a dot: not "..", and not the temporary files of a folder.
_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(?:/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
MAX_KEY_CHARACTERS = 512


class StoreError(ComposerError, RuntimeError):
    """An object store did not do what it was asked."""

    def __init__(self, what: str, *, uri: str, key: str = "", cause_kind: str = "") -> None:
        super().__init__(f"{uri}{f'/{key}' if key else ''}: {what}")
        self.uri, self.key, self.cause_kind = uri, key, cause_kind


class MissingObject(StoreError):
    """There is no object of that key."""


class ObjectTooLarge(StoreError):
    """The object is larger than its reader takes; nothing of it was read."""


class StoreDenied(StoreError):
    """The store refuses who we are or what we ask."""


class StoreFull(StoreError):
    """The store has no room left, or its owner no quota."""


class StoreUnavailable(StoreError):
    """The store gave no usable answer within the deadline."""


class StoreCannotCreate(StoreError):
    """The store lets two writers create one key."""


class StoreClientMissing(MissingExtraError, RuntimeError):
    """The package that speaks to such a store is not installed."""


class ObjectStore(Protocol):
    """Whole objects by key, for any number of threads and processes at once.

    A key names an object or a folder of objects, never both. What was put is seen at once by every reader and listing.
    """

    @property
    def uri(self) -> str:
        """Where the objects are, for messages; without credentials."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Write an object, whole or not at all, over the one that may be there."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Write an object unless there is one of that key: of any number of writers exactly one gets True."""
        ...

    def get(self, key: str, *, most_bytes: int) -> bytes:
        """An object's bytes; MissingObject, or ObjectTooLarge before any of it is read."""
        ...

    def size(self, key: str) -> int | None:
        """The bytes of an object; None where there is none."""
        ...

    def keys(self, prefix: str) -> list[str]:
        """The keys inside the folder `prefix` ("" for all), sorted. Names that cannot be keys are left out."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; those that are not there are fine."""
        ...


@runtime_checkable
class DatedStore(Protocol):
    """A store that says when objects were written, too: a folder, a bucket."""

    def written_at(self, key: str) -> float | None:
        """Seconds since 1970, by the clock of the store; None where there is no such object."""
        ...


def is_key(key: str) -> bool:
    """Whether an object may have that key."""
    return len(key) <= MAX_KEY_CHARACTERS and _KEY.fullmatch(key) is not None


def checked_key(key: str) -> str:
    """The key itself; InputError where no object may have it."""
    if not is_key(key):
        expected = f"parts of [A-Za-z0-9._-] with slashes between, none begun by a dot, {MAX_KEY_CHARACTERS} at most"
        raise InputError(explain("key of an object", got=repr(key[:80]), expected=expected))
    return key


def checked_folder(prefix: str) -> str:
    """A prefix as what each of its keys begins with: "" for all, else it ends with a slash."""
    return f"{checked_key(prefix.rstrip('/'))}/" if prefix else ""


def missing(uri: str, key: str, *, cause_kind: str = "") -> MissingObject:
    return MissingObject("there is no such object", uri=uri, key=key, cause_kind=cause_kind)


def too_large(uri: str, key: str, *, size: int, most_bytes: int) -> ObjectTooLarge:
    what = explain("size of the object", got=f"{size:,} bytes", expected=f"at most {most_bytes:,}")
    return ObjectTooLarge(what, uri=uri, key=key)
