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

import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple, Protocol, TypeVar, runtime_checkable
from urllib.parse import urlsplit

from composer_replication.errors import (
    ComposerError,
    InputError,
    MissingExtraError,
    explain,
)

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


# What is said where a store refuses us: which bucket, which operation, and what to look at.
#
# Credentials are named by the variables that hold them, and said to be set or not; no value of one is ever read into a
# message.

_ADDRESS = re.compile(r"Error performing [A-Z]+ (\w+://\S+) in ")  # obstore's own words, as the next ones
_OF_A_LISTING = "Error performing list request:"
Operation = Literal["get", "put", "list", "delete", "conditional create"]


class _Provider(NamedTuple):
    """What one asks of a provider's accounts, in its own words."""

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
    """The error for an operation that the provider refused with `kind`, a status and its own word for it."""
    provider = _PROVIDERS[scheme]
    where = f"bucket {_place(uri)}" if scheme != "hf" else "the repository"
    what = (
        f"{where} refused {operation} ({kind}). Check the credentials ({_about(provider)}) and what they may do: "
        f"get, put, list, delete and conditional create are needed ({provider.permissions})"
    )
    return StoreDenied(what, uri=uri, key=key, cause_kind=kind)


def is_of_bucket(text: str, uri: str) -> bool:
    """Whether an answer that obstore has no class for came from the bucket, by obstore's text of it.

    Where a machine's own credentials are used, obstore first asks the service that gives them (instance metadata, a
    container's, STS), and tells of its refusals in the same class and form.
    """
    if _OF_A_LISTING in text or "<Code>NoSuchBucket</Code>" in text:
        return True
    address = urlsplit(match[1]) if (match := _ADDRESS.search(text)) else None
    bucket = _place(uri)
    return address is not None and (bucket in address.path.split("/") or address.netloc.startswith(f"{bucket}."))


def without_credentials(scheme: str, *, uri: str, key: str, kind: str) -> StoreUnavailable:
    """The error for an answer that is not the bucket's: a service that gives credentials may do so the next time."""
    what = (
        f"an address that is not the bucket's answered {kind}, as a service that gives credentials does (instance "
        f"metadata, STS): the bucket was not asked. Check the credentials ({_about(_PROVIDERS[scheme])})"
    )
    return StoreUnavailable(what, uri=uri, key=key, cause_kind=f"credentials {kind}")


def unreachable(*, uri: str, key: str, kind: str, seconds: float, tries: int) -> StoreUnavailable:
    """Return the error for an address that has never answered; where credentials are missing, a service may not have.

    Without credentials in the environment obstore asks a service of the machine for some, which only rented machines
    have.
    """
    what = (
        f"nothing answered within {seconds:.1f} s ({tries} {'try' if tries == 1 else 'tries'}; the last: {kind}). "
        f"Check the network, the endpoint and the credentials ({_about(_PROVIDERS[uri.partition('://')[0]])})"
    )
    return StoreUnavailable(what, uri=uri, key=key, cause_kind=kind)


def other_region(*, uri: str, key: str) -> StoreDenied:
    """Return the error for a bucket of S3 that redirects to its own region."""
    now = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    what = (
        f"bucket {_place(uri)} is in another region than {now or 'us-east-1, the default'}. "
        "Set AWS_REGION to the bucket's region, or the option region"
    )
    return StoreDenied(what, uri=uri, key=key, cause_kind="region")


# What obstore's text of an error has in it, and what we say instead: the text may repeat an option's value.
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
    """Return the error for settings with which obstore opens no bucket; nothing of `text`, its own, is shown."""
    what = f"settings of {uri}"
    if "UnknownConfigurationKey" in text:
        return InputError(explain(what, got=f"options {sorted(options)}", expected="names of obstore's options alone"))
    for mark, got, expected, fix in _SETTINGS:
        if mark in text:
            return InputError(explain(what, got=got, expected=expected, fix=fix))
    got = f"a name or a value that does not fit, in options {sorted(options)} or in the environment"
    fix = f"Check the options, and the variables ({_about(_PROVIDERS[scheme])})."
    return InputError(explain(what, got=got, expected="settings by obstore's names", fix=fix))


def _place(uri: str) -> str:
    return uri.partition("://")[2].partition("/")[0]


def _about(provider: _Provider) -> str:
    """Which of its variables are set here, and which are not."""
    set_here = [name for name in provider.variables if os.environ.get(name)]
    unset = [name for name in provider.variables if not os.environ.get(name)]
    both = ("set here", set_here), ("not set here", unset)
    return "; ".join(f"{what}: {', '.join(names)}" for what, names in both if names)


# How long a request may take, and trying again, with growing pauses, until a deadline.

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_SHORTEST_REQUEST_S = 1.0
REQUESTS_IN_DEADLINE = 3
"""A request may take a third of the deadline, so that one that hangs is tried again within it."""
FIRST_ANSWER_S = 8.0
"""How long an address may be silent before it is called unreachable; after its first answer the deadline holds."""
Answer = TypeVar("Answer")


class RequestPace:
    """How long requests may take: a third of the deadline, and what their bytes need on the slowest line there may be.

    Requests under way at once share that line, so the time is that of all of their bytes. Until the store has answered
    once (`has_answered`), a request and all its repetitions get `FIRST_ANSWER_S`: a wrong address is reported soon.
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
        return self._deadline_s if self.has_answered else min(self._deadline_s, FIRST_ANSWER_S)

    @property
    def request_s(self) -> float:
        """The most seconds that a request without bytes may take."""
        share = self._deadline_s / REQUESTS_IN_DEADLINE
        if self.has_answered:
            return share
        waited_s = 0.0 if self.waits_since is None else time.monotonic() - self.waits_since
        return min(share, max(_SHORTEST_REQUEST_S, round(FIRST_ANSWER_S - waited_s, 1)))

    @contextmanager
    def carrying(self, num_bytes: int) -> Iterator[float]:
        """While these bytes travel; the seconds that a request with them gets beyond those of one without."""
        with self._lock:
            self._under_way += num_bytes
            more_s = self._under_way / self._bytes_per_s if num_bytes else 0.0
        try:
            yield more_s
        finally:
            with self._lock:
                self._under_way -= num_bytes


class TryAgain(Exception):
    """An answer that another try may better; `kind` says in a word what was wrong with this one."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


def persist(call: Callable[[], Answer], *, pace: RequestPace, more_s: float, uri: str, key: str) -> Answer:
    """Return what `call` answers, as soon as it does not ask to try again; StoreUnavailable when the time is up.

    `more_s` are the seconds that the bytes of one request need. No request begins after the deadline, so all is over
    after the deadline and the time of one request.
    """
    start, pause, tries = time.monotonic(), _FIRST_PAUSE_S, 0
    pace.waits_since = start
    while True:
        tries += 1
        try:
            return call()
        except TryAgain as unusable:
            kind = unusable.kind
        # Half of each pause is drawn, so that replicas that failed together do not come back together.
        pause_s = pause * (0.5 + secrets.randbelow(1000) / 2000)
        if time.monotonic() + pause_s - start > pace.deadline_s + REQUESTS_IN_DEADLINE * more_s:
            seconds = time.monotonic() - start
            if not pace.has_answered:
                raise unreachable(uri=uri, key=key, kind=kind, seconds=seconds, tries=tries)
            what = f"no usable answer in {seconds:.1f} s and {tries} tries; the last: {kind}"
            raise StoreUnavailable(what, uri=uri, key=key, cause_kind=kind)
        time.sleep(pause_s)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
