"""Runs of a job in processes of their own, some of which are killed.

A job is named by a path, "module:function", and takes the folder of its run and whether to resume; what it returns is
JSON. Children are forked from a server that has everything imported and has run nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from kill_and_resume.kills import Kill
from warm_crf import WarmCall

TIMEOUT_S = 90


def run_to_end(job: str, folder: Path, **options: Any) -> Any:
    """What the job returns when nothing stops it; it resumes if the folder has a complete checkpoint."""
    code, log = _run(job, folder, None, options)
    assert code == 0, f"{job} ended with {code}:\n{log}"
    return json.loads(result_file(folder).read_text(encoding="utf-8"))


def run_until_killed(job: str, folder: Path, kill: Kill, **options: Any) -> None:
    """Run the job, resuming if there is something to resume, until the kill; it is an error if it never comes."""
    code, log = _run(job, folder, kill, options)
    assert code == -signal.SIGKILL, f"{job} was to be killed {kill}, and ended with {code}:\n{log}"


def run_with_kills(job: str, folder: Path, kills: list[Kill], **options: Any) -> Any:
    """One run that is killed again and again, resumed each time, and at last left alone."""
    for kill in kills:
        run_until_killed(job, folder, kill, **options)
    return run_to_end(job, folder, **options)


def _run(job: str, folder: Path, kill: Kill | None, options: dict[str, Any]) -> tuple[int | None, str]:
    folder.mkdir(parents=True, exist_ok=True)
    result_file(folder).unlink(missing_ok=True)
    log = folder.with_name(f"{folder.name}.log")
    moment = None if kill is None else dataclasses.astuple(kill)
    process = WarmCall("kill_and_resume.runs:in_child", job, str(folder), moment, options, str(log))
    try:
        if kill is not None and kill.kind == "seen":
            _kill_when_seen(process, folder / f"checkpoint-{kill.step}" / kill.name)
        code = process.wait(TIMEOUT_S)
    finally:
        process.kill()
    return code, log.read_text(encoding="utf-8", errors="replace")[-4000:] if log.exists() else ""


def _kill_when_seen(process: WarmCall, path: Path) -> None:
    end = time.monotonic() + TIMEOUT_S
    while process.wait(0.0005) is None and time.monotonic() < end:
        if path.exists():
            process.kill()
            return


def in_child(
    job: str, folder: str, kill: list[Any] | None, options: dict[str, Any], log: str, result: str = ""
) -> None:
    with Path(log).open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        os.dup2(file.fileno(), sys.stderr.fileno())
        from composer_replication.trainer.checkpoints import newest_complete

        if kill is not None:
            Kill(*kill).install()
        module, _, function = job.partition(":")
        work = getattr(importlib.import_module(module), function)
        returned = work(Path(folder), newest_complete(Path(folder)) is not None, **options)
        result_file(Path(result or folder)).write_text(json.dumps(returned), encoding="utf-8")


def result_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.result.json")
