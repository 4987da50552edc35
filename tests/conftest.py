"""Settings of every test: how long the property tests run, how many threads, which seed, where the shared files are."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from warm_crf import share_servers

# Read by torch when it is imported, which the light tests never do. A second thread makes small tensors slow: it waits
# by spinning, and where processes share the cores that is several times the work (a suite of 20 s took 100 s of CPU).
os.environ.setdefault("OMP_NUM_THREADS", "1")

NUM_EXAMPLES = {"ci": 15, "full": 1000}
PROFILE = os.environ.get("CRF_TEST_PROFILE", "ci")
SEED = 0
SHARED = Path(__file__).resolve().parents[1].parent / "shared"
NOTES = pytest.StashKey[list[str]]()

# Files that take longest come first, so that no process is left with one when the others are done; in seconds, on two
# busy cores:
LONG_FILES = (
    "test_guides.py",  # 206
    "test_run_killed.py",
    "test_twenty_steps.py",
    "test_fast_rollouts.py",
    "test_channels_teach.py",
    "test_warmup.py",
    "test_composer_channels.py",
    "test_cli_pairs.py",
    "test_vllm_contract.py",
    "test_memory_is_flat.py",
    "test_no_secret_gets_out.py",  # 31
    "test_workspace_world.py",
    "test_hint_controls.py",
    "test_wheel.py",
    "test_bucket_faults.py",
    "test_composer_parity.py",
    "test_triton_interpreter.py",
    "test_replay.py",
    "test_targets_are_generated.py",
    "test_rounds_manager.py",
    "test_cli_diloco.py",  # 20
    "test_replay_load.py",
    "test_fault_server_load.py",
    "test_fuzz_claude.py",
    "test_offline_processes.py",
    "test_composer_figures.py",
    "test_train.py",
    "test_claude_mutations.py",
    "test_replica_trainers.py",
    "test_train_warmup.py",
    "test_train_examples.py",  # 16
    "test_replay_kill.py",
    "test_damaged_documents.py",
    "test_token_rows_training.py",
    "test_train_interrupts.py",
    "test_composer_processes.py",
    "test_collator_cuts.py",
    "test_replay_at_once.py",
    "test_kill_trainers.py",
    "test_replay_order.py",
    "test_offline_resume.py",  # 13
    "test_resume_with_dropout.py",
    "test_checkpoint_resume.py",
    "test_generator.py",
    "test_scrub_scope.py",
    "test_planted_secrets_are_well_formed.py",
    "test_ablation_jobs.py",
    "test_hostile_actions.py",  # 11
)

for _name, _count in NUM_EXAMPLES.items():
    settings.register_profile(_name, derandomize=True, deadline=None, max_examples=_count)
if PROFILE not in NUM_EXAMPLES:
    raise pytest.UsageError(f"CRF_TEST_PROFILE: got {PROFILE!r}, expected one of {sorted(NUM_EXAMPLES)}")
settings.load_profile(PROFILE)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[NOTES] = []
    if getattr(config.option, "numprocesses", None):  # of pytest-xdist
        share_servers()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: at for at, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


def pytest_collection_finish() -> None:
    """What thousands of tests and their modules hold stays: no collection of garbage need look at it again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries look for leaks when the process ends


def pytest_sessionfinish(session: pytest.Session) -> None:
    handed_over: dict[str, object] | None = getattr(session.config, "workeroutput", None)
    if handed_over is not None:  # a process of pytest-xdist, whose terminal is another process's
        handed_over["notes"] = session.config.stash[NOTES]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[NOTES] += getattr(node, "workeroutput", {}).get("notes", [])


def pytest_report_header() -> str:
    return _profile_line()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not terminalreporter.showheader:  # `pytest -q` prints no header, and a count is never cut silently
        terminalreporter.write_line(_profile_line())
    for line in config.stash[NOTES]:
        terminalreporter.write_line(line)


def _profile_line() -> str:
    threads = os.environ["OMP_NUM_THREADS"]
    line = f"test profile {PROFILE}: {NUM_EXAMPLES[PROFILE]} examples per property, torch threads: {threads}"
    return line if PROFILE == "full" else f"{line} (make test-full: {NUM_EXAMPLES['full']} examples)"


@pytest.fixture(autouse=True)
def _same_random_numbers_in_any_order() -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(SEED)


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Prints a line after the run, passed or failed: a count that was cut, a figure that was measured."""
    return request.config.stash[NOTES].append


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of golden vectors and design pages beside the checkout; tests that need it are skipped without it."""
    if not SHARED.is_dir():
        pytest.skip("no shared/ folder beside this checkout")
    return SHARED
