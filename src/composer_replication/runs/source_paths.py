"""How a sidecar names a source file: found again from the run, without the user's name that is in a home's path."""

from __future__ import annotations

from os.path import relpath
from pathlib import Path

_HOME = "~/"


def portable_name(path: Path, run: Path) -> str:
    """`path` from the run if it lies in it or beside it below the home directory, from `~` elsewhere in that directory.

    A path outside the home directory and the run stays absolute.
    """
    path, run = path.absolute(), run.resolve()
    if ".." in path.parts:  # `link/..` is not where its text says
        path = path.resolve()
    shared, homes = {run, *run.parents} & set(path.parents), _homes()
    if run in shared or any(home in folder.parents for home in homes for folder in shared):
        name = Path(relpath(path, run)).as_posix()
        return f"./{name}" if name.startswith("~") else name
    return next((_HOME + path.relative_to(home).as_posix() for home in homes if home in path.parents), str(path))


def find_source(name: str, run: Path) -> Path:
    """The path that `portable_name` gave this name."""
    homes = _homes()
    if homes and name.startswith(_HOME):
        return homes[0] / name.removeprefix(_HOME)
    return run.resolve() / name  # an absolute name stays what it is


def _homes() -> list[Path]:
    """The home directory as it is named and as it resolves; none where it is unknown or, as in some containers, `/`."""
    try:
        home = Path.home()
    except RuntimeError:
        return []
    return [path for path in (home, home.resolve()) if path.is_absolute() and path.parent != path]
