"""Convert an episode to a conversation, an ATIF document or the lines of a Claude Code log.

Ids and times are derived from the task and the seed, so equal episodes give equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from composer_replication.envs.policies.episode import Episode
from composer_replication.envs.policies.situation import PlayedTurn
from composer_replication.envs.workspace.files import ROOT
from composer_replication.ingestion.formats.atif_write import to_atif as _to_atif
from composer_replication.types import Conversation, Provenance, ToolCall, ToolResult, Turn, Usage

FORMAT = "claude_code"
AGENT_VERSION = "2.1.38"
PROJECT = ROOT.replace("/", "-")
_START = datetime(2026, 1, 5, 9, 0, tzinfo=UTC)
_BYTES_PER_TOKEN = 4  # for the usage in logs, which is an estimate
# "<tool_use_error>File does not exist.</tool_use_error>" -> the opening and the closing tag
_TAGS = re.compile(r"</?tool_use_error>")


def session_id(episode: Episode) -> str:
    """Return the UUID of the episode's session."""
    return _uuid(_episode_key(episode), "session")


def to_conversation(episode: Episode) -> Conversation:
    """Return the conversation that ingestion would read from the episode's log."""
    session = session_id(episode)
    file = f"{PROJECT}/{session}.jsonl"
    turns: list[Turn] = []
    parent: str | None = None
    # Every record is one line of the log; `Provenance` names the lines of a turn.
    for line, record in enumerate(_log_records(episode), start=1):
        message, content = record["message"], record["message"]["content"]
        turn_fields: dict[str, Any] = {"parent_id": parent, "timestamp": record["timestamp"]}
        turn_fields["provenance"] = Provenance(file=file, lines=(line,))
        parent = record["uuid"]
        if isinstance(content, str):
            turns.append(Turn(id=record["uuid"], role="user", origin="human", text=content, **turn_fields))
        elif record["type"] == "user":
            results = tuple(
                ToolResult(call_id=block["tool_use_id"], text=block["content"], is_error=block.get("is_error", False))
                for block in content
            )
            turns.append(Turn(id=record["uuid"], role="tool", origin="tool", results=results, **turn_fields))
        elif content[0]["type"] == "text":
            turns.append(_assistant_turn(message, text=content[0]["text"], **turn_fields))
        else:
            call = ToolCall(id=content[0]["id"], name=content[0]["name"], arguments=content[0]["input"])
            # Claude Code writes the text and the call of a message as two records, which become one turn.
            last = turns[-1]
            if last.id == message["id"]:
                lines = (*last.provenance.lines, line)
                turn_fields = {"parent_id": last.parent_id, "timestamp": last.timestamp}
                turn_fields["provenance"] = Provenance(file=file, lines=lines)
                turns[-1] = _assistant_turn(message, text=last.text, calls=(call,), **turn_fields)
            else:
                turns.append(_assistant_turn(message, calls=(call,), **turn_fields))
    version, branch = AGENT_VERSION, {"git_branch": "main"}
    return Conversation(
        id=session, format=FORMAT, turns=tuple(turns), session_id=session, cwd=ROOT, agent_version=version, extra=branch
    )


def to_atif(episode: Episode) -> dict[str, Any]:
    """Return the episode as an ATIF document."""
    return _to_atif(to_conversation(episode))


def log_lines(episode: Episode) -> Iterator[str]:
    """Yield the lines of the episode's log in Claude Code's format."""
    return (json.dumps(record, ensure_ascii=False) for record in _log_records(episode))


def _log_records(episode: Episode) -> Iterator[dict[str, Any]]:
    """Yield the records of the log: the prompt, then the text, the call and the result of every turn."""
    writer = _LogWriter(episode)
    yield writer.record("user", {"role": "user", "content": episode.task.prompt})
    for number, turn in enumerate(episode.turns):
        call_id = f"toolu_01{_hash(_episode_key(episode), 'call', number)[:22]}"
        blocks: list[dict[str, Any]] = [{"type": "text", "text": turn.move.text}] if turn.move.text else []
        call = {"type": "tool_use", "id": call_id, "name": turn.move.tool, "input": dict(turn.move.arguments)}
        blocks.append(call)
        usage = writer.usage(turn)
        # Claude Code writes one record per content block; the records of a turn share the message's id and usage.
        for block in blocks:
            message = {
                "id": f"msg_01{_hash(_episode_key(episode), 'message', number)[:22]}",
                "type": "message",
                "role": "assistant",
                "model": f"world-{episode.policy}",
                "content": [block],
                "stop_reason": "tool_use",
                "stop_sequence": None,
                "usage": usage,
            }
            yield writer.record("assistant", message)
        yield writer.result(turn, call_id)


class _LogWriter:
    """Builds log records with the fields that all records have, such as the parent's id and the time, and counts
    tokens.
    """

    def __init__(self, episode: Episode) -> None:
        self._key, self._session = _episode_key(episode), session_id(episode)
        self._parent: str | None = None
        self._number, self._input_tokens = 0, _estimate_tokens(episode.task.prompt)
        # A session starts at a pseudorandom minute within 90 days.
        minutes = int(_hash(self._key, "minute")[:8], 16) % (60 * 24 * 90)
        self._time = _START + timedelta(minutes=minutes)

    def record(self, kind: str, message: dict[str, Any], **extra_fields: Any) -> dict[str, Any]:
        self._number += 1
        self._time += timedelta(milliseconds=500 + int(_hash(self._key, "pause", self._number)[:4], 16) % 4000)
        name = _uuid(self._key, self._number)
        record = {
            "parentUuid": self._parent,
            "isSidechain": False,
            "userType": "external",
            "cwd": ROOT,
            "sessionId": self._session,
            "version": AGENT_VERSION,
            "gitBranch": "main",
            "type": kind,
            "message": message,
            "uuid": name,
            "timestamp": self._time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            **extra_fields,
        }
        self._parent = name
        return record

    def result(self, turn: PlayedTurn, call_id: str) -> dict[str, Any]:
        text, failed = turn.outcome.text, turn.outcome.failed
        block = {"tool_use_id": call_id, "type": "tool_result", "content": text}
        # Real logs contain the text of an error twice: in tags for the model, and after "Error: " in this field.
        tool_use_result = f"Error: {_TAGS.sub('', text)}" if failed else {"content": text}
        self._input_tokens += _estimate_tokens(text)
        message = {"role": "user", "content": [block | ({"is_error": True} if failed else {})]}
        return self.record("user", message, toolUseResult=tool_use_result)

    def usage(self, turn: PlayedTurn) -> dict[str, int]:
        output_tokens = _estimate_tokens(turn.move.text + turn.move.tool + json.dumps(dict(turn.move.arguments)))
        usage = {"input_tokens": self._input_tokens, "output_tokens": output_tokens}
        # The whole conversation is the input of the next turn.
        self._input_tokens += output_tokens
        return usage


def _assistant_turn(message: dict[str, Any], **turn_fields: Any) -> Turn:
    usage = Usage(**message["usage"])
    return Turn(id=message["id"], role="assistant", origin="model", model=message["model"], usage=usage, **turn_fields)


def _episode_key(episode: Episode) -> str:
    return f"{episode.task.difficulty}/{episode.task.seed}/{episode.policy}/{episode.seed}"


def _hash(*parts: object) -> str:
    return hashlib.sha256("/".join(map(str, parts)).encode()).hexdigest()


def _uuid(*parts: object) -> str:
    return str(uuid.UUID(hex=_hash(*parts)[:32], version=4))


def _estimate_tokens(text: str) -> int:
    return len(text.encode()) // _BYTES_PER_TOKEN + 1
