"""The blocks of the guide that need another engine (`<!-- not run: needs ENGINE -->`), run where that engine is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from guide_pages import Step, steps

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "world-elsewhere.md"


def play(engine: str, address: str, folder: Path) -> Iterator[Step]:
    """Each step after it ran; `$ENDPOINT` of the page is this address."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {"PATH": path, "HOME": str(folder), "ENDPOINT": address}
    for step in steps(PAGE.read_text(encoding="utf-8"), engine=engine):
        command = [sys.executable, "-c", step.command] if step.is_python else ["sh", "-c", step.command]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, f"line {step.line}: {step.command}\n{done.stdout}\n{done.stderr}"
        yield step
