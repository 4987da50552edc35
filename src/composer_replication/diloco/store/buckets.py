"""A store in a bucket of S3, GCS or Azure, accessed through obstore. A create is the provider's conditional put.

Large objects are transferred in several parts in parallel. Error messages never contain the provider's text, which may
contain a signed URL, but only the HTTP status and the provider's error code.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache, partial
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from composer_replication.diloco.store.objects import (
    MissingObject,
    Operation,
    RequestPace,
    StoreCannotCreate,
    StoreClientMissing,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    TryAgain,
    bucket_name,
    checked_folder,
    checked_key,
    credential_status,
    denied,
    is_key,
    missing,
    retry_until_deadline,
    too_large,
)
from composer_replication.errors import InputError, MissingExtraError, explain
from composer_replication.optional import require

CLASSES = {"s3": "S3Store", "gs": "GCSStore", "az": "AzureStore"}
_ALLOW_HTTP_VARIABLES = {
    "s3": "AWS_ALLOW_HTTP",
    "gs": "GOOGLE_ALLOW_HTTP",
    "az": "AZURE_ALLOW_HTTP",
}  # obstore's variables
PART_BYTES = 8 << 20
PARTS_AT_ONCE = 8
_PART_RETRIES = 3
_NONCE = "crfnonce"  # Azure accepts only C# identifiers as names of metadata
# "... with status code: 503 ..." -> "503"
_STATUS = re.compile(r"status code: (\d{3})")
# "<Code>SlowDown</Code>" -> "SlowDown"; the bound keeps messages short
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_FULL_CODES = {"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull"}

# "Error performing GET http://127.0.0.1:9000/bucket/key in 2.1s" -> "http://127.0.0.1:9000/bucket/key". This
# text and the next are obstore's.
_ADDRESS_IN_ERROR = re.compile(r"Error performing [A-Z]+ (\w+://\S+) in ")
_LISTING_ERROR = "Error performing list request:"
# A mark in obstore's error text, and the got, expected and fix of our message. The text itself may contain the value of
# an option, so it is not shown.
_SETTINGS_ERRORS = (
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

Answer = TypeVar("Answer")
Direction = Literal["in", "out", "out by parts"]


class BucketStore:
    """An ObjectStore in a bucket, under a prefix."""

    def __init__(
        self,
        scheme: str,
        bucket: str,
        prefix: str,
        *,
        pace: RequestPace,
        options: Mapping[str, str] | None = None,
        probes: bool = True,
    ) -> None:
        self._obstore: Any = _client()
        self._scheme = scheme
        self.uri = f"{scheme}://{bucket}{f'/{prefix}' if prefix else ''}"
        self._pace = pace
        config = dict(options or {})
        allow_http = config.pop("allow_http", os.environ.get(_ALLOW_HTTP_VARIABLES[scheme], "false"))

        # The time limits of an obstore client are fixed, so there is one client per direction and power of two.
        @cache
        def opened(direction: Direction, request_s: float, doublings: int) -> Any:
            seconds = request_s * 2**doublings
            client: dict[str, Any] = {"timeout": timedelta(seconds=seconds), "allow_http": allow_http.lower() == "true"}
            # An answer that stalls for as long as a request without payload may take is considered dead.
            if direction == "in":
                client["read_timeout"] = timedelta(seconds=request_s)
            retries = _PART_RETRIES if direction == "out by parts" else 0
            again = {"max_retries": retries, "retry_timeout": timedelta(seconds=pace.deadline_s + retries * seconds)}
            store = getattr(self._obstore.store, CLASSES[scheme])
            return store(bucket, prefix=prefix or None, config=config, client_options=client, retry_config=again)

        self._opened = opened
        try:
            opened("out", pace.request_s, 0)
        except (self._obstore.exceptions.BaseError, ValueError, TypeError) as error:
            raise _refused_settings(scheme, str(error), uri=self.uri, options=config) from None
        if probes:
            self._refuse_without_create()

    def put(self, key: str, data: bytes) -> None:
        checked_key(key)
        large = len(data) > PART_BYTES
        self._call(
            "put",
            key,
            lambda bucket: self._obstore.put(
                bucket, key, data, use_multipart=large, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE
            ),
            direction="out by parts" if large else "out",
            num_bytes=len(data),
        )

    def create(self, key: str, data: bytes) -> bool:
        checked_key(key)
        nonce = secrets.token_hex(16)

        def attempt(bucket: Any) -> bool:
            try:
                self._obstore.put(bucket, key, data, mode="create", attributes={_NONCE: nonce})
            except self._obstore.exceptions.AlreadyExistsError:
                return self._is_ours(bucket, key, nonce)
            return True

        return self._call("conditional create", key, attempt, direction="out", num_bytes=len(data))

    def get(self, key: str, *, most_bytes: int) -> bytes:
        checked_key(key)
        most_at_first = min(most_bytes, PART_BYTES)
        return self._call("get", key, lambda bucket: self._read(bucket, key, most_bytes), num_bytes=most_at_first)

    def size(self, key: str) -> int | None:
        attributes = self._head(key)
        return None if attributes is None else attributes["size"]

    def written_at(self, key: str) -> float | None:
        """Return when an object was written, according to the provider's clock; None if the object does not exist."""
        attributes = self._head(key)
        return None if attributes is None else attributes["last_modified"].timestamp()

    def _head(self, key: str) -> Any:
        checked_key(key)
        try:
            return self._call("get", key, lambda bucket: self._obstore.head(bucket, key))
        except MissingObject:
            return None

    def keys(self, prefix: str) -> list[str]:
        folder = checked_folder(prefix)

        def attempt(bucket: Any) -> list[str]:
            pages = self._obstore.list(bucket, prefix=folder or None)
            return [entry["path"] for page in pages for entry in page]

        return sorted(key for key in self._call("list", prefix, attempt) if is_key(key))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete all objects at once, or one by one if the provider stops at a missing object."""
        paths = [checked_key(key) for key in keys]
        try:
            if paths:
                self._call("delete", paths[0], lambda bucket: self._obstore.delete(bucket, paths))
        except MissingObject:
            for path in paths if len(paths) > 1 else []:
                self.delete([path])

    def _is_ours(self, bucket: Any, key: str, nonce: str) -> bool:
        """Return whether the object that made a create fail is our own, written by an earlier try whose answer was
        lost.

        If two processes write at the same time, S3 may report a conflict to one of them before either object exists. In
        that case, TryAgain is raised.
        """
        try:
            existing = self._obstore.get(bucket, key, options={"head": True})
        except FileNotFoundError:
            raise TryAgain("conflict") from None
        return existing.attributes.get(_NONCE) == nonce

    def _read(self, bucket: Any, key: str, most_bytes: int) -> bytes:
        """Read an object in parts. The answer for the first part contains the total size; the remaining parts are
        then read in parallel.
        """
        first = self._first_part(bucket, key)
        size: int = first.meta["size"]
        if size > most_bytes:
            raise too_large(self.uri, key, size=size, most_bytes=most_bytes)
        data = bytes(first.bytes())
        starts = range(PART_BYTES, size, PART_BYTES)
        if starts:
            # Parts with another tag belong to a newer version of the object.
            tag = first.meta["e_tag"]
            with ThreadPoolExecutor(min(PARTS_AT_ONCE, len(starts))) as pool:
                other_parts = pool.map(lambda start: self._part(key, start, min(start + PART_BYTES, size), tag), starts)
                data = b"".join([data, *other_parts])
        if len(data) != size:
            raise TryAgain("truncated, or changed while it was read")
        return data

    def _first_part(self, bucket: Any, key: str) -> Any:
        try:
            return self._obstore.get(bucket, key, options={"range": (0, PART_BYTES)})
        except self._obstore.exceptions.GenericError as error:
            if _status(error) != "416":
                raise
        # An empty object has no range.
        return self._obstore.get(bucket, key)

    def _part(self, key: str, start: int, end: int, tag: str | None) -> bytes:
        """Return one part of the object version with this tag, or empty bytes if the object has been replaced."""
        options = {"range": (start, end), **({"if_match": tag} if tag else {})}

        def attempt(bucket: Any) -> bytes:
            try:
                return bytes(self._obstore.get(bucket, key, options=options).bytes())
            except self._obstore.exceptions.PreconditionError:
                return b""

        return self._call("get", key, attempt, num_bytes=end - start)

    def _refuse_without_create(self) -> None:
        """Raise StoreCannotCreate if the server lets the same object be created twice, because it ignores the
        condition of a conditional put.
        """
        probe = f"crf-probe-{secrets.token_hex(8)}"
        try:
            wins = [self.create(probe, b"first"), self.create(probe, b"second")]
        except MissingObject:
            raise self._no_such_bucket() from None
        # A probe that cannot be deleted does no harm.
        with contextlib.suppress(StoreError):
            self.delete([probe])
        if wins != [True, False]:
            what = "two creates of one object both succeeded, so two replicas could decide one round differently"
            raise StoreCannotCreate(what, uri=self.uri, cause_kind="not_atomic")

    def _no_such_bucket(self) -> StoreDenied:
        return StoreDenied("no such bucket", uri=self.uri, cause_kind="404")

    def _call(
        self,
        operation: Operation,
        key: str,
        call: Callable[[Any], Answer],
        *,
        direction: Direction = "in",
        num_bytes: int = 0,
    ) -> Answer:
        """Return the result of `call`, which is given a client with time limits that suit a transfer of `num_bytes`.
        The call is retried until the deadline.
        """
        with self._pace.transfer_budget(num_bytes) as transfer_s:
            attempt = partial(self._attempt, operation, key, direction, transfer_s, call)
            return retry_until_deadline(attempt, pace=self._pace, transfer_s=transfer_s, uri=self.uri, key=key)

    def _attempt(
        self, operation: Operation, key: str, direction: Direction, transfer_s: float, call: Callable[[Any], Answer]
    ) -> Answer:
        request_s = self._pace.request_s
        # Rounding up to a power of two limits the number of cached clients.
        doublings = math.ceil(math.log2(1 + transfer_s / request_s)) if transfer_s > request_s / 100 else 0
        bucket = self._opened(direction, request_s, doublings)
        try:
            answer = call(bucket)
        except (self._obstore.exceptions.BaseError, FileNotFoundError) as error:
            store_error = self._to_store_error(error, operation, key)
        else:
            self._pace.has_answered = True
            return answer
        # Raised outside the handler, so that the provider's error is not attached as context.
        raise store_error

    def _to_store_error(self, error: Exception, operation: Operation, key: str) -> Exception:
        """Translate an obstore error: return TryAgain if another try may succeed, and a StoreError otherwise."""
        errors, text = self._obstore.exceptions, str(error)
        if isinstance(error, FileNotFoundError):
            self._pace.has_answered = True
            return missing(self.uri, key, cause_kind="404")
        # obstore's text for a redirect to another region, which it does not follow.
        if "incorrectly configured region" in text:
            return _wrong_region(uri=self.uri, key=key)
        status = _status(error)
        self._pace.has_answered = self._pace.has_answered or bool(status)
        code = match[1] if (match := _CODE.search(text)) else ""
        kind = f"{status} {code}".strip()
        if status == "507" or code in _FULL_CODES:
            return StoreFull(f"no space left ({kind})", uri=self.uri, key=key, cause_kind=kind)
        is_transient = not status or status in ("408", "429") or status.startswith("5")
        if isinstance(error, errors.GenericError) and not is_transient and not _is_bucket_answer(text, self.uri):
            return _credentials_unavailable(self._scheme, uri=self.uri, key=key, kind=kind)
        # Listing a prefix without objects gives an empty list, so it is the bucket that is missing.
        if operation == "list" and status == "404":
            return self._no_such_bucket()
        # For a refused listing obstore has no error class, so the status is checked.
        if status in ("401", "403") or isinstance(error, errors.PermissionDeniedError | errors.UnauthenticatedError):
            return denied(self._scheme, operation, uri=self.uri, key=key, kind=kind)
        if is_transient:
            return TryAgain(kind or "no answer")
        return StoreUnavailable(f"unexpected answer ({kind})", uri=self.uri, key=key, cause_kind=kind)


def _status(error: Exception) -> str:
    return match[1] if (match := _STATUS.search(str(error))) else ""


def _is_bucket_answer(text: str, uri: str) -> bool:
    """Return whether an error of obstore's generic class came from the bucket, judging by its text.

    If the machine itself has credentials, obstore first requests them from a service (instance metadata, container
    credentials, STS), and reports its errors in the same class and format.
    """
    if _LISTING_ERROR in text or "<Code>NoSuchBucket</Code>" in text:
        return True
    address = urlsplit(match[1]) if (match := _ADDRESS_IN_ERROR.search(text)) else None
    bucket = bucket_name(uri)
    return address is not None and (bucket in address.path.split("/") or address.netloc.startswith(f"{bucket}."))


def _credentials_unavailable(scheme: str, *, uri: str, key: str, kind: str) -> StoreUnavailable:
    """Return the error, possibly temporary, for a request that was answered by a credential service instead of the
    bucket.
    """
    what = (
        f"an address that is not the bucket's answered {kind}, as a service that gives credentials does (instance "
        f"metadata, STS): the bucket was not asked. Check the credentials ({credential_status(scheme)})"
    )
    return StoreUnavailable(what, uri=uri, key=key, cause_kind=f"credentials {kind}")


def _wrong_region(*, uri: str, key: str) -> StoreDenied:
    """Return the error for an S3 bucket that is in another region than configured."""
    now = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    what = (
        f"bucket {bucket_name(uri)} is in another region than {now or 'us-east-1, the default'}. "
        "Set AWS_REGION to the bucket's region, or the option region"
    )
    return StoreDenied(what, uri=uri, key=key, cause_kind="region")


def _refused_settings(scheme: str, text: str, *, uri: str, options: Collection[str]) -> InputError:
    """Return the error for settings that obstore rejects with the message `text`, which is not shown."""
    what = f"settings of {uri}"
    if "UnknownConfigurationKey" in text:
        return InputError(explain(what, got=f"options {sorted(options)}", expected="options of obstore"))
    for mark, got, expected, fix in _SETTINGS_ERRORS:
        if mark in text:
            return InputError(explain(what, got=got, expected=expected, fix=fix))
    got = f"an invalid name or value in options {sorted(options)} or in the environment"
    fix = f"Check the options and the variables ({credential_status(scheme)})."
    return InputError(explain(what, got=got, expected="settings that obstore accepts", fix=fix))


def _client() -> Any:
    try:
        require("obstore.store", extra="serverless")
        return require("obstore", extra="serverless")
    except MissingExtraError as error:
        raise StoreClientMissing(str(error), name=error.name) from error
