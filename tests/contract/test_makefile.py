"""The Makefile's test targets, with stubs for the programs that they start."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from repository import ROOT

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = [*re.findall(r"^(test[\w-]*):", MAKEFILE, re.MULTILINE), "check"]  # "test-envs: ..." is test-envs
SEVERAL_COMMANDS = {"test-envs": 2, "test-diloco": 2, "check": 4}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which every environment counts as installed and its programs end with the status STUB_STATUS."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copy(ROOT / "Makefile", folder)
    for name in ("constraints", ".ci"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    environments = [".venv", *(f".venv-{each.stem}" for each in (ROOT / "constraints").glob("*.txt"))]
    stubs = [folder / each / "bin" / name for each in environments for name in ("python", "ruff", "pyright")]
    stubs.append(folder / ".azurite/node_modules/.bin/azurite-blob")
    for stub in stubs:
        stub.parent.mkdir(parents=True, exist_ok=True)
        stub.write_text('#!/bin/sh\necho "$0" >> calls\nexit $STUB_STATUS\n')
        stub.chmod(0o755)
    for each in environments:
        (folder / each / ".installed").touch()
    return folder


def make(clone: Path, target: str, status: int, *variables: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Return how make ended, and the stubs that it started."""
    calls = clone / "calls"
    calls.unlink(missing_ok=True)
    names = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "PRIME_RL"))}
    done = subprocess.run(
        ["make", target, *variables],
        cwd=clone,
        env={**names, "STUB_STATUS": str(status)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done, calls.read_text().splitlines() if calls.exists() else []


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("target", TARGETS)
def test_a_target_runs_all_of_its_commands_and_fails_where_one_failed(clone: Path, target: str) -> None:
    passed, all_calls = make(clone, target, 0)
    failed, calls = make(clone, target, 3)
    assert (passed.returncode == 0, failed.returncode == 0) == (True, False), passed.stderr
    assert len(all_calls) == SEVERAL_COMMANDS.get(target, 1)
    assert calls == all_calls


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_a_run_without_prime_rl_says_in_one_line_what_was_skipped_and_how_to_get_it(clone: Path) -> None:
    (line,) = [line for line in make(clone, "test-prime", 0)[0].stdout.splitlines() if "git clone" in line]
    assert "PRIME_RL_SOURCE=" in line
    commit = re.search(r"checkout (\w+)", line)
    assert commit is not None
    contract = (ROOT / "tests/recipes/prime_rl/contract.py").read_text(encoding="utf-8")
    assert f"({commit[1]})" in contract.splitlines()[0], "the commit that the records were made from"
    assert "git clone" not in make(clone, "test-prime", 0, "PRIME_RL_SOURCE=there")[0].stdout
