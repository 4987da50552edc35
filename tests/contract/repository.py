"""Where things are in this checkout, and a fresh interpreter to look at them from."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
PACKAGE = SRC / "composer_replication"
CODE_FOLDERS = ("src", "tests", "benchmarks", "examples")
_GENERATED = {ROOT / "dist", ROOT / "build", ROOT / "runs", ROOT / "site"}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def python_files(*folders: str) -> list[Path]:
    """Every Python file under these folders of the repository, hidden folders and caches aside."""
    return sorted(path for folder in folders for path in _walk(ROOT / folder) if path.suffix == ".py")


def repository_files() -> list[Path]:
    """Every file that is or could be committed; a copy without git is walked instead."""
    if (ROOT / ".git").exists() and shutil.which("git"):
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
        return sorted({ROOT / name for name in listing.split("\0") if name and (ROOT / name).is_file()})
    return sorted(_walk(ROOT))


def markdown_files() -> list[Path]:
    return [path for path in repository_files() if path.suffix == ".md"]


def module_name(path: Path) -> str:
    """`src/composer_replication/loss/__init__.py` -> `composer_replication.loss`."""
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    return {module_name(path): path for path in python_files("src") if path.is_relative_to(PACKAGE)}


def fresh_python(
    *arguments: str, cwd: Path, given: str = "", program: Sequence[str] = (sys.executable,), **environment: str
) -> str:
    """What a new interpreter printed; its traceback fails the test."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV", "PIP_"))}
    done = subprocess.run(
        [*program, *arguments],
        cwd=cwd,
        env={**kept, **environment},
        input=given,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, f"python {arguments[0]} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir() if folder.is_dir() else ():
        if not path.is_dir():
            yield path
        elif not path.name.startswith((".", "__pycache__")) and path not in _GENERATED:
            yield from _walk(path)
