"""The table of steps is the pipeline: it agrees with the artefacts, the commands, the config and what steps write."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
from claude_records import Log, call, text
from run_pieces import ingested

from composer_replication.cli import pipeline as table
from composer_replication.cli.main import VERBS
from composer_replication.cli.pipeline import STEPS
from composer_replication.cli.sites import write_sites
from composer_replication.config import CrfConfig, SitesConfig, describe
from composer_replication.runs import ARTEFACTS

SRC = Path(table.__file__).parents[1]
NOT_OF_A_STEP = {"forgotten", "elsewhere"}
"""Written beside the pipeline, by `crf forget` and by what hands text out."""


def test_every_step_is_a_command_and_has_a_section_and_a_function():
    names = list(STEPS)
    assert names == [verb for verb in VERBS if verb in names]
    with_options = [step for step in STEPS.values() if step.name != "report"]  # a report has none
    sections = {{"evaluate": "evaluation"}.get(step.name, step.name) for step in with_options}
    assert sections <= {path.path.partition(".")[0] for path in describe(CrfConfig)}
    for step in with_options:
        first, second = list(inspect.signature(step.function).parameters)[:2]
        assert (first in ("section", "config"), second) == (True, "run")


def test_what_a_step_reads_was_written_before_it_and_each_artefact_has_one_writer():
    written = set()
    for step in STEPS.values():
        assert {*step.reads, *step.reads_if_there} <= written | set(step.writes)
        assert set(step.optional_sources) <= set(step.reads_if_there)
        assert not written & set(step.writes)
        written |= set(step.writes)
    made_by_steps = {name for name, artefact in ARTEFACTS.items() if artefact.command.removeprefix("crf ") in STEPS}
    assert written == (made_by_steps | {"config"}) - NOT_OF_A_STEP
    for step in STEPS.values():
        for name in set(step.writes) - {"config"}:
            assert ARTEFACTS[name].command == f"crf {step.name}"


def test_sidecars_name_sources_that_the_table_names(tmp_path):
    log = Log(session="s-1")
    log.user("go")
    log.assistant("m1", call("c1", "Read", file_path="/repo/a.py"))
    log.result("c1", "<tool_use_error>File does not exist.</tool_use_error>", is_error=True)
    log.assistant("m2", text("Done."))
    (tmp_path / "s-1.jsonl").write_bytes(log.lines())
    run, _ = ingested(tmp_path / "run", tmp_path / "s-1.jsonl")
    write_sites(SitesConfig(), run)
    step = STEPS["sites"]
    assert {each.name for each in run.meta("sites").sources} == set(step.reads)


@pytest.mark.parametrize("name", ["ingest", "sites", "replay", "pairs"])
def test_every_option_of_a_section_is_read_by_its_step(name):
    """An option that nobody reads cannot exist."""
    read = set()
    for file in {f"{name}.py", "replay.py" if name == "pairs" else f"{name}.py"}:  # states of pairs are read there
        for node in ast.walk(ast.parse((SRC / "cli" / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and "section" in ast.unparse(node.value):
                read.add(node.attr)
    options = {each.path.partition(".")[2] for each in describe(CrfConfig) if each.path.startswith(f"{name}.")}
    assert options - read == set()


def test_every_option_of_training_is_named_outside_of_the_config():
    named, whole = set(), {"loss", "train.switches"}  # read with `vars`, all at once
    for path in SRC.rglob("*.py"):
        if "config" not in path.relative_to(SRC).parts[:1]:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                named |= {node.attr} if isinstance(node, ast.Attribute) else set()
                named |= {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()
                named |= (
                    {node.target.id} if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else set()
                )
    options = {each.path for each in describe(CrfConfig) if each.path.rpartition(".")[0] not in whole}
    assert {path for path in options if path.rpartition(".")[2] not in named} == set()
