"""The store of a URI: a folder, a bucket of S3, GCS or Azure, a repository of the Hub."""

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
_EXPECTED = f"{', '.join(f'{scheme}://' for scheme in SCHEMES)} and a place, or the path of a folder"
_LIKE_A_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")  # of two letters or more: C:/ is a drive


def open_store(
    uri: str,
    *,
    deadline_s: float = 60.0,
    slowest_mb_s: float = 1.0,
    options: Mapping[str, str] | None = None,
    probes: bool = True,
) -> ObjectStore:
    """The store at `uri`: s3://bucket/prefix, gs://…, az://container/prefix, hf://[datasets/]owner/name/folder,
    file://… or a plain path.

    Credentials come from the environment or `options`, never from the URI. `options` are obstore's, by its names
    (`endpoint`, `region`), and `allow_http` for a server on loopback; the Hub's are `endpoint` and `token`. A call
    that gets no usable answer is tried again, with growing pauses, until `deadline_s` are over; a place that has never
    answered gets eight seconds. On top of that come the seconds that its bytes need on a line of `slowest_mb_s`, which
    all that is under way shares. Opening tries out whether the place can create an object once, which makes a folder
    and writes a probe; with `probes=False`, for those who only look, it writes nothing.
    """
    scheme = scheme_of(uri)
    pace = RequestPace(deadline_s, slowest_mb_s)
    if scheme == "file":
        if options:
            raise InputError(explain("options of a folder", got=sorted(options), expected="none"))
        return FileStore(Path(unquote(urlsplit(uri).path) if "://" in uri else uri).expanduser(), probes=probes)
    if scheme in CLASSES:
        parts = urlsplit(uri)
        prefix = checked_folder(unquote(parts.path).strip("/")).rstrip("/")
        return BucketStore(scheme, parts.netloc, prefix, pace=pace, options=options, probes=probes)
    return HubStore(unquote(uri.partition("://")[2]), pace=pace, options=options, probes=probes)


def scheme_of(uri: str) -> str:
    """The scheme of a store's URI, `file` for a plain path; InputError where it is none that there is a store for."""
    scheme, mark, rest = uri.partition("://")
    if not mark:
        if (like := _LIKE_A_SCHEME.match(uri)) is None:
            return "file"
        fix = "A folder of that name is written with ./ before it."
        raise InputError(explain("place of a store", got=_shown(uri, like[1]), expected=_EXPECTED, fix=fix))
    _refuse_credentials(uri, scheme)
    if scheme not in SCHEMES:
        raise InputError(explain("place of a store", got=_shown(uri, scheme), expected=_EXPECTED))
    authority = rest.partition("/")[0]
    if scheme == "file" and authority not in ("", "localhost"):
        fix = "Behind file:// stands a whole path, with a third slash."
        raise InputError(explain("place of a store", got=_shown(uri, scheme), expected="file:///folder", fix=fix))
    if scheme != "file" and not authority:
        expected = f"{scheme}://, and the bucket's name"
        raise InputError(explain("place of a store", got=_shown(uri, scheme), expected=expected))
    return scheme


def _shown(uri: str, scheme: str) -> str:
    """What was got, unless there may be a credential in it: behind a mark of one, or behind a second colon."""
    return f"{scheme}:..." if set("@?#:") & set(uri[len(scheme) + 1 :]) else repr(uri)


def _refuse_credentials(uri: str, scheme: str) -> None:
    """A URI ends up in messages, logs and process lists: it holds no secret."""
    try:
        parts = urlsplit(uri)
    except ValueError:  # a bracket that does not close; its text may repeat the URI
        got = f"{scheme}:..., which is no URI"
        raise InputError(explain("URI of a store", got=got, expected="scheme://place/prefix")) from None
    is_address = ":" in parts.netloc and scheme in SCHEMES  # no bucket has such a name, a key and its secret do
    if "@" in parts.netloc or is_address or parts.query or parts.fragment:
        what = f"a {scheme}:// URI with a user, a colon, a query or a fragment"
        fix = "Set credentials by the environment, as the provider's own tools read them."
        raise InputError(explain("URI of a store", got=what, expected="scheme://place/prefix alone", fix=fix))
