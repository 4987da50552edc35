"""What replicas do in the conformance suite. Imported by the replicas themselves, by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main(word: str = "main") -> dict[str, object]:
    return greet(word)


def greet(word: str, rank_env: str = "REPLICA_RANK") -> dict[str, object]:
    rank = int(os.environ[rank_env])
    print(f"rank {rank} says {word}")
    return {"rank": rank, "word": word}


def greet_by(word: str) -> dict[str, object]:
    return greet(word, "OTHER_RANK")


def raises(words: str) -> None:
    raise ValueError(words)


def exits(status: int) -> None:
    sys.exit(status)


def kills_itself() -> None:
    print("before the end")
    os.kill(os.getpid(), signal.SIGKILL)


def waits(folder: str) -> None:
    """Two children, one of which leaves the group, as torchrun's do; then nothing for a long time."""
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    children = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
    pids = [os.getpid(), *(child.pid for child in children)]
    whole = Path(folder, f".{os.environ['REPLICA_RANK']}")
    whole.write_text("\n".join(map(str, pids)))
    whole.rename(Path(folder, f"pids-{os.environ['REPLICA_RANK']}"))
    time.sleep(60)


def ignores_sigterm(folder: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    waits(folder)


def talks(lines: int) -> None:
    print("ä漢字🙂\tzero\x00 bell\x07 \x1b[31ma colour\x1b[0m \x1b]0;a title\x07 \x9b2J")
    sys.stdout.buffer.write(b"\xff\xfe no UTF-8\n")
    print("x" * 3_000_000)
    for number in range(lines):
        print(f"line {number}")
    print("no newline", end="")


def tells(secret: str) -> None:
    """A careless trainer: it prints a secret and fails with it."""
    value = os.environ[secret]
    print(f"token={value}", flush=True)
    print(value, file=sys.stderr, flush=True)
    raise RuntimeError(f"401 for {value}")


def keeps(secret: str, folder: str) -> None:
    """Says that it has the secret, and stays a while so that its processes can be looked at."""
    Path(folder, "has-it").write_text(str(len(os.environ[secret])))
    time.sleep(60)


def dies_at_first(folder: str) -> str:
    marker = Path(folder, f"was-here-{os.environ['REPLICA_RANK']}")
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "second time"
