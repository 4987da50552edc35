"""One small session per format, with places where a test can plant any JSON text: in a call's arguments and beside."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from claude_records import Log, call, text
from format_records import (
    CODEX_META,
    GEMINI_META,
    OPENCODE_INFO,
    codex_event,
    codex_item,
    codex_line,
    codex_message,
    gemini_answer,
    gemini_tool,
    gemini_user,
    openai_call,
    opencode_message,
    opencode_text,
    opencode_tool,
)

from composer_replication.ingestion.formats import (
    atif,
    claude_code,
    codex,
    gemini,
    inspect_eval,
    mini_sweagent,
    openai_messages,
    opencode,
    openhands,
    sweagent,
)

ARGUMENTS, BESIDE = "@@arguments@@", "@@beside@@"
# What the sessions say around the call: every one of these is a text of some turn.
SAID = ("the task before", "the call itself", "the answer after")


@dataclass(frozen=True)
class Session:
    """The records of one session; `is_lines` says whether each stands on its own line."""

    module: ModuleType
    name: str
    records: list[object]
    is_lines: bool = False
    document: Callable[[list[object]], object] = list
    pack: Callable[[bytes], bytes] = bytes

    def lines(self, arguments=b"{}", beside=b"1"):
        """Each record as JSON, with these texts planted."""
        return [_planted(json.dumps(record).encode(), arguments, beside) for record in self.records]

    def text(self, arguments=b"{}", beside=b"1"):
        if self.is_lines:
            return b"".join(line + b"\n" for line in self.lines(arguments, beside))
        return _planted(json.dumps(self.document(self.records)).encode(), arguments, beside)

    def file(self, arguments=b"{}", beside=b"1"):
        """The text as it lies on disk: in an archive, where the format has one."""
        return self.pack(self.text(arguments, beside))


def _planted(data, arguments, beside):
    return data.replace(json.dumps(ARGUMENTS).encode(), arguments).replace(json.dumps(BESIDE).encode(), beside)


def _claude():
    log = Log()
    log.user(SAID[0])
    log.assistant("msg-1", text(SAID[1]))
    log.assistant("msg-1", {**call("c1"), "input": ARGUMENTS})
    log.result("c1", "came back", toolUseResult={"agentId": BESIDE})
    log.assistant("msg-2", text(SAID[2]))
    return log.records


OPENAI_USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
CHAT = [
    {"role": "user", "content": SAID[0]},
    {"role": "assistant", "content": SAID[1]},
    {"role": "assistant", "content": "", "tool_calls": [openai_call(arguments=ARGUMENTS)]},
    {"role": "tool", "tool_call_id": "c1", "content": "came back"},
    {"role": "assistant", "content": SAID[2], "usage": OPENAI_USAGE, "reasoning_content": "hm"},
]
CODEX = [
    {**CODEX_META, "payload": {**CODEX_META["payload"], "note": BESIDE}},
    codex_message("user", SAID[0], id="item-one"),
    codex_message("assistant", SAID[1], id="item-two"),
    codex_item(type="function_call", name="shell", arguments=ARGUMENTS, call_id="c1"),
    codex_event("token_count", info={"last_token_usage": {"input_tokens": 9, "output_tokens": 3}}),
    codex_item(type="function_call_output", call_id="c1", output={"content": "came back", "success": True}),
    codex_line("compacted", {"message": "so far", "replacement_history": []}),
    codex_item(type="reasoning", summary=[{"type": "summary_text", "text": "hm"}]),
    codex_message("assistant", SAID[2], id="item-three"),
]
GEMINI = [
    {**GEMINI_META, "note": BESIDE},
    gemini_user(SAID[0], "message-one"),
    gemini_answer(SAID[1], "message-two"),
    gemini_answer("", "message-three", toolCalls=[gemini_tool("c1", "success", {"output": "fine"}, args=ARGUMENTS)]),
    gemini_answer(SAID[2], "message-four", thoughts=[{"subject": "hm"}], tokens={"input": 9, "output": 2, "cached": 4}),
    {"$set": {"summary": "a title"}},
]
OPENCODE_TOKENS = {"input": 9, "output": 5, "reasoning": 2, "cache": {"read": 4, "write": 3}}
OPENCODE = [
    opencode_message("user", opencode_text(SAID[0]), id="msg_1"),
    opencode_message("assistant", opencode_text(SAID[1]), id="msg_2", error=BESIDE),
    opencode_message("assistant", opencode_tool("c1", "completed", input=ARGUMENTS, output="fine"), id="msg_3"),
    opencode_message("assistant", opencode_text(SAID[2]), id="msg_4", tokens=OPENCODE_TOKENS),
]
OPENHANDS = [
    {"id": 1, "source": "user", "action": "message", "args": {"content": SAID[0]}},
    {"id": 2, "source": "agent", "action": "message", "args": {"content": SAID[1]}},
    {
        "id": 3,
        "source": "agent",
        "action": "run",
        "args": {},
        "tool_call_metadata": {
            "tool_call_id": "c1",
            "model_response": {"id": "r1", "choices": [{"message": CHAT[2]}], "usage": OPENAI_USAGE},
        },
    },
    {"id": 4, "source": "agent", "observation": "run", "cause": 3, "content": "came back", "extras": {"exit_code": 0}},
    {"id": 5, "source": "agent", "action": "message", "args": {"content": SAID[2]}},
]
METRICS = {
    "prompt_tokens": 9,
    "completion_tokens": 2,
    "cached_tokens": 4,
    "completion_token_ids": [7, 8],
    "logprobs": [-0.5, -1],
    "extra": {"cache_creation_tokens": 1},
}
OWN = {"id": "t4", "origin": "model", "read_from": {"file": "f", "lines": [4]}, "extra": {"blocks": [["text", 16]]}}
ATIF = [
    {"step_id": 1, "source": "user", "message": SAID[0]},
    {"step_id": 2, "source": "agent", "message": SAID[1], "extra": {"theirs": BESIDE}},
    {
        "step_id": 3,
        "source": "agent",
        "message": "",
        "tool_calls": [{"tool_call_id": "c1", "function_name": "ls", "arguments": ARGUMENTS}],
        "observation": {"results": [{"source_call_id": "c1", "content": "came back"}]},
    },
    {"step_id": 4, "source": "agent", "message": SAID[2], "metrics": METRICS, "extra": {"composer_replication": OWN}},
]


def _openhands(history):
    return {"instance_id": "repo-1", "test_result": {"note": BESIDE}, "history": history}


def _zip(data):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("_journal/start.json", "{}")
        archive.writestr("samples/1_epoch_1.json", data)
    return file.getvalue()


SESSIONS = {
    "claude_code": Session(claude_code, "session.jsonl", _claude(), is_lines=True),
    "claude_export": Session(claude_code, "session.json", _claude(), document=lambda lines: {"loglines": lines}),
    "codex": Session(codex, "session.jsonl", CODEX, is_lines=True),
    "openai_lines": Session(openai_messages, "session.jsonl", CHAT, is_lines=True),
    "openai_chats": Session(
        openai_messages,
        "session.jsonl",
        [{"messages": each, "note": BESIDE} for each in (CHAT[:1], CHAT[1:2], CHAT[2:4], CHAT[4:])],
        is_lines=True,
    ),
    "openai_document": Session(
        openai_messages, "session.json", CHAT, document=lambda chat: {"id": "s", "note": BESIDE, "messages": chat}
    ),
    "tau_bench": Session(
        openai_messages, "session.json", CHAT, document=lambda chat: [{"reward": BESIDE, "traj": chat}] * 2
    ),
    "gemini_log": Session(gemini, "session.jsonl", GEMINI, is_lines=True),
    "gemini_document": Session(gemini, "session.json", GEMINI, document=lambda log: {**log[0], "messages": log[1:-1]}),
    "opencode": Session(
        opencode,
        "session.json",
        OPENCODE,
        document=lambda all: {"info": {**OPENCODE_INFO, "note": BESIDE}, "messages": all},
    ),
    "openhands_lines": Session(
        openhands,
        "session.jsonl",
        [_openhands(each) for each in (OPENHANDS[:1], OPENHANDS[1:2], OPENHANDS[2:4], OPENHANDS[4:])],
        is_lines=True,
    ),
    "openhands_document": Session(openhands, "session.json", OPENHANDS, document=_openhands),
    "sweagent": Session(
        sweagent,
        "session.traj",
        [{**each, "agent": "main"} for each in CHAT],
        document=lambda history: {"info": {"model_stats": BESIDE}, "trajectory": [], "history": history},
    ),
    "mini_sweagent": Session(
        mini_sweagent,
        "session.traj.json",
        CHAT,
        document=lambda chat: {"info": {"mini_version": "1", "submission": BESIDE}, "messages": chat},
    ),
    "inspect_eval": Session(
        inspect_eval,
        "session.eval",
        CHAT,
        document=lambda chat: {"id": 1, "scores": BESIDE, "messages": chat},
        pack=_zip,
    ),
    "atif": Session(
        atif,
        "session.json",
        ATIF,
        document=lambda steps: {"schema_version": "ATIF-v1.8", "agent": {}, "notes": BESIDE, "steps": steps},
    ),
}
