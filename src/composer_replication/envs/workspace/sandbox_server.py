"""The sandbox's server process: isolate itself, then fork a child for every request.

`sandbox.py` starts this file as a script, with an empty environment and without site-packages. It imports only the
standard library and `in_sandbox.py` from the same folder.

namespaces  The process has its own root with Python's library (read-only) and an empty `/tmp`: no home, no network, no
            other processes, no programs. It is process 1 there, so it can kill everything that a run has started.
bubblewrap  `bwrap` has set up the same isolation before this process starts.
rlimits     Only the limits of `_limit_child` apply.

Requests and replies are JSON, preceded by their length in four bytes. Children close the file descriptors used for
them.
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

# The user id of "nobody", and the folder of runs inside the sandbox.
NOBODY, RUNS = 65534, "/tmp"
# In bytes.
MEMORY, FILE_SIZE, TMPFS_SIZE = 512 * 2**20, 2**20, 16 * 2**20
TMPFS = f"size={TMPFS_SIZE},nr_inodes=4000"
MAX_REPLY = 2**20
# Modules that tests often import. They are imported once before the forks, so that runs need not load them.
PRELOADED = (
    "abc bisect collections copy dataclasses datetime decimal enum fractions functools heapq io itertools math "
    "operator pathlib random re statistics string textwrap threading time typing"
)

# Constants of <sched.h>, <sys/mount.h> and <sys/prctl.h>, which Python's os module does not all have.
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = (
    *(1, 2, 4, 32, 4096, 16384, 1 << 18, 1 << 21),
)
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
# The number of the system call, which libc does not wrap; on other machines `chroot` replaces it.
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

libc = ctypes.CDLL(None, use_errno=True)


def _check_call(result: int, operation: str) -> None:
    """Raise OSError if a C function returned an error."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{operation}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [None if argument is None else argument.encode() for argument in (source, target, kind)]
    _check_call(libc.mount(*texts, ctypes.c_ulong(flags), None if data is None else data.encode()), f"mount {target}")


def _enter_namespaces(scratch: str, library: list[str]) -> None:
    """Enter new namespaces and continue in a child, which is process 1 in them.

    The parent waits for the child and then exits with the same status.
    """
    user, group = os.geteuid(), os.getegid()
    is_root = user == 0
    # Without root, only a user namespace gives the right to create the others.
    namespaces = NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS
    _check_call(libc.unshare(namespaces if is_root else namespaces | NEWUSER), "unshare")
    if not is_root:
        # "deny" first: without it the kernel refuses an unprivileged gid_map.
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
    _check_call(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL), "prctl")
    _build_root(scratch, library)
    _drop_rights(NOBODY if is_root else None)


def _build_root(root: str, library: list[str]) -> None:
    """Mount a new root with Python's library (read-only), `/dev/null` and an empty `/tmp`, and switch to it."""
    # Made private first, so that the mounts below are not visible outside.
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, f"{TMPFS},mode=755")
    for path in library:
        os.makedirs(root + path)
        _mount(path, root + path, None, MS_BIND)
        # In a user namespace a remount must keep the source's nosuid, nodev, noexec, noatime and nodiratime.
        locked_flags = os.statvfs(path).f_flag & 0xC0E
        flags = MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | locked_flags | MS_RELATIME
        _mount("none", root + path, None, flags)
        # Installed packages are hidden: tests may import the standard library only.
        packages = f"{root}{path}/site-packages"
        if os.path.isdir(packages):
            _mount("tmpfs", packages, "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.makedirs(f"{root}/dev")
    os.close(os.open(f"{root}/dev/null", os.O_CREAT | os.O_WRONLY))
    _mount("/dev/null", f"{root}/dev/null", None, MS_BIND)
    os.mkdir(root + RUNS)
    _mount("tmpfs", root + RUNS, "tmpfs", MS_NOSUID | MS_NODEV, f"{TMPFS},mode=777")
    os.chdir(root)
    machine = os.uname().machine
    if machine in PIVOT_ROOT:
        _check_call(libc.syscall(PIVOT_ROOT[machine], b".", b"."), "pivot_root")
        _check_call(libc.umount2(b".", MNT_DETACH), "umount")
    else:
        _mount(".", "/", None, 8192)  # MS_MOVE
        os.chroot(".")
    os.chdir("/")
    # Without root outside, the tests' user owns this root and could leave files in it, so it is made read-only.
    _mount("none", "/", None, MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)


def _drop_rights(user: int | None) -> None:
    """Drop all capabilities permanently, and switch to `user` unless it is None."""
    # The kernel refuses numbers beyond its last capability.
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    # _LINUX_CAPABILITY_VERSION_3, for this process; all sets empty.
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _check_call(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def _drop_to_nobody(scratch: str) -> None:
    """Switch to the user nobody if this process is root, so that limits apply and tests cannot access other users'
    files.
    """
    if os.geteuid() == 0:
        os.chown(scratch, NOBODY, NOBODY)
        _drop_rights(NOBODY)


def _limit_child(seconds: int) -> None:
    for limit, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_FSIZE, FILE_SIZE),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, 0),  # no process and no thread may be started
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))


class _RequestRunner:
    """Executes requests in child processes, one at a time. Children close the server's file descriptors (`channel`)."""

    def __init__(self, in_sandbox: Any, folder: str, seconds: int, channel: tuple[int, int]) -> None:
        self.in_sandbox, self.root, self.seconds, self.channel = in_sandbox, f"{folder}/workspace", seconds, channel
        self.is_process_1 = os.getpid() == 1

    def run(self, request: dict[str, Any]) -> Any:
        """Execute a request in a new child and return its answer.

        The result is None if there is no answer in time, or if the answer is not valid JSON.
        """
        os.mkdir(self.root)
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read_end)
            self._run_in_child(request, write_end)
        os.close(write_end)
        parts: list[bytes] = []
        size, deadline = 0, time.monotonic() + wall_seconds(self.seconds)
        # The answer ends when the child closes the pipe, the answer becomes too long or the time is over.
        while size <= MAX_REPLY and select.select([read_end], [], [], max(0.0, deadline - time.monotonic()))[0]:
            part = os.read(read_end, 65536)
            if not part:
                break
            parts.append(part)
            size += len(part)
        os.close(read_end)
        self._stop(child)
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(b"".join(parts))
        return None

    def _run_in_child(self, request: dict[str, Any], out: int) -> None:
        """Execute the request in the child process, write the answer to `out`, and exit. This method never returns."""
        try:
            os.setsid()  # a process group of its own, which `_stop` kills
            null = os.open("/dev/null", os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(null, descriptor)
            for descriptor in self.channel:
                os.close(descriptor)
            _limit_child(self.seconds)
            os.write(out, json.dumps(self.in_sandbox.answer(request, self.root)).encode()[:MAX_REPLY])
        finally:
            os._exit(0)

    def _stop(self, child: int) -> None:
        """Kill the child and all processes that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if self.is_process_1:  # process 1 may kill all others (-1), which are this run's
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while True:
                    os.waitpid(-1, 0)


def _empty_folder(folder: str) -> bool:
    """Delete everything that a run has written. Return whether the folder is now empty and usable for the next run."""
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
            os._exit(0)  # the runner has closed the pipe
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _send(target: int, value: Any) -> None:
    data = json.dumps(value).encode()
    data = struct.pack(">I", len(data)) + data
    while data:
        data = data[os.write(target, data) :]


def wall_seconds(seconds: int) -> int:
    """Return the wall-clock limit for a run with this CPU time limit, with some slack for a busy machine."""
    return 2 * seconds + 2


def _main(kind: str, scratch: str, seconds: str) -> None:
    """Isolate this process, report the isolation method, and answer requests until the runner closes the pipe."""
    # Loaded by its path, because the package cannot be imported without site-packages.
    spec = importlib.util.spec_from_file_location(
        "in_sandbox", os.path.join(os.path.dirname(__file__), "in_sandbox.py")
    )
    assert spec is not None
    assert spec.loader is not None
    in_sandbox = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(in_sandbox)
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
        _check_call(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
        _check_call(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")
    except (OSError, AttributeError) as error:  # AttributeError: a libc without these functions, as on macOS
        _send(channel[1], {"failed": str(error)})
        return
    # A garbage collection in a child would write to all memory pages and so cause each to be copied.
    gc.disable()
    gc.freeze()
    folder = scratch if kind == "rlimits" else RUNS
    runs = _RequestRunner(in_sandbox, folder, int(seconds), channel)
    _send(channel[1], {"kind": kind})
    while True:
        (length,) = struct.unpack(">I", _read_exactly(channel[0], 4))
        request = json.loads(_read_exactly(channel[0], length))
        reply, is_clean = runs.run(request), _empty_folder(folder)
        _send(channel[1], {"reply": reply, "ends": not is_clean})
        if not is_clean:
            return  # the next run gets a fresh process in a fresh folder


if __name__ == "__main__":
    _main(*sys.argv[1:])
