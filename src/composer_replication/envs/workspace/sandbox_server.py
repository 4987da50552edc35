"""The sandboxed process: puts walls around itself, then forks a child for every request.

It is started by its path, with no environment and without site-packages, and imports the standard library and
`in_sandbox.py` beside it. In `namespaces` it has a root of its own with Python's library (read only), an empty `/tmp`
and nothing else: no home, no network, no other process, no program to start. It is process 1 there, so a run that is
over leaves nobody behind. In `bubblewrap` the same was set up from outside. In `rlimits` only the limits hold.

Requests and answers are JSON behind four bytes of length, on file descriptors that no child keeps.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import resource
import select
import shutil
import signal
import struct
import sys
import time
from typing import Any

NOBODY, RUNS = 65534, "/tmp"
MEMORY, FILE_SIZE, TMPFS_SIZE = 512 * 2**20, 2**20, 16 * 2**20
TMPFS = f"size={TMPFS_SIZE},nr_inodes=4000"
MAX_REPLY = 2**20
PRELOADED = (
    "abc bisect collections copy dataclasses datetime decimal enum fractions functools heapq io itertools math "
    "operator pathlib random re statistics string textwrap threading time typing"
)

# From <sched.h>, <sys/mount.h>, <sys/prctl.h>.
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = (
    *(1, 2, 4, 32, 4096, 16384, 1 << 18, 1 << 21),
)
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [None if argument is None else argument.encode() for argument in (source, target, kind)]
    checked(libc.mount(*texts, ctypes.c_ulong(flags), None if data is None else data.encode()), f"mount {target}")


def _enter_namespaces(scratch: str, library: list[str]) -> None:
    """New namespaces, as root directly and else as a user of one's own; then a child that is process 1 in them."""
    user, group = os.geteuid(), os.getegid()
    is_root = user == 0
    namespaces = NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS
    checked(libc.unshare(namespaces if is_root else namespaces | NEWUSER), "unshare")
    if not is_root:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{NOBODY} {user} 1"),
            ("gid_map", f"{NOBODY} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    child = os.fork()
    if child:
        os.close(0)
        os.close(1)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    checked(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL), "prctl")
    _build_root(scratch, library)
    _drop_rights(NOBODY if is_root else None)


def _build_root(root: str, library: list[str]) -> None:
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, f"{TMPFS},mode=755")
    for path in library:
        os.makedirs(root + path)
        mount(path, root + path, None, MS_BIND)
        kept_flags = os.statvfs(path).f_flag & 0xC0E  # flags of the source that only its owner may take away
        flags = MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | kept_flags | MS_RELATIME
        mount("none", root + path, None, flags)
        packages = f"{root}{path}/site-packages"
        if os.path.isdir(packages):
            mount("tmpfs", packages, "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.makedirs(f"{root}/dev")
    os.close(os.open(f"{root}/dev/null", os.O_CREAT | os.O_WRONLY))
    mount("/dev/null", f"{root}/dev/null", None, MS_BIND)
    os.mkdir(root + RUNS)
    mount("tmpfs", root + RUNS, "tmpfs", MS_NOSUID | MS_NODEV, f"{TMPFS},mode=777")
    os.chdir(root)
    machine = os.uname().machine
    if machine in PIVOT_ROOT:
        checked(libc.syscall(PIVOT_ROOT[machine], b".", b"."), "pivot_root")
        checked(libc.umount2(b".", MNT_DETACH), "umount")
    else:
        mount(".", "/", None, 8192)  # MS_MOVE
        os.chroot(".")
    os.chdir("/")
    # Without root outside, the root in here belongs to the user whom the tests run as: what they left would stay.
    mount("none", "/", None, MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)


def _drop_rights(user: int | None) -> None:
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    checked(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def _drop_to_nobody(scratch: str) -> None:
    """Without namespaces: root at least becomes nobody, so that limits bind and files of others are shut."""
    if os.geteuid() == 0:
        os.chown(scratch, NOBODY, NOBODY)
        _drop_rights(NOBODY)


def _limit_child(seconds: int) -> None:
    for what, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_FSIZE, FILE_SIZE),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (value, value))


class Runs:
    """The runs of one server: where they happen, what they may take, and the channel that no child keeps."""

    def __init__(self, evidence: Any, folder: str, seconds: int, channel: tuple[int, int]) -> None:
        self.evidence, self.root, self.seconds, self.channel = evidence, f"{folder}/workspace", seconds, channel
        self.is_first = os.getpid() == 1

    def run(self, request: dict[str, Any]) -> Any:
        """One request in a child of its own: its answer, or None where there was none in time."""
        os.mkdir(self.root)
        inward, outward = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(inward)
            self.in_child(request, outward)
        os.close(outward)
        parts: list[bytes] = []
        size, deadline = 0, time.monotonic() + wall_seconds(self.seconds)
        while size <= MAX_REPLY and select.select([inward], [], [], max(0.0, deadline - time.monotonic()))[0]:
            part = os.read(inward, 65536)
            if not part:
                break
            parts.append(part)
            size += len(part)
        os.close(inward)
        self.stop(child)
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(b"".join(parts))
        return None

    def in_child(self, request: dict[str, Any], out: int) -> None:
        """Runs the request and ends the process; nothing of it returns to the server."""
        try:
            os.setsid()
            nothing = os.open("/dev/null", os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(nothing, descriptor)
            for descriptor in self.channel:
                os.close(descriptor)
            _limit_child(self.seconds)
            os.write(out, json.dumps(self.evidence.answer(request, self.root)).encode()[:MAX_REPLY])
        finally:
            os._exit(0)

    def stop(self, child: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if self.is_first:  # process 1: everyone else here is a leftover of this run
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while True:
                    os.waitpid(-1, 0)


def emptied(folder: str) -> bool:
    """Takes out what a run left; whether that worked, and the next run can use the folder."""
    try:
        for entry in list(os.scandir(folder)):
            shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)
    except (OSError, RecursionError):
        return False
    return os.access(folder, os.R_OK | os.W_OK | os.X_OK)


def _read_exactly(source: int, count: int) -> bytes:
    parts: list[bytes] = []
    while count > 0:
        part = os.read(source, count)
        if not part:
            os._exit(0)
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def send(target: int, value: Any) -> None:
    data = json.dumps(value).encode()
    data = struct.pack(">I", len(data)) + data
    while data:
        data = data[os.write(target, data) :]


def wall_seconds(seconds: int) -> int:
    """How long a run may take by the clock, on a machine that is busy with others."""
    return 2 * seconds + 2


def main(kind: str, scratch: str, seconds: str) -> None:
    spec = importlib.util.spec_from_file_location(
        "in_sandbox", os.path.join(os.path.dirname(__file__), "in_sandbox.py")
    )
    assert spec is not None
    assert spec.loader is not None
    evidence = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(evidence)
    for name in PRELOADED.split():
        __import__(name)
    os.environ.clear()
    library = [path for path in sys.path if os.path.isdir(path) and not path.endswith("lib-dynload")]
    channel = (os.dup(0), os.dup(1))
    try:
        if kind == "namespaces":
            _enter_namespaces(scratch, library)
        elif kind == "rlimits":
            _drop_to_nobody(scratch)
        checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
        checked(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")
    except (OSError, AttributeError) as error:  # another system's library has no such call
        send(channel[1], {"failed": str(error)})
        return
    gc.disable()
    gc.freeze()  # pages that a child does not write need no copy
    folder = scratch if kind == "rlimits" else RUNS
    runs = Runs(evidence, folder, int(seconds), channel)
    send(channel[1], {"kind": kind})
    while True:
        (length,) = struct.unpack(">I", _read_exactly(channel[0], 4))
        request = json.loads(_read_exactly(channel[0], length))
        reply, is_clean = runs.run(request), emptied(folder)
        send(channel[1], {"reply": reply, "ends": not is_clean})
        if not is_clean:
            return  # the next run gets a fresh process in a fresh folder


if __name__ == "__main__":
    main(*sys.argv[1:])
