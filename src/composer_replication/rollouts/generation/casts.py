"""Copies of weights in half precision, which an autocast makes: made once a generation, and held for recordings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class Casts(TorchDispatchMode):
    """Inside, an autocast's copy of a weight is made once, and whoever asks again gets that: weights must not change.

    A recording has the copies' addresses. The ones that autocasts have in common are given back when an autocast ends
    in any other thread, and made again by the next pass: so a recording takes those that are held here. The model must
    not run in another thread meanwhile.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._weights = {parameter.data_ptr() for parameter in model.parameters()} - {0}
        self._held: dict[Any, Tensor] = {}
        self.were_recorded = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.ops.aten._to_copy.default or not self._is_cast(args[0], kwargs):
            return func(*args, **kwargs)
        weight: Tensor = args[0]
        key = weight.data_ptr(), weight.dtype, weight.shape, weight.stride(), *map(str, sorted(kwargs.items()))
        if key not in self._held:
            copy = func(*args, **kwargs)
            if weight.is_cuda and torch.cuda.is_current_stream_capturing():
                self.were_recorded = True
                return copy
            self._held[key] = copy
        return self._held[key].detach()  # the same memory; autograd writes on what it is given

    def _is_cast(self, source: Tensor, kwargs: dict[str, Any]) -> bool:
        """Of a weight, or of what an autocast takes for one, and to an autocast's type.

        Copies that a model makes by itself may be written to.
        """
        is_weight = source.data_ptr() in self._weights or (source.is_leaf and source.requires_grad)
        return is_weight and kwargs.get("dtype") == torch.get_autocast_dtype(source.device.type)


@contextmanager
def casts_kept(model: Any) -> Iterator[None]:
    """Inside, the copies in half precision that an autocast makes of trained weights are made once.

    A trainer with bf16 runs each pass in an autocast of its own, at whose end they go: each token's pass would make
    all of them again, and each recording hold its own. The weights must not change inside.
    """
    kind = model.device.type
    if not torch.amp.is_autocast_available(kind):
        yield
        return
    # As it is already, so that nothing changes but how deep passes are nested: copies go at the outermost one's end.
    with torch.autocast(kind, torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind)):
        yield
