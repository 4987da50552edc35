"""Puts this folder and the log builders of the ingestion tests on the import path."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "ingestion")]

from train_runs import folder, train  # noqa: E402, F401  (fixtures, once their folder is on the path)
