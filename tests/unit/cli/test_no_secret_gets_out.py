"""All planted secrets through `crf ingest` and `crf export`: none in an artefact, on stdout or stderr, or in --json."""

from __future__ import annotations

import json
import re

from claude_records import Log, call, text, thinking
from crf import crf

from data.planted_secrets import planted, readings, survivors


def log_with(number, case):
    """A session in which the planted text stands where its place says it was."""
    log = Log(session=f"session-{number:04}")
    place = case.place
    log.user(case.text if place == "user_text" else "go")
    blocks = [thinking(case.text)] if place == "thinking" else []
    blocks += [text(case.text if place == "assistant_text" else "ok")]
    arguments = {"tool_arguments": {"command": case.text}, "path": {"file_path": case.text}}.get(place, {"a": 1})
    log.assistant("m1", *blocks, call("t1", "Bash", **arguments))
    is_result = place not in ("user_text", "assistant_text", "thinking", "tool_arguments", "path")
    log.result("t1", case.text if is_result else "done", is_error=True)
    return log


def lines_by_session(*files):
    """Session -> every line and document of these files that names it, so that each case is judged by its own."""
    found = {}
    for path in files:
        for line in path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]:
            for session in set(re.findall(r"session-\d{4}", line)):
                found.setdefault(session, []).append(line)
    return found


def test_no_planted_secret_gets_out_of_the_command_line(tmp_path, note):
    cases = planted()
    # One process per set of environment values: most cases have none, so most share one run.
    groups = {}
    for number, case in enumerate(cases):
        groups.setdefault(json.dumps(case.env or {}, sort_keys=True), []).append((number, case))
    for index, (environment, members) in enumerate(groups.items()):
        folder = tmp_path / f"logs-{index}"
        folder.mkdir()
        for number, case in members:
            (folder / f"session-{number:04}.jsonl").write_bytes(log_with(number, case).lines())
        options = {"cwd": tmp_path, **json.loads(environment)}
        run, out = tmp_path / f"run-{index}", tmp_path / f"atif-{index}"
        shown = [crf("ingest", folder, "-o", run, "--json", "--workers", "1", **options)]
        shown += [crf("ingest", folder, "-o", run, **options), crf("export", run, "--atif", out, **options)]
        assert [each.returncode for each in shown] == [0, 0, 0]
        files = [*run.iterdir(), *out.iterdir()]
        streams = "\n".join(stream for each in shown for stream in (each.stdout, each.stderr))
        everything = streams + "".join(path.read_text() for path in files)
        views, own = list(readings(streams)), lines_by_session(*files)
        for number, case in members:
            where = (number, case.kind, case.place)
            assert [value for value in case.value if value in everything] == [], where
            assert survivors(case, streams, views=views) == [], where
            mine = "\n".join(own[f"session-{number:04}"])
            assert len(mine) > len(case.text)
            assert survivors(case, mine) == [], where
    note(
        f"{len(cases)} planted secrets of {len({case.kind for case in cases})} kinds through crf ingest and crf export"
    )
