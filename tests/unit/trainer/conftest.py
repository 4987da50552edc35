"""Puts this folder and the helpers of the batch and objective tests on the import path."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "batch"), str(HERE.parent / "objective")]
