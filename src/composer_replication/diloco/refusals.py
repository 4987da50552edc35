"""What torchft's DiLoCo would get wrong without a word, refused before the first step with what to do instead."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from typing import Any

import torch

from composer_replication.diloco.fragments import Fragment
from composer_replication.errors import ConfigError, InputError, explain
from composer_replication.optional import require

_HALVES = (torch.bfloat16, torch.float16)
_log = logging.getLogger(__name__)


def check_schedule(num_fragments: int, *, sync_every: int, delay: int, alpha: float) -> None:
    """One fragment at a time, each after the same number of steps, and arrived before the next one leaves."""
    if num_fragments < 1:
        raise InputError(explain("model_fragments", got="none", expected="one module or more"))
    if sync_every < num_fragments or sync_every % num_fragments:
        nearest = num_fragments * max(1, round(sync_every / num_fragments))
        expected = f"a multiple of the number of fragments, {num_fragments}"
        raise InputError(explain("sync_every", got=sync_every, expected=expected, fix=f"Set {nearest}, say."))
    between = sync_every // num_fragments
    if not 0 <= delay < between:
        expected = f"0 to {between - 1}: a fragment leaves every {between} steps and has to be back before the next"
        raise InputError(explain("fragment_sync_delay", got=delay, expected=expected))
    if not 0 <= alpha <= 1:
        expected = "0 (take the new global weights) to 1 (keep the local ones)"
        raise InputError(explain("fragment_update_alpha", got=alpha, expected=expected))


def check_outer(*, lr: float, momentum: float, nesterov: bool) -> None:
    if not lr > 0:
        raise InputError(explain("outer_lr", got=lr, expected="above 0"))
    if not 0 <= momentum < 1:
        raise InputError(explain("outer_momentum", got=momentum, expected="0 or more, below 1"))
    if nesterov and momentum == 0:
        fix = "Set nesterov=False for plain averaging."
        raise InputError(explain("outer_momentum with nesterov", got=0, expected="above 0", fix=fix))


def check_fragments(fragments: Sequence[Fragment], inner_optimizer: torch.optim.Optimizer) -> None:
    """Every weight that the inner optimiser moves travels, once, in full precision."""
    owners: dict[tuple[Any, ...], str] = {}
    for number, fragment in enumerate(fragments):
        if not any(True for _ in fragment.parameters()):
            fix = "Leave it out, or unfreeze what should be trained."
            got = "no trainable parameter"
            raise InputError(explain(f"model_fragments[{number}]", got=got, expected="one or more", fix=fix))
        for name, weight in fragment.named_parameters():
            owner = f"{name} of fragment {number}"
            if weight.dtype in _HALVES:
                fix = "Outer steps would round to nothing: train model.float(), and compute under autocast."
                raise InputError(explain(owner, got=weight.dtype, expected="torch.float32", fix=fix))
            if (before := owners.setdefault(_memory_of(weight), owner)) != owner:
                fix = "Put tied weights into one fragment: they would be averaged and moved twice."
                raise InputError(explain(owner, got=f"the same weights as {before}", expected="its own", fix=fix))
    moved = [weight for group in inner_optimizer.param_groups for weight in group["params"] if weight.requires_grad]
    missed = [tuple(weight.shape) for weight in moved if _memory_of(weight) not in owners]
    if missed:
        fix = "Give all of the model: replicas would drift apart in the rest (diloco.fragments.split_into_fragments)."
        got = f"{len(missed)} of the inner optimiser's {len(moved)} parameters in no fragment, the first {missed[0]}"
        raise InputError(explain("model_fragments", got=got, expected="every parameter that it moves", fix=fix))


def _memory_of(parameter: torch.Tensor) -> tuple[Any, ...]:
    """Two parameters over one memory are tied as much as one parameter under two names is."""
    if not parameter.numel() or parameter.device.type == "meta" or not hasattr(parameter, "untyped_storage"):
        return (id(parameter),)
    return parameter.device, parameter.untyped_storage().data_ptr(), parameter.storage_offset()


def check_buckets(fragments: Sequence[Fragment]) -> None:
    """torchft packs buckets only where its environment variable asks; more than one of them come back mixed up.

    The callback of each bucket reads the variables of the last one, and tensors that did not fit are left out.
    """
    fragment_class = require("torchft.local_sgd", extra="diloco")._StreamingDiLoCoFragment
    name, cap = "TORCHFT_USE_BUCKETIZATION", fragment_class.bucket_cap_mb  # bytes, whatever it is called
    if os.environ.get(name) != "True":
        return
    for number, fragment in enumerate(fragments):
        dtypes = {weight.dtype for weight in fragment.parameters()}
        if fragment.num_bytes > cap or len(dtypes) > 1:
            got = f"{fragment.num_bytes:,} bytes of {len(dtypes)} dtypes"
            expected = f"one bucket: at most {cap:,} bytes of one dtype"
            fix = f"Unset {name}: torchft 0.2 averages wrongly over more than one bucket, without an error."
            raise ConfigError(explain(f"fragment {number} with {name}", got=got, expected=expected, fix=fix))


def check_manager(manager: Any) -> None:
    """A quorum before the weights leave, and for torchft's own manager a name that its peers can find."""
    if manager._use_async_quorum:
        fix = "Make it with use_async_quorum=False: who takes part has to be known before weights leave."
        raise InputError(explain("manager", got="an asynchronous quorum", expected="a synchronous one", fix=fix))
    if not isinstance(manager, require("torchft.manager", extra="diloco").Manager):
        return
    host = socket.gethostname()
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        fix = f"Add a line to /etc/hosts (the address that peers reach, then {host}), or set a name that resolves."
        got = f"{host}, which does not resolve ({error})"
        expected = "a name with an address: peers are sent to it, and gloo falls back to 127.0.0.1 without a word"
        raise ConfigError(explain("host name of this machine", got=got, expected=expected, fix=fix)) from error
    _log.warning(
        "torchft heals a replica by unpickling what a peer sends (checkpoint transport %s): whoever reaches its port "
        "can run code here. Use it between machines that trust each other; over a bucket nothing is unpickled.",
        type(manager._checkpoint_transport).__name__,
    )
