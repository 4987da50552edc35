"""A request that one process is asking is sent by no other; a run is replayed by one; the dead hold nothing."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from replay_pieces import KEY, TEACHERS, options_for, states

from composer_replication.atomic import try_lock
from composer_replication.errors import RunError
from composer_replication.teacher_replay import ledger as owners
from composer_replication.teacher_replay.ask_and_retry import session_of
from composer_replication.teacher_replay.ledger import TeacherStore
from composer_replication.teacher_replay.replay import replay_trace
from composer_replication.teacher_replay.requests import RequestBuilder
from composer_replication.teacher_replay.tables import ClaimedElsewhere
from composer_replication.teacher_replay.teachers import read_teachers
from fault_server import FaultServer
from refusals import refusal

SRC = Path(__file__).parents[3] / "src"
REPLY = (b"k", "t", {"message": {"content": "yes"}})
WORKER = """
import sys, time
from composer_replication.teacher_replay.ledger import TeacherStore
store = TeacherStore(sys.argv[1])
store.hold("a replay of this run")
print(store.reserve(b"k", "t", 700, 10_000), flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the store and asks for `k`."""
    command = [sys.executable, "-c", WORKER, str(tmp_path / "s.sqlite")]
    environment = os.environ | {"PYTHONPATH": str(SRC)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "1"
        yield process
        process.kill()


def test_a_request_in_flight_elsewhere_is_claimed_until_it_is_answered(tmp_path):
    with TeacherStore(tmp_path / "s.sqlite") as one, TeacherStore(tmp_path / "s.sqlite") as other:
        intent = one.reserve(b"k", "t", 100, 1000)
        claimed = other.reserve(b"k", "t", 100, 1000)
        assert isinstance(claimed, ClaimedElsewhere)
        assert re.search(rf"\b{os.getpid()}\b.*{re.escape(socket.gethostname())}.*\b20\d\d-", str(claimed.holder))
        assert isinstance(other.reserve(b"another", "t", 100, 1000), int)
        one.settle(intent, 40, reply=REPLY)
        assert other.reserve(b"k", "t", 100, 1000) == ClaimedElsewhere(None)
        assert other.reply(b"k") == REPLY[2]
        assert other.meter()[:3] == (40, 100, 0)


def test_a_request_that_failed_elsewhere_is_free_again(tmp_path):
    with TeacherStore(tmp_path / "s.sqlite") as one, TeacherStore(tmp_path / "s.sqlite") as other:
        one.settle(one.reserve(b"k", "t", 100, 1000), 0, reply=None)
        assert isinstance(other.reserve(b"k", "t", 100, 1000), int)


def test_a_killed_process_holds_neither_its_claims_nor_the_run(tmp_path, holder):
    with TeacherStore(tmp_path / "s.sqlite") as store:
        assert isinstance(store.reserve(b"k", "t", 100, 10_000), ClaimedElsewhere)
        with refusal(RunError, what="s.sqlite", got="a replay of this run", fix=f"`kill {holder.pid}`") as error:
            store.hold("a replay of this run")
        assert re.search(rf"\b{holder.pid}\b.*{re.escape(socket.gethostname())}.*\b20\d\d-", error.value.got)
        assert "answers" in error.value.fix
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        store.hold("a replay of this run")
        assert isinstance(store.reserve(b"k", "t", 100, 10_000), int)
        assert store.meter()[:4] == (0, 100, 700, 1)  # what it had in flight stays spent


def test_a_hold_ends_with_its_store(tmp_path):
    with TeacherStore(tmp_path / "s.sqlite") as one:
        one.hold("x")
        one.hold("x")
        with TeacherStore(tmp_path / "s.sqlite") as other:
            other.hold("y")
            with refusal(RunError, what="s.sqlite", got=str(os.getpid())):
                other.hold("x")
    with TeacherStore(tmp_path / "s.sqlite") as other:
        other.hold("x")


def test_a_store_has_one_set_of_owners_whatever_path_leads_to_it(tmp_path, monkeypatch):
    """A link to the file, a link to its folder, and a path from a folder that is left later."""
    (tmp_path / "a").mkdir()
    (tmp_path / "folder").symlink_to("a")
    (tmp_path / "link.sqlite").symlink_to(tmp_path / "a" / "s.sqlite")
    monkeypatch.chdir(tmp_path / "a")
    with TeacherStore("s.sqlite") as one:
        monkeypatch.chdir(tmp_path)
        assert isinstance(one.reserve(b"k", "t", 100, 1000), int)
        one.hold("x")
        for path in ("link.sqlite", "folder/s.sqlite", "a/s.sqlite"):
            with TeacherStore(path) as other:
                assert isinstance(other.reserve(b"k", "t", 100, 1000), ClaimedElsewhere), path
                with refusal(RunError, what="s.sqlite", got=str(os.getpid())):
                    other.hold("x")
        assert one.meter()[:4] == (0, 100, 0, 0)


def test_a_link_to_a_store_that_is_not_there_yet_leads_to_a_new_one(tmp_path):
    (tmp_path / "link.sqlite").symlink_to("new/s.sqlite")
    TeacherStore(tmp_path / "link.sqlite").close()
    assert (tmp_path / "new" / "s.sqlite").is_file()
    assert (tmp_path / "link.sqlite").is_symlink()


def lock_file(store, name, **said):
    path = store.with_name(f"{store.name}.{name}.lock")
    path.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": 0.0, **said}))
    return path


def test_a_number_that_another_process_has_now_does_not_keep_the_dead_alive(tmp_path):
    """This process lives under the number that the file names: by its lock, and by its start, it is another one."""
    store, start = tmp_path / "s.sqlite", owners._process_start(os.getpid())
    by_lock = lock_file(store, "a", start=start, is_locked=True)
    assert not owners._is_owner_alive(store, "a")
    assert not by_lock.exists()
    lock_file(store, "b", start="another boot 17", is_locked=False)
    assert not owners._is_owner_alive(store, "b")
    lock_file(store, "c", start=start, is_locked=False)
    assert owners._is_owner_alive(store, "c")
    lock_file(store, "d", start=start, is_locked=False, host="elsewhere")
    assert owners._is_owner_alive(store, "d")  # nobody here can know
    assert not owners._is_owner_alive(store, "nobody")


def test_two_who_look_at_a_dead_process_at_once_both_find_it_dead(tmp_path, monkeypatch):
    store, seen = tmp_path / "s.sqlite", []
    path = lock_file(store, "a", start="17", is_locked=True)
    lives = owners._is_alive_without_lock

    def looking_meanwhile(descriptor):
        if not seen:
            seen.append("first")
            seen.append(owners._is_owner_alive(store, "a"))
        return lives(descriptor)

    monkeypatch.setattr(owners, "_is_alive_without_lock", looking_meanwhile)
    assert not owners._is_owner_alive(store, "a")
    assert seen == ["first", False]
    assert not path.exists()


def test_a_dead_process_of_another_user_holds_nothing(tmp_path, monkeypatch):
    """Its lock file can be read, but neither written nor removed; a living one's lock is seen all the same."""
    store = tmp_path / "s.sqlite"
    path, living = lock_file(store, "a", start="17", is_locked=True), owners._ProcessLock(store)
    really_open = os.open

    def opening(path, flags, *mode, **more):
        if str(path).endswith(".lock") and flags & (os.O_RDWR | os.O_WRONLY):
            raise PermissionError(13, "Permission denied", str(path))
        return really_open(path, flags, *mode, **more)

    def refused(self, **_):
        raise PermissionError(1, "Operation not permitted", str(self))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", opening)
        patch.setattr(Path, "unlink", refused)
        assert not owners._is_owner_alive(store, "a")
        assert list(owners._find_dead_owners(store, ["a", living.name])) == ["a"]
        assert owners._is_owner_alive(store, living.name)
    assert path.exists()
    living.close()


def test_where_there_are_no_locks_the_living_keep_their_claims(tmp_path, monkeypatch):
    monkeypatch.setattr(owners, "try_lock", lambda _descriptor, exclusive=True: True)
    with TeacherStore(tmp_path / "s.sqlite") as one, TeacherStore(tmp_path / "s.sqlite") as other:
        assert isinstance(one.reserve(b"k", "t", 100, 1000), int)
        assert isinstance(other.reserve(b"k", "t", 100, 1000), ClaimedElsewhere)


def test_an_owner_whose_file_was_taken_for_a_dead_ones_takes_another_name(tmp_path, monkeypatch):
    """Another process may look at the file between its making and its locking, find it free and remove it."""
    removed = []

    def removing_first(descriptor, exclusive=True):
        if not removed:
            removed.extend(tmp_path.glob("*.lock"))
            removed[0].unlink()
        return try_lock(descriptor, exclusive=exclusive)

    monkeypatch.setattr(owners, "try_lock", removing_first)
    owner = owners._ProcessLock(tmp_path / "s.sqlite")
    assert [path.name for path in tmp_path.glob("*.lock")] == [f"s.sqlite.{owner.name}.lock"]
    assert owners._is_owner_alive(tmp_path / "s.sqlite", owner.name)
    owner.close()
    assert len(removed) == 1


def request_of(server, state):
    (teacher,) = read_teachers(TEACHERS[:1], environment={}, api_key=KEY, base_url=server.base_url)
    builder = RequestBuilder(teacher, options_for(server).settings)
    return builder.build(state["messages"], state.get("tools"), session_of(state))


@pytest.mark.parametrize("dies", [False, True])
def test_one_who_waits_takes_the_answer_of_the_other_or_asks_when_it_dies(tmp_path, dies):
    async def both(server, other, intent, request):
        async def end():
            await asyncio.sleep(0.15)
            if dies:
                other.close()  # as a kill does: what it had in flight stays in the store
            else:
                said = {"message": {"content": "theirs"}, "error": None, "latency_s": 0.1, "attempts": 1}
                other.settle(intent, 5, reply=(request.key, request.teacher.slug, said))

        options = options_for(server, cache=tmp_path / "s.sqlite")
        asked = replay_trace(list(states(1, 1)), TEACHERS[:1], 100.0, KEY, options=options)
        return (await asyncio.gather(asked, end()))[0]

    with FaultServer() as server, TeacherStore(tmp_path / "s.sqlite") as other:
        request = request_of(server, next(iter(states(1, 1))))
        intent = other.reserve(request.key, request.teacher.slug, 700, 10**12)
        (result,) = asyncio.run(both(server, other, intent, request))
        assert len(server.ledger()) == int(dies)
    assert (result["response_text"] == "theirs") == result["is_cached"] == (not dies)
    with TeacherStore(tmp_path / "s.sqlite") as store:
        assert store.meter()[1:4] == ((0, 700, 1) if dies else (0, 0, 0))


def test_two_replays_at_once_in_one_process_bill_every_request_once(tmp_path):
    async def both(server):
        options = options_for(server, cache=tmp_path / "s.sqlite", max_concurrency=8)
        asked = [replay_trace(list(states(6, 3)), TEACHERS, 100.0, KEY, options=options) for _ in range(2)]
        return await asyncio.gather(*asked)

    with FaultServer(latency_s=(0.02, 0.06)) as server:
        first, second = asyncio.run(both(server))
        billed = [each.fingerprint for each in server.ledger()]
    assert len(billed) == len(set(billed)) == 18 * 3
    assert [each["response_text"] for each in first] == [each["response_text"] for each in second]
    assert sum(not each["is_cached"] for each in [*first, *second]) == 18 * 3
