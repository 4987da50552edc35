"""What two reviewers broke: half-deleted families, copies that go on, forgetting one of many, crashes, two at once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from claude_records import Log, text
from run_pieces import bytes_of, ingested, stored, write_chat, write_session, write_subagent

from composer_replication.cli.forget import forget
from composer_replication.errors import InputError, RunError
from composer_replication.ingestion.scrubbing import ScrubSettings
from composer_replication.ingestion.session_sources import OLDER
from composer_replication.runs import RunDir
from refusals import refusal

LONG = (
    "a sentence that is long enough to be known again wherever it turns up, in a copy or in what went on from it. " * 5
)


def write_chats(path, *said):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [[{"role": "user", "content": each}, {"role": "assistant", "content": f"re: {each}"}] for each in said]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))


def fresh(tmp_path, *paths, **options):
    return bytes_of(ingested(tmp_path / f"fresh-{len(list(tmp_path.iterdir()))}", *paths, **options)[0])


def test_of_a_family_that_is_partly_gone_everything_stays(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    write_subagent(logs, "parent")
    run, _ = ingested(tmp_path / "run", logs)
    before = set(stored(run))
    (logs / "parent.jsonl").unlink()
    ingested(run.root, logs)
    assert set(stored(run)) == before
    (logs / "parent" / "subagents" / "agent-abc.jsonl").unlink()
    write_session(logs, "other")
    ingested(run.root, logs)
    assert set(stored(run)) == before | {"other"}
    assert list(stored(run))[-2:] == ["parent", "parent/agent-abc"]


def test_what_is_gone_of_a_family_stays_however_often_the_rest_is_read_again(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    write_subagent(logs, "parent")
    run, _ = ingested(tmp_path / "run", logs)
    before = list(stored(run))
    (logs / "parent.jsonl").unlink()
    for _ in range(3):
        with (logs / "parent" / "subagents" / "agent-abc.jsonl").open("ab") as file:
            file.write(b"\n")
        ingested(run.root, logs)
        assert list(stored(run)) == before


def test_a_new_file_with_the_inode_of_a_deleted_one_does_not_take_its_place(tmp_path, monkeypatch):
    from composer_replication.ingestion import registry as discovery

    real = discovery._read_stamp
    monkeypatch.setattr(discovery, "_read_stamp", lambda path: real(path)._replace(inode=7))
    write_session(tmp_path / "logs", "11111111-aaaa").unlink()
    gone = write_session(tmp_path / "logs", "11111111-aaaa", said="first")
    run, _ = ingested(tmp_path / "run", tmp_path / "logs")
    gone.unlink()
    new = write_session(tmp_path / "logs", "22222222-bbbb", said="second")
    for words in (b"\n", b"\n\n"):
        ingested(run.root, tmp_path / "logs")
        assert sorted(stored(run)) == ["11111111-aaaa", "22222222-bbbb"]
        new.write_bytes(new.read_bytes() + words)


def test_a_renamed_sub_agent_is_not_there_twice(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    write_subagent(logs, "parent")
    run, _ = ingested(tmp_path / "run", logs)
    folder = logs / "parent" / "subagents"
    (folder / "agent-abc.jsonl").rename(folder / "agent-abd.jsonl")
    ingested(run.root, logs)
    assert bytes_of(run)["conversations.jsonl"] == fresh(tmp_path, logs)["conversations.jsonl"]


def test_forgetting_one_conversation_leaves_the_rest_of_its_session(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    write_subagent(logs, "parent")
    run, _ = ingested(tmp_path / "run", logs)
    forget(run, ["parent/agent-abc"])
    assert list(stored(run)) == ["parent"]
    for _ in range(2):
        ingested(run.root, logs, reread=True)
        assert list(stored(run)) == ["parent"]


def test_a_forgotten_chat_does_not_come_back_under_another_number_or_name(tmp_path):
    chats = tmp_path / "logs" / "chats.jsonl"
    write_chats(chats, "public one", f"secretive {LONG}")
    run, _ = ingested(tmp_path / "run", tmp_path / "logs")
    forget(run, ["chats:1"])
    write_chats(chats, "new zero", "public one", f"secretive {LONG}")
    ingested(run.root, tmp_path / "logs")
    assert [row["turns"][0]["text"] for row in stored(run).values()] == ["new zero", "public one"]
    chats.rename(chats.with_name("renamed.jsonl"))
    with (tmp_path / "logs" / "renamed.jsonl").open("a") as file:
        file.write("\n")
    ingested(run.root, tmp_path / "logs")
    assert "secretive" not in (run.root / "conversations.jsonl").read_text()


def test_of_a_session_and_an_older_copy_of_it_only_the_longer_one_stays(tmp_path):
    logs = tmp_path / "logs"
    live = Log(session="11111111-aaaa")
    live.user(f"go {LONG}")
    live.assistant("m1", text("done"))
    (logs / "z-backup").mkdir(parents=True)
    (logs / "z-backup" / "11111111-aaaa.jsonl").write_bytes(live.lines())
    live.user("and more")
    live.assistant("m2", text("done again"))
    (logs / "11111111-aaaa.jsonl").write_bytes(live.lines())
    run, summary = ingested(tmp_path / "run", logs)
    assert [len(row["turns"]) for row in stored(run).values()] == [4]
    assert OLDER in {each.reason for each in summary.skipped}


def test_an_export_beside_the_logs_is_a_copy(tmp_path):
    from composer_replication.cli.export import export_atif

    logs = tmp_path / "logs"
    write_session(logs, "11111111-aaaa", said=LONG)
    run, _ = ingested(tmp_path / "run", logs)
    export_atif(run, logs / "z-atif")
    ingested(run.root, logs)
    assert list(stored(run)) == ["11111111-aaaa"]


def test_a_run_inside_the_logs_is_not_read(tmp_path):
    logs = tmp_path / "logs"
    write_session(logs, "11111111-aaaa")
    run, _ = ingested(logs / "run", logs)
    _, summary = ingested(run.root, logs)
    assert {each.reason for each in summary.skipped} == {"run directory"}


def test_two_commands_on_one_run_do_not_lose_anything(tmp_path):
    write_session(tmp_path / "logs", "11111111-aaaa")
    run, _ = ingested(tmp_path / "run", tmp_path / "logs")
    with run.exclusive("a test"), refusal(RunError, what=str(run.root), got="process") as caught:
        ingested(run.root, tmp_path / "logs")
    assert "ingest" in caught.value.what
    with run.exclusive("a test"), refusal(RunError, what=str(run.root), got="process") as caught:
        forget(run, ["11111111-aaaa"])
    assert "forget" in caught.value.what
    assert list(stored(run)) == ["11111111-aaaa"]


@pytest.mark.parametrize("lost", ["conversations.meta.json", "session_sources.jsonl", "session_sources.meta.json"])
def test_after_a_crash_the_next_ingest_reads_everything_and_says_so(tmp_path, lost):
    logs = tmp_path / "logs"
    write_session(logs, "11111111-aaaa")
    write_session(logs, "22222222-bbbb")
    run, _ = ingested(tmp_path / "run", logs)
    forget(run, ["22222222-bbbb"])
    (run.root / lost).write_bytes((run.root / lost).read_bytes()[:-40])
    _, summary = ingested(run.root, logs)
    assert list(stored(run)) == ["11111111-aaaa"]
    assert any(lost in each for each in summary.remarks)


def test_leftovers_of_a_killed_ingest_go(tmp_path):
    write_session(tmp_path / "logs", "11111111-aaaa")
    run, _ = ingested(tmp_path / "run", tmp_path / "logs")
    leftover = run.root / ".conversations.jsonl.123.abcd.tmp"
    leftover.write_text("the unspeakable")
    forget(run, ["11111111-aaaa"])
    assert not leftover.exists()


def test_forgetting_leaves_neither_name_nor_reason_behind(tmp_path):
    logs = tmp_path / "logs" / "acme-merger"
    path = write_session(logs, "11111111-aaaa")
    with path.open("ab") as file:
        file.write(b'{"type": "Initech", "uuid": "odd"}\n')
    write_session(tmp_path / "logs" / "harmless", "22222222-bbbb")
    run, _ = ingested(tmp_path / "run", tmp_path / "logs")
    forget(run, ["11111111-aaaa"])
    everything = b"".join(each.read_bytes() for each in run.root.iterdir())
    for word in (b"11111111-aaaa", b"acme-merger", b"Initech"):
        assert word not in everything


def test_scrubbing_a_run_that_was_not_scrubs_names_and_reasons_too(tmp_path):
    secret = "ghp_" + "a1B2c3D4e5F6" * 3
    logs = tmp_path / "logs" / "-home-alice-shop"
    path = write_session(logs, secret)
    with path.open("ab") as file:
        file.write(b'{"type": "' + secret.encode() + b'", "uuid": "odd"}\n')
    write_session(logs, "11111111-aaaa")
    run, _ = ingested(tmp_path / "run", tmp_path / "logs", scrub=None)
    path.unlink()
    _, summary = ingested(run.root, tmp_path / "logs")
    everything = b"".join(each.read_bytes() for each in run.root.iterdir()) + repr(summary).encode()
    assert secret.encode() not in everything
    assert b"alice" not in everything
    assert len(stored(run)) == 2


def test_no_scrub_on_a_scrubbed_run_reads_again_and_leaves_everything_in(tmp_path):
    write_session(tmp_path / "logs" / "-home-alice-shop", "11111111-aaaa", said="I am alice, at /home/alice")
    run, _ = ingested(tmp_path / "run", tmp_path / "logs", scrub=ScrubSettings(user_names=("alice",)))
    assert "alice" not in (run.root / "conversations.jsonl").read_text()
    ingested(run.root, tmp_path / "logs", scrub=None)
    assert "I am alice, at /home/alice" in (run.root / "conversations.jsonl").read_text()
    assert len(stored(run)) == 1


def test_secrets_in_ids_and_token_ids_go(tmp_path):
    from composer_replication.ingestion.scrubbing import scrub_conversation
    from composer_replication.privacy import Scrubber
    from composer_replication.types import Conversation, Provenance, ToolCall, Turn

    secret = "ghp_" + "a1B2c3D4e5F6" * 3
    write_chat(tmp_path / "logs" / f"{secret}.jsonl")
    run, _ = ingested(tmp_path / "run", tmp_path / "logs")
    assert secret not in (run.root / "conversations.jsonl").read_text()
    where = Provenance(file="f", lines=(1,))
    call = ToolCall(id="c", name="Bash", arguments={"command": f"echo {secret}"})
    turn = Turn(id="t", role="assistant", origin="model", calls=(call,), token_ids=(1, 2), provenance=where)
    after = Turn(
        id="u", role="user", origin="human", provenance=where, extra={"atif": {"prompt_token_ids": [1, 2], "x": 1}}
    )
    scrubbed = scrub_conversation(Conversation(id="s", format="atif", turns=(turn, after)), Scrubber().scope())
    assert scrubbed.turns[0].token_ids is None
    assert scrubbed.turns[1].extra == {"atif": {"x": 1}}


def test_excluding_takes_out_what_has_no_file_and_says_when_nothing_matched(tmp_path):
    logs = tmp_path / "logs"
    gone = write_session(logs, "11111111-aaaa")
    write_subagent(logs / "deep", "22222222-bbbb")
    (logs / "deep" / "22222222-bbbb.jsonl").unlink()
    run, _ = ingested(tmp_path / "run", logs)
    gone.unlink()
    _, summary = ingested(run.root, logs, exclude=["*1111*", "nothing-like-it"])
    assert list(stored(run)) == ["22222222-bbbb/agent-abc"]
    assert [re.findall(r"'[^']*'", each) for each in summary.remarks if "--exclude" in each] == [["'nothing-like-it'"]]
    ingested(run.root, logs, exclude=["deep"])
    assert stored(run) == {}


def test_the_same_files_named_twice_are_read_once(tmp_path):
    logs = tmp_path / "logs"
    path = write_session(logs / "p", "11111111-aaaa")
    run, summary = ingested(tmp_path / "run", logs, path, logs / "p", logs / "p" / ".." / "p")
    assert (list(stored(run)), summary.skipped, summary.num_read) == (["11111111-aaaa"], (), 1)
    with pytest.raises(InputError) as caught:
        ingested(run.root, "")
    assert caught.value.what == "path"


def test_people_whose_folders_look_alike_scrubbed_keep_their_sessions(tmp_path):
    logs = tmp_path / "logs"
    for name in ("alice", "bob"):
        write_chat(logs / f"-home-{name}-x" / "s.jsonl", f"{name} says {LONG}")
    run, _ = ingested(tmp_path / "run", logs)
    assert len(stored(run)) == 2
    (logs / "-home-alice-x" / "s.jsonl").unlink()
    for _ in range(2):
        ingested(run.root, logs)
        assert len(stored(run)) == 2


def test_a_very_long_line_is_named_and_not_held_in_memory(tmp_path, monkeypatch):
    from composer_replication.ingestion import source_files

    monkeypatch.setattr(source_files, "MAX_LINE_BYTES", 10_000)
    path = write_session(tmp_path / "logs", "11111111-aaaa")
    first, _, rest = path.read_bytes().partition(b"\n")
    path.write_bytes(first + b"\n" + b"\x00" * 3_000_000 + b"\n" + rest)
    run, summary = ingested(tmp_path / "run", tmp_path / "logs")
    assert len(stored(run)["11111111-aaaa"]["turns"]) == 4
    assert [(each.reason, each.first) for each in summary.skipped] == [("line too long", "11111111-aaaa.jsonl:2")]


def test_brackets_without_end_cost_neither_time_nor_memory(tmp_path):
    (tmp_path / "n.json").write_text("[" * 100_000)
    code = (
        "import sys, re\nfrom pathlib import Path\nfrom composer_replication.ingestion.registry import detect\n"
        "assert detect(Path(sys.argv[1])) is None\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])"
    )
    source = RunDir.__module__ and os.fspath(__import__("composer_replication").__path__[0]) + "/.."
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "n.json")],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert int(done.stdout) < 300_000  # kB
