"""Modules of an engine's recipe where that engine is not installed: which are there, and what the others say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from composer_replication import optional
from composer_replication.recipes import verl

ROOT = Path(__file__).parents[2]
WITHOUT_VERL = {"channel_loss", "columns"}
WHAT_TO_TYPE = ("recipes/verl/README.md", "`make test-verl`", "constraints/verl.txt")
LOOK = """
import json, sys
from importlib import import_module
sys.modules["verl"] = None
said = {}
for name in sys.argv[1:]:
    try:
        import_module(f"composer_replication.recipes.verl.{name}")
    except ImportError as error:
        said[name] = [type(error).__name__, error.name, str(error)]
print(json.dumps(said))
"""


def test_each_module_that_needs_verl_says_how_to_get_it():
    modules = sorted(path.stem for path in Path(verl.__path__[0]).glob("[!_]*.py"))
    look = [sys.executable, "-c", LOOK, *modules]
    result = subprocess.run(look, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)
    assert said.keys() == set(modules) - WITHOUT_VERL
    assert len(said) == 5
    for kind, missing, message in said.values():
        assert (kind, missing) == ("MissingExtraError", "verl")
        assert all(name in message for name in WHAT_TO_TYPE), message
        assert "pip install" not in message  # which finds no set of versions


def test_the_files_and_targets_that_are_named_are_there():
    targets = {line.split(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if line[:1].isalpha()}
    for constraints, target in optional._PINNED_SETS.values():
        assert (ROOT / constraints).is_file()
        assert target.removeprefix("make ") in targets
    for readme in optional._NOT_RESOLVED_BY_PIP.values():
        assert "--no-deps" in (ROOT / "src/composer_replication" / readme).read_text()
