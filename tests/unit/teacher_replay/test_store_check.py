"""A store checks itself when it is opened: damage is an error by name, and no paid answer is forgotten in silence."""

from __future__ import annotations

import json
import random
import sqlite3

import pytest
from crf import crf
from replay_pieces import TEACHERS

from composer_replication.cli.main import in_words
from composer_replication.errors import ArtefactCorruptError, InputError
from composer_replication.teacher_replay.store import tables
from composer_replication.teacher_replay.store.ledger import TeacherStore
from composer_replication.teacher_replay.store.tables import Refused

FIX = "Nothing was changed. Put an earlier copy of the file back"


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
    "less spent": ("UPDATE meter SET spent = 0", r"a total of spent of \$0\.000000, whose entries add up to \$0"),
    "negative spent": ("UPDATE meter SET spent = -190", "a total of spent that is no amount"),
    "text for money": ("UPDATE meter SET spent = 'much'", "a total of spent that is no amount"),
    "nothing unknown": ("UPDATE meter SET unknown = 0, num_unknown = 0", "a total of unknown"),
    "unknown counted less": ("UPDATE meter SET num_unknown = 0", "a total of num_unknown of 0, whose entries .* 1"),
    "something reserved": ("UPDATE meter SET reserved = 7", "a total of reserved"),
    "a negative entry": (
        "INSERT INTO bills (at, teacher, amount, is_known) VALUES (0, 't', -190, 1)",
        "total of spent",
    ),
    "entries that cancel out": (
        "UPDATE bills SET amount = amount + CASE id WHEN 1 THEN 500 WHEN 2 THEN -500 ELSE 0 END",
        "CHECK constraint failed in bills",
    ),
    "no totals": ("DELETE FROM meter", "0 rows of totals"),
    "a reply gone": ("DELETE FROM replies WHERE key = (SELECT MIN(key) FROM replies)", "1 replies gone that were paid"),
    "all replies gone": ("DELETE FROM replies", "3 replies gone that were paid for"),
    "another reply": (
        "UPDATE replies SET reply = CAST(replace(reply, 'said 1', 'paid 1') AS BLOB)",
        "a reply of 't' that is not the one that was paid for",
    ),
    "another teacher": ("UPDATE replies SET teacher = 'better'", "a reply of 'better' that is not the one"),
    "a reply from nowhere": ("INSERT INTO replies VALUES (x'99', 't', x'7b7d')", "that no entry paid for"),
    "text for a reply": ("UPDATE replies SET reply = 'yes'", "a reply that is none"),
    "no replies": ("DROP TABLE replies", "a store without replies"),
    "no entries": ("DROP TABLE bills", "a store without bills"),
    "other columns": ("ALTER TABLE meter RENAME COLUMN spent TO gone", "a table meter with columns"),
    "an earlier version": ("PRAGMA user_version = 2", "version 2 with tables of a later one: bills, holds"),
    "no version": ("PRAGMA user_version = 0", "a store without a version"),
    "a later version": ("PRAGMA user_version = 9", "version 9 of the store, this program knows 3"),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_a_store_that_was_tampered_with_is_named_and_left_as_it_is(path, what):
    statement, named = TAMPERED[what]
    change(path, statement)
    before = path.read_bytes()
    for _ in range(2):  # the second time, too: nothing was mended in silence
        with pytest.raises(ArtefactCorruptError, match=named) as error:
            TeacherStore(path)
        assert FIX in str(error.value) or "Use the version of this program that wrote it" in str(error.value)
    assert path.read_bytes() == before
    assert not list(path.parent.glob("*.lock"))


def test_a_file_that_is_empty_foreign_or_no_database_is_named(tmp_path):
    empty, foreign, other = (tmp_path / name for name in ("empty", "foreign", "other"))
    empty.touch()
    change(foreign, "CREATE TABLE songs (name TEXT)")
    other.write_bytes(b"SQLite format 3\0" + b"but not really" * 300)
    for path, named in (
        (empty, "an empty file"),
        (foreign, "another program's database .tables songs"),
        (other, "other"),
    ):
        before = path.read_bytes()
        with pytest.raises(ArtefactCorruptError, match=named):
            TeacherStore(path)
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
    with pytest.raises(ArtefactCorruptError, match=r"s\.sqlite-wal without it") as error:
        TeacherStore(path)
    assert "move s.sqlite-wal and s.sqlite-shm to where it is now" in str(error.value)
    assert not path.exists()
    for each in beside:
        each.rename(each.with_name(each.name.replace("s.sqlite", "away.sqlite")))
    with TeacherStore(away) as moved:
        assert moved.reply(b"last") == {"message": {}}


def test_advice_to_move_a_store_names_what_lies_beside_it(path):
    change(path, "UPDATE meter SET spent = 0")
    with pytest.raises(ArtefactCorruptError, match="together with its -wal and -shm"):
        TeacherStore(path)
    assert "together with its -wal and -shm" in in_words(sqlite3.DatabaseError("database disk image is malformed"))


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
        assert not isinstance(intent, Refused)
        with pytest.raises(InputError, match="whole nano-dollars, 0 or more"):
            store.reserve(b"x", "t", amount, 1000)
        with pytest.raises(InputError, match="cap"):
            store.reserve(b"x", "t", 1, amount)
        with pytest.raises(InputError, match="cost of a request"):
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
        with pytest.raises(ArtefactCorruptError, match="a total of unknown"):
            TeacherStore(path)
    assert path.read_bytes() == before


def test_another_process_that_upgrades_while_we_look_is_no_damage(tmp_path, monkeypatch):
    path, version_of, done = old_store(tmp_path, "PRAGMA journal_mode = WAL"), tables.version_of, []

    def upgraded_right_after(connection):
        version = version_of(connection)
        if not done:
            done.append(version)
            TeacherStore(path).close()
        return version

    monkeypatch.setattr(tables, "version_of", upgraded_right_after)
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
    assert "a total of spent of $0.000000" in done.stderr
    assert "Traceback" not in done.stderr
