"""A full disk, a store that is damaged, output that nobody takes: a sentence and status 1, in every verb."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from crf import SRC, crf, must
from test_cli_replay import SLUGS, write_chats

from composer_replication.cli.main import _ADVICE_BY_ERRNO
from fault_server import FaultServer

LIMITED = (
    "import resource, sys; limit = int(sys.argv.pop(1)); resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit));"
    "from composer_replication.cli.main import main; sys.exit(main(sys.argv[1:]))"
)
BIDI = "\u202e\u2066\u200e\x1b]0;x\x07\x9b31m"


@pytest.fixture(scope="module")
def server():
    with FaultServer(agreement=1.0) as running:
        yield running


@pytest.fixture(scope="module")
def made(tmp_path_factory, server):
    """A folder with a run that has gone all the way to pairs."""
    folder = tmp_path_factory.mktemp("made")
    write_chats(folder / "chats.jsonl")
    specs = [
        {"slug": slug, "base_url": server.base_url, "input_per_mtok": 1.0, "output_per_mtok": 1.0} for slug in SLUGS
    ]
    (folder / "teachers.json").write_text(json.dumps(specs))
    must("ingest", "chats.jsonl", "-o", "run", cwd=folder)
    must("sites", "run", "--min-confidence", "0.2", cwd=folder)
    must("replay", "run", "--teachers", "teachers.json", "--set=replay.states=all", cwd=folder)
    must("pairs", "run", cwd=folder)
    return folder


@pytest.fixture
def folder(made, tmp_path):
    shutil.copytree(made, tmp_path / "made")
    return tmp_path / "made"


def with_room_for(num_bytes, *arguments, cwd):
    """`crf` where no file may grow beyond so many bytes: what a full disk does, also to root."""
    environment = {"HOME": str(cwd), "PYTHONPATH": str(SRC), "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", LIMITED, str(num_bytes), *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=120)


def is_a_sentence(done, verb):
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert "CRF_DEBUG" not in done.stderr  # as for what nobody foresaw
    assert any(line.startswith(f"crf {verb}: ") for line in done.stderr.splitlines()), done.stderr


WRITING = [
    ["ingest", "chats.jsonl", "-o", "run", "--reread"],
    ["sites", "run"],
    ["replay", "run", "--teachers", "teachers.json", "--set=replay.states=all", "--max-tokens", "9"],
    ["pairs", "run", "--export", "p.jsonl", "--where-it-worked"],
    ["export", "run", "--atif", "atif"],
    ["forget", "chats:0", "--run", "run", "--yes"],
]


@pytest.mark.parametrize("arguments", WRITING, ids=" ".join)
def test_a_full_disk_is_said_and_leaves_what_was_there(folder, arguments):
    before = {path.name: path.read_bytes() for path in (folder / "run").glob("*.jsonl")}
    done = with_room_for(100, *arguments, cwd=folder)
    is_a_sentence(done, arguments[0])
    full_file, full_store = re.escape(_ADVICE_BY_ERRNO[errno.EFBIG]), r"teacher_cache\.sqlite\b.*\bdisk I/O error"
    assert re.search(f"{full_file}|{full_store}", done.stderr), done.stderr
    (folder / "run" / "elsewhere.jsonl").unlink(missing_ok=True)  # where a copy was about to be made
    assert {path.name: path.read_bytes() for path in (folder / "run").glob("*.jsonl")} == before
    assert not list(folder.rglob("*.tmp"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    "arguments",
    [
        ["sites", "run", "--json"],
        ["pairs", "run"],
        ["forget", "chats:0", "--run", "run", "--dry-run"],
        ["export", "run", "--atif", "atif"],
        ["--help"],
    ],
    ids=" ".join,
)
def test_output_onto_a_full_disk_is_said(folder, arguments):
    environment = {"HOME": str(folder), "PYTHONPATH": str(SRC), "PATH": os.environ["PATH"]}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "composer_replication", *arguments],
            cwd=folder,
            env=environment,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=120,
        )
    if arguments == ["--help"]:  # argparse itself keeps silent
        assert done.stderr == ""
        return
    is_a_sentence(done, arguments[0])
    assert "No space left on device" in done.stderr
    assert _ADVICE_BY_ERRNO[errno.ENOSPC] in done.stderr


def damage(path):
    """Other bytes where the answers stand; the rest of the store is well, so that opening it tells nothing."""
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = DELETE")
    ((page,),) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'replies'").fetchall()
    ((size,),) = connection.execute("PRAGMA page_size").fetchall()
    connection.close()
    data = bytearray(path.read_bytes())
    data[(page - 1) * size : page * size] = b"\xaa" * size
    path.write_bytes(data)


def test_a_damaged_store_is_named(folder):
    damage(folder / "run" / "teacher_cache.sqlite")
    done = crf("replay", "run", "--teachers", "teachers.json", "--set=replay.states=all", cwd=folder)
    is_a_sentence(done, "replay")
    assert "teacher_cache.sqlite" in done.stderr
    forgotten = crf("forget", "chats:0", "--run", "run", "--yes", cwd=folder)
    assert "Traceback" not in forgotten.stderr
    assert "CRF_DEBUG" not in forgotten.stderr


def test_json_and_paths_hold_nothing_that_a_terminal_acts_upon(tmp_path):
    """Ids of logs and names of folders are text from elsewhere."""
    place = tmp_path / f"run{BIDI}"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    (tmp_path / f"chat{BIDI}.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    shown = [crf("ingest", f"chat{BIDI}.jsonl", "-o", place, "--json", cwd=tmp_path)]
    conversation = json.loads((place / "conversations.jsonl").read_text().splitlines()[0])["id"]
    assert "\u202e" in conversation
    shown += [crf("sites", place, *json_, cwd=tmp_path) for json_ in ([], ["--json"])]
    shown += [crf("export", place, "--atif", tmp_path / f"atif{BIDI}", cwd=tmp_path)]
    shown += [
        crf("forget", conversation, "--run", place, "--dry-run", *json_, cwd=tmp_path) for json_ in ([], ["--json"])
    ]
    for done in shown:
        assert done.returncode == 0, done.stderr
        for stream in (done.stdout, done.stderr):
            assert [each for each in stream if not each.isprintable() and each != "\n"] == []
    told = json.loads(shown[-1].stdout)
    assert told["conversations"] == [conversation]
    assert told["run"] == str(place)
