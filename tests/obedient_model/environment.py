"""The world's tools for a trainer that runs them: an environment in TRL's sense."""

from __future__ import annotations

from obedient_model.tasks import KIND_OF, WORKED


class ToyEnvironment:
    """One task. Only the right call works; any other raises what the tool complains about."""

    def __init__(self) -> None:
        self._kind, self._has_worked = next(iter(KIND_OF.values())), False

    def reset(self, *, kind: str, **_row: object) -> None:
        self._kind, self._has_worked = KIND_OF[kind], False

    def get_reward(self) -> float:
        return float(self._has_worked)

    def _called(self, name: str, **arguments: str) -> str:
        complaint = self._kind.complaint(name, arguments)
        if complaint is not None:
            raise ValueError(complaint)
        self._has_worked = True
        return WORKED

    def grep(self, path: str) -> str:
        """The tool grep.

        Args:
            path: path
        """
        return self._called("grep", path=path)

    def scan(self, path: str) -> str:
        """The tool scan.

        Args:
            path: path
        """
        return self._called("scan", path=path)

    def load(self, path: str) -> str:
        """The tool load.

        Args:
            path: path
        """
        return self._called("load", path=path)

    def read(self, path: str, mode: str = "text") -> str:
        """The tool read.

        Args:
            path: path
            mode: mode
        """
        return self._called("read", path=path, mode=mode)

    def save(self, path: str, folder: str = "temp") -> str:
        """The tool save.

        Args:
            path: path
            folder: folder
        """
        return self._called("save", path=path, folder=folder)
