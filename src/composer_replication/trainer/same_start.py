"""Ensure that all processes in a training begin with the same weights, tokenizer, sessions and settings.

Under FSDP's `cpu_ram_efficient_loading` only rank 0 reads the weights, and the other ranks hold zeros until the model
is sharded. Anything copied or computed from these zeros would be garbage, so those ranks get rank 0's weights here. If
a rank loaded different weights, an error names it. All ranks must call the functions in this module together.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
from torch import Tensor, distributed, nn

from composer_replication.errors import ConfigError, InputError, explain
from composer_replication.trainer.objective.distributed import is_sharded, unwrapped
from composer_replication.trainer.objective.fingerprint import (
    adapter_tensors,
    has_no_weights,
    trained_adapter_digest,
    weights_digest,
)

_FIX = "Use the same model, adapter and options on every rank, and set a seed for random weights."
_NO_WEIGHTS = "no weights"
_WAIT_SECONDS = 3.0


def _num_processes() -> int:
    """Return the number of processes that train together; 1 if there is no process group."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def launched_processes() -> int:
    """Return the number of processes that a launcher such as torchrun has started."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 1


def check_is_in_group(world_size: int) -> None:
    """Raise ConfigError if a launcher has started several processes, but they are not in one process group."""
    launched = launched_processes()
    if launched > 1 and world_size == 1:
        fix = (
            "Without an accelerator, transformers creates no process group: set TrainingArguments(use_cpu=True), as "
            "`crf train` does."
        )
        raise ConfigError(explain("processes in this training run", got=1, expected=launched, fix=fix))


def share_start_weights(model: nn.Module, *, what: str = "initial weights") -> None:
    """Copy rank 0's weights to ranks without weights, and check that all ranks have the same weights and adapter.

    An adapter that is still untrained is initialized at random, so it is copied from rank 0 as well. If ranks have
    other weights, InputError is raised on every rank and names them. A model that is already sharded is left unchanged.
    """
    if _num_processes() == 1 or is_sharded(model):
        return
    module = unwrapped(model)
    refuse_differences({f"shapes and dtypes of the {what}": _layout(module)}, fix=_FIX)
    is_empty = has_no_weights(module)
    digests = _gather(_NO_WEIGHTS if is_empty else weights_digest(module))
    if digests[0] == _NO_WEIGHTS:
        fix = "Load the weights at least on rank 0."
        raise InputError(explain(f"{what} on rank 0", got="only zeros", expected="loaded weights", fix=fix))
    _raise_if_different(what, [digests[0] if digest == _NO_WEIGHTS else digest for digest in digests], _FIX)
    # At least one rank has only zeros, so all ranks take part in the broadcast of rank 0's weights.
    if _NO_WEIGHTS in digests:
        _materialize(module)
        _broadcast([*module.parameters(), *module.buffers()], receives=is_empty)
        refuse_differences({what: weights_digest(module)}, fix=_FIX)
    adapters = _gather(trained_adapter_digest(module) or "")
    if not any(adapters):
        _broadcast(list(adapter_tensors(module).values()), receives=distributed.get_rank() != 0)
        return
    _raise_if_different(f"adapter on the {what}", [digest or "an untrained adapter" for digest in adapters], _FIX)


def refuse_missing_weights(model: nn.Module, *, what: str, fix: str) -> None:
    """Raise InputError on every rank if a model's weights are all zero on some ranks, and name those ranks."""
    if _num_processes() == 1:
        return
    empty = [rank for rank, text in enumerate(_gather(str(has_no_weights(unwrapped(model))))) if text == "True"]
    if empty:
        got = f"only zeros on rank{'s' if len(empty) > 1 else ''} {', '.join(map(str, empty))}"
        raise InputError(explain(what, got=got, expected="loaded weights", fix=fix))


def refuse_differences(about: Mapping[str, str], *, fix: str = "Start every rank with the same command.") -> None:
    """Raise InputError on every rank if a text differs between ranks, naming the ranks that differ from rank 0."""
    if _num_processes() == 1:
        return
    for what, text in about.items():
        _raise_if_different(what, _gather(text), fix)


def errors_of_ranks(text: str, *, is_own: bool) -> dict[int, str]:
    """Publish this rank's error in the launcher's store, and return another rank's error, keyed by that rank.

    The error is published only if `is_own` is set, since otherwise another rank's error may have caused it. Ranks other
    than 0 wait briefly for rank 0's error; rank 0 waits for any rank's, unless its own error is the cause. Returns {}
    if no error arrives in time, or if the store cannot be reached.
    """
    wait = timedelta(seconds=_WAIT_SECONDS)
    # A restarted job uses the same store, so keys contain the restart count.
    prefix = f"composer_replication/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/error/"
    try:
        rank, host, port = int(os.environ["RANK"]), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = distributed.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=wait)  # pyright: ignore[reportPrivateImportUsage]
        if is_own:
            # Rank 0 does not know which rank fails, so every error is also stored under "any".
            for key in (str(rank), "any"):
                store.set(f"{prefix}{key}", f"{rank} {text}")
        if is_own and rank == 0:
            return {}
        key = "0" if rank else "any"
        store.wait([f"{prefix}{key}"], wait)
        other_rank, _, message = store.get(f"{prefix}{key}").decode().partition(" ")
        return {int(other_rank): message}
    # KeyError and ValueError: no launcher. RuntimeError: no store, or no other rank has published an error in time.
    except (KeyError, ValueError, RuntimeError):
        return {}


def _raise_if_different(what: str, texts: Sequence[str], fix: str) -> None:
    differing_ranks = [rank for rank, text in enumerate(texts) if text != texts[0]]
    if differing_ranks:
        got = "; ".join(f"{_unique_lines(texts[rank], texts[0])} on rank {rank}" for rank in differing_ranks)
        expected = f"{_unique_lines(texts[0], texts[differing_ranks[0]])}, as on rank 0"
        raise InputError(explain(what, got=got, expected=expected, fix=fix))


def _unique_lines(text: str, other_text: str) -> str:
    """Return the lines of `text` that are not in `other_text`, as one text with shortened digests."""
    lines = sorted(set(text.splitlines()) - set(other_text.splitlines()))
    # SHA-256 digests have 64 characters; the first 12 are enough to distinguish two of them.
    return ", ".join(line[:12] if len(line) == 64 else line for line in lines) or "fewer entries"


def _layout(module: nn.Module) -> str:
    """Return a text with a model's tensor count, dtypes, and a digest of names and shapes.

    This must be the same on all ranks before weights are sent.
    """
    named_tensors = [*module.named_parameters(), *module.named_buffers()]
    dtypes = sorted(
        {str(tensor.dtype).removeprefix("torch.") for _, tensor in named_tensors if tensor.is_floating_point()}
    )
    rows = [f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in named_tensors]
    digest = hashlib.sha256("\n".join(sorted(rows)).encode()).hexdigest()
    return f"{len(named_tensors)} tensors in {' and '.join(dtypes)} ({digest[:12]})"


def _materialize(module: nn.Module) -> None:
    """Allocate memory on the CPU for a model on the meta device, without initializing it."""
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        module.to_empty(device="cpu")
        if hasattr(module, "tie_weights"):
            module.tie_weights()  # pyright: ignore[reportCallIssue]


@torch.no_grad()
def _broadcast(tensors: Sequence[Tensor], *, receives: bool) -> None:
    """Broadcast rank 0's tensors as bytes, one at a time. Ranks with a false `receives` keep their own values."""
    device = _device()
    for tensor in tensors:
        sent = tensor.detach().contiguous().to(device).reshape(-1).view(torch.uint8)
        # `broadcast` writes into the tensor on every rank, so ranks that keep their weights pass a copy.
        sent = sent.clone() if sent.data_ptr() == tensor.data_ptr() else sent
        distributed.broadcast(sent, src=0)
        if receives:
            tensor.detach().copy_(sent.view(tensor.dtype).reshape(tensor.shape))


def _gather(text: str) -> list[str]:
    """Gather one text from every rank, in rank order. Texts are sent as bytes, since torch would pickle objects."""
    device = _device()
    encoded = text.encode()
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(_num_processes())]
    distributed.all_gather(lengths, torch.tensor([len(encoded)], device=device))
    longest = max(int(length) for length in lengths)
    # `all_gather` needs tensors of the same length on all ranks, so texts are padded with zeros.
    rows = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in lengths]
    distributed.all_gather(rows, torch.tensor(list(encoded.ljust(longest, b"\0")), dtype=torch.uint8, device=device))
    return [bytes(row[: int(length)].tolist()).decode() for row, length in zip(rows, lengths, strict=True)]


def _device() -> torch.device:
    """Return the device for collectives: the CPU if the process group supports it, else this rank's accelerator."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or "cpu:" in distributed.get_backend_config():
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
