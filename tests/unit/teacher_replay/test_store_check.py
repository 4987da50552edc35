"""A store checks itself when it is opened: damage is an error by name, and no paid answer is forgotten in silence."""

from __future__ import annotations

import json
import random
import re
import sqlite3

import pytest
from crf import crf
from replay_pieces import TEACHERS

from composer_replication.cli.main import _describe_error
from composer_replication.errors import ArtefactCorruptError, InputError
from composer_replication.teacher_replay import tables
from composer_replication.teacher_replay.ledger import TeacherStore
from composer_replication.teacher_replay.tables import RequestRefused
from refusals import refusal


@pytest.fixture
def path(tmp_path):
    """Three replies, one unknown, one bill without a reply: $0.000000490 in all."""
    place = tmp_path / "s.sqlite"
    with TeacherStore(place) as store:
        for number in range(3):
            key = bytes([number]) * 32
            data = {"message": {"content": f"said {number} " + "x" * 900}}
            store.settle(store.reserve(key, "t", 100, 1000), 30, reply=(key, "t", data), session="a")
        store.settle(store.reserve(b"u", "t", 300, 1000), None, reply=None)
        store.settle(store.reserve(b"f", "t", 100, 1000), 100, reply=None)
        assert store.meter()[:4] == (190, 0, 300, 1)
    return place


def change(path, *statements):
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA ignore_check_constraints = ON")
    for statement in statements:
        connection.execute(statement)
    connection.close()


TAMPERED = {
    "less spent": ("UPDATE meter SET spent = 0", r"\bspent\b.*\$0\.000000.*\$0\.000000"),
    "negative spent": ("UPDATE meter SET spent = -190", r"\bspent\b.*-190"),
    "text for money": ("UPDATE meter SET spent = 'much'", r"\bspent\b.*'much'"),
    "nothing unknown": ("UPDATE meter SET unknown = 0, num_unknown = 0", r"\bunknown\b.*\$0\.000000"),
    "unknown counted less": ("UPDATE meter SET num_unknown = 0", r"\bnum_unknown\b.*\b0\b.*\b1\b"),
    "something reserved": ("UPDATE meter SET reserved = 7", r"\breserved\b.*\$0\.000000"),
    "a negative entry": (
        "INSERT INTO bills (at, teacher, amount, is_known) VALUES (0, 't', -190, 1)",
        r"\bspent\b.*\$0\.000000",
    ),
    "entries that cancel out": (
        "UPDATE bills SET amount = amount + CASE id WHEN 1 THEN 500 WHEN 2 THEN -500 ELSE 0 END",
        "CHECK constraint failed in bills",
    ),
    "no totals": ("DELETE FROM meter", r"\b0 rows\b"),
    "a reply gone": ("DELETE FROM replies WHERE key = (SELECT MIN(key) FROM replies)", r"\b1 repl"),
    "all replies gone": ("DELETE FROM replies", r"\b3 repl"),
    "another reply": (
        "UPDATE replies SET reply = CAST(replace(reply, 'said 1', 'paid 1') AS BLOB)",
        r"\breply\b.*'t'.*\b010101010101\b",
    ),
    "another teacher": ("UPDATE replies SET teacher = 'better'", r"\breply\b.*'better'"),
    "a reply from nowhere": ("INSERT INTO replies VALUES (x'99', 't', x'7b7d')", r"\breply\b.*'t'.*\b99\b"),
    "text for a reply": ("UPDATE replies SET reply = 'yes'", r"\breply\b"),
    "no replies": ("DROP TABLE replies", r"\breplies\b"),
    "no entries": ("DROP TABLE bills", r"\bbills\b"),
    "other columns": ("ALTER TABLE meter RENAME COLUMN spent TO gone", r"\bmeter\b.*\bone gone reserved\b"),
    "an earlier version": ("PRAGMA user_version = 2", r"\b2\b.*\bbills, holds\b"),
    "no version": ("PRAGMA user_version = 0", r"\bversion\b"),
    "a later version": ("PRAGMA user_version = 9", r"\b9\b.*\b3\b"),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_a_store_that_was_tampered_with_is_named_and_left_as_it_is(path, what):
    statement, named = TAMPERED[what]
    change(path, statement)
    before = path.read_bytes()
    for _ in range(2):  # the second time, too: nothing was mended in silence
        with refusal(ArtefactCorruptError, what=str(path)) as error:
            TeacherStore(path)
        assert re.search(named, error.value.got)
        assert ("-wal" in error.value.fix) == (what != "a later version")  # that one is no damage, and stays
    assert path.read_bytes() == before
    assert not list(path.parent.glob("*.lock"))


def test_a_file_that_is_empty_foreign_or_no_database_is_named(tmp_path):
    empty, foreign, other = (tmp_path / name for name in ("empty", "foreign", "other"))
    empty.touch()
    change(foreign, "CREATE TABLE songs (name TEXT)")
    other.write_bytes(b"SQLite format 3\0" + b"but not really" * 300)
    for path, named in (
        (empty, ""),
        (foreign, "songs"),
        (other, "file is not a database"),  # SQLite's words
    ):
        before = path.read_bytes()
        with refusal(ArtefactCorruptError, what=str(path), got=named) as error:
            TeacherStore(path)
        assert ("-wal" in error.value.fix) == (path != empty)  # where nothing was written, no log lies beside it
        assert path.read_bytes() == before


def test_a_log_without_its_store_is_no_place_for_a_new_one(path):
    """What was paid for last may lie in the log alone: it belongs with the store, wherever that was moved."""
    store = TeacherStore(path)
    store.settle(store.reserve(b"last", "t", 100, 1000), 30, reply=(b"last", "t", {"message": {}}))
    beside = [path.with_name(path.name + end) for end in ("-wal", "-shm")]
    copies = {each: each.read_bytes() for each in (path, *beside)}  # as a killed process leaves them
    store.close()
    for each, data in copies.items():
        each.write_bytes(data)
    away = path.with_name("away.sqlite")
    path.rename(away)
    with refusal(ArtefactCorruptError, what=str(path), got="s.sqlite-wal", fix="s.sqlite-wal") as error:
        TeacherStore(path)
    assert "s.sqlite-shm" in error.value.fix
    assert not path.exists()
    for each in beside:
        each.rename(each.with_name(each.name.replace("s.sqlite", "away.sqlite")))
    with TeacherStore(away) as moved:
        assert moved.reply(b"last") == {"message": {}}


def test_advice_to_move_a_store_names_what_lies_beside_it(path):
    change(path, "UPDATE meter SET spent = 0")
    with pytest.raises(ArtefactCorruptError) as error:
        TeacherStore(path)
    for advice in (error.value.fix, _describe_error(sqlite3.DatabaseError("database disk image is malformed"))):
        assert re.search(r"-wal\b.*-shm\b", advice)


def test_a_truncated_store_is_never_a_new_one(path):
    whole = path.read_bytes()
    for size in range(0, len(whole), 1500):
        path.write_bytes(whole[:size])
        with pytest.raises(ArtefactCorruptError):
            TeacherStore(path)
        assert path.read_bytes() == whole[:size]


def test_flipped_bytes_never_change_money_or_answers_unseen(path, note):
    """Of every flip: an error by name, or the very same books and replies."""
    whole, rng, seen = path.read_bytes(), random.Random(3), 0
    with TeacherStore(path) as store:
        wanted = (store.meter(), [store.reply(bytes([number]) * 32) for number in range(3)])
    for _ in range(150):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        try:
            with TeacherStore(path) as store:
                found = (store.meter(), [store.reply(bytes([number]) * 32) for number in range(3)])
        except ArtefactCorruptError:
            seen += 1
            continue
        assert found == wanted
    note(f"store: 150 flipped bits, {seen} named as damage, 0 changed money or answers")
    assert seen >= 10


@pytest.mark.parametrize("amount", [-1, 1.5, True, "7"])
def test_amounts_that_are_none_are_refused(amount):
    with TeacherStore() as store:
        intent = store.reserve(b"k", "t", 100, 1000)
        assert not isinstance(intent, RequestRefused)
        with refusal(InputError, what="bound", got=repr(amount)):
            store.reserve(b"x", "t", amount, 1000)
        with refusal(InputError, what="cap", got=repr(amount)):
            store.reserve(b"x", "t", 1, amount)
        with refusal(InputError, what="cost", got=repr(amount)):
            store.settle(intent, amount, reply=None)
        assert store.meter()[:4] == (0, 100, 0, 0)


OLD = """
CREATE TABLE replies (key BLOB PRIMARY KEY, teacher TEXT NOT NULL, reply BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE intents (
    id INTEGER PRIMARY KEY, key BLOB NOT NULL, teacher TEXT NOT NULL, owner TEXT NOT NULL, started REAL NOT NULL,
    reserved INTEGER NOT NULL
);
CREATE TABLE meter (
    one INTEGER PRIMARY KEY CHECK (one = 1), spent INTEGER NOT NULL, reserved INTEGER NOT NULL,
    unknown INTEGER NOT NULL, num_unknown INTEGER NOT NULL, halted TEXT
);
CREATE TABLE reply_owners (key BLOB NOT NULL, session TEXT NOT NULL, PRIMARY KEY (key, session)) WITHOUT ROWID;
INSERT INTO replies VALUES (x'01', 't', CAST('{"message":1}' AS BLOB)), (x'02', 't', CAST('{"message":2}' AS BLOB));
INSERT INTO intents VALUES (4, x'03', 't', '17-gone', 0.0, 40);
INSERT INTO meter VALUES (1, 500, 40, 60, 3, 'a reason');
PRAGMA user_version = 2;
"""


def old_store(tmp_path, *changes):
    path = tmp_path / "old.sqlite"
    connection = sqlite3.connect(path, isolation_level=None)
    connection.executescript(OLD + ";".join(changes))
    connection.close()
    return path


def test_a_store_of_the_version_before_keeps_its_answers_and_what_was_spent(tmp_path):
    path = old_store(tmp_path)
    for _ in range(2):
        with TeacherStore(path) as store:
            assert store.meter() == (500, 0, 100, 4, "a reason")
            assert [store.reply(key) for key in (b"\x01", b"\x02")] == [{"message": 1}, {"message": 2}]


def test_a_store_of_the_version_before_with_wrong_amounts_is_refused_as_it_is(tmp_path):
    path = old_store(tmp_path, "UPDATE meter SET spent = -500")
    for _ in range(2):
        with pytest.raises(ArtefactCorruptError, match="CHECK constraint failed"):
            TeacherStore(path)
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT spent FROM meter").fetchone() == (-500,)
    assert connection.execute("PRAGMA user_version").fetchone() == (2,)
    connection.close()


def test_a_store_of_the_version_before_whose_books_are_wrong_is_not_upgraded(tmp_path):
    path = old_store(tmp_path, "UPDATE meter SET unknown = 60, num_unknown = 0")
    before = path.read_bytes()
    for _ in range(2):
        with refusal(ArtefactCorruptError, what=str(path), got="unknown"):
            TeacherStore(path)
    assert path.read_bytes() == before


def test_another_process_that_upgrades_while_we_look_is_no_damage(tmp_path, monkeypatch):
    path, read_version, done = old_store(tmp_path, "PRAGMA journal_mode = WAL"), tables.read_version, []

    def upgraded_right_after(connection):
        version = read_version(connection)
        if not done:
            done.append(version)
            TeacherStore(path).close()
        return version

    monkeypatch.setattr(tables, "read_version", upgraded_right_after)
    with TeacherStore(path) as store:
        assert store.meter() == (500, 0, 100, 4, "a reason")
    assert done == [2]


def test_a_damaged_store_ends_a_replay_with_one_sentence(path, tmp_path):
    """`crf replay` on a run whose store was tampered with: no traceback, nothing sent."""
    message = {"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": "done"}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(message) + "\n")
    (tmp_path / "t.json").write_text(json.dumps([{**TEACHERS[0], "base_url": "http://127.0.0.1:9"}]))
    assert crf("ingest", "chats.jsonl", "-o", "run", cwd=tmp_path).returncode == 0
    change(path, "UPDATE meter SET spent = 0")
    (tmp_path / "run" / "teacher_cache.sqlite").write_bytes(path.read_bytes())
    done = crf("replay", "run", "--teachers", "t.json", "--full", "--set=replay.states=all", cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(r"teacher_cache\.sqlite\b.*\bspent\b.*\$0\.000000", done.stderr)
    assert "Traceback" not in done.stderr
