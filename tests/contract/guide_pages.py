"""Guides as they run: `$ command` lines of console blocks with what they print, and Python blocks, top to bottom.

The test compares; this file as a script records: python tests/contract/guide_pages.py docs/guides/*.md
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from guide_needs import endpoint, provide
from markdown_pages import blocks
from repository import ROOT, SRC

TESTS = ROOT / "tests"
sys.path[:0] = [str(TESTS)] if str(TESTS) not in sys.path else []  # as a script this file finds its own folder only
from warm_crf import crf_command, python_command  # noqa: E402

PROMPT = "$ "
_WIDTH = "110"


class Step(NamedTuple):
    """One command of a page, with the lines that the page says it prints; None where it says nothing."""

    command: str
    is_python: bool
    line: int
    expected: list[str] | None


def steps(text: str, *, engine: str = "") -> list[Step]:
    """What is run here; of another engine, the blocks that say they need it (`<!-- not run: needs ENGINE -->`)."""
    found: list[Step] = []
    for block in blocks(text):
        if block.not_run != (f"needs {engine}" if engine else None):
            continue
        if block.language == "python":
            found.append(Step(block.code, True, block.line, None))
        elif block.language == "console":
            found += _console_steps(block.code, block.line)
    return found


def _console_steps(code: str, first: int) -> Iterator[Step]:
    command, printed, start = "", list[str](), first
    for number, line in enumerate([*code.splitlines(), PROMPT], start=first):
        if line.startswith(PROMPT):
            if command:
                yield Step(command, False, start, printed or None)
            command, printed, start = line.removeprefix(PROMPT), [], number
        else:
            printed.append(line.rstrip())


def play(text: str, folder: Path) -> Iterator[tuple[Step, list[str]]]:
    """Each step with the lines it really printed, run from a folder that holds the examples and what the page needs."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    provide(text, folder)
    (folder / "bin").mkdir()
    crf = folder / "bin" / "crf"
    crf.write_text(f'#!/bin/sh\nexec {shlex.join(crf_command())} "$@"\n')
    crf.chmod(0o755)
    kept = {name: os.environ[name] for name in ("TMPDIR",) if name in os.environ}
    path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**kept, "PATH": path, "HOME": str(folder), "PYTHONPATH": str(SRC), "COLUMNS": _WIDTH}
    environment["OMP_NUM_THREADS"] = "1"  # models this small are only slower with more
    with endpoint(text) as more:
        for step in steps(text):
            command = [*python_command(), "-c", step.command] if step.is_python else ["sh", "-c", step.command]
            given = {**environment, **more}
            done = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, timeout=240)
            assert done.returncode == 0, f"line {step.line}: {step.command}\n{done.stdout}\n{done.stderr}"
            yield step, [line.rstrip() for line in done.stdout.rstrip("\n").splitlines()]


def record(page: Path) -> None:
    """Put what the commands print now below them, where the page shows any output."""
    lines = page.read_text(encoding="utf-8").splitlines()
    with tempfile.TemporaryDirectory() as folder:
        played = list(play("\n".join(lines), Path(folder)))
    for step, printed in reversed([each for each in played if each[0].expected is not None]):
        lines[step.line : step.line + len(step.expected or ())] = printed
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        record(Path(name))
