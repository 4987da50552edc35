"""`crf sites` over several sessions: what a gate refuses again in a later session of the project is taught there."""

from __future__ import annotations

import json

import pytest
from claude_records import Log, call
from run_pieces import ingested

from composer_replication.cli.sites import write_sites
from composer_replication.config import SitesConfig

REFUSED = "PreToolUse:Bash hook error: src/{}.go: code is not formatted, run the formatter first"


def _session(folder, name, day):
    log = Log(session=name)
    log.user(f"task {name}")
    log.assistant("m1", call("c1", "Bash", command=f"deploy {name}"))
    log.result("c1", REFUSED.format(name), is_error=True)
    lines = [json.loads(line) for line in log.lines().splitlines()]
    text = "\n".join(
        json.dumps({**line, "timestamp": f"2026-02-{day:02}T10:00:00.000Z", "cwd": "/srv/shop"}) for line in lines
    )
    (folder / f"{name}.jsonl").write_text(text + "\n", encoding="utf-8")


@pytest.mark.parametrize("days", [(1, 2, 3), (3, 2, 1), (2, 3, 1)])
def test_only_the_first_refusal_of_a_project_is_not_the_models_whatever_the_order_of_the_files(tmp_path, days):
    for name, day in zip("abc", days, strict=True):
        _session(tmp_path, name, day)
    run = ingested(tmp_path / "run", *sorted(tmp_path.glob("*.jsonl")))[0]
    written = write_sites(SitesConfig(), run)
    first = "abc"[days.index(1)]
    assert {site.conversation_id: (site.blame, site.is_kept) for site in written.sites} == {
        name: ("harness", False) if name == first else ("model", True) for name in "abc"
    }
    rows = [
        row
        for row in map(json.loads, run.path("sites").read_text(encoding="utf-8").splitlines())
        if row["kind"] == "hook_blocked"
    ]
    assert [row["conversation_id"] for row in rows if row["hint"]] == [name for name in "abc" if name != first]
    assert [row["conversation_id"] for row in rows] == ["a", "b", "c"]  # the order of the file is that of the run
