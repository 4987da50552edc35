"""Random and adversarial tool calls from a seed: what a model, a bug or an attacker could send."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

TOOL_NAMES = ("LS", "Glob", "Grep", "Read", "Edit", "Write")
ODD_NAMES = (
    "",
    "read",
    "Bash",
    "Read ",
    "__init__",
    "call",
    "Finish\0",
    "Ünï",
    "\ud800",
    "x" * 5000,
    7,
    None,
    ("Read",),
)
ARGUMENTS = {
    "LS": ("path",),
    "Glob": ("pattern", "path"),
    "Grep": ("pattern", "path"),
    "Read": ("file_path", "offset", "limit"),
    "Edit": ("file_path", "old_string", "new_string", "replace_all"),
    "Write": ("file_path", "content"),
}
ODD_PATHS = (
    *("", ".", "..", "/", "//", "~", "~root/.ssh", "/etc/passwd", "/proc/self/environ", "/dev/null", "/workspace/"),
    *("/workspace/../etc/passwd", "/workspace/a/../../../etc/shadow", "..\\..\\windows", "C:\\Windows\\System32"),
    *("/workspace/./tests//", "/WORKSPACE/tests", "file:///etc/passwd", "/workspace/%2e%2e/%2e%2e/etc/passwd"),
    *("/workspace/link -> /etc", "/workspace/\0/etc", "/workspace/\n", "/workspace/" + "a/" * 400, "/" + "b" * 9000),
    *(
        "/workspace/\u202egpj.exe",
        "/workspace/é",
        "/workspace/e\u0301",
        "\ud83d",
        "$HOME/.bashrc",
        "`id`",
        "; rm -rf /",
    ),
    *("/workspacex/a", "//workspace/tests", "/workspace/tests/../../workspace/tests", "CANARY", "-rf", "*"),
)
ODD_PATTERNS = (
    *("(a+)+$", "(x+x+)+y", "(.*)*z", "(a|a)*b", "(a|b|ab)*c", "((((((((((a))))))))))", "(?=x)", r"\1", "[", "(?i)A"),
    *("a{99999}", "(a{900}){900}", ".{0,500}.{0,500}x", "[^\\W]", "\\", "**/" * 90, "{a,b}" * 40, "[!a-z]*", "?" * 300),
    *("", "^$", "\\b", "(", "*", "[z-a]", "\0", "é+", "(?P<x>a)(?P=x)", "a" * 5000),
)
ODD_VALUES = (
    *(None, True, False, 0, -1, 1.5, 10**400, -(10**400), float("nan"), float("inf"), float("-inf"), 1e308, 2**63),
    *(
        [],
        {},
        [[]],
        {"a": {"b": [1]}},
        b"bytes",
        object,
        "",
        "\0",
        "\ud800\udc00",
        "\U0001d518",
        "x" * 300_000,
        "\r\n" * 50,
    ),
)
CODE = (
    "import os, sys\nos.environ['CRF_HOSTILE'] = '1'\nsys.path.append('hostile')\nos.umask(0)\n",
    "open('CANARY', 'w').write('dead')\n",
    "import os\nos._exit(3)\n",
    "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n",
    "import shutil\nshutil.rmtree('/', ignore_errors=True)\n",
    "import socket\nsocket.create_connection(('127.0.0.1', 80), 1)\n",
    "x = [0] * 10**10\n",
    "def f():\n    return f()\nf()\n",
    "raise KeyboardInterrupt\n",
    "import builtins\nbuiltins.open = None\nbuiltins.repr = None\n",
    "import gc\nfor each in gc.get_objects():\n    if isinstance(each, dict):\n        each.pop('answer', None)\n",
    "import os\nos.write(1, b'[' * 10**5)\nos.closerange(0, 99)\n",
    "class É(Exception):\n    def __str__(self): return 'x' * 10**6\nraise É\n",
    "def test_x(:\n",
    "\ufeff# nothing\n",
)


def hostile_calls(seed: int, count: int, files: Mapping[str, str], canary: str) -> Iterator[tuple[Any, Any]]:
    """`count` calls: some that work, so that files change, and everything else that can be thought of."""
    draw = random.Random(seed)
    paths = [f"/workspace/{name}" for name in files]
    for _ in range(count):
        kind = draw.random()
        if kind < 0.02:
            yield draw.choice(ODD_NAMES), {}
        elif kind < 0.05:
            yield draw.choice(TOOL_NAMES), draw.choice((*ODD_VALUES, "{", "[1]", '{"path": 1}', "[" * 9999, "NaN"))
        elif kind < 0.12:
            yield "RunTests", {}
        elif kind < 0.16:
            name = draw.choice([*paths, "/workspace/tests/test_odd.py", "/workspace/odd.py"])
            yield "Write", {"file_path": name, "content": draw.choice(CODE).replace("CANARY", canary)}
        else:
            tool = draw.choice(TOOL_NAMES)
            given = {key: _value(draw, key, paths, files, canary) for key in ARGUMENTS[tool] if draw.random() < 0.93}
            if draw.random() < 0.05:
                given[draw.choice(("self", "extra", "\ud800", "file-path"))] = draw.choice(ODD_VALUES)
            yield tool, given


def _value(draw: random.Random, key: str, paths: list[str], files: Mapping[str, str], canary: str) -> Any:
    if draw.random() < 0.08:
        return draw.choice(ODD_VALUES)
    if key in ("path", "file_path"):
        return draw.choice((*paths, "/workspace", "/workspace/tests", *ODD_PATHS)).replace("CANARY", canary)
    if key == "pattern":
        return draw.choice((*ODD_PATTERNS, "def ", "**/*.py", r"return \w+"))
    if key in ("offset", "limit"):
        return draw.choice((0, 1, 2, 5, 10**9, -3, 2.5))
    if key == "replace_all":
        return draw.random() < 0.5
    lines = draw.choice(list(files.values())).splitlines() or [""]
    return draw.choice((*lines, "\n", "x", draw.choice(lines)[:3], "  tail  "))
