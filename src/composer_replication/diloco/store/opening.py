"""The store of a URI: a folder, a bucket of S3, GCS or Azure, a repository of the Hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from composer_replication.diloco.store.buckets import CLASSES, BucketStore
from composer_replication.diloco.store.files import FileStore
from composer_replication.diloco.store.hub import HubStore
from composer_replication.diloco.store.objects import ObjectStore, checked_folder
from composer_replication.diloco.store.retries import Pace
from composer_replication.errors import InputError, explain

SCHEMES = ("file", *CLASSES, "hf")


def open_store(
    uri: str, *, deadline_s: float = 60.0, slowest_mb_s: float = 1.0, options: Mapping[str, str] | None = None
) -> ObjectStore:
    """The store at `uri`: s3://bucket/prefix, gs://…, az://container/prefix, hf://[datasets/]owner/name/folder,
    file://… or a plain path.

    Credentials come from the environment or `options`, never from the URI. `options` are obstore's, by its names
    (`endpoint`, `region`), and `allow_http` for a server on loopback; the Hub's are `endpoint` and `token`. A call
    that gets no usable answer is tried again, with growing pauses, until `deadline_s` are over. On top of that come the
    seconds that its bytes need on a line of `slowest_mb_s`, which all that is under way shares.
    """
    scheme = uri.partition("://")[0] if "://" in uri else "file"
    _refuse_credentials(uri, scheme)
    pace = Pace(deadline_s, slowest_mb_s)
    if scheme == "file":
        if options:
            raise InputError(explain("options of a folder", got=sorted(options), expected="none"))
        return FileStore(Path(unquote(urlsplit(uri).path) if "://" in uri else uri).expanduser())
    if scheme in CLASSES:
        parts = urlsplit(uri)
        prefix = checked_folder(unquote(parts.path).strip("/")).rstrip("/")
        return BucketStore(scheme, parts.netloc, prefix, pace=pace, options=options)
    if scheme == "hf":
        return HubStore(unquote(uri.partition("://")[2]), pace=pace, options=options)
    raise InputError(explain("scheme of a store", got=repr(scheme), expected=f"one of {', '.join(SCHEMES)}, or a path"))


def _refuse_credentials(uri: str, scheme: str) -> None:
    """A URI ends up in messages, logs and process lists: it holds no secret."""
    if "://" not in uri:
        return
    parts = urlsplit(uri)
    if "@" in parts.netloc or parts.query or parts.fragment:
        what = f"a {scheme}:// URI with a user, a query or a fragment"
        fix = "Set credentials by the environment, as the provider's own tools read them."
        raise InputError(explain("URI of a store", got=what, expected="scheme://place/prefix alone", fix=fix))
