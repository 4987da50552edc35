"""What an object store promises: its methods, its errors, its keys, and how long it repeats a request.

    StoreError (RuntimeError)
    ├── MissingObject       there is no object with that key
    ├── ObjectTooLarge      the object is larger than its reader accepts
    ├── StoreDenied         the store denies access or refuses the request
    ├── StoreFull           no space, or no quota
    ├── StoreUnavailable    no usable answer within the deadline: 5xx, a hang, a cut connection, too few bytes
    └── StoreCannotCreate   the store lets two writers create one key, so that a round could be decided twice

No message holds a credential: URIs are checked for them when a store is opened.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple, Protocol, TypeVar, runtime_checkable
from urllib.parse import urlsplit

from composer_replication.errors import ComposerError, InputError, MissingExtraError, explain

# "r/00000012/offer/00003.0.1"; not "../x" and not ".tmp": no part begins with a dot, which temporary files do
_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(?:/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
MAX_KEY_CHARACTERS = 512


class StoreError(ComposerError, RuntimeError):
    """An object store did not do what it was asked to do."""

    def __init__(self, what: str, *, uri: str, key: str = "", cause_kind: str = "") -> None:
        super().__init__(f"{uri}{f'/{key}' if key else ''}: {what}")
        self.uri, self.key, self.cause_kind = uri, key, cause_kind


class MissingObject(StoreError):
    """There is no object with that key."""


class ObjectTooLarge(StoreError):
    """The object is larger than its reader accepts; none of it was read."""


class StoreDenied(StoreError):
    """The store denies access or refuses the request."""


class StoreFull(StoreError):
    """The store has no space left, or its owner no quota."""


class StoreUnavailable(StoreError):
    """The store gave no usable answer within the deadline."""


class StoreCannotCreate(StoreError):
    """The store lets two writers create one key."""


class StoreClientMissing(MissingExtraError, RuntimeError):
    """The client package for such a store is not installed."""


class ObjectStore(Protocol):
    """Whole objects by key, for any number of threads and processes at once.

    A key is an object or a folder of objects, never both. Every reader and listing sees at once what was written.
    """

    @property
    def uri(self) -> str:
        """The address of the store for messages, without credentials."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Write an object, as a whole or not at all, and replace the one that may be there."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Write an object unless one with that key exists. Of any number of writers exactly one gets True."""
        ...

    def get(self, key: str, *, most_bytes: int) -> bytes:
        """Return an object's bytes. Raises MissingObject, or ObjectTooLarge before any of it is read."""
        ...

    def size(self, key: str) -> int | None:
        """Return the size of an object in bytes; None if there is none."""
        ...

    def keys(self, prefix: str) -> list[str]:
        """Return the keys in the folder `prefix` ("" for all), sorted, without names that cannot be keys."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that do not exist are ignored."""
        ...


@runtime_checkable
class DatedStore(Protocol):
    """A store that also knows when objects were written: a folder, a bucket."""

    def written_at(self, key: str) -> float | None:
        """Return when an object was written, in seconds since 1970 by the store's clock; None if there is none."""
        ...


def is_key(key: str) -> bool:
    """Return whether an object may have that key."""
    return len(key) <= MAX_KEY_CHARACTERS and _KEY.fullmatch(key) is not None


def checked_key(key: str) -> str:
    """Return the key. Raises InputError if no object may have it."""
    if not is_key(key):
        expected = (
            f"up to {MAX_KEY_CHARACTERS} characters: parts of [A-Za-z0-9._-] that begin with no dot, joined by slashes"
        )
        raise InputError(explain("key of an object", got=repr(key[:80]), expected=expected))
    return key


def checked_folder(prefix: str) -> str:
    """Return what all keys of a folder begin with: "" for all, otherwise a prefix that ends with a slash."""
    return f"{checked_key(prefix.rstrip('/'))}/" if prefix else ""


def missing(uri: str, key: str, *, cause_kind: str = "") -> MissingObject:
    """Return the error for an object that does not exist."""
    return MissingObject("no such object", uri=uri, key=key, cause_kind=cause_kind)


def too_large(uri: str, key: str, *, size: int, most_bytes: int) -> ObjectTooLarge:
    """Return the error for an object that is larger than its reader accepts."""
    what = explain("size of the object", got=f"{size:,} bytes", expected=f"at most {most_bytes:,}")
    return ObjectTooLarge(what, uri=uri, key=key)


# Errors for a store that refuses a request: they name the bucket, the operation, and what to check. Credentials are
# named by their variables, which are reported as set or not set; their values are never read into a message.

# "Error performing GET http://127.0.0.1:9000/bucket/key in 2.1s" -> "http://127.0.0.1:9000/bucket/key"; the text is
# obstore's, as is the next one.
_ADDRESS = re.compile(r"Error performing [A-Z]+ (\w+://\S+) in ")
_OF_A_LISTING = "Error performing list request:"
Operation = Literal["get", "put", "list", "delete", "conditional create"]


class _Provider(NamedTuple):
    """The variables and permissions of a provider's accounts, by the provider's own names."""

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
    """Return the error for a refused operation; `kind` is the status and the provider's own word for it."""
    provider = _PROVIDERS[scheme]
    where = f"bucket {_bucket_of(uri)}" if scheme != "hf" else "the repository"
    what = (
        f"{where} refused {operation} ({kind}). Check the credentials ({_credential_status(provider)}) and their "
        f"permissions: get, put, list, delete and conditional create are needed ({provider.permissions})"
    )
    return StoreDenied(what, uri=uri, key=key, cause_kind=kind)


def is_bucket_answer(text: str, uri: str) -> bool:
    """Return whether an answer for which obstore has no class came from the bucket, judging by obstore's text.

    If the credentials are those of the machine, obstore first asks the service that provides them (instance metadata, a
    container's, STS), and reports its refusals with the same class and form.
    """
    if _OF_A_LISTING in text or "<Code>NoSuchBucket</Code>" in text:
        return True
    address = urlsplit(match[1]) if (match := _ADDRESS.search(text)) else None
    bucket = _bucket_of(uri)
    return address is not None and (bucket in address.path.split("/") or address.netloc.startswith(f"{bucket}."))


def credentials_unavailable(scheme: str, *, uri: str, key: str, kind: str) -> StoreUnavailable:
    """Return the error for an answer of a credential service instead of the bucket; a later request may succeed."""
    what = (
        f"an address that is not the bucket's answered {kind}, as a service that gives credentials does (instance "
        f"metadata, STS): the bucket was not asked. Check the credentials ({_credential_status(_PROVIDERS[scheme])})"
    )
    return StoreUnavailable(what, uri=uri, key=key, cause_kind=f"credentials {kind}")


def _unreachable(*, uri: str, key: str, kind: str, seconds: float, tries: int) -> StoreUnavailable:
    """Return the error for an address that has never answered, which may be that of a credential service.

    Without credentials in the environment obstore asks a service of the machine for some, and only rented machines have
    it.
    """
    what = (
        f"nothing answered within {seconds:.1f} s ({tries} {'try' if tries == 1 else 'tries'}; the last: {kind}). "
        f"Check the network, the endpoint and the credentials ({_credential_status(_PROVIDERS[uri.partition('://')[0]])})"
    )
    return StoreUnavailable(what, uri=uri, key=key, cause_kind=kind)


def wrong_region(*, uri: str, key: str) -> StoreDenied:
    """Return the error for a bucket of S3 that redirects to another region."""
    now = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    what = (
        f"bucket {_bucket_of(uri)} is in another region than {now or 'us-east-1, the default'}. "
        "Set AWS_REGION to the bucket's region, or the option region"
    )
    return StoreDenied(what, uri=uri, key=key, cause_kind="region")


# A mark in obstore's error text, and what our message says instead: the text may repeat the value of an option.
_SETTINGS = (
    ("MissingAccount", "no storage account", "its name", "Set AZURE_STORAGE_ACCOUNT_NAME."),
    (
        "InvalidAccessKey",
        "an account key that is not base64",
        "the key as Azure shows it",
        "Correct AZURE_STORAGE_ACCOUNT_KEY.",
    ),
    (
        "OpenCredentials",
        "a file of credentials that cannot be opened",
        "the key file of a service account",
        "Correct GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT.",
    ),
    (
        "DecodeCredentials",
        "a file that does not hold credentials",
        "the key file of a service account",
        "Correct GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT.",
    ),
)


def refused_settings(scheme: str, text: str, *, uri: str, options: Collection[str]) -> InputError:
    """Return the error for settings that obstore rejects, without showing `text`, its own message."""
    what = f"settings of {uri}"
    if "UnknownConfigurationKey" in text:
        return InputError(explain(what, got=f"options {sorted(options)}", expected="options of obstore"))
    for mark, got, expected, fix in _SETTINGS:
        if mark in text:
            return InputError(explain(what, got=got, expected=expected, fix=fix))
    got = f"an invalid name or value in options {sorted(options)} or in the environment"
    fix = f"Check the options and the variables ({_credential_status(_PROVIDERS[scheme])})."
    return InputError(explain(what, got=got, expected="settings that obstore accepts", fix=fix))


def _bucket_of(uri: str) -> str:
    return uri.partition("://")[2].partition("/")[0]


def _credential_status(provider: _Provider) -> str:
    """Return which credential variables of a provider are set on this machine, and which are not."""
    set_here = [name for name in provider.variables if os.environ.get(name)]
    unset = [name for name in provider.variables if not os.environ.get(name)]
    both = ("set here", set_here), ("not set here", unset)
    return "; ".join(f"{what}: {', '.join(names)}" for what, names in both if names)


# How long a request may take, and repeating it with growing pauses until a deadline.

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_SHORTEST_REQUEST_S = 1.0
REQUESTS_IN_DEADLINE = 3
"""A request may take a third of the deadline, so that one that hangs is repeated within it."""
FIRST_ANSWER_S = 8.0
"""How long an address that has never answered may be silent before it counts as unreachable."""
Answer = TypeVar("Answer")


class RequestPace:
    """How long requests may take: a third of the deadline, and the time that their bytes need on the slowest line.

    Requests under way share that line, so the time is that of all of their bytes. Until the store has answered once
    (`has_answered`), a request with all its repetitions gets `FIRST_ANSWER_S`, so that a wrong address is reported
    soon.
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
        """The seconds for a request with all its repetitions."""
        return self._deadline_s if self.has_answered else min(self._deadline_s, FIRST_ANSWER_S)

    @property
    def request_s(self) -> float:
        """The maximum seconds for a request without bytes."""
        share = self._deadline_s / REQUESTS_IN_DEADLINE
        if self.has_answered:
            return share
        waited_s = 0.0 if self.waits_since is None else time.monotonic() - self.waits_since
        return min(share, max(_SHORTEST_REQUEST_S, round(FIRST_ANSWER_S - waited_s, 1)))

    @contextmanager
    def transfer_budget(self, num_bytes: int) -> Iterator[float]:
        """Count these bytes as under way, and yield the extra seconds that a request with them gets."""
        with self._lock:
            self._under_way += num_bytes
            more_s = self._under_way / self._bytes_per_s if num_bytes else 0.0
        try:
            yield more_s
        finally:
            with self._lock:
                self._under_way -= num_bytes


class TryAgain(Exception):
    """An answer after which another try may succeed; `kind` says in a word what was wrong."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


def retry_until_deadline(call: Callable[[], Answer], *, pace: RequestPace, more_s: float, uri: str, key: str) -> Answer:
    """Return the result of `call`, which is repeated while it raises TryAgain. Raises StoreUnavailable when the time is
    up.

    `more_s` are the seconds that the bytes of one request need. No request begins after the deadline, so it is exceeded
    by at most one request.
    """
    start, pause, tries = time.monotonic(), _FIRST_PAUSE_S, 0
    pace.waits_since = start
    while True:
        tries += 1
        try:
            return call()
        except TryAgain as unusable:
            kind = unusable.kind
        # Half of each pause is random, so that replicas that failed together do not retry together.
        pause_s = pause * (0.5 + secrets.randbelow(1000) / 2000)
        if time.monotonic() + pause_s - start > pace.deadline_s + REQUESTS_IN_DEADLINE * more_s:
            seconds = time.monotonic() - start
            if not pace.has_answered:
                raise _unreachable(uri=uri, key=key, kind=kind, seconds=seconds, tries=tries)
            what = f"no usable answer in {seconds:.1f} s and {tries} tries; the last: {kind}"
            raise StoreUnavailable(what, uri=uri, key=key, cause_kind=kind)
        time.sleep(pause_s)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
