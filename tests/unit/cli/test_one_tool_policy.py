"""One policy for tools: a session is shown and trained with its own agent's, and inspect shows what is trained."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest
from two_agents import CLAUDE, CLAUDE_ONLY, CODEX, CODEX_ONLY, write_two_agents

from composer_replication.cli.main import main
from composer_replication.config.presets import load_with_preset
from composer_replication.runs import RunDir
from composer_replication.runs.files import read_conversations, read_sites
from composer_replication.trainer.from_config.inputs import read_inputs
from composer_replication.trainer.from_config.offline import offline_data
from output_facts import lines_with
from tokenizer_assets import load

IS_FULL = os.environ.get("CRF_TEST_PROFILE") == "full"
EXAMPLES = Path(__file__).parents[3] / "examples" / "sessions"
_BUDGETS = (4096, 262_144)
"""One cuts long sessions into windows, the other has room for all of them."""
_SMALL = 250_000
"""Bytes of a fixture that the short profile reads."""


def made(folder, logs, family, *options):
    """A run of these logs with its sites, a tokenizer and a config beside it."""
    run = folder / "run"
    assert main(["ingest", *map(str, logs), "-o", str(run), *options]) == main(["sites", str(run)]) == 0
    load(family).save_pretrained(folder / "model")
    (folder / "run.toml").write_text(
        f'[train]\nmodel = "{folder / "model"}"\nrun = "{run}"\n[train.batch]\noverlap = 512\n'
    )
    return RunDir.open(run)


def trained(folder, budget=_BUDGETS[1]):
    """What `crf train` with the config makes of the run: its windows."""
    config = load_with_preset(str(folder / "run.toml"), [f"train.batch.budget={budget}"])
    return offline_data(read_inputs(config)).train.windows


def inspected(folder, site, capsys):
    """What `crf inspect` says of a site, as data."""
    capsys.readouterr()
    assert main(["inspect", str(folder / "run"), site, "--json", "--config", str(folder / "run.toml")]) == 0
    return json.loads(capsys.readouterr().out)


def sites_of(window):
    """Site id -> the student's and the teacher's ids in a window, each from the window's start to the last target."""
    batch, found = window.batch(), {}
    starts = (batch.site_position == 0).nonzero().flatten().tolist()
    for number, (begin, end) in enumerate(zip(starts, [*starts[1:], batch.student_rows.numel()], strict=True)):
        sides = (
            [*path_to(batch.tree, int(rows[end - 1])), int(batch.target_tokens[end - 1])]
            for rows in (batch.student_rows, batch.teacher_rows)
        )
        found[window.site_ids[number]] = (*sides, end - begin)
    assert len(found) == len(window.site_ids)
    return found


def path_to(tree, row):
    """Ids on the way from the root to a row, by the attention rule alone: all that the row may see."""
    enter, leave = tree.enter[: row + 1], tree.leave[: row + 1]
    seen = (enter <= tree.enter[row]) & (tree.enter[row] < leave)
    return tree.input_ids[: row + 1][seen].tolist()


def compare(folder, capsys, *, most=None):
    """Inspect and train agree on each site, token for token: how many were compared, whole and cut, and tokens."""
    placed = {
        (site, budget): window for budget in _BUDGETS for window in trained(folder, budget) for site in window.site_ids
    }
    sites = list(dict.fromkeys(site for site, _ in placed))
    assert set(sites) == {
        site.id for site, hint in read_sites(RunDir.open(folder / "run")) if site.is_kept and hint is not None
    }
    found = Counter(sites=len(sites))
    for site in sites[:: 1 if most is None else max(1, len(sites) // most)]:
        shown = inspected(folder, site, capsys)
        for window in (placed[site, budget] for budget in _BUDGETS if (site, budget) in placed):
            student, teacher, num_targets = sites_of(window)[site]
            start, end = shown["student"]["target"]
            assert student == shown["student"]["ids"][window.first : end]
            assert num_targets == end - start
            assert teacher == shown["teacher"]["ids"][window.first :]
            found.update({"cut" if window.first else "whole": 1, "tokens": len(student) + len(teacher)})
        found["compared"] += 1
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    made(folder, [write_two_agents(folder / "logs")], "llama3")
    return folder


@pytest.mark.parametrize(
    ("format_name", "own", "others"), [(CLAUDE, CLAUDE_ONLY, CODEX_ONLY), (CODEX, CODEX_ONLY, CLAUDE_ONLY)]
)
def test_prompts_of_training_and_inspect_have_no_tool_of_another_agent(two, capsys, format_name, own, others):
    run, tokenizer = RunDir.open(two / "run"), load("llama3")
    of_format = {each.id for each in read_conversations(run) if each.format == format_name}
    windows = [window for window in trained(two) if window.conversation_id in of_format]
    assert windows
    for window in windows:
        assert window.first == 0
        prompt = tokenizer.decode(window.batch().tree.input_ids)
        assert [f'"{name}"' in prompt for name in (*own, *others)] == [True] * len(own) + [False] * len(others)
    (site,) = [site.id for site, _ in read_sites(run) if site.is_kept and site.conversation_id in of_format]
    shown = inspected(two, site, capsys)
    for side in ("student", "teacher"):
        prompt = tokenizer.decode(shown[side]["ids"])
        assert [f'"{name}"' in prompt for name in (*own, *others)] == [True] * len(own) + [False] * len(others)
    main(["inspect", str(two / "run"), site, "--config", str(two / "run.toml")])
    num_tools = len({"shell", *own} - {"old_string", "workdir"})
    assert lines_with(capsys.readouterr().out, "tools", num_tools, format_name)


def test_inspect_shows_what_train_has_in_its_batch_for_two_agents(two, capsys):
    found = compare(two, capsys)
    assert (found["compared"], found["sites"], found["whole"]) == (2, 2, 4)


def test_a_pair_has_the_tools_of_its_session_on_both_sides(two):
    run, tokenizer = RunDir.open(two / "run"), load("llama3")
    numbers = {"aaaaaaaa-1111": 2, "s-1": 2}
    rows = [
        {"state_id": f"{name}::000{at}", "conversation_id": name, "turn_number": at, "chosen": "I read it first."}
        for name, at in numbers.items()
    ]
    run.write_jsonl("pairs", rows, schema="dpo_pair", version=2, sources=["conversations"])
    found = {window.conversation_id: window.pair_ids() for window in trained(two) if window.state_ids}
    run.path("pairs").unlink()
    for name, own, others in (("aaaaaaaa-1111", CLAUDE_ONLY, CODEX_ONLY), ("s-1", CODEX_ONLY, CLAUDE_ONLY)):
        ((chosen, rejected),) = found[name]
        assert chosen.ids[: chosen.start] == rejected.ids[: rejected.start]
        context = tokenizer.decode(chosen.ids[: chosen.start])
        assert [f'"{each}"' in context for each in (*own, *others)] == [True] * len(own) + [False] * len(others)


def test_tools_of_a_file_are_every_agents(tmp_path, capsys):
    (tmp_path / "tools.json").write_text(json.dumps([{"name": "Ask", "parameters": {"type": "object"}}]))
    run = made(tmp_path, [write_two_agents(tmp_path / "logs")], "llama3", "--tools", str(tmp_path / "tools.json"))
    for site in (site.id for site, _ in read_sites(run) if site.is_kept):
        assert '"Ask"' in load("llama3").decode(inspected(tmp_path, site, capsys)["student"]["ids"])


def test_inspect_shows_what_train_has_in_its_batch_for_the_examples(tmp_path, capsys, note):
    check_fixtures(tmp_path, capsys, note, "example", [EXAMPLES])


def test_inspect_shows_what_train_has_in_its_batch_for_the_shared_sessions(tmp_path, capsys, note, shared_dir):
    fixtures = shared_dir / "fixtures" / "sessions"
    small = [
        path for path in sorted(fixtures.rglob("projects/**/*")) if path.is_file() and path.stat().st_size <= _SMALL
    ]
    for path in small:
        copy = tmp_path / "small" / path.relative_to(fixtures)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    check_fixtures(tmp_path, capsys, note, "shared", [fixtures if IS_FULL else tmp_path / "small"])


def check_fixtures(folder, capsys, note, whose, logs):
    made(folder, logs, "llama3")
    found = compare(folder, capsys, most=None if IS_FULL else 5)
    assert found["whole"] > 0
    note(
        f"inspect = train, {whose} sessions: {found['compared']} of {found['sites']} sites, "
        f"{found['tokens']:,} tokens; "
        f"{found['whole']} times in a window with all of the context, {found['cut']} times with some of it"
    )
