"""States and settings for tests that ask a server: sessions whose states are prefixes of each other."""

from __future__ import annotations

from composer_replication.teacher_replay.ask_and_retry import RetryPolicy
from composer_replication.teacher_replay.replay import ReplayOptions, replay, teachers_of
from composer_replication.teacher_replay.requests import RequestSettings

TEACHERS = [
    {"slug": "anthropic/claude-opus-4.7", "input_per_mtok": 15.0, "output_per_mtok": 75.0},
    {"slug": "openai/gpt-5", "input_per_mtok": 1.25, "output_per_mtok": 10.0},
    {"slug": "deepseek/deepseek-v4-pro", "input_per_mtok": 0.5, "output_per_mtok": 2.0},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}},
    }
]
KEY = "sk-very-secret-key-of-the-test-1234567890"


def states(num_sessions, num_each=3, *, size=200, tools=True):
    """Messages are shared between the states of a session, as ingested ones are."""
    for session in range(num_sessions):
        messages = [
            {"role": "system", "content": "You are a coding agent."},
            {"role": "user", "content": f"Task {session}: " + "fix it. " * (size // 8)},
        ]
        for index in range(num_each):
            state = {
                "state_id": f"s{session}::{index:04d}",
                "messages": list(messages),
                "student_action": f'[TOOL_USE] name=bash input={{"command":"ls {index}"}}',
            }
            if tools:
                state["tools"] = TOOLS
            yield state
            call = {
                "id": f"c{index}",
                "type": "function",
                "function": {"name": "bash", "arguments": '{"command":"ls"}'},
            }
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": f"c{index}", "content": f"a.py b{session}.py"})


def options_for(server, **changes):
    given = {
        "base_url": server.base_url if server else None,
        "max_concurrency": 16,
        "timeout_s": 2.0,
        "patience": RetryPolicy(max_attempts=6, first_wait_s=0.01, longest_wait_s=5.0),
        "settings": RequestSettings(max_tokens=64),
        "environment": {},
    }
    return ReplayOptions(**(given | changes))


async def collect(asked, options, *, cap=100.0, api_key=KEY, teachers=TEACHERS):
    """Every result by its place, and the report."""
    found = {}

    def keep(state, teacher, result):
        assert (state, teacher) not in found
        found[state, teacher] = result

    known = teachers_of(teachers, api_key, options)
    report = await replay(asked, known, cap, options=options, on_result=keep)
    return found, report
