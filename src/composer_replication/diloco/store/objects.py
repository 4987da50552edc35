"""Define the interface of an object store, its errors and keys, and how long a failing request is repeated.

    StoreError (RuntimeError)
    ├── MissingObject       no object has this key
    ├── ObjectTooLarge      the object is larger than its reader accepts
    ├── StoreDenied         access is denied, or the request is refused
    ├── StoreFull           no space is left, or the quota is used up
    ├── StoreUnavailable    no usable answer within the deadline: 5xx, a timeout, a lost connection, a truncated object
    └── StoreCannotCreate   the store lets two writers create the same key, so a round could be decided twice

No message contains a credential: `open_store` refuses URIs that may hold one.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

from composer_replication.errors import ComposerError, InputError, MissingExtraError, explain

# "r/00000012/offer/00003.0.1"; not "../x" or ".tmp": names that begin with a dot are for temporary files
_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(?:/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
MAX_KEY_CHARACTERS = 512


class StoreError(ComposerError, RuntimeError):
    """Raised if a request to an object store fails."""

    def __init__(self, what: str, *, uri: str, key: str = "", cause_kind: str = "") -> None:
        super().__init__(f"{uri}{f'/{key}' if key else ''}: {what}")
        self.uri, self.key, self.cause_kind = uri, key, cause_kind


class MissingObject(StoreError):
    """Raised if no object has the requested key."""


class ObjectTooLarge(StoreError):
    """Raised if an object is larger than its reader accepts. No part of it has been returned."""


class StoreDenied(StoreError):
    """Raised if access is denied, or the store refuses the request."""


class StoreFull(StoreError):
    """Raised if the store has no space left, or its quota is used up."""


class StoreUnavailable(StoreError):
    """Raised if the store gives no usable answer within the deadline."""


class StoreCannotCreate(StoreError):
    """Raised if the store lets two writers create the same key."""


class StoreClientMissing(MissingExtraError, RuntimeError):
    """Raised if the client package for this kind of store is not installed."""


class ObjectStore(Protocol):
    """Stores objects (bytes) by key. Any number of threads and processes may use the same store.

    A key names either an object or a folder of objects, never both. A write is immediately visible to all readers and
    listings.
    """

    @property
    def uri(self) -> str:
        """The address of the store, without credentials."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Write or replace an object atomically."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Write an object unless the key exists. Returns whether this call wrote it; if several writers compete,
        only one gets True.
        """
        ...

    def get(self, key: str, *, most_bytes: int) -> bytes:
        """Return the bytes of an object. Raises MissingObject, or ObjectTooLarge if it has more than `most_bytes`."""
        ...

    def size(self, key: str) -> int | None:
        """Return the size of an object in bytes; None if it does not exist."""
        ...

    def keys(self, prefix: str) -> list[str]:
        """Return the sorted keys in the folder `prefix` ("" for all keys). Names that are not valid keys are left
        out.
        """
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects. Missing objects are ignored."""
        ...


@runtime_checkable
class DatedStore(Protocol):
    """A store that records when objects were written, as folders and buckets do."""

    def written_at(self, key: str) -> float | None:
        """Return when an object was written, as Unix time by the store's clock; None if it does not exist."""
        ...


def is_key(key: str) -> bool:
    """Return whether the argument is a valid key."""
    return len(key) <= MAX_KEY_CHARACTERS and _KEY.fullmatch(key) is not None


def checked_key(key: str) -> str:
    """Return the key. Raises InputError if it is not valid."""
    if not is_key(key):
        expected = (
            f"up to {MAX_KEY_CHARACTERS} characters: parts of [A-Za-z0-9._-] that begin with no dot, joined by slashes"
        )
        raise InputError(explain("key of an object", got=repr(key[:80]), expected=expected))
    return key


def checked_folder(prefix: str) -> str:
    """Return the common prefix of all keys in a folder: "" for the whole store, otherwise a valid key followed by a
    slash.
    """
    return f"{checked_key(prefix.rstrip('/'))}/" if prefix else ""


def missing(uri: str, key: str, *, cause_kind: str = "") -> MissingObject:
    """Return the error for an object that does not exist."""
    return MissingObject("no such object", uri=uri, key=key, cause_kind=cause_kind)


def too_large(uri: str, key: str, *, size: int, most_bytes: int) -> ObjectTooLarge:
    """Return the error for an object that is larger than its reader accepts."""
    what = explain("size of the object", got=f"{size:,} bytes", expected=f"at most {most_bytes:,} bytes")
    return ObjectTooLarge(what, uri=uri, key=key)


# Errors for refused requests name the bucket, the operation, and what to check. They say which credential variables are
# set, but never contain their values.

Operation = Literal["get", "put", "list", "delete", "conditional create"]


class _Provider(NamedTuple):
    """The names of a provider's credential variables, and the permissions that a store needs there."""

    variables: tuple[str, ...]
    permissions: str


_PROVIDERS: Mapping[str, _Provider] = {
    "s3": _Provider(
        ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_ENDPOINT_URL"),
        "s3:GetObject, s3:PutObject and s3:DeleteObject below the prefix, s3:ListBucket on the bucket",
    ),
    "gs": _Provider(
        ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_APPLICATION_CREDENTIALS"),
        "storage.objects.get, .create, .delete and .list",
    ),
    "az": _Provider(
        ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"), "read, create, write, delete and list of blobs"
    ),
    "hf": _Provider(("HF_TOKEN",), "a token that may write to the repository"),
}


def denied(scheme: str, operation: Operation, *, uri: str, key: str, kind: str) -> StoreDenied:
    """Return the error for a refused operation; `kind` is the HTTP status and the provider's error code."""
    provider = _PROVIDERS[scheme]
    where = f"bucket {bucket_name(uri)}" if scheme != "hf" else "the repository"
    what = (
        f"{where} refused {operation} ({kind}). Check the credentials ({credential_status(scheme)}) and their "
        f"permissions: get, put, list, delete and conditional create are needed ({provider.permissions})"
    )
    return StoreDenied(what, uri=uri, key=key, cause_kind=kind)


def _unreachable(*, uri: str, key: str, kind: str, seconds: float, tries: int) -> StoreUnavailable:
    """Return the error for an address that has never answered.

    This may be the address of a credential service instead of the store: if the environment contains no credentials,
    obstore asks such a service, which exists only on machines of a cloud provider.
    """
    what = (
        f"nothing answered within {seconds:.1f} s ({tries} {'try' if tries == 1 else 'tries'}; the last: {kind}). "
        f"Check the network, the endpoint and the credentials ({credential_status(uri.partition('://')[0])})"
    )
    return StoreUnavailable(what, uri=uri, key=key, cause_kind=kind)


def bucket_name(uri: str) -> str:
    """Return the name of the bucket in a URI, or the first part of the path if the URI names no bucket."""
    return uri.partition("://")[2].partition("/")[0]


def credential_status(scheme: str) -> str:
    """Describe which credential variables of a provider are set on this machine, and which are not."""
    provider = _PROVIDERS[scheme]
    set_here = [name for name in provider.variables if os.environ.get(name)]
    unset = [name for name in provider.variables if not os.environ.get(name)]
    both = ("set here", set_here), ("not set here", unset)
    return "; ".join(f"{what}: {', '.join(names)}" for what, names in both if names)


# Timeouts of requests, and retries with exponential backoff and jitter until a deadline.

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_SHORTEST_REQUEST_S = 1.0
REQUESTS_IN_DEADLINE = 3
"""A request may take a third of the deadline, so that a hanging request is repeated in time."""
FIRST_ANSWER_S = 8.0
"""The seconds after which an address that has never answered counts as unreachable."""
Answer = TypeVar("Answer")


class RequestPace:
    """The timeouts of requests: a third of the deadline, plus the time to transfer their bytes at the lowest bandwidth.

    Concurrent requests share the bandwidth, so the transfer time is computed from the bytes of all requests under way.
    Until the store has answered for the first time (`has_answered`), a request and its repetitions get only
    `FIRST_ANSWER_S` seconds, so that a wrong address is reported soon.
    """

    def __init__(self, deadline_s: float, slowest_mb_s: float) -> None:
        if not deadline_s > 0:
            raise InputError(explain("deadline_s of a store", got=deadline_s, expected="more than 0 seconds"))
        if not slowest_mb_s > 0:
            raise InputError(explain("slowest_mb_s of a store", got=slowest_mb_s, expected="more than 0 MB/s"))
        self.has_answered = False
        self.waits_since: float | None = None
        self._deadline_s = deadline_s
        self._bytes_per_s = slowest_mb_s * 1e6
        self._lock, self._under_way = threading.Lock(), 0

    @property
    def deadline_s(self) -> float:
        """The total time in seconds for a request and its repetitions."""
        return self._deadline_s if self.has_answered else min(self._deadline_s, FIRST_ANSWER_S)

    @property
    def request_s(self) -> float:
        """The timeout in seconds of a request that transfers no payload."""
        share = self._deadline_s / REQUESTS_IN_DEADLINE
        if self.has_answered:
            return share
        waited_s = 0.0 if self.waits_since is None else time.monotonic() - self.waits_since
        return min(share, max(_SHORTEST_REQUEST_S, round(FIRST_ANSWER_S - waited_s, 1)))

    @contextmanager
    def transfer_budget(self, num_bytes: int) -> Iterator[float]:
        """Count these bytes as under way inside the context, and yield the additional seconds that a request needs
        to transfer them.
        """
        with self._lock:
            self._under_way += num_bytes
            transfer_s = self._under_way / self._bytes_per_s if num_bytes else 0.0
        try:
            yield transfer_s
        finally:
            with self._lock:
                self._under_way -= num_bytes


class TryAgain(Exception):
    """Raised if a request fails in a way that may be temporary; `kind` describes the failure in a few words."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


def retry_until_deadline(
    call: Callable[[], Answer], *, pace: RequestPace, transfer_s: float, uri: str, key: str
) -> Answer:
    """Return the result of `call`, which is repeated as long as it raises TryAgain. Raises StoreUnavailable after the
    deadline.

    `transfer_s` is the transfer time of one request. No request starts after the deadline, so the deadline is exceeded
    by the duration of one request at most.
    """
    start, pause, tries = time.monotonic(), _FIRST_PAUSE_S, 0
    pace.waits_since = start
    while True:
        tries += 1
        try:
            return call()
        except TryAgain as unusable:
            kind = unusable.kind
        # Jitter: half of each pause is random, so that replicas that failed together do not retry together.
        pause_s = pause * (0.5 + secrets.randbelow(1000) / 2000)
        if time.monotonic() + pause_s - start > pace.deadline_s + REQUESTS_IN_DEADLINE * transfer_s:
            seconds = time.monotonic() - start
            if not pace.has_answered:
                raise _unreachable(uri=uri, key=key, kind=kind, seconds=seconds, tries=tries)
            what = f"no usable answer in {seconds:.1f} s and {tries} tries; the last: {kind}"
            raise StoreUnavailable(what, uri=uri, key=key, cause_kind=kind)
        time.sleep(pause_s)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
