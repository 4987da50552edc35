"""Whole Claude Code sessions, written by hand: everything that a log may hold, and a long one with token counts."""

from __future__ import annotations

from claude_records import Log, call, text, thinking


def session():
    """Split messages, parallel calls, a rewind, a compaction, an inline sidechain, meta text, records without one."""
    log = Log()
    log.add("summary", summary="A title")
    log.user("a caveat", isMeta=True)
    start = log.user("the first task")
    log.assistant("msg-a", thinking("pondering"), usage={"input_tokens": 10, "output_tokens": 3})
    log.assistant("msg-a", text("reading both"), usage={"input_tokens": 10, "output_tokens": 3})
    first = log.assistant("msg-a", call("call-1", path="one.py"), usage={"input_tokens": 10, "output_tokens": 9})
    log.result("call-1", "content of one", toolUseResult={"file": {"content": "content of one"}})
    log.assistant("msg-a", call("call-2", path="two.py"), parent=first, usage={"output_tokens": 9})
    log.add("progress", data={"type": "hook_progress"})
    log.result("call-2", [text("no such file"), text("two.py")], is_error=True)
    log.assistant("msg-b", text("the wrong way"), call("call-3", "Bash", command="rm x", timeout=5))
    log.result("call-3", "gone")
    log.user("rather another way", parent=start)
    before = log.assistant("msg-c", call("call-4", "Task", prompt="look for it"), text("asked"))
    log.user("look for it", parent=None, isSidechain=True)
    log.assistant("msg-s", text("looking"), call("call-s", "Grep", pattern="it"), isSidechain=True)
    log.result("call-s", "three hits", isSidechain=True)
    log.assistant("msg-t", text("found it"), isSidechain=True)
    log.result("call-4", "it is there", parent=before, toolUseResult={"agentId": "abc"})
    end = log.assistant("msg-d", text("long work"))
    log.add("system", parent=None, subtype="compact_boundary", logicalParentUuid=end, compactMetadata={"preTokens": 9})
    log.user("what happened so far", isCompactSummary=True)
    log.user([text("and now"), {"type": "image", "source": {"data": "aGk="}}, "a bare string"])
    log.assistant("msg-e", text("going on"), usage={"input_tokens": 7, "cache_read_input_tokens": 5})
    return log.lines().splitlines()


def sub_agent():
    log = Log()
    log.user("search", isSidechain=True, agentId="abc")
    log.assistant("msg-u", text("searching"), call("call-u", "Grep"), isSidechain=True, agentId="abc")
    log.result("call-u", "a hit", isSidechain=True, agentId="abc")
    log.assistant("msg-v", text("here"), isSidechain=True, agentId="abc")
    return log.lines().splitlines()


def long_session(num_prompts=6, num_steps=5):
    """Prompts with several answers each, parallel calls, a compaction, a rewind; usage as real logs have it."""
    log, context, length_at_fork = Log(session="s-2"), 15_000, 0
    log.add("progress", parent=None, data={"type": "hook_progress"})
    fork = log.last
    for number in range(num_prompts):
        if number == num_prompts // 2:
            log.add("system", parent=None, subtype="compact_boundary", logicalParentUuid=log.last)
            log.user("what happened so far", isCompactSummary=True)
            context = 15_000
        if number == num_prompts - 1:
            log.last, context = fork, length_at_fork
        fork, length_at_fork = log.last, context
        log.user(f"prompt {number}")
        for step in range(num_steps):
            name, context = f"msg-{number}-{step}", context + 2500
            usage = {"input_tokens": 3, "cache_read_input_tokens": context - 3, "output_tokens": 60}
            log.assistant(name, thinking(f"thought {number} {step}"), usage=usage)
            first = log.assistant(name, call(f"call-{number}-{step}-a", path="a.py"), usage=usage)
            log.assistant(name, call(f"call-{number}-{step}-b", path="b.py"), usage=usage)
            log.add("progress", data={"type": "hook_progress"})
            log.result(f"call-{number}-{step}-b", f"content b {number} {step} " + "x" * 9000)
            end = log.last
            log.result(f"call-{number}-{step}-a", f"content a {number} {step}", parent=first)
            log.last = end if step % 2 else log.last
        usage = {"input_tokens": 3, "cache_read_input_tokens": context + 2497, "output_tokens": 60}
        log.assistant(f"msg-{number}-end", text(f"answer {number}"), usage=usage)
        context += 2600
    return log.lines().splitlines()
