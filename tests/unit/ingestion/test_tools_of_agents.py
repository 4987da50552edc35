"""`tools.jsonl` says whose a tool is, and one reader gives an agent its own."""

from __future__ import annotations

import json
import re

from run_pieces import ingested, run_states
from two_agents import CLAUDE, CODEX, tool_names, two_agents_run

from composer_replication.cli.forget import forget
from composer_replication.cli.sites import write_sites
from composer_replication.config import SitesConfig
from composer_replication.errors import RunError
from composer_replication.runs.files import TOOLS_SCHEMA, TOOLS_VERSION, read_tools
from composer_replication.trainer.from_config.inputs import tools_of
from refusals import refusal

GIVEN = {"shell": {"type": "object", "properties": {}}, "Ask": {"type": "object"}}


def rows_of(run):
    rows = run.read_jsonl("tools", schema=TOOLS_SCHEMA, version=TOOLS_VERSION)
    return [(row["name"], row["format"], row["source"], row["num_calls"]) for row in rows]


def test_two_agents_have_a_row_each_for_tools_of_one_name(tmp_path):
    run = two_agents_run(tmp_path)
    assert rows_of(run) == [
        ("Edit", CLAUDE, "inferred", 1),
        ("Read", CLAUDE, "inferred", 1),
        ("apply_patch", CODEX, "inferred", 2),
        ("shell", CLAUDE, "inferred", 1),
        ("shell", CODEX, "inferred", 1),
    ]
    table = read_tools(run)
    assert (table.declared, tool_names(table.of(CLAUDE))) == ({}, ["Edit", "Read", "shell"])
    assert tool_names(table.of(CODEX)) == ["apply_patch", "shell"]
    assert table.of("gemini") == []
    types = [table.of(each)[-1]["function"]["parameters"]["properties"]["command"] for each in (CLAUDE, CODEX)]
    assert types == [{"type": "string"}, {"type": "array"}]


def test_what_a_file_gave_is_every_agents_and_goes_before_what_was_inferred(tmp_path):
    run = two_agents_run(tmp_path, tools=GIVEN)
    assert [row for row in rows_of(run) if row[2] == "file"] == [("Ask", None, "file", 0), ("shell", None, "file", 2)]
    table = read_tools(run)
    assert table.declared == GIVEN
    assert tool_names(table.of(CLAUDE)) == ["Ask", "Edit", "Read", "shell"]
    assert tool_names(table.of(CODEX)) == ["Ask", "apply_patch", "shell"]
    assert tool_names(table.of("gemini")) == ["Ask", "shell"]
    assert all(table.of(each)[-1]["function"]["parameters"] == GIVEN["shell"] for each in (CLAUDE, CODEX, "gemini"))


def test_templates_get_the_same_with_an_empty_description(tmp_path):
    run = two_agents_run(tmp_path, tools=GIVEN)
    for format_name, tools in (tools_of(run) or {}).items():
        bare = [{**each, "function": {**each["function"]}} for each in tools]
        assert [each["function"].pop("description") for each in bare] == [""] * len(tools)
        assert bare == read_tools(run).of(format_name or "other")
        assert all(list(each["function"]) == ["name", "description", "parameters"] for each in tools)


def test_a_forgotten_session_takes_its_tools_along_and_the_given_ones_stay(tmp_path):
    run = two_agents_run(tmp_path, tools={"Ask": GIVEN["Ask"]})
    forget(run, ["aaaaaaaa-1111"])
    assert rows_of(run) == [
        ("Ask", None, "file", 0),
        ("apply_patch", CODEX, "inferred", 2),
        ("shell", CODEX, "inferred", 1),
    ]


def files_of(run):
    """All but the locks, which stay where a command was."""
    return {path.name: path.read_bytes() for path in run.root.iterdir() if path.is_file() and path.suffix != ".lock"}


def test_tools_that_do_not_say_whose_they_are_are_refused_with_the_command_that_makes_them_anew(tmp_path):
    run = two_agents_run(tmp_path)
    made_anew = run.path("tools").read_bytes()
    write_sites(SitesConfig(), run)
    rows = [{key: row[key] for key in row if key != "format"} for row in map(json.loads, made_anew.splitlines())]
    run.write_jsonl("tools", rows, schema=TOOLS_SCHEMA, version=2, sources=["conversations"])
    everything = files_of(run)
    command = f"`crf ingest PATH... -o {run.root}`"
    for reader in (
        lambda: tools_of(run),
        lambda: run_states(run),
        lambda: write_sites(SitesConfig(), run),
        lambda: forget(run, ["aaaaaaaa-1111"]),
    ):
        with refusal(RunError, what="tools.jsonl", got="2 (", fix=command) as caught:
            reader()
        assert re.search(r"^3\b.*\btool\b", caught.value.expected)
    assert everything == files_of(run)
    _, summary = ingested(run.root, tmp_path / "logs")
    assert (summary.num_read, run.path("tools").read_bytes()) == (0, made_anew)
