"""Run verl's engine on a machine without a GPU, for tests and experiments, not for real training.

verl accesses the device only through a platform object. This one describes the CPU: the device is `cpu`, collectives
use gloo, memory statistics are zero. verl registers its engines only for `cuda`, so the engine lookup gets that name.
Environment variables (`ENVIRONMENT`) select all of this; set them before verl is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from composer_replication.optional import importing

with importing("verl", extra="verl"):
    from verl.plugin.platform import PlatformBase, PlatformRegistry

NAME = "composer-cpu"
ENVIRONMENT = {"VERL_USE_EXTERNAL_MODULES": __name__, "VERL_PLATFORM": NAME, "VERL_ENGINE_DEVICE": "cuda"}
"""Environment variables for a process on the CPU; `__name__` is the path of this module, which verl imports."""


class _NoDeviceMemory(ModuleType):
    """A stand-in for `torch.cpu` that adds the memory functions of `torch.cuda` that engines call. It reports that
    no device memory is in use.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, *_device: object) -> str:
        return "CPU"

    def get_rng_state(self, *_device: object) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, *_device: object) -> None:
        torch.set_rng_state(state)

    def max_memory_allocated(self, *_device: object) -> int:
        return 0

    # All of them are statistics of device memory, which is zero here.
    max_memory_reserved = memory_allocated = memory_reserved = max_memory_allocated

    def mem_get_info(self, *_device: object) -> tuple[int, int]:
        return 0, 0

    def empty_cache(self) -> None:
        return None

    def reset_peak_memory_stats(self, *_device: object) -> None:
        return None

    def set_device(self, *_device: object) -> None:
        return None


@PlatformRegistry.register(platform=NAME)
class _CpuPlatform(PlatformBase):
    """A verl platform object that describes the CPU."""

    _module = _NoDeviceMemory("composer_cpu_device")

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return NAME

    @property
    def device_module(self) -> ModuleType:
        return self._module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:  # noqa: ARG002
        """Return False, so that this platform is never selected automatically: a machine whose GPU is not found must
        not silently train on its CPU.
        """
        return False

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:  # noqa: ARG002
        return None

    def synchronize(self, device_index: int | None = None) -> None:  # noqa: ARG002
        return None

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:  # noqa: ARG002
        return None

    def empty_cache(self) -> None:
        return None

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:  # noqa: ARG002
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        # verl reads and writes this variable even without a GPU; on the CPU it has no effect.
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:  # noqa: ARG002
        yield

    def profiler_start(self) -> None:
        return None

    def profiler_stop(self) -> None:
        return None

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_cpus": num_gpus}

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
