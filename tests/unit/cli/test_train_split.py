"""`crf train` on a run with a split: weights, proof and figures do not know what the test sessions hold."""

from __future__ import annotations

import json
import shutil

import pytest
from train_runs import adapter_of, same

from composer_replication.cli.main import main
from composer_replication.runs import RunDir
from composer_replication.runs.split import read_split

SHORT = tuple(
    f"--set=train.{each}"
    for each in ("optimiser.steps=2", "proof.on=true", "warmup.mode=until", "warmup.every=1", "warmup.most=2")
)
MARKER = "marker of a held-out session"


@pytest.fixture
def split_run(folder, tmp_path):
    """A run of the folder's logs with a split; with a marker in every text of the sessions that are its test."""

    def make(name, marked=frozenset()):
        logs = tmp_path / f"{name}-logs"
        shutil.copytree(folder / "logs", logs)
        for identity in marked:
            path = logs / f"{identity}.jsonl"
            records = [json.loads(line) for line in path.read_text().splitlines()]
            path.write_text("".join(f"{json.dumps(_marked(record))}\n" for record in records))
        run = str(tmp_path / name)
        for verb in (["ingest", str(logs), "-o", run], ["split", run], ["sites", run], ["pairs", run, "--no-filter"]):
            assert main(verb) == 0
        return RunDir.open(run)

    return make


def _marked(record):
    content = record["message"]["content"]
    if isinstance(content, str):
        record["message"]["content"] = f"{content} {MARKER}"
    for block in content if isinstance(content, list) else ():
        for key in ("text", "content"):
            if isinstance(block.get(key), str):
                block[key] += f" {MARKER}"
        block["input"] = {key: f"{value} {MARKER}" for key, value in block.get("input", {}).items()}
        if "input" in block and not block["input"]:
            del block["input"]
    return record


def _trained(train, run, tmp_path):
    """The adapter, the proof's rows, every figure but times, and the counts of a training on the run."""
    output = tmp_path / f"{run.root.name}-out"
    status, _, err = train(*SHORT, f"--set=train.run='{run.root}'", output=output)
    assert status == 0, err
    proofs = list(run.read_jsonl("hint_proof", schema="hint_proof", version=3))
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    figures = [{k: v for k, v in each.items() if k.startswith(("loss", "ran/", "eval_l"))} for each in lines]
    record = json.loads((output / "adapter" / "training.json").read_text())
    return adapter_of(output), proofs, figures, (record["counts"], record["drops"])


def test_weights_proof_and_figures_do_not_change_with_the_test_sessions(train, split_run, tmp_path):
    plain = split_run("plain")
    sides = read_split(plain)
    assert (len(sides.train), len(sides.validation), len(sides.test)) == (7, 2, 3)
    marked = split_run("marked", sides.test)
    assert read_split(marked) == sides
    assert MARKER in marked.path("conversations").read_text()
    (weights, *first), (others, *second) = (_trained(train, run, tmp_path) for run in (plain, marked))
    assert same(weights, others)
    assert first == second
    assert {row["conversation_id"] for row in first[0]} <= sides.train
    assert first[2][0]["conversations"] == len(sides.train)


def test_a_share_that_the_split_was_not_drawn_with_is_refused(train, split_run):
    run = split_run("plain")
    status, _, err = train(f"--set=train.run='{run.root}'", "--set=split.test=0.5", "--dry-run")
    assert status == 1
    assert "split.test" in err
    assert "crf split" in err


def test_without_evaluations_the_validation_is_learnt_from(train, split_run):
    run = split_run("plain")
    sides = read_split(run)
    status, out, err = train(f"--set=train.run='{run.root}'", "--dry-run", "--json")
    assert status == 0, err
    assert json.loads(out)["counts"]["conversations"] == len(sides.train | sides.validation)
