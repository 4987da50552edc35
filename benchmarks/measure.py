"""Timing, peak memory and the printed table; shared by the benchmark scripts."""

from __future__ import annotations

import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

GIB = 2**30


@dataclass
class Row:
    """One variant's figures; `note` says why there are none."""

    variant: str
    ms: float | None = None
    ms_spread: float | None = None
    peak_gib: float | None = None
    extra_gib: float | None = None
    note: str = ""


def measure(
    variant: str, step: Callable[[], object], *, device: torch.device, repeats: int, base_bytes: int = 0
) -> Row:
    """Median time of `repeats` steps after two warm-up steps; `extra_gib` is the peak above `base_bytes`."""
    try:
        for _ in range(2):
            step()
        _synchronize(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times_ms = []
        for _ in range(repeats):
            _synchronize(device)
            started = time.perf_counter()
            step()
            _synchronize(device)
            times_ms.append(1e3 * (time.perf_counter() - started))
    except (ImportError, torch.OutOfMemoryError) as error:
        return Row(variant, note=f"{type(error).__name__}: {str(error).splitlines()[0][:90]}")
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    row = Row(variant, ms=statistics.median(times_ms), ms_spread=max(times_ms) - min(times_ms))
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
        row.peak_gib, row.extra_gib = peak / GIB, (peak - base_bytes) / GIB
    return row


def missing_peer(variant: str, error: ImportError) -> Row:
    return Row(variant, note=f"not installed ({str(error).splitlines()[0][:90]})")


def print_table(title: str, rows: Iterable[Row], floor: str | None = None) -> None:
    """A Markdown table; with a `floor` variant, times relative to it too."""
    rows = list(rows)
    floor_ms = next((row.ms for row in rows if row.variant == floor), None)
    print(f"\n### {title}\n")
    print("| variant | ms (median) | spread | x floor | peak GiB | extra GiB | note |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        ratio = row.ms / floor_ms if row.ms and floor_ms else None
        cells = [_figure(row.ms, 2), _figure(row.ms_spread, 2), _figure(ratio, 3)]
        cells += [_figure(row.peak_gib, 2), _figure(row.extra_gib, 2), row.note]
        print(f"| {row.variant} | " + " | ".join(cells) + " |")


def save(path: str | None, name: str, settings: dict[str, object], rows: Iterable[Row]) -> None:
    """Append one JSON line with the settings, the machine and every row."""
    if path is None:
        return
    record = {"bench": name, "settings": settings, "machine": machine(), "rows": [asdict(row) for row in rows]}
    with Path(path).open("a") as out:
        out.write(json.dumps(record) + "\n")


def machine() -> dict[str, str]:
    accelerator = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    return {"python": platform.python_version(), "torch": torch.__version__, "accelerator": accelerator}


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
