"""Starting PRIME-RL: what is registered before its orchestrator runs, and that `rl` finds ours first."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from composer_replication.errors import ConfigError, MissingExtraError
from composer_replication.recipes.prime_rl import start
from refusals import refusal

pytestmark = pytest.mark.full  # in `make test-prime` always
CONFIGS = Path(start.__file__).parent / "configs"
# A stand-in for the engine's package, by the paths that `hinted_turns` and `start` import.
ENGINE = {
    "orchestrator/algo/__init__.py": "class Grpo:\n    pass\n\n\nALGORITHM_CLASSES = {'grpo': Grpo}\n",
    "orchestrator/algo/base.py": "iter_trainable_traces = None\n",
    "orchestrator/trajectories.py": "iter_trainable_branches = None\n",
    "configs/algorithm.py": "FrozenModelConfig = None\n",
    "entrypoints/orchestrator.py": (
        "import sys\nfrom prime_rl.orchestrator.algo import ALGORITHM_CLASSES\n\n\n"
        "def main():\n    print(ALGORITHM_CLASSES['grpo'].__name__, *sys.argv)\n"
    ),
}


def write_engine(folder: Path) -> dict[str, str]:
    """The stand-in and its command `rl`; the variables by which both are found."""
    for name, text in ENGINE.items():
        path = folder / "prime_rl" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for package in {path.parent for path in (folder / "prime_rl").rglob("*.py")} | {folder / "prime_rl"}:
        (package / "__init__.py").touch()
    command = folder / "bin" / "rl"
    command.parent.mkdir()
    command.write_text('#!/bin/sh\necho "rl $@"\norchestrator "$@"\nexit 3\n', encoding="utf-8")
    command.chmod(0o755)
    source = str(Path(start.__file__).parents[3])
    path = os.pathsep.join([str(command.parent), os.environ["PATH"]])
    return {"PATH": path, "PYTHONPATH": os.pathsep.join([str(folder), source])}


def test_rl_starts_an_orchestrator_with_our_algorithm(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    """The one process that is started here is ours, by the name that `rl` calls it by."""
    for name, value in write_engine(tmp_path).items():
        monkeypatch.setenv(name, value)
    status = start.main(["--composer", str(CONFIGS / "composer.toml"), "rl", "@", "run.json", "--clean"])
    printed = capfd.readouterr().out.splitlines()
    assert printed == ["rl @ run.json --clean", "ComposerAlgorithm orchestrator @ run.json --clean"]
    assert status == 3, "the engine's own exit status"


def test_the_orchestrator_alone_is_the_engine_s_with_our_algorithm(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    write_engine(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["start"])
    for name in [each for each in sys.modules if each.partition(".")[0] == "prime_rl"]:
        monkeypatch.delitem(sys.modules, name)
    try:
        status = start.main(["orchestrator", "@", "orchestrator.json"])
    finally:
        for name in [each for each in sys.modules if each.partition(".")[0] == "prime_rl"]:
            del sys.modules[name]
    assert (status, capsys.readouterr().out) == (0, "ComposerAlgorithm orchestrator @ orchestrator.json\n")


def test_a_mistake_in_the_settings_is_told_before_anything_starts(tmp_path: Path) -> None:
    settings = tmp_path / "composer.toml"
    settings.write_text("alfa_sdpo = 0.1\n")
    with pytest.raises(ConfigError, match="alpha_sdpo"):
        start.main(["--composer", str(settings), "rl", "@", "rl.toml"])


def test_a_job_for_slurm_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"rl\.sbatch"):
        start.main(["rl", "@", str(CONFIGS / "rl_64.toml")])


def test_without_the_engine_its_absence_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with refusal(MissingExtraError, what="PRIME-RL", got="`rl`", fix="PRIME-RL"):
        start.main(["rl", "@", str(CONFIGS / "rl.toml")])


def test_the_command_tells_an_error_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "composer_replication.recipes.prime_rl.start", "rl", "@", str(CONFIGS / "rl.toml")]
    environment = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert re.match("MissingExtraError: .*PRIME-RL.*`rl`", done.stderr), done.stderr
    assert done.stderr.count("\n") == 1


def test_the_algorithm_takes_the_place_of_grpo_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    algo: Any = ModuleType("prime_rl.orchestrator.algo")
    algo.ALGORITHM_CLASSES = {"grpo": type("Grpo", (), {}), "opd": type("Opd", (), {})}
    others = {
        "prime_rl": ModuleType("prime_rl"),
        "prime_rl.orchestrator.algo": algo,
        "prime_rl.orchestrator.algo.base": SimpleNamespace(iter_trainable_traces=None),
        "prime_rl.orchestrator.trajectories": SimpleNamespace(iter_trainable_branches=None),
        "prime_rl.configs.algorithm": SimpleNamespace(FrozenModelConfig=None),
    }
    for name, module in others.items():
        monkeypatch.setitem(sys.modules, name, module)
    grpo, opd = algo.ALGORITHM_CLASSES.values()
    from composer_replication.recipes.prime_rl.hinted_turns import register

    made = register()
    assert list(algo.ALGORITHM_CLASSES.items()) == [("grpo", made), ("opd", opd)]
    assert issubclass(made, grpo)
