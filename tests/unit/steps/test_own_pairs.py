"""`crf pairs` without any adviser: corrections, as many states where acting at once was right, readers of old rows."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest
from claude_records import Log, call, text
from render_checks import decode
from run_pieces import ingested

from composer_replication.batch.render.renderer import Renderer
from composer_replication.cli import pairs as own_pairs
from composer_replication.cli.main import main
from composer_replication.cli.pairs import write_pairs
from composer_replication.cli.sites import write_sites
from composer_replication.config import PairsConfig, SitesConfig
from composer_replication.runs.files import PAIRS_SCHEMA, PAIRS_VERSION, read_pairs
from composer_replication.trainer.sessions.dataset import LoggedSessions
from composer_replication.trainer.sessions.rendering import read_sessions
from tokenizer_assets import load

NOT_READ = "<tool_use_error>File has not been read yet. Read it first before writing to it.</tool_use_error>"
SHOWN = "     1→def total(items):\n     2→    return sum(items)"
REFUSED = "The user doesn't want to proceed with this tool use. To tell you how to proceed, the user said:\n"


def edit(identity, new, old="return sum(items)"):
    return call(identity, "Edit", file_path="/repo/cart.py", old_string=old, new_string=new)


def session(name, *, fails=True, refused=False):
    """An edit of a file that was not read, its reading, the edit; and one more edit, refused first where that is so."""
    log = Log(session=name)
    log.user(f"{name}: fix the cart")
    if fails:
        log.assistant("m1", text("I change it."), edit("c1", "return 0"))
        log.result("c1", NOT_READ, is_error=True)
    log.assistant("m2", text("I have to read it first."), call("c2", "Read", file_path="/repo/cart.py"))
    log.result("c2", SHOWN)
    log.assistant("m3", text("Now."), edit("c3", "return 0"))
    log.result("c3", "The file has been updated.")
    if refused:
        log.assistant("m4", edit("c4", "return 1", "return 0"))
        log.result("c4", REFUSED + "don't return one", is_error=True)
        log.assistant("m5", edit("c5", "return 2", "return 0"))
        log.result("c5", "The file has been updated.")
    log.assistant("last", text("Done."))
    return log.lines()


@pytest.fixture
def made(tmp_path):
    def make(**sessions):
        (tmp_path / "logs").mkdir()
        for name, lines in sessions.items():
            (tmp_path / "logs" / f"{name}.jsonl").write_bytes(lines)
        return ingested(tmp_path / "run", tmp_path / "logs")[0]

    return make


def rows_of(run):
    return list(run.read_jsonl("pairs", schema=PAIRS_SCHEMA, version=PAIRS_VERSION))


def test_each_source_is_counted_and_looking_first_is_balanced(made):
    run = made(a=session("a"), b=session("b", refused=True), c=session("c", fails=False))
    found = write_pairs(PairsConfig(), run)
    assert found.by_source == {"correction": 2, "user": 1, "acted_at_once": 2}
    assert (found.report, found.num_failures) == (None, 3)
    assert Counter(row["source"] for row in rows_of(run)) == found.by_source
    counts = run.meta("pairs").counts
    assert {name: counts[f"source: {name}"] for name in found.by_source} == found.by_source
    assert [source.name for source in run.meta("pairs").sources] == ["conversations"]


def test_a_row_is_one_call_against_another_at_the_state_before_its_turn(made):
    run = made(a=session("a"))
    write_pairs(PairsConfig(), run)
    row, acted = rows_of(run)
    assert (row["state_id"], row["conversation_id"], row["turn_number"]) == ("a::0000.0", "a", 0)
    assert row["chosen"] == '[TOOL_USE] name=Read input={"file_path":"/repo/cart.py"}'
    assert row["rejected"].startswith("[TOOL_USE] name=Edit")  # without the words of either turn
    assert (row["n_teachers_agreeing"], row["teachers"]) == (0, [])
    assert row["metadata"]["rejected_failures"] == ["edit_not_read"]
    assert (acted["turn_number"], acted["chosen_action"]["calls"][0]["name"]) == (2, "Edit")
    assert acted["rejected_action"]["calls"][0]["arguments"] == {"file_path": "/repo/cart.py"}


def test_training_reads_them_with_both_sides_and_only_corrections_reject_their_turn(made):
    run = made(a=session("a"))
    write_pairs(PairsConfig(), run)
    (logged,) = read_sessions(run, with_sites=False, with_pairs=True)
    names = [(pair.source, pair.action.calls[0].name, pair.rejected.calls[0].name) for pair in logged.pairs]
    assert names == [("correction", "Read", "Edit"), ("acted_at_once", "Edit", "Read")]
    assert [pair.rejects_turn for pair in logged.pairs] == [True, False]


def test_the_right_call_of_a_site_is_that_of_its_own_call(made):
    log = Log(session="a")
    log.user("fix both")
    other = call("c2", "Edit", file_path="/repo/shop.py", old_string="a", new_string="b")
    log.assistant("m1", edit("c1", "return 0"), other)
    log.result("c1", NOT_READ, is_error=True)
    log.result("c2", NOT_READ, is_error=True)
    log.assistant("m2", call("c3", "Read", file_path="/repo/shop.py"), call("c4", "Read", file_path="/repo/cart.py"))
    log.result("c3", SHOWN)
    log.result("c4", SHOWN)
    run = made(a=log.lines())
    write_sites(SitesConfig(), run)
    write_pairs(PairsConfig(), run)
    (logged,) = read_sessions(run, with_sites=True, with_pairs=True)
    right = [logged.right_call(site).arguments["file_path"] for site, _ in logged.sites]
    assert right == ["/repo/cart.py", "/repo/shop.py"]


def test_a_window_holds_them_as_token_pairs_of_calls_alone(made):
    run = made(a=session("a"))
    write_sites(SitesConfig(), run)
    write_pairs(PairsConfig(), run)
    renderer = Renderer(load("qwen3"))
    found = LoggedSessions.from_run(run, renderer, budget=4096)
    assert found.counts["pairs"] == 2
    sides = [
        [decode(renderer, ids[start:]) for ids, start in pair] for window in found.windows for pair in window.pair_ids()
    ]
    assert [[side.count("<tool_call>") for side in pair] for pair in sides] == [[1, 1], [1, 1]]
    assert not any(word in side for pair in sides for side in pair for word in ("I change it.", "read it first"))
    learned = decode(renderer, [token for batch in found.batches() for token in batch.response.targets.tolist()])
    assert "Now." in learned  # what acted at once is a good turn
    assert "I change it." not in learned


def test_the_pairs_are_the_same_with_sites_written_before(made):
    run = made(a=session("a"), b=session("b", refused=True))
    write_pairs(PairsConfig(), run)
    without = rows_of(run)
    write_sites(SitesConfig(), run)
    write_pairs(PairsConfig(), run)
    assert rows_of(run) == without
    assert [source.name for source in run.meta("pairs").sources] == ["conversations", "sites"]


def only_fails(name):
    """A correction that says to look first, and nothing that acted at once."""
    log = Log(session=name)
    log.user(name)
    log.assistant("m1", edit("c1", "return 0"))
    log.result("c1", NOT_READ, is_error=True)
    log.assistant("m2", call("c2", "Read", file_path="/repo/cart.py"))
    log.result("c2", SHOWN)
    return log.lines()


def only_reads(name, number=1):
    """Files that were listed and read at once: the opposite of looking for a path, not of looking for a text."""
    log = Log(session=name)
    log.user(name)
    names = [f"part{at}.py" for at in range(number)]
    log.assistant("m0", call("c0", "Bash", command="ls /repo"))
    log.result("c0", "\n".join(names))
    for at, each in enumerate(names):
        log.assistant(f"m{at + 1}", call(f"c{at + 1}", "Read", file_path=f"/repo/{each}"))
        log.result(f"c{at + 1}", SHOWN)
    return log.lines()


def test_what_a_session_lacks_is_made_up_by_others_and_what_nobody_has_stays_out(made):
    run = made(a=session("a", fails=False), b=only_fails("b"))
    assert write_pairs(PairsConfig(), run).by_source == {"correction": 1, "acted_at_once": 1}
    assert {row["source"]: row["conversation_id"] for row in rows_of(run)} == {"correction": "b", "acted_at_once": "a"}


def test_a_run_without_any_failure_says_so(made, capsys):
    run = made(a=session("a", fails=False))
    assert main(["pairs", str(run.root)]) == 0
    made_line, *notes, about_replay = capsys.readouterr().err.splitlines()
    assert made_line.endswith(" 0 pairs")
    assert "`crf replay RUN`" in about_replay
    assert len(notes) == 1  # which says so
    assert rows_of(run) == []


def test_the_command_says_how_many_of_each_source(made, capsys):
    run = made(a=session("a"))
    assert main(["pairs", str(run.root)]) == 0
    shown = capsys.readouterr()
    lines = [line.split() for line in shown.out.splitlines()]
    assert ["correction", "1"] in [line[:2] for line in lines]
    assert ["acted_at_once", "1"] in [line[:2] for line in lines]
    made_line, *notes, about_replay = shown.err.splitlines()
    assert made_line.endswith(" 2 pairs")
    assert "`crf replay RUN`" in about_replay
    assert notes == []
    assert main(["pairs", str(run.root), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["sources"] == {"correction": 1, "acted_at_once": 1, "failures": 1}


def test_an_export_holds_them_with_their_states(made, tmp_path):
    run = made(a=session("a"))
    assert write_pairs(PairsConfig(), run, export=tmp_path / "out.jsonl").num_exported == 2
    first = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])
    assert [message["role"] for message in first["prompt"]] == ["system", "user"]
    assert first["chosen"][0]["tool_calls"][0]["function"]["name"] == "Read"
    assert first["chosen"][0]["content"] == first["rejected"][0]["content"] == ""


def test_rows_of_earlier_versions_are_teachers_pairs(made):
    run = made(a=session("a"))
    row = {
        "state_id": "a::0000",
        "chosen": "Done.",
        "conversation_id": "a",
        "turn_number": 0,
        "chosen_action": {"text": "Done.", "calls": []},
    }
    run.write_jsonl("pairs", [row], schema=PAIRS_SCHEMA, version=3, sources=["conversations"])
    ((_, pair),) = read_pairs(run)
    assert (pair.source, pair.rejected, pair.rejects_turn, pair.action.text) == ("teachers", None, True, "Done.")


def test_looking_for_a_text_is_balanced_by_its_own_kind_alone_and_the_rest_is_reported(made, capsys):
    run = made(a=only_reads("a"), b=only_fails("b"), c=only_fails("c"))
    assert write_pairs(PairsConfig(), run).by_source == {"correction": 2}
    assert main(["pairs", str(run.root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["without_opposite"] == {"looked_for_text": 2}
    assert run.meta("pairs").counts["without opposite: looked_for_text"] == 2
    assert main(["pairs", str(run.root)]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(r"\b2 pairs\b.*\(2\b.*\btext\)", said)


def test_spare_pairs_of_one_kind_do_not_use_up_the_room_of_another(made, monkeypatch):
    monkeypatch.setattr(own_pairs, "_MAX_SPARE", 1)
    made_of = {"a": only_reads("a", 3), "b": session("b", fails=False), "c": only_fails("c"), "d": only_fails("d")}
    run = made(**made_of)
    found = write_pairs(PairsConfig(), run)
    assert found.by_source == {"correction": 2, "acted_at_once": 1}
    assert {row["source"]: row["conversation_id"] for row in rows_of(run)}["acted_at_once"] == "b"
    assert found.surplus_look_first == {"looked_for_text": 1}
    monkeypatch.setattr(own_pairs, "_MAX_SPARE", 64)
    assert write_pairs(PairsConfig(), run).by_source == {"correction": 2, "acted_at_once": 1}


def test_one_session_may_have_several_spare_pairs_for_others(made):
    several = session("a", fails=False, refused=True)
    run = made(a=several, b=only_fails("b"), c=only_fails("c"))
    found = write_pairs(PairsConfig(), run)
    assert (found.by_source["correction"], found.by_source["acted_at_once"], found.surplus_look_first) == (2, 2, {})
