"""Ten thousand random and adversarial calls: none escapes, none raises, and a seed has one transcript."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from pathlib import Path

import pytest

from composer_replication.envs.workspace import Outcome, TestRunner, Workspace, generate_task
from composer_replication.envs.workspace.workspace import MAX_TEXT
from hostile_calls import hostile_calls

NUM_CALLS = 10_000 if os.environ.get("CRF_TEST_PROFILE") == "full" else 600
PER_SESSION = 200
DESCRIPTORS = Path("/proc/self/fd")
LONGEST = 100_000  # one Read; everything else is far shorter


@pytest.fixture(scope="module")
def runner():
    made = TestRunner(seconds=1)
    made.values({}, [])  # it is running: what the test compares is what calls change
    yield made
    made.close()


def state_of_this_process():
    return {
        "descriptors": len(list(DESCRIPTORS.iterdir())) if DESCRIPTORS.is_dir() else 0,
        "environment": dict(os.environ),
        "folder": Path.cwd(),
        "umask": _umask(),
        "path": list(sys.path),
        "modules": {name for name in sys.modules if name.startswith(("odd", "tests.test_odd"))},
        "limits": [resource.getrlimit(each) for each in (resource.RLIMIT_AS, resource.RLIMIT_CPU)],
        "signals": [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)],
        "builtins": (open, repr, type, sys.getrecursionlimit()),
    }


def _umask():
    now = os.umask(0)
    os.umask(now)
    return now


def transcript(seed, canary, runner):
    """Every outcome of the sessions of a seed, and what each was worth."""
    said = []
    for session in range(NUM_CALLS // PER_SESSION):
        task = generate_task(session, difficulty=("easy", "medium", "hard")[session % 3])
        workspace = Workspace(task, runner=runner, max_calls=PER_SESSION + 1)
        for name, arguments in hostile_calls(seed + session, PER_SESSION, task.files, canary):
            outcome = workspace.call(name, arguments)
            assert type(outcome) is Outcome
            assert type(outcome.text) is str
            assert len(outcome.text) <= max(LONGEST, MAX_TEXT)
            outcome.text.encode()
            said.append(outcome)
        assert all(not name.startswith(("/", "../")) and "/../" not in name for name in workspace.files)
        said.append(workspace.reward())
    return said


def test_calls_never_escape_never_raise_and_a_seed_has_one_transcript(tmp_path, runner, note):
    canary, beside = tmp_path / "canary", tmp_path / "beside"
    canary.write_text("alive")
    before, folder = state_of_this_process(), sorted(tmp_path.iterdir())
    started = time.perf_counter()
    first = transcript(7, str(canary), runner)
    seconds = time.perf_counter() - started
    assert canary.read_text() == "alive"
    assert sorted(tmp_path.iterdir()) == folder
    assert not beside.exists()
    assert transcript(7, str(canary), runner) == first
    after = state_of_this_process()
    # What tests before this one left open may be closed meanwhile; nothing may be left open by this one.
    assert after.pop("descriptors") <= before.pop("descriptors")
    assert after == before
    outcomes = [each for each in first if isinstance(each, Outcome)]
    kinds = {each.kind for each in outcomes if each.kind}
    assert {"file_not_found", "input_validation", "tool_not_found", "edit_not_read", "is_directory"} <= kinds
    assert 0.2 < sum(each.failed for each in outcomes) / len(outcomes) < 0.95
    note(f"hostile calls in the workspace: {len(outcomes)}, {len(outcomes) / seconds:.0f} a second ({runner.kind})")


def test_another_seed_is_another_transcript(tmp_path):
    task = generate_task(1)
    calls = [list(hostile_calls(seed, 50, task.files, str(tmp_path))) for seed in (1, 1, 2)]
    assert repr(calls[0]) == repr(calls[1]) != repr(calls[2])
