"""Puts the helpers of this folder and of the command-line and training tests on the import path."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), *(str(HERE.parent / name) for name in ("cli", "ingestion", "trainer", "evaluation"))]

from evaluation_runs import run  # noqa: E402, F401  (fixtures, once their folder is on the path)
from train_runs import folder  # noqa: E402, F401
