"""Puts the contract tests' folder on the path: the guide is read by the same code there and here."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "contract"))
