"""`benchmarks/hints.py`: what is prepared is the session's own tokens, and scoring is a plain pass over them."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

import hints
from composer_replication.cli.main import main
from hint_effects import ITEMS_SCHEMA, Effects, mean_with_interval, print_tables, score
from hint_items import SCHEMA, prepare
from output_facts import lines_with
from student_templates import save_student, tokenizer_of
from tiny_models import VOCAB, build

FAMILY = "qwen2_5_like"
EXAMPLES = Path(__file__).parents[2] / "examples" / "sessions"


def item(role="site", **values):
    spans = {"name": [2, 4], "arguments": [4, 9], "first": [6, 7]}
    hints = {"none": [], "template": [20, 21, 22], "other_kind": [30, 31, 32, 33, 34]}
    ids = {"prefix": list(range(40, 52)), "tail": list(range(60, 69))}
    about = {"id": "s1", "session": "a", "kind": "edit_noop", "tool": "Edit", "role": role, "is_held_out": False}
    return {**about, **ids, "hints": hints, "spans": spans, **values}


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scored")
    model = build("qwen2-tied")
    model.save_pretrained(folder / "model")
    head = {"schema": SCHEMA, "hints": ["none", "template", "other_kind"]}
    rows = [head, item(), item("good", prefix=[3, 4, 5])]
    (folder / "items.jsonl").write_text("\n".join(map(json.dumps, rows)))
    score(folder / "items.jsonl", str(folder / "model"), folder / "result.json", device="cpu", temperatures=[2.0])
    return model, rows[1:], folder / "result.json"


def test_scores_are_those_of_one_plain_pass_over_prefix_hint_and_tail(scored):
    model, rows, path = scored
    for row, found in zip(rows, json.loads(path.read_text())["items"], strict=True):
        for name, hint in row["hints"].items():
            ids = row["prefix"] + hint + row["tail"]
            before = len(ids) - len(row["tail"])
            assert max(ids) < VOCAB
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0]
            for (span, (start, end)), (shown, temperature) in product(
                row["spans"].items(), ((name, 1.0), (f"{name}@2", 2.0))
            ):
                log_probs = (logits / temperature).log_softmax(-1)
                rows_of = range(before + start - 1, before + end - 1)
                expected = sum(float(log_probs[at, ids[at + 1]]) for at in rows_of)
                assert found["log_probs"][shown][span] == pytest.approx(expected, abs=1e-4), (shown, span)
        assert found["num_tokens"] == {"name": 2, "arguments": 5, "first": 1}


def test_effects_are_differences_to_no_hint_to_good_calls_and_to_other_kinds():
    def row(role, none, template, other):
        return {**item(role), "num_tokens": {"name": 4}, "log_probs": {
            name: {"name": value} for name, value in (("none", none), ("template", template), ("other_kind", other))
        }}  # fmt: skip

    effects = Effects([row("site", -5.0, -8.0, -6.0), row("good", -2.0, -3.0, -2.5)])
    assert effects.of("site", "template", "name") == [("a", -3.0)]
    assert effects.of("site", "template", "name", per_token=True) == [("a", -0.75)]
    assert effects.of("site", "template", "name", kind="git_state") == []
    assert effects.difference("template", "name") == [("a", -2.0)]
    assert effects.beside_other("template", "name") == [("a", -2.0)]
    assert effects.of("site", "template", "first") == []


def test_an_effect_at_a_temperature_is_beside_no_hint_at_the_same():
    values = {
        "none": -5.0,
        "template": -8.0,
        "other_kind": -6.0,
        "none@2": -4.0,
        "template@2": -4.5,
        "other_kind@2": -4.2,
    }
    row = {**item(), "num_tokens": {"name": 4}, "log_probs": {name: {"name": value} for name, value in values.items()}}
    effects = Effects([row])
    assert effects.of("site", "template@2", "name") == [("a", -0.5)]
    assert effects.beside_other("template@2", "name") == [("a", pytest.approx(-0.3))]


def test_an_interval_is_over_sessions_and_not_over_calls():
    of_two = [("a", 1.0), ("a", 1.0), ("b", 4.0), ("b", 4.0)]
    assert mean_with_interval(of_two, 400) == "+2.50 [+1.00, +4.00]"
    assert mean_with_interval([("a", 1.0), ("a", 2.0)], 400) == "+1.50"
    assert mean_with_interval([], 400) == ""


def test_the_table_has_a_row_for_every_hint_and_every_kind(scored, capsys):
    print_tables(scored[2], rounds=50)
    shown = capsys.readouterr().out
    assert re.search(r"\b1 sites\D+1\b.*\bcalls\b", shown)
    assert shown.count("| template | 1 |") == 4  # three measures, and by kind
    assert "| edit_noop | other_kind | 1 |" in shown


def test_scoring_asks_for_nothing_of_the_package():
    source = (Path(__file__).parents[2] / "benchmarks" / "hint_effects.py").read_text()
    modules = {
        line.split()[1].split(".")[0] for line in source.splitlines() if line.lstrip().startswith(("from ", "import "))
    }
    assert modules - set(sys.stdlib_module_names) == {"torch", "transformers", "peft"}  # peft for an adapter alone


def test_prepared_items_are_the_sessions_own_tokens(tmp_path, capsys):
    run = str(tmp_path / "run")
    assert main(["ingest", str(EXAMPLES), "-o", run]) == 0
    assert main(["sites", run]) == 0
    folder = save_student(FAMILY, tmp_path)
    sites = [json.loads(line) for line in (tmp_path / "run" / "sites.jsonl").read_text().splitlines()]
    kept = {site["id"]: site for site in sites if site["is_kept"]}
    writer = tmp_path / "writer.jsonl"
    writer.write_text("\n".join(json.dumps({"site": each, "hint": "Look before you act."}) for each in kept))
    out = tmp_path / "items.jsonl"
    prepare(run, str(folder), out, {"writer": writer}, max_sites=50, max_tokens=3000)
    head, *items = map(json.loads, out.read_text().splitlines())
    assert head["hints"] == ["none", "template", "raw_error", "other_kind", "writer"]
    assert {each["role"] for each in items} == {"site", "good"}
    tokenizer = tokenizer_of(FAMILY)
    for each in items:
        texts = {name: tokenizer.decode(each["tail"][a:b]) for name, (a, b) in each["spans"].items()}
        if each["role"] == "site":
            assert texts["name"].endswith(each["tool"])
            assert kept[each["id"]]["hint"]["text"] in tokenizer.decode(each["hints"]["template"])
            assert kept[each["id"]]["hint"]["text"] not in tokenizer.decode(each["hints"]["other_kind"])
        assert "Look before you act." in tokenizer.decode(each["hints"]["writer"])
        longest = max(map(len, each["hints"].values()))
        assert len(each["prefix"]) + longest + len(each["tail"]) <= 3000
    num_sites, num_good = ([each["role"] for each in items].count(role) for role in ("site", "good"))
    assert lines_with(capsys.readouterr().out, out, num_sites, "sites", num_good, "calls")


def test_items_say_who_is_held_out_and_name_no_session(tmp_path, capsys):
    run = str(tmp_path / "run")
    assert main(["ingest", str(EXAMPLES), "-o", run]) == 0
    assert main(["split", run, "--set", "split.test=0.4", "--set", "split.validation=0"]) == 0
    assert main(["sites", run]) == 0
    out = tmp_path / "items.jsonl"
    prepare(run, str(save_student(FAMILY, tmp_path)), out, {}, max_sites=50, max_tokens=3000)
    _, *items = map(json.loads, out.read_text().splitlines())
    sides = {row["conversation_id"]: row["side"] for row in _rows(run, "split")}
    of_site = {row["id"]: sides[row["conversation_id"]] for row in _rows(run, "sites")}
    assert {each["is_held_out"] for each in items} == {True, False}
    assert all(each["is_held_out"] == (of_site[each["id"]] == "test") for each in items)
    sessions = {row["conversation_id"]: row["session"] for row in _rows(run, "split")}
    assert not any(name in out.read_text() for name in sessions.values())
    digests = {name: hashlib.sha256(name.encode()).hexdigest()[:16] for name in sessions.values()}
    of_conversation = {row["id"]: row["conversation_id"] for row in _rows(run, "sites")}
    assert {each["id"]: each["session"] for each in items} == {
        each["id"]: digests[sessions[of_conversation[each["id"]]]] for each in items
    }
    assert len({each["session"] for each in items}) > 1


def test_of_a_run_that_was_never_split_nobody_says_who_is_held_out(scored, tmp_path):
    run, out = str(tmp_path / "run"), tmp_path / "items.jsonl"
    assert main(["ingest", str(EXAMPLES), "-o", run]) == 0
    assert main(["sites", run]) == 0
    prepare(run, str(save_student(FAMILY, tmp_path)), out, {}, max_sites=50, max_tokens=3000)
    _, *items = map(json.loads, out.read_text().splitlines())
    assert {each["is_held_out"] for each in items} == {None}


def test_items_of_another_version_are_refused_before_a_model_is_loaded(tmp_path):
    assert ITEMS_SCHEMA == SCHEMA
    path = tmp_path / "items.jsonl"
    path.write_text(json.dumps({"schema": "hint_items 1", "hints": []}))
    with pytest.raises(SystemExit, match=f"'hint_items 1'.*'{ITEMS_SCHEMA}'"):
        score(path, "no such model", tmp_path / "out.json")


def test_a_table_of_the_held_out_leaves_the_others_out(scored, tmp_path, capsys, monkeypatch):
    result = json.loads(scored[2].read_text())
    result["items"].append({**result["items"][0], "id": "s2", "session": "b", "is_held_out": True})
    path = tmp_path / "both.json"
    path.write_text(json.dumps(result))
    for asked, numbers in ((["--held-out"], ["1", "0", "1"]), ([], ["2", "1", "2"])):
        monkeypatch.setattr(sys, "argv", ["hints.py", "table", str(path), "--rounds", "50", *asked])
        hints.main()
        (head,) = lines_with(capsys.readouterr().out, "sites", "calls", "sessions")
        assert re.findall(r"\d+", head[head.index(" sites") - 1 :])[:3] == numbers
    del result["items"][0]["is_held_out"]
    path.write_text(json.dumps(result))
    with pytest.raises(SystemExit, match=re.escape(str(path))):
        print_tables(path, held_out=True)


def _rows(run, name):
    return [json.loads(line) for line in (Path(run) / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("placement", ["in_last_message", "head"])
def test_a_hint_stands_where_it_is_asked_to(tmp_path, placement):
    run = str(tmp_path / "run")
    assert main(["ingest", str(EXAMPLES), "-o", run]) == 0
    assert main(["sites", run]) == 0
    folder, out = save_student(FAMILY, tmp_path), tmp_path / "items.jsonl"
    prepare(run, str(folder), out, {}, max_sites=50, max_tokens=3000, placement=placement)
    head, *items = map(json.loads, out.read_text().splitlines())
    assert head["placement"] == placement
    sites = [each for each in items if each["role"] == "site"]
    assert sites
    tokenizer = tokenizer_of(FAMILY)
    for each in sites:
        before, after = tokenizer.decode(each["prefix"]), tokenizer.decode(each["tail"])
        if placement == "head":
            assert "<|im_start|>assistant" not in before
            assert "<|im_start|>user" in after
        else:  # the message goes on after it, and the turn's own header is the next one
            assert not after.startswith("<|im_start|>")
            assert after.count("<|im_start|>") == 1
