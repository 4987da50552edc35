"""Puts the helpers of the command-line and the training tests on the import path, and shares their small run."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), *(str(HERE.parent / name) for name in ("cli", "ingestion", "trainer"))]

from evaluation_runs import other, run  # noqa: E402, F401  (fixtures, once their folder is on the path)
from train_runs import folder  # noqa: E402, F401
