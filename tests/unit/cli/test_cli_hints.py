"""`crf hints`: every hint that is taught, strike-outs that hold over reruns, and a model that writes them."""

from __future__ import annotations

import json

import pytest
from claude_records import Log, call
from crf import crf, must

from composer_replication.cli.pipeline import STEPS
from composer_replication.config import CrfConfig, SitesConfig
from composer_replication.evaluation.report.plots import _sum_teacher_costs
from composer_replication.evaluation.report.records import RunRecords
from composer_replication.hint_generator.teacher_hints import QUOTES
from composer_replication.runs import RunDir
from fault_server import FaultServer, Reply
from output_facts import lines_with

MISSING = "<tool_use_error>File does not exist.</tool_use_error>"
NOT_READ = "<tool_use_error>File has not been read yet. Read it first before writing to it.</tool_use_error>"


@pytest.fixture
def run(tmp_path):
    log = Log(session="aaaaaaaa-1111")
    log.user("go")
    log.assistant("m1", call("t1", "Edit", file_path="/repo/a.py", old_string="x", new_string="y"))
    log.result("t1", NOT_READ, is_error=True)
    log.assistant("m2", call("t2", "Read", file_path="/repo/b_one.py"))
    log.result("t2", MISSING, is_error=True)
    log.assistant("m3", call("t3", "Bash", command="pytest -q"))
    log.result("t3", "Exit code 1\n1 failed", is_error=True)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "aaaaaaaa-1111.jsonl").write_bytes(log.lines())
    must("ingest", "logs", "-o", "run", cwd=tmp_path)
    must("sites", "run", cwd=tmp_path)
    return tmp_path / "run"


def hints(run, *options):
    return json.loads(must("hints", run, "--json", *options, cwd=run.parent))["hints"]


def test_every_kept_site_is_listed_with_its_hint(run):
    listed = hints(run)
    assert [(each["kind"], each["source"]) for each in listed] == [
        ("edit_not_read", "template"),
        ("file_not_found", "template"),
    ]
    done = crf("hints", run, "--kind", "file_not_found", cwd=run.parent)
    head, text = done.stdout.splitlines()
    assert lines_with(head, listed[1]["site"], "file_not_found", "template")
    assert text.strip() == listed[1]["hint"] != listed[0]["hint"]
    assert lines_with(done.stderr, 1, 2, "hints")


def test_a_hint_that_was_struck_out_stays_out_until_it_is_taken_back(run):
    first, second = hints(run)
    assert hints(run, "--drop", first["site"][:6]) == [second]
    rows = [json.loads(line) for line in (run / "sites.jsonl").read_text().splitlines()]
    assert (rows[0]["is_kept"], rows[0]["hint"]) == (False, None)
    assert "crf hints RUN --keep" in rows[0]["reason"]
    counts = json.loads((run / "sites.meta.json").read_text())["counts"]
    assert (counts["hint: template"], counts["sites"]) == (1, 3)
    must("sites", run, cwd=run.parent)
    assert hints(run) == [second]
    hints(run, "--keep", first["site"])
    must("sites", run, cwd=run.parent)
    assert hints(run) == [first, second]
    assert crf("hints", run, "--drop", "zzzz", cwd=run.parent).returncode == 1


def test_strike_outs_survive_forgetting_and_hold_only_ids(run):
    first, _ = hints(run)
    hints(run, "--drop", first["site"])
    must("forget", "aaaaaaaa-1111", "--run", run, "--yes", cwd=run.parent)
    (row,) = [json.loads(line) for line in (run / "struck_hints.jsonl").read_text().splitlines()]
    assert first["site"] in str(row)
    assert "/repo" not in str(row)


def reply(text):
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": 600, "completion_tokens": 20, "cost": 0.001}
    body = {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}
    return Reply(status=200, headers={}, body=body)


@pytest.mark.parametrize(
    ("text", "refusals", "source"),
    [
        ("Look at what is there before you act.", [], "writer"),
        ("There is neither a.py nor b_one.py.", [QUOTES], "template"),
    ],
)
def test_a_writer_is_reached_and_what_quotes_the_call_is_refused_and_counted(run, text, refusals, source):
    with FaultServer() as server:
        server.script([reply(text), reply(text)])
        prices = {"input_per_mtok": 1.0, "output_per_mtok": 1.0}
        teachers = [{"slug": "openai/gpt-5", "base_url": server.base_url, **prices}]
        (run.parent / "teachers.json").write_text(json.dumps(teachers))
        done = crf("hints", run, "--writer", "teachers.json", "--json", cwd=run.parent)
    assert done.returncode == 0, done.stderr
    assert len(lines_with(done.stderr, "hints", 2)) == 2  # what became of the model's, and how many are listed
    assert len(lines_with(done.stderr, QUOTES, 2)) == len(refusals)
    assert [each["source"] for each in json.loads(done.stdout)["hints"]] == [source] * 2
    meta = json.loads((run / "sites.meta.json").read_text())
    assert meta["counts"][f"hint: {source}"] == 2
    said = meta["settings"]
    assert (said["writer"], said["writer_calls"], said["writer_usd"]) == ("openai/gpt-5", 2, pytest.approx(0.002))
    config = CrfConfig(sites=SitesConfig(writer=str(run.parent / "teachers.json")))
    assert STEPS["sites"].why_stale(config, RunDir.open(run)) == ""
    assert STEPS["sites"].why_stale(CrfConfig(), RunDir.open(run)) == "writer: openai/gpt-5 -> None"
    (cost,) = _sum_teacher_costs(RunRecords(RunDir.open(run), run))
    assert (cost.slug, cost.calls, cost.usd) == ("openai/gpt-5, hints", 2, pytest.approx(0.002))
