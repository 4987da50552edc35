"""What one replica is asked to do, as JSON that says nothing it should not: entrypoints by name, secrets by name."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from composer_replication.diloco.serverless.replica_process import JOB_VARIABLE
from composer_replication.errors import InputError, explain

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MOST_JOB_BYTES = 100_000  # an environment variable of Linux holds 131,072


@dataclass(frozen=True, kw_only=True)
class ReplicaJob:
    """What one replica is asked to do. All of it is JSON; of secrets it holds the names."""

    entrypoint: str
    args: Mapping[str, Any]
    rank: int
    launch: str
    attempt: int = 0
    rank_env: str = "REPLICA_RANK"
    gpu: str | None = None
    timeout_s: float | None = None
    secrets: Sequence[str] = ()
    path: Sequence[str] = ()

    @property
    def name(self) -> str:
        """This one start of this replica: known before a service is asked, so that a lost answer loses no replica."""
        return start_name(self.launch, self.rank, self.attempt)

    def environment(self) -> dict[str, str]:
        """The variables that tell `replica_process` what to do."""
        return {JOB_VARIABLE: self.as_json(), self.rank_env: str(self.rank), "PYTHONUNBUFFERED": "1"}

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    def check(self) -> None:
        """InputError where a replica could not be started with this."""
        if not VARIABLE.fullmatch(self.rank_env):
            expected = "the name of an environment variable"
            raise InputError(explain("rank_env", got=repr(self.rank_env), expected=expected))
        for name, value in self.args.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError):
                fix = "Put it into the bucket or a file, and hand over where it is."
                got = type(value).__name__
                raise InputError(explain(f"entrypoint_args[{name!r}]", got=got, expected="JSON", fix=fix)) from None
        if (size := len(self.as_json().encode())) > _MOST_JOB_BYTES:
            fix = "Put what is large into the bucket, and hand over its key."
            expected = f"{_MOST_JOB_BYTES:,} at most"
            raise InputError(explain("entrypoint_args", got=f"{size:,} bytes", expected=expected, fix=fix))


def check_variables(secrets: Sequence[str], env: Mapping[str, str]) -> None:
    """InputError where a name is none, or a secret is also a variable that anybody may see."""
    for name in (*secrets, *env):
        if not VARIABLE.fullmatch(name):
            # Not what was got: it may be the value, put where its name belongs.
            expected = "names of environment variables, such as AWS_SECRET_ACCESS_KEY"
            raise InputError(explain("secrets and env", got="a name that is none", expected=expected))
    if twice := set(secrets) & env.keys():
        expected = "secrets by name alone, in `secrets`"
        raise InputError(explain("env", got=f"{', '.join(sorted(twice))}, a secret", expected=expected))


def start_name(launch: str, rank: int, attempt: int) -> str:
    """What a start is called in labels, tags, names of actors and command lines. It is no secret."""
    return f"{launch}.{rank}.{attempt}"


def entrypoint_name(entrypoint: str | Callable[..., Any], *, backend: str, takes_callables: bool) -> str:
    """The name that another process finds an entrypoint by."""
    if isinstance(entrypoint, str):
        if not all(part.isidentifier() for part in entrypoint.split(".")):
            raise InputError(explain("entrypoint", got=repr(entrypoint), expected="a module, or module.function"))
        return entrypoint
    if not takes_callables:
        expected = "a module or module.function that the replica's machine has installed"
        raise InputError(explain(f"entrypoint of {backend}", got="a callable", expected=expected))
    name, module = getattr(entrypoint, "__qualname__", ""), getattr(entrypoint, "__module__", "")
    if not inspect.isfunction(entrypoint) or not name.isidentifier():
        expected = "a function at the top of a module: the replica imports it by its name"
        raise InputError(explain("entrypoint", got=repr(entrypoint), expected=expected))
    if module != "__main__":
        return f"{module}.{name}"
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None:
        return f"{spec.name}.{name}"
    return f"{Path(getattr(main, '__file__', '')).resolve()}::{name}"
