"""Optional dependencies: imported where they are used, with the command to type when they are not there."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

from composer_replication.errors import InputError, MissingExtraError

# What broken installs raise besides ImportError: a missing shared library (OSError), a binary built against another
# version of a dependency (ValueError, AttributeError, TypeError), a package's own start-up check (RuntimeError).
_BROKEN_INSTALL = (ImportError, OSError, RuntimeError, ValueError, AttributeError, TypeError)


def require(module: str, *, extra: str) -> ModuleType:
    """Import `module`, or raise MissingExtraError that names the extra to install or the reason the import failed."""
    if "." not in module and not available(module):
        raise _missing(module, extra)
    try:
        return importlib.import_module(module)
    except _BROKEN_INSTALL as cause:
        if isinstance(cause, ModuleNotFoundError) and _is_or_contains(cause.name, module):
            raise _missing(module, extra) from None
        raise MissingExtraError(
            f"{module} is installed, but importing it failed with {type(cause).__name__}: {cause}. "
            f"Repair that first; {_install_command(extra)} installs the versions this package is tested with",
            name=module,
        ) from cause


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
    return MissingExtraError(f"{module} is not installed. Type: {_install_command(extra)}", name=module)


def _install_command(extra: str) -> str:
    return f'pip install "composer-replication[{extra}]"'


def _is_or_contains(missing: str | None, module: str) -> bool:
    return missing is not None and f"{module}.".startswith(f"{missing}.")
