"""Puts the helpers of the batch, the command-line, the ingestion and the replay tests on the import path."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), *(str(HERE.parent / name) for name in ("batch", "cli", "ingestion", "teacher_replay"))]
