"""Optional dependencies: imported where they are used, with the command to type when they are not there."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType, TracebackType

from composer_replication.errors import InputError, MissingExtraError

# What broken installs raise besides ImportError: a missing shared library (OSError), a binary built against another
# version of a dependency (ValueError, AttributeError, TypeError), a package's own start-up check (RuntimeError).
_BROKEN_INSTALL = (ImportError, OSError, RuntimeError, ValueError, AttributeError, TypeError)


# Extras that have a tested set of their own: its file in a clone, and the target that installs it and runs the tests.
_OWN_SETS = {
    "monarch": ("constraints/monarch.txt", "make test-monarch"),
    "verl": ("constraints/verl.txt", "make test-verl"),
}
# What pip cannot work out by itself: these engines' bounds exclude versions that our own core asks for.
_NO_SET_FOR_PIP = {"prime-rl": "recipes/prime_rl/README.md", "verl": "recipes/verl/README.md"}


def require(module: str, *, extra: str) -> ModuleType:
    """Import `module`, or raise MissingExtraError that names the extra to install or the reason the import failed."""
    if "." not in module and not available(module):
        raise _missing(module, extra)
    try:
        return importlib.import_module(module)
    except _BROKEN_INSTALL as cause:
        if isinstance(cause, ModuleNotFoundError) and _is_or_contains(cause.name, module):
            raise _missing(module, extra) from None
        raise _broken(module, extra, cause) from cause


class importing:  # noqa: N801 - read as a statement: `with importing("verl", extra="verl"):`
    """Around import statements of a package: they fail as `require` does, and keep their types and their form."""

    def __init__(self, package: str, *, extra: str) -> None:
        self._package, self._extra = package, extra

    def __enter__(self) -> None:
        if not available(self._package):
            raise _missing(self._package, self._extra)

    def __exit__(
        self, kind: type[BaseException] | None, cause: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # One that is explained already comes from a module of ours which the package itself imported.
        if isinstance(cause, _BROKEN_INSTALL) and not isinstance(cause, MissingExtraError):
            raise _broken(self._package, self._extra, cause) from cause


def available(package: str) -> bool:
    """Whether a top-level package can be imported, found out without importing it."""
    if "." in package:
        raise InputError(f"available() takes a top-level package, got {package!r}: a dotted name imports its parent")
    if package in sys.modules:  # find_spec refuses modules without a __spec__; None there means "blocked"
        return sys.modules.get(package) is not None
    spec = importlib.util.find_spec(package)
    # No origin is a namespace package: most often a folder of that name in the working directory, such as `wandb/`.
    return spec is not None and spec.origin is not None


def _missing(module: str, extra: str) -> MissingExtraError:
    return MissingExtraError(f"{module} is not installed. {_what_to_type(extra)}", name=module)


def _broken(module: str, extra: str, cause: BaseException) -> MissingExtraError:
    return MissingExtraError(
        f"{module} is installed, but importing it failed with {type(cause).__name__}: {cause}. "
        f"Repair that first. The versions this package is tested with: {_what_to_type(extra)}",
        name=module,
    )


def _what_to_type(extra: str) -> str:
    command = f'Type: pip install "composer-replication[{extra}]"'
    if extra in _NO_SET_FOR_PIP:
        command = f"pip finds no set of versions for it by itself: {_NO_SET_FOR_PIP[extra]} has the commands to type"
    if extra not in _OWN_SETS:
        return command
    constraints, target = _OWN_SETS[extra]
    return f"{command}. In a clone, `{target}` makes an environment of its own from {constraints}"


def _is_or_contains(missing: str | None, module: str) -> bool:
    return missing is not None and f"{module}.".startswith(f"{missing}.")
