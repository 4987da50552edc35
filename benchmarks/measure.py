"""Measure time and peak memory of variants, and print the table; shared by the benchmark scripts."""

from __future__ import annotations

import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

GIB = 2**30


@dataclass
class Row:
    """The measurements of one variant, or a note on why there are none."""

    variant: str
    ms: float | None = None
    ms_spread: float | None = None
    ratio: float | None = None
    peak_gib: float | None = None
    extra_gib: float | None = None
    note: str = ""


def measure_all(
    steps: Mapping[str, Callable[[], object]], *, device: torch.device, rounds: int, base_bytes: int = 0
) -> list[Row]:
    """Time all variants once per round after a warm-up; the first variant is the baseline.

    The clock of a GPU drifts by more than the differences of interest, but hardly within a round. Therefore `ratio` is
    the median over rounds of a variant's time divided by the baseline's. Peak memory is measured in a separate pass;
    `extra_gib` is the peak above `base_bytes`.
    """
    rows = {name: _warm_up(name, step, device, base_bytes) for name, step in steps.items()}
    runnable = {name: step for name, step in steps.items() if not rows[name].note}
    times_ms: dict[str, list[float]] = {name: [] for name in runnable}
    for _ in range(rounds):
        for name, step in runnable.items():
            times_ms[name].append(_timed(step, device))
    floor = times_ms[next(iter(steps))]
    for name, measured in times_ms.items():
        rows[name].ms = statistics.median(measured)
        rows[name].ms_spread = max(measured) - min(measured)
        rows[name].ratio = statistics.median(ours / base for ours, base in zip(measured, floor, strict=True))
    return list(rows.values())


def _warm_up(name: str, step: Callable[[], object], device: torch.device, base_bytes: int) -> Row:
    """Run three untimed steps, and return a row with the peak memory of the last one."""
    row = Row(name)
    try:
        step()
        step()
        _synchronize(device)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        step()
        _synchronize(device)
    except (ImportError, torch.OutOfMemoryError) as error:
        row.note = f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
        return row
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
        row.peak_gib, row.extra_gib = peak / GIB, (peak - base_bytes) / GIB
    return row


def _timed(step: Callable[[], object], device: torch.device) -> float:
    _synchronize(device)
    started = time.perf_counter()
    step()
    _synchronize(device)
    return 1e3 * (time.perf_counter() - started)


def missing_peer(variant: str, error: ImportError) -> Row:
    return Row(variant, note=f"not installed ({str(error).splitlines()[0][:90]})")


def print_table(title: str, rows: Iterable[Row]) -> None:
    """Print a Markdown table. Ratios are relative to the first row, the baseline."""
    print(f"\n### {title}\n")
    print("| variant | ms (median) | spread | x floor (median over rounds) | peak GiB | extra GiB | note |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        cells = [_figure(row.ms, 2), _figure(row.ms_spread, 2), _figure(row.ratio, 3)]
        cells += [_figure(row.peak_gib, 2), _figure(row.extra_gib, 2), row.note]
        print(f"| {row.variant} | " + " | ".join(cells) + " |")


def save(path: str | None, name: str, settings: dict[str, object], rows: Iterable[Row]) -> None:
    """Append a JSON line with the settings, the machine and all rows to a file."""
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
