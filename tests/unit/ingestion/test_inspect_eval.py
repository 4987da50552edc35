"""Inspect logs: references resolved, zips that lie or burst, and nothing written to disk."""

from __future__ import annotations

import io
import json
import struct
import zipfile

from small_formats import flipped, read_bytes, read_path, replaced, sample, tally

from composer_replication.ingestion.formats import inspect_eval

LONG = "x" * 200
MESSAGES = [
    {"id": "m0", "role": "system", "content": "SYSTEM"},
    {"id": "m1", "role": "user", "source": "input", "content": "attachment://aa"},
    {
        "id": "m2",
        "role": "assistant",
        "content": [{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "Look."}],
        "tool_calls": [
            {"id": "c1", "function": "bash", "arguments": {"cmd": "tc://aa"}, "type": "function"},
            {"id": "c2", "function": "bash", "arguments": {"cmd": "pwd"}, "type": "function"},
        ],
    },
    {"id": "m3", "role": "tool", "tool_call_id": "c1", "function": "bash", "content": "out"},
    {
        "id": "m4",
        "role": "tool",
        "tool_call_id": "c2",
        "content": "",
        "error": {"type": "timeout", "message": "too slow"},
    },
    {"id": "m5", "role": "assistant", "content": "done", "model": "m-2"},
]
EVENT = {
    "event": "model",
    "model": "m-1",
    "timestamp": "2025-10-06T10:15:45+00:00",
    "input": [],
    "input_refs": [[0, 2], [2, 5]],
    "output": {"choices": [{"message": MESSAGES[5]}], "usage": {"input_tokens": 9, "output_tokens": 3}},
}
SAMPLE = {"id": 1, "epoch": 1, "uuid": "u-1", "messages": MESSAGES, "attachments": {"aa": LONG}, "events": [EVENT]}
HEADER = {"eval": {"task": "guess", "eval_id": "e-1", "model": "m", "packages": {"inspect_ai": "0.3"}}}


def _zip(*samples, method=zipfile.ZIP_DEFLATED, header=HEADER):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr("_journal/start.json", "{}")
        for index, each in enumerate(samples):
            data = each if isinstance(each, bytes) else json.dumps(each).encode()
            archive.writestr(f"samples/{index}_epoch_1.json", data)
        archive.writestr("header.json", json.dumps(header))
    return file.getvalue()


def _read(tmp_path, data):
    return read_bytes(inspect_eval, tmp_path, "log.eval", data)


def test_messages_with_references_resolved(tmp_path):
    (conversation,), report = _read(tmp_path, _zip(SAMPLE))
    system, user, asked, answered, done = conversation.turns
    assert (conversation.id, conversation.session_id, conversation.agent_version) == ("u-1", "e-1/1", "0.3")
    assert (system.role, user.text, user.origin) == ("system", LONG, "human")
    assert (asked.text, asked.thinking, [call.id for call in asked.calls]) == ("Look.", "hm", ["c1", "c2"])
    assert asked.calls[0].arguments == {"cmd": LONG}
    assert [(each.call_id, each.text, each.is_error) for each in answered.results] == [
        ("c1", "out", False),
        ("c2", "too slow", True),
    ]
    assert answered.provenance.lines == (4, 5)
    assert (done.model, done.usage.input_tokens, done.timestamp) == ("m-2", 9, EVENT["timestamp"])
    assert not report.skipped


def test_messages_from_the_pool_where_the_sample_has_none(tmp_path):
    for pool in ({"message_pool": MESSAGES[:5]}, {"events_data": {"messages": MESSAGES[:5]}}):
        (conversation,), report = _read(tmp_path, _zip({**SAMPLE, "messages": [], **pool}))
        assert [turn.id for turn in conversation.turns] == ["m0", "m1", "m2", "m3", "m5"]
        assert not report.skipped
    bad = {**EVENT, "input_refs": [[0, 2], [3, 99], [-1, 2], "x", [0, 2] * 3]}
    (conversation,), report = _read(
        tmp_path, _zip({**SAMPLE, "messages": [], "message_pool": MESSAGES[:5], "events": [bad]})
    )
    assert [turn.id for turn in conversation.turns] == ["m0", "m1", "m5"]
    assert report.skipped["message reference outside the pool"] == 4


def test_missing_and_bursting_attachments_are_counted(tmp_path, monkeypatch):
    (conversation,), report = _read(tmp_path, _zip({**SAMPLE, "attachments": {}}))
    assert conversation.turns[1].text == "attachment://aa"
    assert report.skipped["attachment is missing or too large"] == 2
    monkeypatch.setattr(inspect_eval, "MAX_MEMBER_BYTES", 8000)
    user = {"role": "user", "content": "attachment://aa"}
    bomb = {"messages": [user] * 100, "attachments": {"aa": "y" * 1000}}
    (conversation,), report = _read(tmp_path, _zip(bomb))
    assert sum(turn.text == "y" * 1000 for turn in conversation.turns) == 8
    assert report.skipped["attachment is missing or too large"] == 92


def test_large_members_cost_only_themselves(tmp_path, monkeypatch):
    monkeypatch.setattr(inspect_eval, "MAX_MEMBER_BYTES", 10_000)
    bomb = b'{"messages": [{"role": "user", "content": "' + b"0" * 2_000_000 + b'"}]}'
    data = _zip(bomb, SAMPLE)
    # The same bomb with the size in both headers changed to a small one.
    lie = data.replace(struct.pack("<I", len(bomb)), struct.pack("<I", 100))
    assert lie != data
    for each in (data, lie):
        conversations, report = _read(tmp_path, each)
        assert [conversation.id for conversation in conversations] == ["u-1"]
        assert sum(report.skipped.values()) == 1
    monkeypatch.setattr(inspect_eval, "MAX_TOTAL_BYTES", len(json.dumps(SAMPLE)) + 200)
    conversations, report = _read(tmp_path, _zip(SAMPLE, {**SAMPLE, "uuid": "u-2"}))
    assert [conversation.id for conversation in conversations] == ["u-1"]
    assert report.skipped["zip member too large"] == 1


def test_an_archive_that_bursts_is_left_out_unread(tmp_path, monkeypatch):
    """A megabyte of blanks packs to a kilobyte; 65 of them are more than fifty times their archive."""
    blanks, opened = b'{"messages": []' + b" " * 2**20 + b"}", []
    data = _zip(*[blanks] * 65)
    monkeypatch.setattr(zipfile.ZipFile, "open", lambda self, *args, **named: opened.append(args))
    conversations, report = _read(tmp_path, data)
    assert (conversations, opened) == ([], [])
    assert report.skipped == {"zip that unpacks to too much": 1}


def test_an_archive_of_too_many_members_is_left_out_unread(tmp_path, monkeypatch):
    monkeypatch.setattr(inspect_eval, "MAX_MEMBERS", 4)
    conversations, report = _read(tmp_path, _zip(SAMPLE, SAMPLE, SAMPLE))
    assert (conversations, report.skipped) == ([], {"zip with more than 4 members": 1})


def test_unreadable_compression_is_counted(tmp_path):
    data = bytearray(_zip(SAMPLE, {**SAMPLE, "uuid": "u-2"}))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        offset = archive.getinfo("samples/0_epoch_1.json").header_offset
    central = data.index(b"PK\x01\x02", data.index(b"PK\x01\x02") + 4)
    data[offset + 8 : offset + 10] = data[central + 10 : central + 12] = struct.pack("<H", 93)  # zstd
    conversations, report = _read(tmp_path, bytes(data))
    assert [conversation.id for conversation in conversations] == ["u-2"]
    assert dict(report.skipped) == {"zip compression method 93 is not readable": 1}
    conversations, report = _read(tmp_path, _zip(SAMPLE, method=zipfile.ZIP_LZMA))
    assert (conversations, report.skipped["zip compression method 14 is not readable"]) == ([], 2)  # the header too


def test_names_are_only_compared_and_nothing_is_written(tmp_path):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in (
            "../samples/x.json",
            "samples/../../x.json",
            "/samples/x.json",
            "samples/a.json",
            "samples/b/c.json",
        ):
            archive.writestr(name, json.dumps({**SAMPLE, "uuid": name}))
    before = sorted(tmp_path.parent.rglob("*"))
    conversations, _ = _read(tmp_path, file.getvalue())
    assert [each.id for each in conversations] == ["samples/a.json"]
    assert sorted(tmp_path.parent.rglob("*")) == sorted([*before, tmp_path / "log.eval"])


def test_nan_and_repeated_ids(tmp_path):
    text = json.dumps({**SAMPLE, "scores": {"s": {"value": float("nan")}}}).encode()
    conversations, report = _read(tmp_path, _zip(text, SAMPLE, b"[]", b"{", b'{"messages": []}'))
    assert [each.id for each in conversations] == ["u-1", "u-1#2"]
    assert conversations[0].extra["scores"] == {"s": {"value": None}}
    assert dict(report.skipped) == {
        "sample is not an object": 1,
        "invalid JSON document": 1,
        "sample without messages": 1,
    }


def test_sample_counts():
    path = sample("inspect_message_dedup.eval")
    with zipfile.ZipFile(path) as archive:
        messages = json.loads(archive.read("samples/0_epoch_1.json"))["messages"]
    roles = [message["role"] for message in messages]
    calls = sum(len(message.get("tool_calls") or []) for message in messages)
    errors = sum(message.get("error") is not None for message in messages)
    assistants, tools = roles.count("assistant"), roles.count("tool")
    conversations, report = read_path(inspect_eval, path)
    assert tally(conversations) == (assistants, len(roles) - assistants - tools, calls, tools, errors)
    assert {turn.id for turn in conversations[0].turns} == {message["id"] for message in messages}
    assert not report.skipped


def test_sniff(tmp_path):
    assert inspect_eval.sniff(_zip(SAMPLE), tmp_path / "log.eval")
    assert inspect_eval.sniff(_zip(SAMPLE), tmp_path / "log.zip")
    assert not inspect_eval.sniff(b"{}", tmp_path / "log.eval")


def test_junk_costs_no_neighbour(tmp_path):
    for index, messages in replaced(MESSAGES):
        conversations, _ = _read(tmp_path, _zip({**SAMPLE, "messages": messages}))
        kept = {each["id"] for n, each in enumerate(MESSAGES) if n != index and each["role"] != "tool"}
        assert kept <= {turn.id for turn in conversations[0].turns}
    for field in ("attachments", "events", "message_pool", "uuid"):
        for junk in (3, "x", [3], {"a": 3}, None, [{"event": "model", "output": {"choices": [3]}, "input_refs": 3}]):
            (conversation,), _ = _read(tmp_path, _zip({**SAMPLE, field: junk}))
            assert len(conversation.turns) == 5
    for data in (b"", b"PK\x03\x04", b"PK\x05\x06" + b"\0" * 18, *flipped(_zip(SAMPLE), 300)):
        _read(tmp_path, data)
        inspect_eval.sniff(data, tmp_path / "log.eval")
