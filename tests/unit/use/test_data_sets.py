"""Data sets for other trainers: what is in them, that `datasets` loads them, and that secrets do not get out."""

from __future__ import annotations

import json
import re

import pytest
from claude_records import Log, call, text

from composer_replication.cli.main import main
from composer_replication.runs import RunDir
from composer_replication.runs.files import read_conversations


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """`datasets.load_dataset("json", ...)` with a cache of the test's own."""
    datasets = pytest.importorskip("datasets")
    cache = str(tmp_path_factory.mktemp("cache"))
    return lambda **files: datasets.load_dataset(
        "json", data_files={k: str(v) for k, v in files.items()}, cache_dir=cache
    )


def exported(run, shape, folder, capsys):
    assert main(["export", str(run), f"--{shape}", str(folder), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["rows"]


def test_good_turns_are_rows_with_what_stood_before_them(example_run, tmp_path, capsys, load):
    rows = exported(example_run, "sft", tmp_path / "sft", capsys)
    data = load(train=tmp_path / "sft" / "train.jsonl")["train"]
    assert len(data) == rows["train"] > 5
    turns = {
        f"{each.id}::{number:04d}": turn
        for each in read_conversations(RunDir.open(example_run))
        for number, turn in enumerate(turn for turn in each.turns if turn.role == "assistant")
    }
    failed = {
        site["turn_id"]
        for site in map(json.loads, (example_run / "sites.jsonl").read_text().splitlines())
        if site["blame"] == "model" and site["is_kept"]
    }
    assert failed
    assert {turns[row["id"]].id for row in data} & failed == set()
    row = next(each for each in data if turns[each["id"]].calls)
    (said,) = row["completion"]
    turn = turns[row["id"]]
    assert said["content"] == turn.text
    assert [each["function"]["name"] for each in said["tool_calls"]] == [each.name for each in turn.calls]
    assert said["tool_calls"][0]["function"]["arguments"] == dict(turn.calls[0].arguments)
    assert row["prompt"][0]["role"] == "system"
    assert {each["function"]["name"] for each in json.loads(row["tools"])} >= {turn.calls[0].name}


def test_conversations_in_sharegpt_s_form(example_run, tmp_path, capsys, load):
    rows = exported(example_run, "sharegpt", tmp_path / "talk", capsys)
    data = load(train=tmp_path / "talk" / "train.jsonl")["train"]
    assert len(data) == rows["train"] == len((example_run / "conversations.jsonl").read_text().splitlines())
    talk = [each for row in data for each in row["conversations"]]
    assert {each["from"] for each in talk} == {"system", "human", "gpt", "tool"}
    calls = [each["value"] for each in talk if "<tool_call>" in each["value"]]
    written = calls[0].split("<tool_call>\n")[1].split("\n</tool_call>")[0]
    assert set(json.loads(written)) == {"name", "arguments"}
    assert all(each["value"].startswith("<tool_response>\n") for each in talk if each["from"] == "tool")


def test_artefacts_of_a_run_load_by_themselves(example_run, load):
    for name in ("conversations", "sites", "pairs"):
        data = load(train=example_run / f"{name}.jsonl")["train"]
        assert len(data) == json.loads((example_run / f"{name}.meta.json").read_text())["rows"] > 0


def test_the_card_loads_the_files_it_names(example_run, tmp_path, capsys):
    yaml = pytest.importorskip("yaml")
    exported(example_run, "sft", tmp_path / "sft", capsys)
    card = (tmp_path / "sft" / "README.md").read_text()
    (config,) = yaml.safe_load(card.split("---")[1])["configs"]
    assert config["data_files"] == [{"split": "train", "path": "train.jsonl"}]
    for name in ("id", "prompt", "completion", "tools"):
        assert f"| `{name}` |" in card


def test_exported_pairs_have_a_card_beside_them_and_load(example_run, tmp_path, capsys, load):
    assert main(["pairs", str(example_run), "--export", str(tmp_path / "p.jsonl")]) == 0
    assert str(tmp_path / "p.card.md") in capsys.readouterr().err
    data = load(train=tmp_path / "p.jsonl")["train"]
    card = (tmp_path / "p.card.md").read_text()
    assert [name for name in data.column_names if f"| `{name}` |" not in card] == []
    assert 'data_files={"train": "p.jsonl"}' in card


def test_sides_of_the_split_are_files_of_their_own(example_run, tmp_path, capsys):
    import shutil

    run = shutil.copytree(example_run, tmp_path / "run")
    assert main(["split", str(run)]) == 0
    assert main(["sites", str(run)]) == 0
    assert main(["pairs", str(run)]) == 0
    capsys.readouterr()
    rows = exported(run, "sharegpt", tmp_path / "talk", capsys)
    sides = [json.loads(line) for line in (run / "split.jsonl").read_text().splitlines()]
    written = {
        json.loads(line)["id"]: path.stem
        for path in (tmp_path / "talk").glob("*.jsonl")
        for line in path.read_text().splitlines()
    }
    assert written == {each["conversation_id"]: each["side"] for each in sides}
    assert sum(rows.values()) == len(sides)


def test_a_secret_stops_all_of_it_and_may_be_let_through(tmp_path, capsys, monkeypatch):
    log = Log(session="s-1")
    log.user("go")
    log.assistant("m1", call("c1", "Bash", command="deploy --to blue-heron-violet-42"))
    log.result("c1", "done")
    log.assistant("m2", text("Deployed."))
    (tmp_path / "s-1.jsonl").write_bytes(log.lines())
    run = str(tmp_path / "run")
    assert main(["ingest", str(tmp_path / "s-1.jsonl"), "-o", run, "--workers", "1"]) == 0
    assert main(["sites", run]) == 0
    monkeypatch.setenv("DEPLOY_TOKEN", "blue-heron-violet-42")
    capsys.readouterr()
    assert main(["export", run, "--sft", str(tmp_path / "out")]) == 1
    told = capsys.readouterr().err
    assert re.search(r"\b2\b.*\bsecret\b", told)
    assert "`--no-scrub`" in told
    assert list((tmp_path / "out").glob("*.jsonl")) == []
    assert main(["export", run, "--sharegpt", str(tmp_path / "out"), "--no-scrub"]) == 0
    assert "blue-heron-violet-42" in (tmp_path / "out" / "train.jsonl").read_text()


def test_without_sites_nobody_knows_which_turns_are_good(tmp_path, capsys):
    from run_pieces import ingested, write_session

    ingested(tmp_path / "run", write_session(tmp_path / "logs", "s-1"))
    assert main(["export", str(tmp_path / "run"), "--sft", str(tmp_path / "out")]) == 1
    assert "`crf sites" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
