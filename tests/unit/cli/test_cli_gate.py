"""What leaves the machine by `crf` is looked at once more: refused with its place, and with a way on."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from test_cli_replay import SLUGS, rows

from composer_replication.cli.main import main
from fault_server import FaultServer
from output_facts import lines_with

WORDS = "tulip harvest oven 42"


def crf(*arguments, cwd, **environment):
    """`crf` in this process, with an environment of its own: much cheaper than a process for each."""
    out, err = io.StringIO(), io.StringIO()
    kept = {"HOME": str(cwd), "PATH": os.environ["PATH"], **environment}
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(cwd))
        stack.enter_context(patch.dict(os.environ, kept, clear=True))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        status = main(list(arguments))
    return SimpleNamespace(returncode=status, stdout=out.getvalue(), stderr=err.getvalue())


def must(*arguments, **options):
    done = crf(*arguments, **options)
    assert done.returncode == 0, done.stderr


def write_chat(path, text):
    function = {"name": "bash", "arguments": '{"command": "pytset -q"}'}
    messages = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c0", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c0", "content": "bash: pytset: command not found"},
        {"role": "assistant", "content": "Done."},
    ]
    path.write_text(json.dumps({"messages": messages}) + "\n")


@pytest.fixture(scope="module")
def server():
    with FaultServer(agreement=1.0) as running:
        yield running


@pytest.fixture
def ready(tmp_path, server):
    write_chat(tmp_path / "chats.jsonl", f"the word is {WORDS}")
    specs = [
        {"slug": slug, "base_url": server.base_url, "input_per_mtok": 1.0, "output_per_mtok": 1.0} for slug in SLUGS
    ]
    (tmp_path / "teachers.json").write_text(json.dumps(specs))
    return tmp_path


def replay(folder, *options, **environment):
    return crf(
        "replay", "run", "--teachers", "teachers.json", "--set=replay.states=all", *options, cwd=folder, **environment
    )


def test_a_secret_that_is_known_by_now_is_not_sent_and_can_be_taken_out(ready, server):
    must("ingest", "chats.jsonl", "-o", "run", cwd=ready)
    before = server.requests()["num_chat"]
    for options in ([], ["--dry-run"]):
        done = replay(ready, *options, DEPLOY_PASSWORD=WORDS)
        assert done.returncode == 1
        assert [line for line in lines_with(done.stderr, 1, "ENV_SECRET x1") if line.startswith("crf replay: ")]
        (place,) = lines_with(done.stderr, "state chats::0000", "message 2", "user", "ENV_SECRET x1")
        assert WORDS not in done.stderr + done.stdout
    assert server.requests()["num_chat"] == before
    assert not (ready / "run" / "teacher_calls.jsonl").exists()
    for way in ("crf ingest PATH... -o RUN --reread", "crf forget SESSION", "--allow ID", "--no-scrub"):
        assert way in done.stderr
    name = re.search(r"\bid (\w{12})\b", place)[1]
    assert replay(ready, "--allow", name, DEPLOY_PASSWORD=WORDS).returncode == 0
    must("ingest", "chats.jsonl", "-o", "run", "--reread", cwd=ready, DEPLOY_PASSWORD=WORDS)
    assert replay(ready, DEPLOY_PASSWORD=WORDS).returncode == 0
    assert all(row["error"] is None for row in rows(ready))


def test_a_run_made_without_scrubbing_goes_nowhere_unless_the_flag_is_typed_again(ready, server):
    must("ingest", "chats.jsonl", "-o", "run", "--no-scrub", cwd=ready)
    before = server.requests()["num_chat"]
    refused = [replay(ready), crf("export", "run", "--atif", "atif", cwd=ready)]
    assert server.requests()["num_chat"] == before
    done = replay(ready, "--no-scrub")
    assert done.returncode == 0, done.stderr
    assert [line for line in lines_with(done.stderr, "--no-scrub") if line.startswith("crf replay: ")]
    refused += [crf("pairs", "run", "--export", "p.jsonl", cwd=ready)]
    for each in refused:
        assert each.returncode == 1
        (line,) = lines_with(each.stderr, "crf ingest", "--no-scrub")
        assert line.count("--no-scrub") > 1  # how the run was made, and what to type here
    assert not (ready / "atif").exists()
    assert not (ready / "run" / "pairs.jsonl").exists()
    must("pairs", "run", "--threshold", "2", "--where-it-worked", cwd=ready)  # stays here
    must("pairs", "run", "--where-it-worked", "--export", "p.jsonl", "--no-scrub", cwd=ready)
    must("export", "run", "--atif", "atif", "--no-scrub", cwd=ready)
    assert WORDS in next((ready / "atif").iterdir()).read_text()


def test_an_export_names_the_place_and_not_the_secret(ready):
    must("ingest", "chats.jsonl", "-o", "run", cwd=ready)
    done = crf("export", "run", "--atif", "atif", cwd=ready, DEPLOY_PASSWORD=WORDS)
    assert done.returncode == 1
    assert lines_with(done.stderr, "step 1", "ENV_SECRET x1", "id")
    assert WORDS not in done.stderr + done.stdout
    assert not (ready / "atif").exists()
