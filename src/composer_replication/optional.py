"""Import what may be missing: optional dependencies, and the objects that settings name as `package.module:name`.

If an optional dependency is missing, the error names the command that installs it.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from types import ModuleType, TracebackType
from typing import Any

from composer_replication.errors import InputError, MissingExtraError, explain

# What broken installs raise besides ImportError: a missing shared library (OSError), a binary built against another
# version of a dependency (ValueError, AttributeError, TypeError), a package's own start-up check (RuntimeError).
_BROKEN_INSTALL = (ImportError, OSError, RuntimeError, ValueError, AttributeError, TypeError)

# Extras with a separate set of pinned versions: its file in a clone, and the make target that installs and tests it.
_PINNED_SETS = {
    "monarch": ("constraints/monarch.txt", "make test-monarch"),
    "verl": ("constraints/verl.txt", "make test-verl"),
}
# Extras that pip cannot resolve, as the engines exclude versions that our core requires: the page with the commands.
_NOT_RESOLVED_BY_PIP = {"prime-rl": "recipes/prime_rl/README.md", "verl": "recipes/verl/README.md"}
# "my_rewards.code:score"; not "owner/dataset", "data.jsonl" or "verifiers:word-count"
_MODULE_AND_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def require(module: str, *, extra: str) -> ModuleType:
    """Import and return a module. Raises MissingExtraError, which names the extra to install or the reason why the
    import failed.
    """
    if "." not in module and not available(module):
        raise _missing(module, extra)
    try:
        return importlib.import_module(module)
    except _BROKEN_INSTALL as cause:
        if isinstance(cause, ModuleNotFoundError) and _is_or_contains(cause.name, module):
            raise _missing(module, extra) from None
        raise _broken(module, extra, cause) from cause


class importing:  # noqa: N801 - read as a statement: `with importing("verl", extra="verl"):`
    """A context manager around import statements of an optional package: if they fail, it raises the same errors as
    `require`.

    Unlike a call of `require`, import statements let type checkers see the imported names.
    """

    def __init__(self, package: str, *, extra: str) -> None:
        self._package, self._extra = package, extra

    def __enter__(self) -> None:
        if not available(self._package):
            raise _missing(self._package, self._extra)

    def __exit__(
        self, kind: type[BaseException] | None, cause: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A MissingExtraError comes from a module of ours that the package itself imports. It is clear as it is.
        if isinstance(cause, _BROKEN_INSTALL) and not isinstance(cause, MissingExtraError):
            raise _broken(self._package, self._extra, cause) from cause


def available(package: str) -> bool:
    """Return whether a top-level package can be imported, without importing it."""
    if "." in package:
        raise InputError(f"available() takes a top-level package, got {package!r}: a dotted name imports its parent")
    # find_spec raises for a loaded module without a __spec__. None in sys.modules blocks the import.
    if package in sys.modules:
        return sys.modules.get(package) is not None
    spec = importlib.util.find_spec(package)
    # A namespace package has no origin. Most often it is a folder in the working directory, such as `wandb/`.
    return spec is not None and spec.origin is not None


def is_object_name(text: str) -> bool:
    """Return whether a text has the form `package.module:name`."""
    return _MODULE_AND_NAME.fullmatch(text) is not None


def load_object(name: str, *, what: str, fix: str, error_class: type[InputError]) -> Any:
    """Import and return the object that `package.module:name` names.

    Raises `error_class`, with `what` in the message, if the name has another form or cannot be imported.
    """
    if not is_object_name(name):
        raise error_class(explain(what, got=repr(name), expected="package.module:name"))
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise error_class(
            explain(f"{what} {name}", got=str(error), expected="an importable package.module:name", fix=fix)
        ) from error


def load_function(module: str, name: str, *, what: str) -> Any:
    """Import a module and return one of its functions. Raises InputError, which mentions `what`, if the module has
    no such function.

    Errors raised by the import itself are passed on.
    """
    function = getattr(importlib.import_module(module), name, None)
    if function is None:
        raise InputError(explain(f"{what} {name}", got="no such function", expected=f"a function of {module}"))
    return function


def _missing(module: str, extra: str) -> MissingExtraError:
    return MissingExtraError(f"{module} is not installed. {_install_command(extra)}", name=module)


def _broken(module: str, extra: str, cause: BaseException) -> MissingExtraError:
    return MissingExtraError(
        f"{module} is installed, but importing it failed with {type(cause).__name__}: {cause}. "
        f"Repair it, or install the versions this package is tested with. {_install_command(extra)}",
        name=module,
    )


def _install_command(extra: str) -> str:
    """Return the sentence that says how to install an extra."""
    command = f'Type: pip install "composer-replication[{extra}]"'
    if extra in _NOT_RESOLVED_BY_PIP:
        command = f"pip cannot resolve its versions: {_NOT_RESOLVED_BY_PIP[extra]} has the commands"
    if extra not in _PINNED_SETS:
        return command
    constraints, target = _PINNED_SETS[extra]
    return f"{command}. In a clone, `{target}` creates a separate environment from {constraints}"


def _is_or_contains(missing: str | None, module: str) -> bool:
    """Return whether the missing module is the required one or a package that contains it.

    If it is neither, the required module is installed, but a module that it imports is missing.
    """
    return missing is not None and f"{module}.".startswith(f"{missing}.")
