"""The entrypoint of a replica: join the run at a bucket, and call a trainer with its manager.

    python -m composer_replication.diloco.serverless.replica_entrypoint --rendezvous s3://bucket/run --world-size 4
        --trainer-module my_trainer --trainer-kwargs-json '{"steps": 100}'

The rank is read from REPLICA_RANK. Other parameters of the manager come from environment variables named CRF_DILOCO_
and the parameter in capitals (CRF_DILOCO_GRACE_S=60), or from `settings`, which takes precedence.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from composer_replication.errors import InputError, explain
from composer_replication.optional import load_function

__all__ = ["main"]

PREFIX = "CRF_DILOCO_"


def _truth(text: str) -> bool:
    return {"1": True, "true": True, "0": False, "false": False}[text.lower()]


SETTINGS: Mapping[str, Callable[[str], Any]] = {
    "generation": int,
    "min_replicas": int,
    "grace_s": float,
    "first_grace_s": float,
    "timeout_s": float,
    "poll_s": float,
    "lease_s": float,
    "takeover": _truth,
    "payload": str,
    "mean_payload": str,
    "shard_bytes": int,
    "parallel": int,
    "state_every": int,
    "keep_rounds": int,
}


def main(
    rendezvous_uri: str,
    world_size: int,
    trainer_module: str,
    trainer_fn: str = "train",
    trainer_kwargs: Mapping[str, Any] | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
) -> Any:
    """Call `trainer_fn(**trainer_kwargs, manager=..., rank=..., world_size=...)` as one replica. Its rank is read
    from REPLICA_RANK.
    """
    rank = _read_rank(os.environ, world_size)
    chosen = {**_read_settings(os.environ), **(settings or {})}
    if unknown := chosen.keys() - SETTINGS.keys():
        raise InputError(explain("settings", got=", ".join(sorted(unknown)), expected=f"some of {', '.join(SETTINGS)}"))
    train = load_function(trainer_module, trainer_fn, what="trainer")
    # Imported here because it loads torch, and the checks above should fail fast.
    from composer_replication.diloco.rounds.manager import ObjectStoreManager

    with ObjectStoreManager(rendezvous_uri, rank=rank, world_size=world_size, **chosen) as manager:
        return train(**(trainer_kwargs or {}), manager=manager, rank=rank, world_size=world_size)


def _read_rank(environment: Mapping[str, str], world_size: int) -> int:
    """Return the rank of this replica from the environment. Raises RuntimeError if it is not set, and ValueError if
    it is out of range.
    """
    text = environment.get("REPLICA_RANK")
    if text is None:
        fix = "Executors set it; for a replica that you start yourself: REPLICA_RANK=0."
        raise RuntimeError(explain("REPLICA_RANK", got="no such variable", expected="this replica's rank", fix=fix))
    if not text.isascii() or not text.isdigit() or int(text) >= world_size:
        raise InputError(explain("REPLICA_RANK", got=repr(text), expected=f"0 to {world_size - 1}"))
    return int(text)


def _read_settings(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of the manager from environment variables."""
    settings: dict[str, Any] = {}
    for name, read in SETTINGS.items():
        variable = f"{PREFIX}{name.upper()}"
        if (text := environment.get(variable)) is None:
            continue
        try:
            settings[name] = read(text)
        except (ValueError, KeyError):
            kind = "1 or 0" if read is _truth else "a whole number" if read is int else "a number"
            raise InputError(explain(variable, got=repr(text), expected=kind)) from None
    return settings


def _run(argv: Sequence[str] | None = None) -> None:
    """Run a replica from the command line, and print the trainer's result as JSON. Values that JSON cannot represent
    are printed as their `repr`.
    """
    parser = argparse.ArgumentParser(description="Run one replica of a DiLoCo run.", allow_abbrev=False)
    parser.add_argument("--rendezvous", required=True, metavar="URI", help="bucket or folder that all replicas share")
    parser.add_argument("--world-size", required=True, type=int, metavar="N", help="number of replicas")
    parser.add_argument("--trainer-module", required=True, metavar="MODULE", help="module of the trainer")
    parser.add_argument("--trainer-fn", default="train", metavar="NAME", help="its function (default: train)")
    parser.add_argument(
        "--trainer-kwargs-json",
        type=json.loads,
        default={},
        metavar="JSON",
        help="keyword arguments of the trainer, as JSON",
    )
    args = parser.parse_args(argv)
    value = main(args.rendezvous, args.world_size, args.trainer_module, args.trainer_fn, args.trainer_kwargs_json)
    print(json.dumps(value, default=repr))


if __name__ == "__main__":
    _run()
