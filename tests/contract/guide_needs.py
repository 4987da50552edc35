"""What a guide needs that the repository does not hold: `<!-- needs: NAME, NAME -->` puts it where the guide runs.

A guide whose needs cannot be met is skipped, with the reason.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from repository import ROOT

_NEEDS = re.compile(r"^<!-- needs: (?P<names>.+?) -->$", re.MULTILINE)
_TOKENIZERS = {"qwen2.5": "qwen2_5", "qwen3": "qwen3"}
_ENDPOINT, _ADVISERS = "endpoint", "advisers"
_SESSIONS = ROOT.parent / "shared" / "fixtures" / "sessions"


def needs_of(text: str) -> list[str]:
    """Names of what a page says it needs."""
    return [name.strip() for found in _NEEDS.finditer(text) for name in found["names"].split(",")]


def provide(text: str, folder: Path) -> None:
    """Put everything a page needs into the folder, under its name."""
    for name in needs_of(text):
        if name == "sessions":
            if not _SESSIONS.is_dir():
                pytest.skip("the session fixtures are not beside this checkout (../shared)")
            shutil.copytree(_SESSIONS, folder / name)
        elif name in (_ENDPOINT, _ADVISERS):
            continue  # `endpoint` runs them beside the page
        elif name in _TOKENIZERS:
            _link_tokenizer(_TOKENIZERS[name], folder / name)
        else:
            raise ValueError(f"a guide needs {name!r}, expected sessions or one of {sorted(_TOKENIZERS)}")


@contextmanager
def endpoint(text: str) -> Iterator[dict[str, str]]:
    """Where a page asks teachers: a server on this machine that answers as they might, as $ENDPOINT.

    $ADVISERS is one as `crf world advisers` runs it.
    """
    sys.path.append(str(ROOT / "tests"))  # where this is run as a script
    if _ADVISERS in needs_of(text):
        from composer_replication.envs.adviser_server import AdviserServer

        with AdviserServer(range(80), ["easy"]) as server:
            yield {"ADVISERS": server.base_url}
    elif _ENDPOINT in needs_of(text):
        from fault_server import FaultServer

        with FaultServer(seed=1, agreement=0.7) as server:
            yield {"ENDPOINT": server.base_url}
    else:
        yield {}


def _link_tokenizer(family: str, place: Path) -> None:
    sys.path.append(str(ROOT / "tests"))  # where this is run as a script
    from tokenizer_assets import CACHE, load

    load(family)  # downloads it the first time, and skips where it cannot
    place.symlink_to(CACHE / family, target_is_directory=True)
