"""Writes `tests/data/recipes/twenty_steps.*` anew: `python tests/recipes/record_twenty_steps.py`.

Recording samples rollouts; checking (`test_twenty_steps.py`) plays the recorded ones again, since another machine's
rounding would sample others.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    from recipes.recorded_steps import FOLDER, save_record
    from recipes.trl_steps import run

    with tempfile.TemporaryDirectory() as folder:
        recorder, names = run(Path(folder))
    save_record(recorder.batches, recorder.steps, names)
    for number, step in enumerate(recorder.steps, 1):
        print(f"{number:2} grpo {step.grpo:+.6f} sdpo {step.sdpo:.6f} grad {step.grad_norm:.4f}")
    print([len(each.sites) for each in recorder.batches], "sites")
    for path in sorted(FOLDER.iterdir()):
        print(path.name, path.stat().st_size)


if __name__ == "__main__":
    main()
