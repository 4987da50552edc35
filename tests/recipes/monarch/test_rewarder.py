"""The rewarder's work without Monarch: functions by name, what they ask for, what they weigh, what they return."""

from __future__ import annotations

import asyncio
import math
import re
import sys
from types import ModuleType

import pytest

from composer_replication.errors import InputError, NonFiniteError
from composer_replication.recipes.monarch.rewarder import Rewarder, RewarderSettings
from refusals import refusal


async def exact(trace, task):
    return float(trace.last_reply == task.answer)


def bonus(completion, info, missing=0.5):
    return {"long": len(completion) / 10, "seen": info["seen"] * missing}


bonus._vf_weight = 2.0  # as verifiers' decorator marks a function


def from_column(seen):
    return seen


def broken(completion):
    return math.nan


def silent(completion):
    return None


def greedy(gold):
    return gold


@pytest.fixture(autouse=True)
def _module(monkeypatch):
    module = ModuleType("rewards_here")
    for each in (exact, bonus, from_column, broken, silent, greedy):
        setattr(module, each.__name__, each)
    module.constant = 3
    monkeypatch.setitem(sys.modules, "rewards_here", module)


def scores(*names, rows=None, completions=("four", "4")):
    rewarder = Rewarder(RewarderSettings(rewards=tuple(f"rewards_here:{name}" for name in names)))
    return asyncio.run(rewarder.score(list(completions), rows=rows))


ROWS = [{"answer": "4", "info": {"seen": 1.0}}, {"answer": "4", "info": {"seen": 3.0}}]


def test_functions_are_given_what_they_name_and_added_up_by_weight():
    assert scores("exact", rows=ROWS) == [0.0, 1.0]
    assert scores("from_column", rows=ROWS) == [1.0, 3.0]
    assert scores("exact", "bonus", rows=ROWS) == pytest.approx([2 * (0.4 + 0.5), 1 + 2 * (0.1 + 1.5)])


def test_the_last_reply_is_the_last_assistant_message_and_nothing_that_a_tool_said():
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "cat", "arguments": "{}"}}]}
    tool = {"role": "tool", "name": "cat", "content": "4"}
    wrong = [call, tool, {"role": "assistant", "content": "I do not know."}]
    right = [call, {"role": "assistant", "content": [{"type": "text", "text": " 4\n"}]}, tool]
    rows = [{"answer": "4", "messages": messages} for messages in (wrong, right, [call, tool], [tool])]
    assert scores("exact", rows=rows, completions=["4"] * 4) == [0.0, 1.0, 0.0, 0.0]


def test_what_is_no_reward_is_said():
    with pytest.raises(NonFiniteError, match="completion 0"):
        scores("broken")
    with refusal(InputError, what="silent", got="None"):
        scores("silent")
    with refusal(InputError, what="greedy", got="['gold']"):
        scores("greedy", rows=ROWS)
    with refusal(InputError, what="rows") as caught:
        scores("exact", rows=ROWS[:1])
    assert re.findall(r"\d+", caught.value.got) == ["1", "2"]  # rows and completions


@pytest.mark.parametrize(
    ("names", "facts"),
    [
        ((), {"what": "rewards", "got": "()"}),
        ("rewards_here:exact", {"what": "rewards", "got": "'rewards_here:exact'"}),
        (("rewards_here.exact",), {"got": "'rewards_here.exact'", "expected": "package.module:name"}),
        (("rewards_here:nothing",), {"got": "attribute 'nothing'", "expected": "package.module:name"}),
        (("no_such_module:nothing",), {"got": "'no_such_module'", "fix": "PYTHONPATH"}),
        (("rewards_here:constant",), {"got": "rewards_here:constant", "expected": "function"}),
    ],
)
def test_a_name_that_names_no_function_is_refused(names, facts):
    with refusal(InputError, **facts):
        Rewarder(RewarderSettings(rewards=names))
