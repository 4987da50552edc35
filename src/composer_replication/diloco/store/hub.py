"""A store in a repository of the Hugging Face Hub, accessed through its client. Every write is a commit.

A create checks that the object does not exist at the current head, and commits on that head. If the head has moved, the
Hub refuses the commit, and the create is tried again. The Hub limits commits per hour and keeps deleted files in its
history, so this store suits a few replicas whose rounds take many minutes.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from composer_replication.diloco.store.objects import (
    MissingObject,
    Operation,
    RequestPace,
    StoreCannotCreate,
    StoreClientMissing,
    StoreDenied,
    StoreError,
    StoreUnavailable,
    TryAgain,
    checked_folder,
    checked_key,
    denied,
    is_key,
    missing,
    retry_until_deadline,
    too_large,
)
from composer_replication.errors import InputError, MissingExtraError, explain
from composer_replication.optional import require

_TYPES = {"datasets": "dataset", "spaces": "space", "models": "model"}
_HEAD_MOVED = (409, 412)
_TRANSIENT = (408, 429)
_NO_COMMIT = "0" * 40
_THREAD = "crf-asks-hub"

Answer = TypeVar("Answer")


class HubStore:
    """An ObjectStore in a repository, under a folder: `[datasets/]owner/name[@revision][/folder]`."""

    def __init__(
        self, path: str, *, pace: RequestPace, options: Mapping[str, str] | None = None, probes: bool = True
    ) -> None:
        self._hub: Any = _client()
        self._pace = pace
        self.uri = f"hf://{path}"
        extras = dict(options or {})
        self._token = extras.pop("token", None)
        self._api = self._hub.HfApi(endpoint=extras.pop("endpoint", None), token=self._token)
        if extras:
            raise InputError(explain(f"options of {self.uri}", got=sorted(extras), expected="only endpoint and token"))
        parts = path.strip("/").split("/")
        kind = _TYPES[parts.pop(0)] if parts[0] in _TYPES else "model"
        if len(parts) < 2:
            raise InputError(explain("URI of a store", got=self.uri, expected="hf://[datasets/]owner/name[/folder]"))
        name, _, revision = parts[1].partition("@")
        self._folder = checked_folder("/".join(parts[2:]))
        self._revision = revision or "main"
        self._repository = {"repo_id": f"{parts[0]}/{name}", "repo_type": kind}
        if probes:
            self._refuse_without_parents()

    def put(self, key: str, data: bytes) -> None:
        added = self._addition(key, data)
        self._call("put", key, lambda: self._commit([added()], f"put {key}", parent=None), num_bytes=len(data))

    def create(self, key: str, data: bytes) -> bool:
        added, nonce = self._addition(key, data), secrets.token_hex(16)

        def attempt() -> bool:
            head = self._head()
            if self._size_at(key, head) is not None:
                return self._is_written_by(nonce, key, head)
            revision = self._commit([added()], f"create {key} {nonce}", parent=head)
            # If the object has the same bytes already, the client makes no commit, and reports success.
            return self._is_written_by(nonce, key, revision)

        return self._call("conditional create", key, attempt, num_bytes=len(data))

    def get(self, key: str, *, most_bytes: int) -> bytes:
        checked_key(key)
        # The size and the bytes are read at the same commit, so that they match.
        head, size = self._call("get", key, lambda: (head := self._head(), self._size_at(key, head)))
        if size is None:
            raise missing(self.uri, key)
        if size > most_bytes:
            raise too_large(self.uri, key, size=size, most_bytes=most_bytes)

        def attempt() -> bytes:
            url = self._hub.hf_hub_url(
                filename=f"{self._folder}{key}", revision=head, endpoint=self._api.endpoint, **self._repository
            )
            headers = self._hub.utils.build_hf_headers(token=self._token)
            answer = self._hub.utils.get_session().get(url, headers=headers, follow_redirects=True)
            self._hub.utils.hf_raise_for_status(answer)
            if len(answer.content) != size:
                raise TryAgain("truncated")
            return answer.content

        return self._call("get", key, attempt, num_bytes=size)

    def size(self, key: str) -> int | None:
        checked_key(key)
        return self._call("get", key, lambda: self._size_at(key, self._revision))

    def keys(self, prefix: str) -> list[str]:
        folder = f"{self._folder}{checked_folder(prefix)}"

        def attempt() -> list[str]:
            tree = self._api.list_repo_tree(
                path_in_repo=folder.rstrip("/") or None, recursive=True, revision=self._revision, **self._repository
            )
            paths = [entry.path for entry in tree if isinstance(entry, self._hub.hf_api.RepoFile)]
            return sorted(path.removeprefix(self._folder) for path in paths if path.startswith(folder))

        try:
            return [key for key in self._call("list", prefix, attempt) if is_key(key)]
        except MissingObject:
            return []

    def delete(self, keys: Sequence[str]) -> None:
        paths = [f"{self._folder}{checked_key(key)}" for key in keys]

        def attempt() -> None:
            there = self._api.get_paths_info(paths=paths, revision=self._revision, **self._repository)
            deletions = [self._hub.CommitOperationDelete(path_in_repo=entry.path, is_folder=False) for entry in there]
            if deletions:
                self._commit(deletions, f"delete {len(deletions)} objects", parent=None)

        if paths:
            self._call("delete", keys[0], attempt)

    def _addition(self, key: str, data: bytes) -> Callable[[], Any]:
        """Return a function that builds the operation to add a file. Each try needs a new operation, because the
        client refuses to send the same one twice.
        """
        path = f"{self._folder}{checked_key(key)}"
        return lambda: self._hub.CommitOperationAdd(path_in_repo=path, path_or_fileobj=data)

    def _commit(self, operations: list[Any], message: str, *, parent: str | None) -> str:
        return self._api.create_commit(
            operations=operations,
            commit_message=message,
            parent_commit=parent,
            revision=self._revision,
            **self._repository,
        ).oid

    def _head(self) -> str:
        return self._api.repo_info(revision=self._revision, **self._repository).sha

    def _size_at(self, key: str, revision: str) -> int | None:
        entries = self._api.get_paths_info(paths=[f"{self._folder}{key}"], revision=revision, **self._repository)
        return next((entry.size for entry in entries if isinstance(entry, self._hub.hf_api.RepoFile)), None)

    def _is_written_by(self, nonce: str, key: str, revision: str) -> bool:
        """Return whether the object was written by one of our own commits with this nonce: either that of the
        current try, or that of a try whose answer was lost.
        """
        path = f"{self._folder}{key}"
        entries = self._api.get_paths_info(paths=[path], revision=revision, expand=True, **self._repository)
        return any(entry.last_commit and nonce in entry.last_commit.title for entry in entries)

    def _refuse_without_parents(self) -> None:
        """Raise StoreCannotCreate if the Hub accepts a commit whose parent is not the current head."""
        probe = self._addition("crf-probe", b"a commit on a parent that is not there")

        def attempt() -> bool:
            try:
                self._commit([probe()], "probe", parent=_NO_COMMIT)
            except self._hub.errors.HfHubHTTPError as error:
                status = error.response.status_code
                # These errors are not about the parent; any other refusal is expected.
                if status in (401, 403, *_TRANSIENT) or status >= 500 or self._is_missing_repository(error):
                    raise
                return True
            return False

        if not self._call("conditional create", "", attempt):
            what = "the Hub accepted a commit on a parent that is not the head, so two replicas could create one object"
            raise StoreCannotCreate(what, uri=self.uri, cause_kind="not_atomic")

    def _call(self, operation: Operation, key: str, call: Callable[[], Answer], *, num_bytes: int = 0) -> Answer:
        # Make a plain request first, because the client repeats a commit for a minute.
        if not self._pace.has_answered:
            first = partial(self._attempt, "get", "", 0.0, self._head)
            retry_until_deadline(first, pace=self._pace, transfer_s=0.0, uri=self.uri, key="")
        with self._pace.transfer_budget(num_bytes) as transfer_s:
            attempt = partial(self._attempt, operation, key, transfer_s, call)
            return retry_until_deadline(attempt, pace=self._pace, transfer_s=transfer_s, uri=self.uri, key=key)

    def _attempt(self, operation: Operation, key: str, transfer_s: float, call: Callable[[], Answer]) -> Answer:
        unusable = (self._hub.errors.HTTPError, OSError)
        try:
            answer = _within(self._pace.request_s + transfer_s, call, (*unusable, StoreError, TryAgain))
        except unusable as error:
            store_error = self._to_store_error(error, operation, key)
        else:
            self._pace.has_answered = True
            return answer
        # Raised outside the handler, so that the client's error, which contains addresses, is not attached as context.
        raise store_error

    def _to_store_error(self, error: Exception, operation: Operation, key: str) -> Exception:
        """Translate an error of the Hub's client: return TryAgain if another try may succeed, and a StoreError
        otherwise.
        """
        status = getattr(getattr(error, "response", None), "status_code", 0)
        kind = str(status or type(error).__name__)
        if isinstance(error, self._hub.errors.OfflineModeIsEnabled):
            what = "the Hub client is in offline mode. Unset HF_HUB_OFFLINE"
            return StoreUnavailable(what, uri=self.uri, key=key, cause_kind=kind)
        self._pace.has_answered = self._pace.has_answered or bool(status)
        if self._is_missing_repository(error):
            return StoreDenied("no such repository, or no access to it", uri=self.uri, key=key, cause_kind=kind)
        if isinstance(error, self._hub.errors.EntryNotFoundError):
            return missing(self.uri, key, cause_kind=kind)
        if status in (401, 403):
            return denied("hf", operation, uri=self.uri, key=key, kind=kind)
        if status in (*_HEAD_MOVED, *_TRANSIENT) or status >= 500 or not status:
            return TryAgain(kind)
        return StoreUnavailable(f"unexpected answer ({kind})", uri=self.uri, key=key, cause_kind=kind)

    def _is_missing_repository(self, error: Exception) -> bool:
        errors = self._hub.errors
        return isinstance(error, errors.RepositoryNotFoundError | errors.RevisionNotFoundError)


def _within(seconds: float, call: Callable[[], Answer], expected: tuple[type[Exception], ...]) -> Answer:
    """Return the result of `call`, which runs in a thread. Raises TryAgain if it takes longer than `seconds`,
    because the client may wait forever.
    """
    answers: list[Answer] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            answers.append(call())
        # Raised again by the waiting thread.
        except expected as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name=_THREAD)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise TryAgain("no answer")
    return answers[0]


def _is_not_ours(record: logging.LogRecord) -> bool:
    """Return whether a log record of the client belongs to other code than this module.

    Used as a log filter. It drops the client's messages about retries of our requests, because this module reports the
    final result.
    """
    return record.threadName != _THREAD


def _client() -> Any:
    # Adding the same function again has no effect, because a logger stores each filter once.
    logging.getLogger("huggingface_hub.utils._http").addFilter(_is_not_ours)
    try:
        for module in ("huggingface_hub.utils", "huggingface_hub.errors", "huggingface_hub.hf_api"):
            require(module, extra="serverless")
        return require("huggingface_hub", extra="serverless")
    except MissingExtraError as error:
        raise StoreClientMissing(str(error), name=error.name) from error
