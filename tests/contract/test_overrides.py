"""Private methods of transformers' and TRL's trainers are overridden in one file, a line each, and nowhere else."""

from __future__ import annotations

import ast

from repository import SRC, python_files
from transformers import Trainer
from trl import GRPOTrainer

OVERRIDES = SRC / "composer_replication" / "trainer" / "overrides.py"
PRIVATE = {name for kind in (Trainer, GRPOTrainer) for name in dir(kind) if name[0] == "_" and name[:2] != "__"}


def methods(source: str):
    """The classes' functions by name, with the number of statements in each."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, ast.FunctionDef):
                    yield f"{node.name}.{each.name}", each.name, len(each.body)


def trainers(source: str) -> set[str]:
    """Classes of a file that stand on a trainer: they name one, or one of the classes that take its methods over."""
    known = {"Trainer", "GRPOTrainer", "_Trainer", "SafeCheckpoints", "WithTeacher", "TaughtRollouts"}
    if not any(name in source for name in known):
        return set()
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    return {node.name for node in classes if known & {getattr(base, "id", "") for base in node.bases}}


def test_every_override_is_one_line():
    found = [(where, size) for where, name, size in methods(OVERRIDES.read_text(encoding="utf-8")) if name in PRIVATE]
    assert len(found) >= 15
    assert [each for each in found if each[1] != 1] == []


def test_no_other_file_overrides_a_private_method():
    others = [path for path in python_files("src") if path != OVERRIDES]
    found = {path: names for path in others if (names := trainers(path.read_text(encoding="utf-8")))}
    assert {name for names in found.values() for name in names} == {"ComposerReplicationTrainer", "OfflineTrainer"}
    assert [
        where
        for path, names in found.items()
        for where, name, _ in methods(path.read_text(encoding="utf-8"))
        if name in PRIVATE and where.partition(".")[0] in names
    ] == []


def test_a_planted_override_is_seen():
    source = "class Mine(WithTeacher, Trainer):\n    def _save(self, a, b):\n        pass\n        pass\n"
    assert trainers(source) == {"Mine"}
    assert [(where, size) for where, name, size in methods(source) if name in PRIVATE] == [("Mine._save", 2)]
