"""What a session had shown until now: which paths were there, and whether the last build had failed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from composer_replication.sites.classify import Before, Verdict
from composer_replication.sites.commands import Command, is_path
from composer_replication.sites.tools import channel_of, command_text, path_argument

_BUILDS = re.compile(
    r"\b(?:build|compile|make|cmake|gcc|g\+\+|clang|cargo|go|javac|tsc|webpack|vite|mvn|gradlew?|dotnet|npm run)\b"
)
_REMOVES = frozenset({"rm", "mv", "rmdir", "unlink", "git"})


class History:
    """Grows call by call. Paths are known by their ending, since a shell and a file tool name them differently."""

    def __init__(self) -> None:
        self._paths: set[str] = set()
        self._work_failed = False  # the last build, while none has worked since

    def before(self) -> Before:
        """As it stands now, for the next call."""
        return Before(existed=self._existed, work_failed=self._work_failed)

    def add(self, tool: str, arguments: Mapping[str, Any], verdict: Verdict) -> None:
        """A call and how it went."""
        command = Command.of(command_text(tool, arguments))
        if _BUILDS.search(command.text):
            self._work_failed = verdict.is_failure
        if verdict.is_failure:
            return
        if channel_of(tool) == "file":
            path = path_argument(arguments)
            if path:
                self._paths.add(path)
        elif command.only_shows:
            self._paths |= {word for word in command.words if is_path(word)}
        elif any(name in _REMOVES for name, _ in command.programs):
            self._paths -= {path for path in self._paths if any(path.endswith(word) for word in command.words)}

    def _existed(self, path: str) -> bool:
        return path in self._paths or any(known.endswith(f"/{path}") for known in self._paths)
