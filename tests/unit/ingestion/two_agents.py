"""Small sessions of Claude Code and of Codex, each with a failure the model is to blame for, and a run with both."""

from __future__ import annotations

import json

from claude_records import Log, call, text
from format_records import CODEX_META, codex_item, codex_message
from run_pieces import ingested

NOT_READ = "<tool_use_error>File has not been read yet. Read it first before writing to it.</tool_use_error>"
NOT_FOUND = "apply_patch verification failed: Failed to find expected lines in shop/cart.py:\ndef total(items):"
PATCH = "*** Begin Patch\n*** Update File: shop/cart.py\n@@\n-def total(items):\n+def sum_up(items):\n*** End Patch"
ADDED = "*** Begin Patch\n*** Add File: shop/new.py\n+x = 1\n*** End Patch"
CLAUDE, CODEX = "claude_code", "codex"
CLAUDE_ONLY, CODEX_ONLY = ("Edit", "Read", "old_string"), ("apply_patch", "workdir")
"""Names of tools and of arguments that only the one agent has. Both have a `shell`, with other arguments."""


def claude_session(session="aaaaaaaa-1111"):
    log = Log(session=session)
    log.user("go")
    log.assistant("m1", call("t1", "Read", file_path="/repo/b.py"), call("t2", "shell", command="ls", timeout=3))
    log.result("t1", "x = 1")
    log.result("t2", "a.py")
    log.assistant("m2", call("t3", "Edit", file_path="/repo/b.py", old_string="x", new_string="y"))
    log.result("t3", "done")
    log.assistant("m3", call("t4", "Edit", file_path="/repo/a.py", old_string="x", new_string="y"))
    log.result("t4", NOT_READ, is_error=True)
    log.assistant("m4", text("I read it first."))
    return log.lines()


def codex_session():
    shell = {"command": ["rg", "total("], "workdir": "/w"}
    lines = [
        CODEX_META,
        codex_message("user", "Rename Cart.total."),
        codex_item(type="function_call", name="shell", arguments=json.dumps(shell), call_id="c1"),
        codex_item(type="function_call_output", call_id="c1", output="shop/cart.py:4:def total(items, coupon=None):"),
        codex_item(type="custom_tool_call", name="apply_patch", call_id="c2", input=ADDED),
        codex_item(type="custom_tool_call_output", call_id="c2", output="Success. Updated the following files:\nA x"),
        codex_item(type="custom_tool_call", name="apply_patch", call_id="c3", input=PATCH),
        codex_item(type="custom_tool_call_output", call_id="c3", output=NOT_FOUND),
        codex_message("assistant", "The signature has a second parameter; I will patch with it."),
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def write_two_agents(folder):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "aaaaaaaa-1111.jsonl").write_bytes(claude_session())
    (folder / "rollout-1.jsonl").write_bytes(codex_session())
    return folder


def two_agents_run(tmp_path, **options):
    return ingested(tmp_path / "run", write_two_agents(tmp_path / "logs"), **options)[0]


def tool_names(tools):
    return [tool["function"]["name"] for tool in tools]
