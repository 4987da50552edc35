"""What is said where a store refuses us: which bucket, which operation, and what to look at.

Credentials are named by the variables that hold them, and said to be set or not; no value of one is ever read into a
message.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal, NamedTuple

from composer_replication.diloco.store.objects import StoreDenied

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
    place = uri.partition("://")[2].partition("/")[0]
    where = f"bucket {place}" if scheme != "hf" else "the repository"
    set_here = [name for name in provider.variables if name in os.environ]
    unset = [name for name in provider.variables if name not in os.environ]
    about = "; ".join(
        f"{what}: {', '.join(names)}" for what, names in (("set here", set_here), ("not set here", unset)) if names
    )
    what = (
        f"{where} refused {operation} ({kind}). Check the credentials ({about}) and what they may do: "
        f"get, put, list, delete and conditional create are needed ({provider.permissions})"
    )
    return StoreDenied(what, uri=uri, key=key, cause_kind=kind)
