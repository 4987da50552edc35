"""Open the store at a URI: a folder, a bucket of S3, GCS or Azure, or a repository of the Hub."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from composer_replication.diloco.store.buckets import CLASSES, BucketStore
from composer_replication.diloco.store.files import FileStore
from composer_replication.diloco.store.hub import HubStore
from composer_replication.diloco.store.objects import ObjectStore, RequestPace, checked_folder
from composer_replication.errors import InputError, explain

SCHEMES = ("file", *CLASSES, "hf")
_EXPECTED = f"{', '.join(f'{scheme}://' for scheme in SCHEMES)} with a bucket or path, or the path of a folder"
# "s3:bucket", a scheme without slashes; not "C:/runs", because a single letter is a drive
_SCHEME_WITHOUT_SLASHES = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")


def open_store(
    uri: str,
    *,
    deadline_s: float = 60.0,
    slowest_mb_s: float = 1.0,
    options: Mapping[str, str] | None = None,
    probes: bool = True,
) -> ObjectStore:
    """Return the store at `uri`: s3://bucket/prefix, gs://…, az://container/prefix, hf://[datasets/]owner/name/folder,
    file://… or a plain path.

    Credentials come from the environment or `options`, never from the URI. For a bucket, `options` are those of
    obstore, under the same names (`endpoint`, `region`), and `allow_http` for a server on loopback. For the Hub, they
    are `endpoint` and `token`.

    A call without a usable answer is repeated for `deadline_s` seconds, with exponential backoff; an address that has
    never answered gets eight seconds. Each request also gets the time to transfer its bytes at `slowest_mb_s`, a
    bandwidth that all requests share. When a store is opened, a check makes sure that only one of two writers can
    create an object; this check creates folders and writes a probe object. With `probes=False`, which is meant for
    readers, nothing is written.
    """
    scheme = scheme_of(uri)
    pace = RequestPace(deadline_s, slowest_mb_s)
    if scheme == "file":
        if options:
            raise InputError(explain("options of a folder", got=sorted(options), expected="no options"))
        return FileStore(Path(unquote(urlsplit(uri).path) if "://" in uri else uri).expanduser(), probes=probes)
    if scheme in CLASSES:
        parts = urlsplit(uri)
        prefix = checked_folder(unquote(parts.path).strip("/")).rstrip("/")
        return BucketStore(scheme, parts.netloc, prefix, pace=pace, options=options, probes=probes)
    return HubStore(unquote(uri.partition("://")[2]), pace=pace, options=options, probes=probes)


def scheme_of(uri: str) -> str:
    """Return the scheme of a store's URI, or `file` for a plain path. Raises InputError for an unsupported scheme."""
    scheme, mark, rest = uri.partition("://")
    if not mark:
        if (match := _SCHEME_WITHOUT_SLASHES.match(uri)) is None:
            return "file"
        fix = "For a folder of that name, write ./ before it."
        raise InputError(explain("location of a store", got=_shown(uri, match[1]), expected=_EXPECTED, fix=fix))
    _refuse_credentials(uri, scheme)
    if scheme not in SCHEMES:
        raise InputError(explain("location of a store", got=_shown(uri, scheme), expected=_EXPECTED))
    authority = rest.partition("/")[0]
    if scheme == "file" and authority not in ("", "localhost"):
        fix = "Write an absolute path after file://, which gives three slashes."
        raise InputError(explain("location of a store", got=_shown(uri, scheme), expected="file:///folder", fix=fix))
    if scheme != "file" and not authority:
        expected = f"{scheme}:// and the name of a bucket"
        raise InputError(explain("location of a store", got=_shown(uri, scheme), expected=expected))
    return scheme


def _shown(uri: str, scheme: str) -> str:
    """Return the URI in a form that is safe in messages: only its scheme if the rest may contain a credential."""
    return f"{scheme}:..." if set("@?#:") & set(uri[len(scheme) + 1 :]) else repr(uri)


def _refuse_credentials(uri: str, scheme: str) -> None:
    """Raise InputError for a URI that may hold a secret, because URIs appear in messages, logs and process lists."""
    try:
        parts = urlsplit(uri)
    except ValueError:
        # For example, a bracket is not closed. The message of the error may contain the URI, so it is not shown.
        got = f"{scheme}:..., which is not a valid URI"
        raise InputError(explain("URI of a store", got=got, expected="scheme://bucket/prefix")) from None
    # The name of a bucket never contains a colon; a colon may separate a key from its secret.
    is_address = ":" in parts.netloc and scheme in SCHEMES
    if "@" in parts.netloc or is_address or parts.query or parts.fragment:
        what = f"a {scheme}:// URI with a user, a colon, a query or a fragment"
        fix = "Set credentials in the environment, as for the provider's own tools."
        raise InputError(explain("URI of a store", got=what, expected="only scheme://bucket/prefix", fix=fix))
