"""What `--round NAME=VALUE` takes: settings of the outer loop and of the rounds, with defaults and bounds.

A table of its own, so that whoever prints it loads no tensors; a test compares it with what the two are made of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from composer_replication.errors import InputError, explain

NUMBER, WHOLE, TRUTH, PAYLOAD = "a number", "a whole number", "true or false", "fp32, bf16, int8 or int4"


class RoundKey(NamedTuple):
    """One setting."""

    name: str
    kind: str
    default: Any  # None: what the text says
    text: str
    least: float = -math.inf


OUTER_KEYS = (
    RoundKey("sync_every", WHOLE, 100, "steps of each replica between two exchanges of one part of the model", 1),
    RoundKey("outer_lr", NUMBER, 0.7, "of the outer optimiser, which steps by the mean of what replicas learnt", 0),
    RoundKey("outer_momentum", NUMBER, 0.9, "of the outer optimiser", 0),
    RoundKey("nesterov", TRUTH, True, "whether that momentum is Nesterov's"),
    RoundKey("num_fragments", WHOLE, 1, "parts of the model, exchanged in turn; divides `sync_every`", 1),
    RoundKey("fragment_sync_delay", WHOLE, 0, "steps that a part may be on its way while training goes on", 0),
    RoundKey("fragment_update_alpha", NUMBER, 0.0, "share of its own weights that a replica keeps at an exchange", 0),
)
MANAGER_KEYS = (
    RoundKey("payload", PAYLOAD, "fp32", "how what was learnt travels"),
    RoundKey("mean_payload", PAYLOAD, None, "how the mean travels; default: as `payload`, bf16 for int8 and int4"),
    RoundKey("min_replicas", WHOLE, None, "without so many there is no round; default: half of them, rounded up", 1),
    RoundKey("grace_s", NUMBER, 30.0, "seconds that a round waits for those who are late, once it has a quorum", 0),
    RoundKey("first_grace_s", NUMBER, None, "the same before the first round; default: half of `timeout_s`", 0),
    RoundKey("timeout_s", NUMBER, 1800.0, "seconds after which a replica gives a round up, and fails", 0),
    RoundKey("poll_s", NUMBER, 1.0, "seconds between two looks at the bucket while it waits", 0),
    RoundKey(
        "lease_s", NUMBER, 20.0, "seconds without a sign of life after which a rank is free for another process", 0
    ),
    RoundKey("shard_bytes", WHOLE, 64 * 2**20, "bytes of one object, at most", 1),
    RoundKey("parallel", WHOLE, 4, "requests at once, each way", 1),
    RoundKey("state_every", WHOLE, 10, "exchanges between two states that one who is behind may load", 1),
    RoundKey("keep_rounds", WHOLE, 2, "exchanges whose offers are kept", 1),
)
ROUND_KEYS = {key.name: key for key in (*OUTER_KEYS, *MANAGER_KEYS)}


def split(given: Sequence[tuple[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of the outer loop, and of the rounds; InputError where one is unknown or holds something wrong."""
    if unknown := sorted({name for name, _ in given} - ROUND_KEYS.keys()):
        raise InputError(explain("--round", got=", ".join(unknown), expected=f"some of {', '.join(ROUND_KEYS)}"))
    for name, value in given:
        _check(ROUND_KEYS[name], value)
    settings = dict(given)
    outer = {key.name for key in OUTER_KEYS}
    return {name: settings[name] for name in settings if name in outer}, {
        name: settings[name] for name in settings if name not in outer
    }


def _check(key: RoundKey, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    is_right = {
        NUMBER: is_number,
        WHOLE: is_number and isinstance(value, int),
        TRUTH: isinstance(value, bool),
        PAYLOAD: value in ("fp32", "bf16", "int8", "int4"),
    }[key.kind]
    bound = "" if key.least == -math.inf else f", {key.least:g} or more"
    if not is_right or (is_number and value < key.least):
        raise InputError(explain(f"--round {key.name}", got=repr(value), expected=f"{key.kind}{bound}"))


def check_outer_loop(settings: Mapping[str, Any]) -> None:
    """What replicas would refuse of the outer loop before their first step, refused here."""
    from composer_replication.diloco.refusals import check_outer, check_schedule

    chosen = {key.name: key.default for key in OUTER_KEYS} | dict(settings)
    try:
        check_schedule(
            chosen["num_fragments"],
            sync_every=chosen["sync_every"],
            delay=chosen["fragment_sync_delay"],
            alpha=chosen["fragment_update_alpha"],
        )
        check_outer(lr=chosen["outer_lr"], momentum=chosen["outer_momentum"], nesterov=chosen["nesterov"])
    except InputError as error:
        message = explain(f"--round {error.what}", got=error.got, expected=error.expected, fix=error.fix)
        raise InputError(message) from None
