"""Messages typed while Claude Code works, and what it shows its model beside the messages: each once, at its place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from claude_records import Log, call, text
from raw_counts import lost, raw
from test_claude_code import read

from composer_replication.ingestion.formats import claude_code
from composer_replication.ingestion.source_files import IngestReport, SourceFile

FOLDER = Path(__file__).parents[4] / "shared" / "fixtures" / "sessions" / "claude_code"
FILES = sorted(FOLDER.rglob("*.jsonl")) if FOLDER.is_dir() else []


class Session(Log):
    """A log whose records have a time each, with the queue's records, which have no uuid."""

    def __init__(self, **options):
        super().__init__(**options)
        self.clock = 0

    def add(self, kind, **fields):
        return super().add(kind, **{"timestamp": self.now(), **fields})

    def now(self):
        self.clock += 1
        return f"2026-01-01T00:00:{self.clock:02d}.000Z"

    def queue(self, operation, content=None, *, at=None, **fields):
        record = {"type": "queue-operation", "operation": operation, "timestamp": at or self.now(), "sessionId": "s-1"}
        self.records.append(record | ({} if content is None else {"content": content}) | fields)

    def attach(self, kind, **fields):
        return self.add("attachment", attachment={"type": kind, **fields})


def working():
    """A session in the middle of a call."""
    log = Session()
    log.user("go")
    log.assistant("m1", text("First."), call("c1", "Bash", command="ls"))
    return log


def spoken(conversation):
    return [turn.text or [*(c.id for c in turn.calls), *(r.text for r in turn.results)] for turn in conversation.turns]


def test_a_message_taken_into_the_running_turn_stands_between_the_results_and_the_answer(tmp_path):
    log = working()
    log.queue("enqueue", "stop that")
    log.result("c1", "a.py")
    log.queue("remove")
    log.assistant("m2", text("Stopping."))
    [conversation], report = read(tmp_path, log.lines())
    assert spoken(conversation) == ["go", "First.", ["a.py"], "stop that", "Stopping."]
    said = conversation.turns[3]
    assert (said.role, said.origin, said.provenance.lines) == ("user", "human", (3, 5))
    assert said.extra == {"attachment": "queued_command"}
    assert report.counts["queued messages placed"] == 1
    assert not +lost(tmp_path / "s-1.jsonl", [conversation])
    others = tuple(turn for turn in conversation.turns if turn is not said)
    assert +lost(tmp_path / "s-1.jsonl", [replace(conversation, turns=others)]) == {"queued messages": 1}


def test_a_record_of_the_queue_that_overtook_the_result_in_the_file_does_not_overtake_it_here(tmp_path):
    log = working()
    log.queue("enqueue", "did we test it?")
    log.queue("remove", at="2026-01-01T00:00:09.000Z")  # written before what it came after, as real logs do
    log.assistant("m1", call("c2"), timestamp="2026-01-01T00:00:07.000Z")
    log.result("c2", timestamp="2026-01-01T00:00:08.000Z")
    log.result("c1", timestamp="2026-01-01T00:00:08.500Z")
    log.assistant("m2", text("Yes."), timestamp="2026-01-01T00:00:12.000Z")
    [conversation], _ = read(tmp_path, log.lines())
    assert [turn.role for turn in conversation.turns] == ["user", "assistant", "tool", "user", "assistant"]
    assert conversation.turns[3].text == "did we test it?"


def test_a_message_that_follows_as_a_record_of_its_own_is_there_once(tmp_path):
    log = working()
    log.queue("enqueue", "and then?")
    log.result("c1")
    log.assistant("m2", text("Done."))
    log.queue("dequeue")
    log.user("and then?")
    log.assistant("m3", text("Nothing."))
    [conversation], report = read(tmp_path, log.lines())
    assert [turn.text for turn in conversation.turns].count("and then?") == 1
    assert not report.counts["queued messages placed"]


def test_a_message_that_left_the_queue_without_any_record_is_placed(tmp_path):
    log = working()
    log.queue("enqueue", "and then?")
    log.result("c1")
    log.queue("dequeue")
    log.assistant("m2", text("Nothing."))
    [conversation], _ = read(tmp_path, log.lines())
    assert spoken(conversation)[-2:] == ["and then?", "Nothing."]


@pytest.mark.parametrize("operation", ["popAll", "remove", None])
def test_a_message_taken_back_or_never_delivered_is_no_turn_and_counted(tmp_path, operation):
    log = working()
    log.queue("enqueue", "never mind")
    if operation == "remove":
        log.queue("remove", "never mind", reason="cancelled")
    elif operation:
        log.queue(operation, "never mind")
    log.result("c1")
    log.assistant("m2", text("Done."))
    [conversation], report = read(tmp_path, log.lines())
    assert "never mind" not in spoken(conversation)
    name = "queued messages never delivered" if operation is None else "queued messages taken back"
    assert report.counts[name] == 1


@pytest.mark.parametrize("reason", [{}, {"reason": "absorbed_mid_turn", "content": "stop that"}])
def test_an_attachment_and_the_queue_tell_of_one_message(tmp_path, reason):
    log = working()
    log.queue("enqueue", "stop that")
    log.result("c1", "a.py")
    log.attach("queued_command", prompt="stop that", commandMode="prompt")
    log.queue("remove", **reason)
    log.assistant("m2", text("Stopping."))
    [conversation], report = read(tmp_path, log.lines())
    assert spoken(conversation) == ["go", "First.", ["a.py"], "stop that", "Stopping."]
    assert conversation.turns[3].origin == "human"
    assert report.counts["queued messages placed"] == 1


def test_where_attachments_are_kept_a_removal_without_one_took_the_message_back(tmp_path):
    log = working()
    log.queue("enqueue", "stop that")
    log.queue("enqueue", "never mind")
    log.queue("remove", "never mind")
    log.result("c1", "a.py")
    log.attach("queued_command", prompt=[{"type": "text", "text": "stop that"}, {"type": "image", "source": {}}])
    log.queue("remove", "stop that")
    log.assistant("m2", text("Stopping."))
    [conversation], report = read(tmp_path, log.lines())
    assert spoken(conversation)[-2:] == ["stop that\n[image]", "Stopping."]
    assert conversation.turns[-2].extra == {"attachment": "queued_command", "images": 1}
    assert (report.counts["queued messages placed"], report.counts["queued messages taken back"]) == (1, 1)


def test_a_task_that_ended_is_told_by_the_harness_not_by_a_person(tmp_path):
    log = working()
    log.queue("enqueue", "<task-notification>\n<task-id>b1</task-id>")
    log.result("c1")
    log.queue("remove")
    log.assistant("m2", text("It is done."))
    log.user("<agent-notification>\n<agent-id>a1</agent-id>")
    [conversation], _ = read(tmp_path, log.lines())
    assert [turn.origin for turn in conversation.turns if turn.role == "user"] == ["human", "meta", "meta"]


SHOWN = {
    "file": ({"filename": "/r/a.py", "content": {"type": "text", "file": {"content": "1\tx = 1"}}}, "x = 1"),
    "edited_text_file": ({"filename": "/r/a.py", "snippet": "2\ty = 2"}, "y = 2"),
    "nested_memory": ({"path": "/r/CLAUDE.md", "content": {"content": "Use pnpm."}}, "Use pnpm."),
    "hook_additional_context": ({"hookName": "PostToolUse:Edit", "content": ["be", "brief"]}, "be\nbrief"),
    "hook_success": ({"hookName": "h", "hookEvent": "SessionStart", "content": "on branch main"}, "on branch main"),
    "todo_reminder": ({"content": [{"content": "write tests", "status": "pending"}]}, "[pending] write tests"),
    "selected_lines_in_ide": ({"filename": "a.py", "content": "z = 3"}, "z = 3"),
    "opened_file_in_ide": ({"filename": "a.py"}, "[opened_file_in_ide: a.py]"),
}


@pytest.mark.parametrize("kind", SHOWN)
def test_what_the_model_was_shown_is_a_turn_of_context(tmp_path, kind):
    fields, words = SHOWN[kind]
    log = Session()
    log.user("look at @a.py")
    log.attach(kind, **fields)
    log.assistant("m1", text("I see."))
    [conversation], report = read(tmp_path, log.lines())
    shown = conversation.turns[1]
    assert (shown.role, shown.origin, shown.extra) == ("user", "meta", {"attachment": kind})
    assert words in shown.text
    assert report.counts[f"attachments placed: {kind}"] == 1
    assert "unseen_context" not in conversation.turns[2].extra


def test_an_attached_image_leaves_its_mark(tmp_path):
    log = Session()
    log.user("look")
    log.attach("file", filename="a.png", content={"type": "image", "file": {"base64": "AAAA"}})
    log.assistant("m1", text("I see."))
    [conversation], _ = read(tmp_path, log.lines())
    assert conversation.turns[1].text == "[image]"
    assert conversation.turns[1].extra == {"attachment": "file", "images": 1}


@pytest.mark.parametrize("kind", ["plan_mode", "brand_new_kind", "todo_reminder"])
def test_turns_after_words_that_no_log_has_are_marked(tmp_path, kind):
    log = Session()
    log.user("go")
    log.assistant("m1", text("Before."))
    log.attach(kind)
    log.assistant("m2", text("After."))
    log.assistant("m3", text("Later."))
    [conversation], report = read(tmp_path, log.lines())
    assert [turn.extra.get("unseen_context") for turn in conversation.turns] == [None, None, [kind], [kind]]
    named = {"unknown attachment type 'brand_new_kind'": 1} if kind == "brand_new_kind" else {}
    assert dict(report.skipped) == named
    assert report.counts[f"attachments without text: {kind}"] == (not named)


@pytest.mark.parametrize(("kind", "fields"), [("hook_cancelled", {}), ("hook_success", {"hookEvent": "Stop"})])
def test_what_no_model_saw_is_counted_and_nothing_else(tmp_path, kind, fields):
    log = Session()
    log.user("go")
    log.attach(kind, content="for the screen", **fields)
    log.assistant("m1", text("Done."))
    [conversation], report = read(tmp_path, log.lines())
    assert [(turn.text, turn.extra) for turn in conversation.turns] == [("go", {}), ("Done.", {})]
    assert report.counts[f"attachments not shown: {kind}"] == 1


def test_what_hooks_say_between_parallel_results_does_not_tear_them_apart(tmp_path):
    log = Session()
    log.user("go")
    log.assistant("m1", call("c1"))
    second = log.assistant("m1", call("c2"))
    log.result("c1", "one")
    log.attach("hook_additional_context", content=["formatted"])
    log.result("c2", "two", parent=second)
    log.attach("hook_additional_context", content=["checked"])
    log.assistant("m2", text("Both."))
    [conversation], _ = read(tmp_path, log.lines())
    assert [turn.role for turn in conversation.turns] == ["user", "assistant", "tool", "user", "user", "assistant"]
    assert [result.text for result in conversation.turns[2].results] == ["one", "two"]
    assert [turn.text.split("\n")[-1] for turn in conversation.turns[3:5]] == ["formatted", "checked"]


def test_an_attachment_of_a_rewound_branch_stays_there(tmp_path):
    log = Session()
    asked = log.user("go")
    log.attach("edited_text_file", filename="dead.py", snippet="dead")
    log.assistant("m1", text("Dead."))
    log.user("another way", parent=asked)
    log.attach("edited_text_file", filename="live.py", snippet="live")
    log.assistant("m2", text("Alive."))
    [conversation], _ = read(tmp_path, log.lines())
    assert "dead" not in "".join(turn.text for turn in conversation.turns)
    assert "live" in conversation.turns[-2].text
    both, _ = read(tmp_path, log.lines(), with_branches=True)
    assert ["dead" in "".join(turn.text for turn in each.turns) for each in both] == [False, True]


@pytest.mark.skipif(not FILES, reason="the session fixtures are not beside this checkout (../shared)")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_of_a_real_log_is_lost(path):
    found = list(claude_code.read(SourceFile(path, path.name), IngestReport(), with_branches=True))
    assert {kind: number for kind, number in lost(path, found).items() if number} == {}
    assert raw(path)
