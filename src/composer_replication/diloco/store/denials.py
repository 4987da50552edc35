"""What is said where a store refuses us: which bucket, which operation, and what to look at.

Credentials are named by the variables that hold them, and said to be set or not; no value of one is ever read into a
message.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from composer_replication.diloco.store.objects import StoreDenied, StoreUnavailable
from composer_replication.errors import InputError, explain

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
