"""Records of codex, openai_messages, gemini and opencode as their agents write them, for every test that needs some."""

from __future__ import annotations

CODEX_META = {
    "timestamp": "t0",
    "type": "session_meta",
    "payload": {"id": "s-1", "cwd": "/w", "cli_version": "0.104.0"},
}


def codex_line(kind, payload, timestamp="t1"):
    return {"timestamp": timestamp, "type": kind, "payload": payload}


def codex_item(**payload):
    return codex_line("response_item", payload)


def codex_message(role, text, **more):
    kind = "output_text" if role == "assistant" else "input_text"
    return codex_item(type="message", role=role, content=[{"type": kind, "text": text}], **more)


def codex_event(kind, **payload):
    return codex_line("event_msg", {"type": kind, **payload})


def openai_call(call_id="c1", name="look", arguments='{"path": "a"}'):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


GEMINI_META = {"sessionId": "s-1", "projectHash": "abc", "startTime": "t0", "lastUpdated": "t9", "directories": ["/w"]}


def gemini_user(text, id="u1"):
    return {"id": id, "timestamp": "t1", "type": "user", "content": [{"text": text}]}


def gemini_answer(text, id="a1", **more):
    return {"id": id, "timestamp": "t2", "type": "gemini", "content": text, "model": "gemini-x", **more}


def gemini_tool(id, status, response=None, **more):
    result = [{"functionResponse": {"id": id, "name": "run", "response": response}}] if response else None
    return {"id": id, "name": "run", "args": {"a": id}, "status": status, "result": result, **more}


OPENCODE_INFO = {
    "id": "ses_1",
    "title": "Fix",
    "directory": "/w",
    "version": "1.0.1",
    "time": {"created": 1, "updated": 2},
}


def opencode_message(role, *parts, id="msg_1", **info):
    return {
        "info": {"id": id, "sessionID": "ses_1", "role": role, "time": {"created": 7}, **info},
        "parts": list(parts),
    }


def opencode_text(words, **more):
    return {"type": "text", "text": words, **more}


def opencode_tool(call_id, status, **state):
    state = {"status": status, "input": {"path": call_id}, **state}
    return {"type": "tool", "callID": call_id, "tool": "read", "state": state}
