"""The blocks of the guide that need another engine (`<!-- not run: needs ENGINE -->`), run where that engine is.

`python tests/adapters/engine_guide.py ENGINE ADDRESS` records what they print now.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "contract"))
from guide_pages import Step, steps

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "world-elsewhere.md"


def play(engine: str, address: str, folder: Path) -> Iterator[tuple[Step, list[str]]]:
    """Each step with the lines it really printed; `$ENDPOINT` of the page is this address."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {"PATH": path, "HOME": str(folder), "ENDPOINT": address}
    for step in steps(PAGE.read_text(encoding="utf-8"), engine=engine):
        command = [sys.executable, "-c", step.command] if step.is_python else ["sh", "-c", step.command]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, f"line {step.line}: {step.command}\n{done.stdout}\n{done.stderr}"
        yield step, [line.rstrip() for line in done.stdout.rstrip("\n").splitlines()]


def record(engine: str, address: str) -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    with tempfile.TemporaryDirectory() as folder:
        played = list(play(engine, address, Path(folder)))
    for step, printed in reversed([each for each in played if each[0].expected is not None]):
        lines[step.line : step.line + len(step.expected or ())] = printed
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record(*sys.argv[1:])
