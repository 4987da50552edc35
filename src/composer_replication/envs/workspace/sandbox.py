"""Runs tests in a process that can reach nothing, and says which kind of wall stands around it."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("in_sandbox.py")
SECONDS = 5
MEMORY = 512 * 2**20
MAX_TEXT = 4000


@dataclass(frozen=True, kw_only=True)
class TestReport:
    """What a test run printed."""

    __test__ = False
    text: str
    passed: int
    failed: int


class TestRunner:
    """Runs tests of a set of files."""

    __test__ = False

    def __init__(self) -> None:
        self.kind = "rlimits"

    def run_tests(self, files: Mapping[str, str], paths: Sequence[str]) -> TestReport:
        """Every test of the files named, as text without times and addresses."""
        reply = self._ask({"files": dict(files), "paths": list(paths)})
        if not isinstance(reply, dict):
            return TestReport(text="The tests did not end: stopped.", passed=0, failed=1)
        failed, passed = int(reply["failed"]), int(reply["passed"])
        counts = [f"{failed} failed"] * bool(failed) + [f"{passed} passed"] * bool(passed or not failed)
        text = "\n".join([*reply["lines"], ", ".join(counts)])
        return TestReport(text=text[-MAX_TEXT:], passed=passed, failed=failed)

    def values(self, files: Mapping[str, str], expressions: Sequence[tuple[str, str]]) -> list[str]:
        """The value of each (module, expression) as canonical text; none where the process gave no answer."""
        reply = self._ask({"files": dict(files), "expressions": [list(each) for each in expressions]})
        return [str(each) for each in reply] if isinstance(reply, list) and len(reply) == len(expressions) else []

    def _ask(self, request: Mapping[str, Any]) -> Any:
        try:
            done = subprocess.run(  # noqa: S603 (the words are ours)
                [sys.executable, "-I", "-S", str(PROGRAM)],
                input=json.dumps(request).encode() + b"\n",
                capture_output=True,
                timeout=SECONDS,
                env={"PYTHONHASHSEED": "0"},
                start_new_session=True,
                preexec_fn=_limit,
                check=False,
            )
            return json.loads(done.stdout)
        except (subprocess.TimeoutExpired, ValueError):
            return None


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
