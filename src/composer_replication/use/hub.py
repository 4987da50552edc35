"""Merged weights to the hub: only where somebody named a repository, private unless said otherwise, without data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from composer_replication.errors import InputError, RunError, explain

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_SENT = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "README.md")


def check_repository(name: str) -> str:
    """`owner/name`, told before anything is merged."""
    if _REPOSITORY.fullmatch(name) is None:
        fix = "Name it as the hub does: your user name or organisation, a slash, and the repository."
        raise InputError(explain("--push", got=repr(name), expected="owner/name", fix=fix))
    return name


def push_folder(folder: Path, repository: str, *, is_public: bool = False, api: Any = None) -> str:
    """Send a folder of weights to the hub, and return the address; `api` stands in for `huggingface_hub.HfApi`."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage] (of whichever HTTP library this version is built on)
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
    )

    hub = HfApi() if api is None else api
    check_repository(repository)
    try:
        hub.create_repo(repo_id=repository, repo_type="model", private=not is_public, exist_ok=True)
        if not is_public and hub.repo_info(repo_id=repository, repo_type="model").private is not True:
            raise _would_be_public(repository)  # one that was there before stays as it was
        done = hub.upload_folder(
            folder_path=str(folder),
            repo_id=repository,
            repo_type="model",
            commit_message="Weights made by composer-replication",
            allow_patterns=list(_SENT),
        )
    except OfflineModeIsEnabled as error:
        raise _refused(repository, error, "HF_HUB_OFFLINE is set: unset it to send something.") from error
    except LocalTokenNotFoundError as error:
        raise _refused(repository, error, "`hf auth login`, or set HF_TOKEN to a token that may write.") from error
    except HfHubHTTPError as error:
        fix = "Look at the name, and whether your token may write there (`hf auth whoami`)."
        raise _refused(repository, error, fix) from error
    except ValueError as error:  # a name, or an address, that the client does not take
        raise _refused(repository, error, "Look at the name, and at HF_ENDPOINT.") from error
    except (HTTPError, OSError) as error:
        raise _refused(repository, error, "Look at the network; the same command can be run again.") from error
    return str(getattr(done, "commit_url", None) or done)


def _would_be_public(repository: str) -> RunError:
    fix = "Make it private on the hub, name another one, or say --public if everybody may have these weights."
    got = "a repository that is there already, and public"
    return RunError(explain(f"sending to {repository}", got=got, expected="a private one", fix=fix))


def _refused(repository: str, error: Exception, fix: str) -> RunError:
    lines = str(error).strip().splitlines()
    got = f"{type(error).__name__}{': ' + lines[0] if lines else ''}"
    return RunError(explain(f"sending to {repository}", got=got, expected="a hub that takes it", fix=fix))
