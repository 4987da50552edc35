"""The benchmark scripts run anywhere at a small size, and name a peer they cannot measure."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from warm_crf import python_command

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = {
    "jsd_kernel.py": ["--rows", "32", "--hidden", "16", "--vocab", "500"],
    "sdpo_step.py": ["--tiny"],
}
VARIANTS = (
    "ours: linear_divergence",
    "TRL ChunkedDivergence",
    "Liger chunked_loss (compiled)",
    "Liger Triton fused_linear_jsd",
    "dense",
)


@pytest.mark.parametrize("script", SMALL)
def test_the_script_prints_a_row_for_every_variant_and_a_reason_for_every_gap(script, tmp_path):
    figures = tmp_path / "figures.jsonl"
    command = [*python_command(), str(BENCHMARKS / script), *SMALL[script], "--device", "cpu", "--repeats", "3"]
    result = subprocess.run(
        [*command, "--json", str(figures)], capture_output=True, text=True, check=False, timeout=200
    )
    assert result.returncode == 0, result.stderr
    rows = {row["variant"]: row for row in json.loads(figures.read_text())["rows"]}
    for variant in VARIANTS:
        assert f"| {variant} |" in result.stdout
        assert rows[variant]["ms"] or rows[variant]["note"], variant
    assert rows["ours: linear_divergence"]["ms"] > 0
    assert rows["dense"]["ms"] > 0
