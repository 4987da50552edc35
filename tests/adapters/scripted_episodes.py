"""Twenty episodes as scripts of calls, and what became of them: the same in every engine that the world runs in.

Every call here can be said in all of them (TRL calls methods: an unknown tool never reaches the world there).
`python tests/adapters/scripted_episodes.py` records the digests anew, where the world was meant to change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_replication.envs.workspace import Difficulty, Task, Workspace, generate_task

RECORDED = Path(__file__).with_name("episodes.json")
NUM_EPISODES, MAX_CALLS = 20, 16
DIFFICULTIES: tuple[Difficulty, ...] = ("easy", "medium", "hard")
Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Script:
    """An agent that looks at nothing: the calls it makes in this task."""

    style: str
    seed: int
    difficulty: Difficulty
    calls: tuple[Call, ...]

    @property
    def name(self) -> str:
        return f"{self.style}-{self.difficulty}-{self.seed}"


def scripts() -> list[Script]:
    made = []
    for seed in range(NUM_EPISODES):
        difficulty = DIFFICULTIES[(seed + seed // len(STYLES)) % 3]
        style = list(STYLES)[seed % len(STYLES)]
        calls = tuple(STYLES[style](generate_task(seed, difficulty=difficulty)))
        made.append(Script(style=style, seed=seed, difficulty=difficulty, calls=calls))
    return made


def expert(task: Task) -> Iterator[Call]:
    yield "LS", {"path": Workspace.root}
    yield from _solving(task)
    yield "RunTests", {}
    yield "Finish", {}


def careless(task: Task) -> Iterator[Call]:
    path = _path(task)
    yield "Read", {"file_path": f"{path}x"}
    yield "Edit", {"file_path": path, "old_string": "a", "new_string": "b"}
    yield "Read", {"file_path": path}
    yield "Edit", {"file_path": path, "old_string": "no such text", "new_string": "b"}
    yield "Edit", {"file_path": path, "old_string": "same", "new_string": "same"}
    yield "Edit", {"file_path": path, "old_string": " ", "new_string": "\t"}
    yield "RunTests", {}
    yield from _solving(task)
    yield "Finish", {}


def searcher(task: Task) -> Iterator[Call]:
    yield "Glob", {"pattern": "**/*.py"}
    yield "Grep", {"pattern": "def ", "path": Workspace.root}
    yield "Grep", {"pattern": "("}
    yield "Read", {"file_path": Workspace.root}
    yield "Read", {"file_path": _path(task), "offset": 2, "limit": 1}
    yield "LS", {"path": "/etc"}
    yield "Write", {"file_path": "/etc/passwd", "content": "mine"}
    yield "Write", {"file_path": f"{Workspace.root}/notes.md", "content": "Später: prüfen\n"}
    yield "Finish", {}


def breaker(task: Task) -> Iterator[Call]:
    path = _path(task)
    yield "Read", {"file_path": path}
    yield "Write", {"file_path": path, "content": "def ("}
    yield "RunTests", {}


def stubborn(task: Task) -> Iterator[Call]:
    for number in range(MAX_CALLS):
        yield "Read", {"file_path": _path(task), "offset": number + 1, "limit": 1}


def hurried(task: Task) -> Iterator[Call]:
    """The first half of the work: where there is more than one edit, part of the reward."""
    calls = list(_solving(task))
    yield from calls[: max(2, len(calls) // 2)]
    yield "Finish", {}
    yield "Read", {"file_path": _path(task)}


STYLES = {each.__name__: each for each in (expert, careless, searcher, breaker, stubborn, hurried)}


def _path(task: Task) -> str:
    return f"{Workspace.root}/{task.solution[0].path}"


def _solving(task: Task) -> Iterator[Call]:
    for edit in task.solution:
        path = f"{Workspace.root}/{edit.path}"
        if edit.old:
            yield "Read", {"file_path": path}
            yield "Edit", {"file_path": path, "old_string": edit.old, "new_string": edit.new}
        else:
            yield "Write", {"file_path": path, "content": edit.new}


def happened(name: str, arguments: object, outcome: Any) -> dict[str, Any]:
    """A call with its outcome as plain data; engines that do not show a failure's kind leave it out."""
    return {"name": name, "arguments": arguments, "text": outcome.text, "failed": outcome.failed, "kind": outcome.kind}


def played_alone(script: Script) -> tuple[list[dict[str, Any]], float]:
    """The episode without any engine: every call's outcome, and the reward."""
    workspace = Workspace(generate_task(script.seed, difficulty=script.difficulty), max_calls=MAX_CALLS)
    calls = [happened(name, arguments, workspace.call(name, arguments)) for name, arguments in script.calls]
    return calls, workspace.reward().value


def digest(calls: Sequence[dict[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(calls, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]


def record(script: Script, calls: Sequence[dict[str, Any]], reward: float) -> dict[str, Any]:
    return {"episode": script.name, "calls": len(calls), "reward": reward, "digest": digest(calls)}


def recorded() -> list[dict[str, Any]]:
    return json.loads(RECORDED.read_text(encoding="utf-8"))


if __name__ == "__main__":
    lines = [json.dumps(record(script, *played_alone(script))) for script in scripts()]
    RECORDED.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
