"""How much of the package a run enters: files and functions, by package and in the order of first entry.

    python benchmarks/entered_code.py run     # `crf run` on the demo's 96 sessions with the embedded student, 4 steps
    python benchmarks/entered_code.py grpo    # two GRPO steps of the embedded student in the workspace, with channel 2
    python benchmarks/entered_code.py grpo --order   # also every function in the order of its first call

A reader who follows a run has to open these files. Counted are functions and methods that were called; importing a
module does not count, nor do lambdas, comprehensions and class bodies. The numbers go into `benchmarks/README.md`.
"""

from __future__ import annotations

import argparse
import collections
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import itertools

import composer_replication

PACKAGE = Path(composer_replication.__file__).parent
STEPS = {"run": 4, "grpo": 2}
# The most files and functions that a run should enter; None where only files are limited.
LIMITS: dict[str, tuple[int, int | None]] = {"run": (200, 1500), "grpo": (60, None)}


def main() -> int:
    """Trace one run, print its figures and return 1 if it enters more than the limits allow."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("subject", choices=("run", "grpo"))
    parser.add_argument("--order", action="store_true", help="list the functions in the order of their first call")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        start = {"run": pipeline_run, "grpo": grpo_steps}[args.subject](Path(folder))
        with entered_functions() as entered:
            start()
    functions = list(entered)
    if args.order:
        for code in functions:
            print(f"{module_path(code)}:{code.co_firstlineno} {code.co_qualname}")
    files = {module_path(code) for code in functions}
    packages = [module_path(code).partition("/")[0] for code in functions]
    switches = sum(before != after for before, after in itertools.pairwise(packages))
    by_package = collections.Counter(path.partition("/")[0] for path in files)
    print(", ".join(f"{name} {count}" for name, count in by_package.most_common()))
    print(f"{args.subject}: {len(files)} files, {len(functions)} functions, {switches} changes of package")
    max_files, max_functions = LIMITS[args.subject]
    return int(len(files) > max_files or (max_functions is not None and len(functions) > max_functions))


@contextmanager
def entered_functions() -> Iterator[dict[CodeType, None]]:
    """Yield the code objects of the package's functions, in the order of their first call, in any thread."""
    entered: dict[CodeType, None] = {}
    root = f"{PACKAGE}{os.sep}"

    def profile(frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        # Class bodies are code objects too, but without CO_NEWLOCALS (0x2) or without CO_OPTIMIZED (0x1).
        if event == "call" and code.co_filename.startswith(root) and code.co_flags & 1 and code.co_name[0] != "<":
            entered.setdefault(code)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield entered
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def module_path(code: CodeType) -> str:
    """Return the path of a function's file below the package."""
    return Path(code.co_filename).relative_to(PACKAGE).as_posix()


def pipeline_run(folder: Path) -> Callable[[], object]:
    """Write the demo's session logs and return the call of `crf run` on them."""
    from composer_replication.cli.demo import demo_logs
    from composer_replication.cli.main import main as crf

    logs = demo_logs(folder / "logs")
    options = [
        f"train.optimiser.steps={STEPS['run']}",
        "ingest.workers=1",
        "train.batch.budget=1536",
        "train.batch.overlap=64",
    ]
    settings = [word for option in options for word in ("--set", option)]
    return lambda: crf(["run", str(logs), "--model", "student", "-o", str(folder / "run"), *settings])


def grpo_steps(folder: Path) -> Callable[[], object]:
    """Return the training call of a trainer whose rollouts contain errors, so that channel 2 runs."""
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig

    from composer_replication import ComposerReplicationTrainer
    from composer_replication.envs.trl_environment import WorkspaceEnvironment, task_rows

    args = GRPOConfig(
        output_dir=str(folder),
        max_steps=STEPS["grpo"],
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=256,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        dataloader_pin_memory=False,
        seed=1,
    )
    trainer: Any = ComposerReplicationTrainer(
        model="student",
        args=args,
        reward_funcs=[],
        train_dataset=Dataset.from_list(task_rows(range(20_000, 20_008))),
        environment_factory=WorkspaceEnvironment,
        alpha_sdpo=0.1,
    )

    def train() -> None:
        trainer.train()
        losses = [row.get("loss/sdpo_kl") for row in trainer.state.log_history if "loss/total" in row]
        print(f"channel 2 by step: {losses}")
        if len(losses) != STEPS["grpo"] or None in losses:
            raise SystemExit("channel 2 did not run in every step, so these figures would leave its files out")

    return train


if __name__ == "__main__":
    sys.exit(main())
