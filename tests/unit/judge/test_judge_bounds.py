"""Logs are anybody's: odd types, huge numbers and long sessions neither break the judge nor slow it down."""

from __future__ import annotations

import itertools
import random

import pytest

from composer_replication.sites.actions.session_state import SessionState
from composer_replication.sites.judge import Judge, judged_calls
from composer_replication.types import Conversation, Provenance, ToolCall, ToolResult, Turn
from cpu_time import least_cpu_seconds

WHERE = Provenance(file="log", lines=(1,))
TOOLS = [
    "Read",
    "Edit",
    "Write",
    "MultiEdit",
    "Grep",
    "Glob",
    "Bash",
    "Task",
    "Skill",
    "mcp__x__read_file",
    "",
    "apply_patch",
]
KEYS = ["file_path", "path", "old_string", "new_string", "content", "pattern", "command", "edits", "limit", "offset"]
VALUES = [
    None, 0, -1, 10**30, 1.5, True, "", "/", "~", "..", "a/../../b", "\0", "\ud800", "x" * 5000, [], {}, [{}], ["a"],
    {"a": 1}, "/repo/a.py", "**/" * 40 + "*" * 40, "cd /repo && cat a.py", "$(", "'", "a\0b\nc", "C:\\x\\y.py",
]  # fmt: skip
MISSING = "File does not exist."
TEXTS = [
    "", "999999999999999999999→x\n1→y", "     1→" + "x" * 3000, "     5→a\n     7→b", "<system-reminder>" * 50,
    "\0\n\0\n",
    "File does not exist.", "File has not been read yet.", "Shell cwd was reset to " + "/x" * 300, "a/b:12:c\n" * 50,
    "exceeds maximum", "total 0\n" + "d" * 500, "Available agents: " + "a," * 500,
]  # fmt: skip


def turns(calls):
    for number, (call, text, failed) in enumerate(calls):
        yield Turn(id=f"a{number}", role="assistant", origin="model", calls=(call,), provenance=WHERE)
        results = (ToolResult(call_id=call.id, text=text, is_error=failed),)
        yield Turn(id=f"r{number}", role="tool", origin="tool", results=results, provenance=WHERE)


def test_odd_calls_and_results_get_a_verdict():
    chance = random.Random(0)
    state = SessionState("/repo")
    judge = Judge(state)
    for number in range(3000):
        keys = chance.sample(KEYS, chance.randrange(5))
        call = ToolCall(
            id=str(number), name=chance.choice(TOOLS), arguments={key: chance.choice(VALUES) for key in keys}
        )
        assert judge.verdict(call).says in ("ok", "fails", "risky", "unknown")
        state.add(call, chance.choice(TEXTS), failed=chance.random() < 0.3)
        if chance.random() < 0.1:
            state.add_message(chance.choice(["", "@" + "a/" * 200, "<command-name>/exit<", "Note: a.py was modified"]))
    assert state.paths.status("/repo/a.py").why


def long_session(number):
    """Reads, edits, searches and commands of many files, and failures among them."""
    steps = []
    for each in range(number):
        path = f"/repo/src/m{each % (number // 4)}.py"
        lines = "".join(f"{line:6}→value_{line} = {line}\n" for line in range(1, 40))
        steps += [
            (ToolCall(id=f"{each}r", name="Read", arguments={"file_path": path}), lines, False),
            (ToolCall(id=f"{each}e", name="Edit", arguments={"file_path": path, "old_string": "value_7 = 7",
                                                              "new_string": f"value_7 = {each}"}), "updated", False),
            (ToolCall(id=f"{each}m", name="Read", arguments={"file_path": f"/repo/no/{each}.py"}), MISSING, True),
            (ToolCall(id=f"{each}g", name="Glob", arguments={"pattern": f"**/*{each}.go"}), path, False),
            (ToolCall(id=f"{each}b", name="Bash", arguments={"command": f"touch x{each} && ls src"}), "m1.py", False),
        ]  # fmt: skip
    return Conversation(id="s", format="claude_code", turns=tuple(turns(steps)), cwd="/repo")


def test_a_session_of_twice_the_length_takes_about_twice_the_time():
    short, long = long_session(60), long_session(240)

    def judge_all(conversation):
        return sum(each.judgement.says == "fails" for each in judged_calls(conversation, sites={}))

    assert judge_all(short) >= 0
    base = least_cpu_seconds(lambda: judge_all(short), enough=0.0, rounds=3)
    taken = least_cpu_seconds(lambda: judge_all(long), enough=4 * 2 * base, rounds=3)
    print(f"the judge: {base * 1000:.0f} ms for 300 calls, {taken * 1000:.0f} ms for 1200")
    assert taken < 4 * 2.5 * base


@pytest.mark.parametrize("seed", range(4))
def test_a_verdict_is_the_same_whatever_comes_after_it(seed):
    chance = random.Random(seed)
    paths = [f"/repo/{name}" for name in ("a.py", "src/b.py", "src/c.py", "no.py")]
    steps = []
    for number in range(40):
        path = chance.choice(paths)
        made = chance.choice([
            ("Read", {"file_path": path}), ("Edit", {"file_path": path, "old_string": "x = 1", "new_string": "x = 2"}),
            ("Write", {"file_path": path, "content": "x = 1\nx = 1\n"}), ("Bash", {"command": f"cd src && cat {path}"}),
            ("Glob", {"pattern": "**/*.py"}), ("Bash", {"command": "git checkout main"}),
        ])  # fmt: skip
        text = chance.choice(
            ["     1→x = 1\n     2→y\n", "File does not exist.", "/repo/a.py", "File has not been read yet."]
        )
        steps.append((ToolCall(id=str(number), name=made[0], arguments=made[1]), text, chance.random() < 0.4))
    every = tuple(turns(steps))
    whole = [each.judgement for each in judged_calls(conversation_of(every))]
    assert len({judgement.rule for judgement in whole}) > 4
    for end in range(0, len(every), 7):
        begun = [each.judgement for each in judged_calls(conversation_of(every[:end]))]
        assert begun == whole[: len(begun)]


def conversation_of(some):
    return Conversation(id="s", format="claude_code", turns=tuple(some), cwd="/repo")


def test_the_order_of_questions_changes_no_answer():
    """The judge may be asked about any calls in any state; asking leaves nothing behind but the doubt in a source."""
    asked = [ToolCall(id="q", name="Read", arguments={"file_path": f"/repo/{name}.py"}) for name in "abc"]
    answers = []
    for order in itertools.permutations(asked):
        state = SessionState("/repo")
        state.add(ToolCall(id="1", name="Glob", arguments={"pattern": "*.py"}), "/repo/a.py", failed=False)
        judge = Judge(state)
        answers.append({call.arguments["file_path"]: judge.verdict(call) for call in order})
    assert all(answer == answers[0] for answer in answers)
