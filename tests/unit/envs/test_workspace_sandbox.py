"""What code that runs in the sandbox can reach, what it leaves behind, and what a run costs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

from composer_replication.envs.workspace import TestRunner, Workspace, generate_task, sandbox
from composer_replication.envs.workspace.sandbox import _command
from composer_replication.errors import InputError, SandboxError
from refusals import refusal

PROBE = """
import os

def attempt(code):
    space = {}
    try:
        exec(code, space)
        return str(space.get("out", "done"))[:300]
    except BaseException as error:
        return type(error).__name__
"""
WALLS = ("namespaces", "rlimits")


@cache
def runner(kind):
    try:
        made = TestRunner(kind=kind, seconds=1)
        assert made.kind == kind
    except SandboxError as error:
        pytest.skip(f"this machine has no such wall: {error}")
    return made


def attempt(kind, code):
    (value,) = runner(kind).values({"probe.py": PROBE}, [("probe", f"attempt({code!r})")]) or ["no answer"]
    return value


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import os; out = dict(os.environ)", "'{}'"),
        ("import os; out = os.fork()", "'BlockingIOError'"),
        ("import threading; t = threading.Thread(target=print); t.start()", "'RuntimeError'"),
        ("out = [0] * 10**9", "'MemoryError'"),
        ("import os; open(os.__file__, 'a')", "'PermissionError'"),
        ("import os; out = os.getuid() == 0", "'False'"),
        ("import os; os.setuid(0)", "'PermissionError'"),
        ("import os; os.chroot('.')", "'PermissionError'"),
        ("import os; [os.fstat(n) for n in range(8, 64)]", "'OSError'"),
        ("open('large', 'w').write('x' * 2**21)", "'OSError'"),
        ("out = open('probe.py').read(12)", r"'\nimport os\n\n'"),
    ],
)
@pytest.mark.parametrize("kind", WALLS)
def test_what_code_can_reach_behind_any_wall(kind, code, expected):
    assert attempt(kind, code) == expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import os; out = [n for n in os.listdir('/') if n in ('etc', 'proc', 'sys', 'bin', 'usr', 'home')]", "'[]'"),
        ("import os; out = os.listdir('/dev')", "\"['null']\""),
        ("import os; out = os.getppid()", "'1'"),
        ("import socket; socket.create_connection(('127.0.0.1', 9), 1)", "'OSError'"),
        ("import socket; socket.create_connection(('192.0.2.1', 80), 1)", "'OSError'"),
        ("import subprocess; subprocess.run(['/bin/sh', '-c', 'true'])", "'BlockingIOError'"),
        ("import ctypes; out = ctypes.CDLL(None).ptrace(16, 1, 0, 0)", "'-1'"),
        ("import ctypes; out = ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None)", "'-1'"),
    ],
)
def test_what_code_can_reach_behind_namespaces(code, expected):
    assert attempt("namespaces", code) == expected


@pytest.mark.parametrize("kind", ["bubblewrap", *WALLS])
def test_a_file_outside_is_neither_read_nor_changed(kind, tmp_path):
    canary = tmp_path / "canary"
    canary.write_text("alive")
    canary.chmod(0o600)
    if kind == "rlimits" and os.geteuid() != 0:
        pytest.skip("limits alone do not hide a user's files from the user's processes")
    for code in (f"out = open({str(canary)!r}).read()", f"open({str(canary)!r}, 'w').write('dead')"):
        assert attempt(kind, code) in ("'FileNotFoundError'", "'PermissionError'")
    assert canary.read_text() == "alive"


LEFTOVERS = {
    "files": "import os; os.chdir('..'); [open(f'{n}', 'w') for n in range(9)]; os.makedirs('a/b/c')",
    "a folder that is shut": "import os; os.makedirs('shut/in'); os.chmod('shut', 0)",
    "a full disk": "import os\nfor n in range(10**6): open(str(n), 'w').write('x' * 2**19)",
    "many folders": "import os\nfor n in range(10**4): os.mkdir('d'); os.chdir('d')",
    "a kill of everyone": "import os; os.kill(-1, 9)",
    "a kill of the parent": "import os; os.kill(os.getppid(), 9)",
    "no end": "while True: pass",
    "no end that ignores signals": "import signal; [signal.signal(n, 1) for n in (2, 15, 24)]\nwhile True: pass",
    "a crash": "import ctypes; ctypes.string_at(0)",
    "deep recursion": "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "an exit": "import os; os._exit(0)",
    "closed descriptors": "import os; os.closerange(0, 64)",
    "noise on every descriptor": "import os\nfor n in range(64):\n  try: os.write(n, b'[[[[')\n  except OSError: pass",
    "nested noise": "import os\nfor n in range(64):\n  try: os.write(n, b'[' * 10**5)\n  except OSError: pass",
}


@pytest.mark.parametrize("name", LEFTOVERS)
def test_the_run_after_a_hostile_one_is_as_if_it_had_not_been(name):
    attempt("namespaces", LEFTOVERS[name])
    task = generate_task(1)
    tests = [each for each in task.files if each.startswith("tests/")]
    assert runner("namespaces").run_tests(task.files, tests) == _clean_report()
    assert attempt("namespaces", "import os; out = os.listdir('/tmp')") == "\"['workspace']\""


@cache
def _clean_report():
    task = generate_task(1)
    report = TestRunner(seconds=2).run_tests(task.files, [each for each in task.files if each.startswith("tests/")])
    assert report.ended
    return report


AS_A_USER = """
from composer_replication.envs.workspace import TestRunner
from composer_replication.errors import ComposerError

runner = TestRunner(kind="namespaces", seconds=1)
probe = {probe!r}
try:
    runner.kind
except ComposerError as error:
    print("skip:", error)
    raise SystemExit
for code in {codes!r}:
    print(*runner.values({{"probe.py": probe}}, [("probe", f"attempt({{code!r}})")]))
"""


def test_a_user_who_is_not_root_leaves_nothing_outside_the_folder_of_the_run():
    codes = {
        "open('/left', 'w')": "'OSError'",
        "import os; os.mkdir('/dev/left')": "'OSError'",
        "import os; os.mkdir(os.path.dirname(os.__file__) + '/left')": "'OSError'",
        "import os; out = 'left' in str(os.listdir('/') + os.listdir('/dev'))": "'False'",
        "import os; os.rmdir('../workspace') if not os.unlink('probe.py') else 0; os.chmod('/tmp', 0o500)": "'done'",
        "import os; out = os.listdir('/tmp')": "\"['workspace']\"",
    }
    script = AS_A_USER.format(probe=PROBE, codes=list(codes))
    as_user = ["unshare", "-U", "--map-user=1000", "--map-group=1000"] if os.geteuid() == 0 else []
    if as_user and (shutil.which("unshare") is None or subprocess.run([*as_user, "true"], check=False).returncode):
        pytest.skip("root cannot become a user of its own here: unshare -U does not work")
    shown = subprocess.run([*as_user, sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    if shown.startswith("skip:"):
        pytest.skip(f"this machine has no such wall for a user: {shown}")
    assert shown.splitlines() == list(codes.values())


def test_what_does_not_end_is_stopped_and_said():
    started = time.monotonic()
    report = runner("namespaces").run_tests({"tests/test_a.py": "while True: pass"}, ["tests/test_a.py"])
    assert (report.ended, report.text) == (False, sandbox.ENDED)
    assert time.monotonic() - started < 25


def test_output_has_no_addresses_times_or_paths_of_the_machine():
    text = (
        "def test_a():\n    assert object() == 1\n"
        "def test_b():\n    assert {'b', 'a', 'c', 'd'} == 1\n"
        "def test_c():\n    raise ValueError(__file__ if '__file__' in globals() else __import__('os').getcwd())\n"
        "def test_d():\n    class E(Exception):\n        def __str__(self): raise KeyError\n    raise E\n"
        "def test_e():\n    assert [1, 2] == [1, 3], 'they differ'\n"
    )
    files = {"tests/test_a.py": text}
    reports = {kind: runner(kind).run_tests(files, ["tests/test_a.py"]).text for kind in WALLS}
    if shutil.which("bwrap"):
        assert runner("bubblewrap").run_tests(files, ["tests/test_a.py"]).text == reports["namespaces"]
    first, _, *others, without_message, last, count = reports["namespaces"].splitlines()
    assert first == "FAILED tests/test_a.py::test_a - assert <object object at 0x...> == 1"
    assert others == ["FAILED tests/test_a.py::test_c - ValueError: /workspace"]
    assert re.fullmatch(r"FAILED tests/test_a\.py::test_d - E: .*\bKeyError", without_message)
    assert last == "FAILED tests/test_a.py::test_e - AssertionError: they differ"
    assert count == "5 failed"
    fresh = TestRunner(kind="namespaces").run_tests(files, ["tests/test_a.py"]).text
    assert fresh == reports["namespaces"] == reports["rlimits"]


def test_a_runner_works_in_a_forked_process_and_after_it_was_closed():
    mine = TestRunner(seconds=1)
    assert mine.values({"a.py": "x = 1"}, [("a", "x")]) == ["1"]
    child = os.fork()
    if child == 0:
        os._exit(0 if mine.values({"a.py": "x = 2"}, [("a", "x")]) == ["2"] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert mine.values({"a.py": "x = 3"}, [("a", "x")]) == ["3"]
    mine.close()
    assert mine.values({"a.py": "x = 4"}, [("a", "x")]) == ["4"]
    mine.close()


def test_the_first_wall_that_stands_is_taken_and_named():
    assert TestRunner().kind in ("bubblewrap", "namespaces")
    with refusal(InputError, got="'paper'", expected="namespaces"):
        TestRunner(kind="paper")  # type: ignore[arg-type]


def test_where_no_wall_stands_nothing_is_worth_zero_it_is_said(monkeypatch):
    monkeypatch.setattr(sandbox, "PROGRAM", Path("/nowhere/sandbox_server.py"))
    workspace = Workspace(generate_task(1), runner=TestRunner())
    with refusal(SandboxError, what="sandbox", fix="CRF_SANDBOX=rlimits") as caught:
        workspace.reward()
    assert re.search(r"\bnamespaces: \w+Error\b", caught.value.got)


def test_limits_alone_are_taken_only_by_their_name(monkeypatch):
    refused = "namespaces: unshare: Operation not permitted"
    start = sandbox._SandboxProcess.receive
    hello = {"failed": refused.partition(": ")[2]}
    monkeypatch.setattr(
        sandbox._SandboxProcess, "receive", lambda self, s: start(self, s) if self.kind == "rlimits" else hello
    )
    with refusal(SandboxError, what="sandbox", got=refused, fix="CRF_SANDBOX=rlimits") as caught:
        _ = TestRunner().kind
    assert "bubblewrap" in caught.value.fix
    assert "namespaces" in caught.value.fix
    assert TestRunner(kind="rlimits").kind == "rlimits"
    monkeypatch.setenv("CRF_SANDBOX", "rlimits")
    assert TestRunner().kind == "rlimits"
    monkeypatch.setenv("CRF_SANDBOX", "paper")
    with refusal(InputError, got="'paper'", expected="namespaces"):
        TestRunner()


def test_bubblewrap_is_told_to_unshare_everything_and_to_show_no_home():
    command = _command("bubblewrap", "/scratch", 4)
    assert Path(command[0]).name == "bwrap"
    assert {"--unshare-all", "--die-with-parent", "--clearenv"} <= set(command)
    assert "--bind" not in command
    assert " --size 16777216 --tmpfs /tmp --remount-ro /dev --remount-ro / " in " ".join(command)
    shown = {command[at + 1] for at, each in enumerate(command) if each == "--ro-bind"}
    assert "/" not in shown
    assert str(Path.home()) not in shown


def test_a_run_costs_a_few_milliseconds(note):
    task = generate_task(1)
    tests = [each for each in task.files if each.startswith("tests/")]
    mine = TestRunner()
    costs = []
    for _ in range(20):
        started = time.perf_counter()
        assert mine.run_tests(task.files, tests) == _clean_report()
        costs.append(time.perf_counter() - started)
    note(f"a test run in the workspace's sandbox ({mine.kind}): {1000 * min(costs):.1f} ms, best of 20")
    assert min(costs) < 0.25
