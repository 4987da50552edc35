"""Several processes of one run, on this machine, over gloo; forked warm like the others."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

from kill_and_resume.runs import TIMEOUT_S, in_child, result_file
from warm_crf import WarmCall


def run_group(job: str, folder: Path, *, size: int = 2, **options: Any) -> list[Any]:
    """What the job returns on each of `size` processes of a torch.distributed group that accelerate takes over."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    logs = [folder.with_name(f"{folder.name}.{rank}.log") for rank in range(size)]
    processes = [
        WarmCall("kill_and_resume.groups:member", job, str(folder), rank, size, port, options, str(log))
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    said = "\n".join(log.read_text(encoding="utf-8", errors="replace")[-3000:] for log in logs if log.exists())
    assert codes == [0] * size, f"{job} ended with {codes}:\n{said}"
    return [json.loads(result_file(Path(f"{folder}-{rank}")).read_text(encoding="utf-8")) for rank in range(size)]


def member(job: str, folder: str, rank: int, size: int, port: int, options: dict[str, Any], log: str) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
    }
    in_child(job, folder, None, options, log, result=f"{folder}-{rank}")
