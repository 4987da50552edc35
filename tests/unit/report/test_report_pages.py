"""What the pages say, that they say it twice in the same bytes, and that text from logs stays text."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from html import unescape
from html.parser import HTMLParser

import pytest

from composer_replication.cli.main import main
from composer_replication.cli.report import write_report
from composer_replication.errors import InputError
from composer_replication.evaluation.report import build
from composer_replication.evaluation.report.build import _CHANNELS
from composer_replication.evaluation.report.credit import _DECISIONS
from composer_replication.evaluation.report.figures import _ARMS
from composer_replication.evaluation.report.findings import (
    HELD_OUT,
    NO_TRAINING,
    NOT_REACHED,
    PROOF_AHEAD,
    PROOF_UNFINISHED,
)
from composer_replication.evaluation.report.records import _ON_REQUEST
from composer_replication.runs import RunDir
from composer_replication.runs.directory import outside_copies
from composer_replication.runs.files import read_sites
from composer_replication.runs.split import read_split_rows
from output_facts import lines_with
from refusals import refusal
from report_runs import SCRIPT, make_run

SECTIONS = ["result", "training", "failures", "hints", "pairs", "sessions", "cost", "dropped", "conventions", "lineage"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunDir:
    return make_run(tmp_path_factory.mktemp("runs") / "run", 12)


@pytest.fixture(scope="module")
def report(run):
    return write_report(run)


@pytest.fixture(scope="module")
def page(report) -> str:
    return report.html.read_text(encoding="utf-8")


class Page(HTMLParser):
    """Every element with its attributes, and the text of the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def named(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def test_the_verdict_comes_before_every_section(page):
    assert page.index("less likely to repeat the calls that failed") < page.index("<section")
    places = [page.index(f'<section id="{name}"') for name in SECTIONS]
    assert places == sorted(places)


def test_the_primary_figure_is_shown_with_interval_and_control(page):
    for shown in ("+0.412", "+0.241", "+0.583", "+0.031", "\N{MINUS SIGN}0.091", "+0.153"):
        assert shown in page
    assert page.count('<tr class="primary">') == page.count('<tr class="group">') == 1  # it, and the others below
    assert page.index('<tr class="primary">') < page.index('<tr class="group">')


def test_every_channel_has_a_curve_and_ids_are_unique(page):
    assert len(re.findall(r'aria-label="Channel \d', page)) == 3
    ids = [attributes["id"] for _, attributes in Page(page).elements if attributes.get("id")]
    assert len(ids) == len(set(ids))


def test_a_site_shows_hint_tokens_decisions_and_what_became_of_it(run, page):
    (gap, *_) = [row for row in run.read_jsonl("token_gaps", schema="token_gaps", version=1) if row["side"] == "test"]
    card = page[page.index(f'id="site-{gap["site_id"]}"') :]
    card = card[: card.index("</article>")]
    assert lines_with(re.search(r'<span class="tag held">([^<]*)</span>', card)[1], "test")
    assert card.count("<blockquote>") == 1
    assert len(re.findall(r"<span class=\"[du]?\d?\"", card)) == 2 * len(gap["tokens"])
    for role in ("erring", "correction", "good"):
        assert f'<th scope="row">{_DECISIONS[role][0]}<' in card


def state_of_evaluation(report):
    """What the table of files says of evaluation.json."""
    return re.search(r"\| evaluation\S*json \|[^|]*\| ([^|]+) \|", report.markdown.read_text())[1]


def test_figures_of_other_weights_are_said_to_be_that(run, tmp_path):
    from composer_replication.runs.files import hash_weight_files, read_evaluation, write_evaluation

    other = RunDir.open(shutil.copytree(run.root, tmp_path / "run"))
    (other.path("adapter") / "adapter_model.safetensors").write_bytes(b"weights")
    report = write_report(other)
    assert report.verdict.word == "other_weights"
    assert report.verdict.label in report.markdown.read_text()
    assert "crf evaluate" in report.verdict.sentences[0]
    html = report.html.read_text()
    assert '<div class="note" role="note">' in html[html.index('<section id="result"') :]
    assert state_of_evaluation(report) != "current"
    record = read_evaluation(other)
    record["models"]["after"]["files"] = hash_weight_files(other.path("adapter"))
    record["models"]["control"]["lacks"] = ["No control for channel 2: none."]
    write_evaluation(other, record)
    report = write_report(other)
    assert report.verdict.word == "better"
    assert "No control for channel 2: none." in report.markdown.read_text()
    html = report.html.read_text()
    assert "No control for channel 2: none." in html
    assert '<div class="note" role="note">' not in html[html.index('<section id="result"') :]
    assert state_of_evaluation(report) == "current"
    record["models"]["control-2"] = {"name": "another shuffle", "digest": "0c12", "files": "others"}
    write_evaluation(other, record)
    second = other.root / "control" / "2" / "adapter"
    second.mkdir(parents=True)
    (second / "adapter_model.safetensors").write_bytes(b"weights of a shuffle")
    told = write_report(other).verdict
    assert told.word == "other_weights"
    assert _ARMS["control"] in " ".join(told.sentences)


def test_remarks_of_the_verdict_stand_below_it_and_what_got_worse_is_told_once(run, tmp_path):
    from composer_replication.runs.files import WORSE_BESIDES, read_evaluation, write_evaluation

    other = RunDir.open(shutil.copytree(run.root, tmp_path / "run"))
    record = read_evaluation(other)
    record["verdict"]["remarks"] = ["The 8 steps saw 8 of 16 windows.", f"{WORSE_BESIDES}: loss on good turns -1."]
    record["split"] |= {"near_duplicates": 3, "states": 40}
    write_evaluation(other, record)
    for path in (write_report(other).html, other.path("report_md")):
        text = path.read_text(encoding="utf-8")
        assert text.count("The 8 steps saw 8 of 16 windows.") == 1
        assert "loss on good turns" in text
        assert re.search(r"\b3\D+40\b.*\bstates\b", text)
    record["figures"].append({**record["figures"][-1], "name": "x", "label": "lost", "estimate": -1.0, "low": -2.0})
    record["figures"][-1] |= {"high": -0.5, "kind": None, "is_primary": False}
    write_evaluation(other, record)
    text = write_report(other).markdown.read_text(encoding="utf-8")
    (worse,) = [line for line in lines_with(text, "lost") if line.startswith("- ")]
    assert lines_with(worse, "\N{MINUS SIGN}1.000")
    assert "loss on good turns" not in text


def test_what_the_proof_dropped_is_left_out_once_and_by_what_it_was_for(run):
    from composer_replication.evaluation.report.build import _list_drops
    from composer_replication.evaluation.report.records import RunRecords

    records = RunRecords(run, run.root)
    records.__dict__["training_record"] = {"drops": {"lm_ce: failed_call": 4, "sdpo_kl: hint_does_nothing": 8}}
    told = [(each.stage, each.reason) for each in _list_drops(records)]
    assert ("train", f"{_CHANNELS['lm_ce']}: failed call") in told
    ((stage, reason),) = [each for each in told if "hint does nothing" in each[1]]
    assert (stage == "train", reason) == (False, "hint does nothing")


PROOF_OFF = "[train.proof]\non = false\n"


@pytest.mark.parametrize(
    ("upto", "settings", "reasons"),
    [
        ("pairs", None, {NO_TRAINING}),
        ("train", "[train]\n", {HELD_OUT, NOT_REACHED}),
        ("train", PROOF_OFF, {"train.proof.on = false"}),
        ("train", "[loss]\nalpha_sdpo = 0.0\n", {"loss.alpha_sdpo = 0"}),
        ("begun", "[train]\n", {PROOF_AHEAD}),
        ("partial", "[train]\n", {PROOF_UNFINISHED}),
    ],
)
def test_a_hint_is_proved_or_not_proved_or_not_tested_with_the_reason(tmp_path, capsys, upto, settings, reasons):
    made = make_run(tmp_path / "run", 8, upto="train" if upto == "train" else "pairs")
    sites = [site for site, hint in read_sites(made) if site.is_kept and hint is not None]
    rows = {}
    if settings is not None:
        made.path("config").write_text(settings)
        (made.root / "checkpoints").mkdir(exist_ok=True)
    if upto == "partial":
        (made.root / "hint_proof.partial.jsonl").write_text("")
    if upto == "train":  # a proof of some of the sites; it lies there as well where an earlier training made it
        held_out = {row.conversation_id for row in read_split_rows(made) if row.side == "test"}
        all_rows = list(made.read_jsonl("hint_proof", schema="hint_proof", version=3))
        some = [row for row in all_rows if row["conversation_id"] not in held_out][1:]
        made.write_jsonl("hint_proof", some, schema="hint_proof", version=3, sources=["conversations", "sites"])
        rows = {row["site_id"]: row["is_kept"] for row in some} if len(reasons) == 2 else {}
    assert main(["report", str(made.root), "--json"]) == 0
    hints = json.loads(capsys.readouterr().out)["hints"]
    assert hints["proved"] == sum(rows.values())
    assert hints["not_proved"] == len(rows) - sum(rows.values())
    assert sum(hints["not_tested"].values()) == len(sites) - len(rows)
    assert len(hints["not_tested"]) == len(reasons)
    assert all(lines_with("\n".join(hints["not_tested"]), reason) for reason in reasons)
    page, text = ((made.root / name).read_text(encoding="utf-8") for name in ("report.html", "report.md"))
    for why, number in hints["not_tested"].items():
        assert re.search(rf"\b{number}\b[^<]*{re.escape(why)}<", page)
        assert re.search(rf"\| [^|]*{re.escape(why)} \| {number} \|", text.replace(chr(92), ""))
    kept = Counter(rows.values())[True]
    assert [line for line in text.splitlines() if line.startswith("| kept |")] == [f"| kept | {kept} |"] * bool(rows)


def test_all_that_took_time_is_in_the_cost(run, tmp_path):
    other = RunDir.open(shutil.copytree(run.root, tmp_path / "run"))
    for folder, seconds in (
        ("adapter", {"warm-up": 12.0, "hint proof": 3.5}),
        ("control/adapter", {"hint proof": 2.0}),
    ):
        (path := other.root / folder / "training.json").parent.mkdir(exist_ok=True)
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**known, "seconds": seconds}))
    text = write_report(other).markdown.read_text(encoding="utf-8")
    cost = text.partition("\n## Cost\n")[2].partition("\n## ")[0].split("\n")
    *times, price = [each for each in cost if each.startswith("- ")]
    assert times[:2] == ["- Warm-up: 12.0 s", "- Hint proof: 3.5 s"]  # called as the record calls them
    assert [each.rpartition(": ")[2] for each in times[2:]] == ["1 min 34 s", "1 min 36 s"]
    assert lines_with(times[2], "steps")
    assert lines_with(times[3], "Control")
    assert "$" not in price


def test_only_what_is_worth_a_look_is_listed_first(run):
    from composer_replication.evaluation.report.findings import _sites_to_review
    from composer_replication.evaluation.report.records import RunRecords

    records = RunRecords(run, run.root)
    listed = _sites_to_review(records)
    sizes = [float(found[1]) for each in listed if (found := re.search("\N{MINUS SIGN}?\\+?([\\d.]+) nats", each.why))]
    assert sizes
    assert min(sizes) >= 0.05
    sure = [float(found[1]) for each in listed if (found := re.search(r"only (\d+)% sure", each.why))]
    assert all(each < 90 for each in sure)


def test_the_classes_of_tokens_follow_their_gaps():
    from composer_replication.evaluation.report.credit import _shade_class

    gaps = {-4.0: "d4", -1.0: "d3", -0.3: "d2", -0.05: "d1", -0.04: "", 0.0: "", 0.05: "u1", 2.9: "u3", 3.0: "u4"}
    assert {gap: _shade_class(gap) for gap in gaps} == gaps


def test_nothing_is_asked_of_the_network_and_one_script_may_run(page):
    parsed = Page(page)
    assert [name for name, attributes in parsed.elements if "src" in attributes] == []
    assert {attributes["href"] for attributes in parsed.named("link")} == {"data:,"}
    assert all(attributes["href"].startswith("#") for attributes in parsed.named("a"))
    (policy,) = [each["content"] for each in parsed.named("meta") if each.get("http-equiv")]
    assert policy.startswith("default-src 'none'")
    assert "script-src 'sha256-" in policy
    assert len(parsed.named("script")) == 1


def test_the_same_files_give_the_same_bytes(run, report):
    before = report.html.read_bytes(), report.markdown.read_bytes()
    again = write_report(run)
    assert (again.html.read_bytes(), again.markdown.read_bytes()) == before


@pytest.mark.parametrize("most", [50, 2])
def test_a_script_in_every_field_of_a_log_stays_text(tmp_path, monkeypatch, most):
    monkeypatch.setattr(build, "MOST_IN_ONE_FILE", most)
    done = write_report(make_run(tmp_path / "run", 4, hostile=True))
    pages = [done.html, *(sorted(done.folder.iterdir()) if done.folder else ())]
    assert len(pages) == (1 if most == 50 else 5)
    for path in pages:
        text = path.read_text(encoding="utf-8")
        elements = Page(text).elements
        assert sum(tag == "script" for tag, _ in elements) == 1
        assert not [tag for tag, each in elements if tag == "img" or any(name.startswith("on") for name in each)]
        assert "hacked" in text
    assert SCRIPT[:8] not in done.markdown.read_text(encoding="utf-8")


def test_markdown_has_the_verdict_and_every_section(report):
    text = report.markdown.read_text(encoding="utf-8")
    assert text.index(f"**{report.verdict.label}.**") < text.index("\n## ")
    headings = re.findall(r"\n## (.+)\n", text)
    assert len(set(headings)) == len(headings) == len(SECTIONS) - 1  # sessions are on the other page
    assert {"Training", "Hints", "Pairs", "Cost"} <= set(headings)
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert len(tables) > 30
    assert "\n\n\n" not in text


@pytest.mark.parametrize(
    ("upto", "missing"),
    [
        ("ingest", ["split", "sites", "pairs", "hint_proof", "metrics", "evaluation", "evaluated", "token_gaps"]),
        ("pairs", ["hint_proof", "metrics", "evaluation", "evaluated", "token_gaps"]),
        ("train", ["evaluation", "evaluated", "token_gaps"]),
        ("evaluate", []),
    ],
)
def test_a_half_finished_run_says_what_is_missing(tmp_path, upto, missing):
    done = write_report(make_run(tmp_path / "run", 3, upto=upto))
    assert [each.name for each in done.absent] == missing
    text = done.html.read_text(encoding="utf-8")

    assert done.verdict.word == ("better" if upto == "evaluate" else "not_evaluated")
    assert text.count("<section") == len(SECTIONS)
    note = text[text.index("<main") : text.index('<section id="result"')]
    assert ('<div class="note" role="note">' in note) == bool(missing)
    for each in done.absent:
        assert f"<code>{each.file_name}</code>" in note
        assert f"<code>{each.command}</code>" in note


def test_what_a_finished_step_did_without_is_not_missing(tmp_path):
    run = make_run(tmp_path / "run", 3)
    for name in ("hint_proof", "token_gaps"):
        run.path(name).unlink()
    done = write_report(run)
    assert done.absent == []
    page = done.html.read_text(encoding="utf-8")
    assert lines_with(page, "<code>hint_proof.jsonl</code>", _ON_REQUEST["hint_proof"])


def test_an_empty_run_has_a_report(tmp_path):
    done = write_report(RunDir.create(tmp_path / "run"))
    assert "conversations" in [each.name for each in done.absent]
    assert done.num_sessions == 0


def test_a_damaged_artefact_is_named_and_the_rest_shown(tmp_path):
    run = make_run(tmp_path / "run", 3)
    run.path("pairs").write_bytes(b"{}\n")
    run.path("evaluation").write_bytes(b"[")
    done = write_report(run)
    assert {each.name for each in done.absent if each.reason} == {"pairs", "evaluation"}
    text = unescape(done.html.read_text(encoding="utf-8"))
    for each in done.absent:
        assert not each.reason or lines_with(text, f"<code>{each.file_name}</code>", each.reason)
    assert done.num_sessions == 3


def test_many_sessions_have_a_page_each_and_old_pages_go(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "MOST_IN_ONE_FILE", 4)
    run = make_run(tmp_path / "run", 6)
    done = write_report(run)
    assert done.folder == run.root / "report_sessions"
    assert [path.name for path in sorted(done.folder.iterdir())] == [f"{number:05d}.html" for number in range(1, 7)]
    first = (done.folder / "00001.html").read_text(encoding="utf-8")
    assert 'href="../report.html#sessions"' in first
    text = done.html.read_text(encoding="utf-8")
    links = re.findall(r'href="(report_sessions/\d{5}\.html)(#site-\w+)?"', text)
    assert len({page for page, _ in links}) == 6
    for page, site in links:
        assert not site or f'id="{site[1:]}"' in (run.root / page).read_text(encoding="utf-8")
    (done.folder / "mine.txt").write_text("not ours")
    (done.folder / ".00002.html.tmp").write_text("of a report that was killed")
    monkeypatch.setattr(build, "MOST_IN_ONE_FILE", 50)
    assert write_report(run).folder is None
    assert [path.name for path in done.folder.iterdir()] == ["mine.txt"]


def test_a_report_elsewhere_is_remembered_by_the_run(tmp_path, run):
    copy = RunDir.open(shutil.copytree(run.root, tmp_path / "run"))
    done = write_report(copy, tmp_path / "out" / "page.html")
    assert done.markdown == tmp_path / "out" / "page.md"
    assert [each.what for each in outside_copies(copy)] == ["report"]
    with refusal(InputError, expected=".html"):
        write_report(copy, tmp_path / "out")


def test_unseen_characters_are_shown(tmp_path):
    from composer_replication.evaluation.report.build import _replace_invisible

    assert _replace_invisible("a\u202eb\x1b[31m\ud800c\n") == "a\ufffdb\ufffd[31m\ufffdc\n"


def test_a_training_elsewhere_is_read_from_there(tmp_path):
    run = make_run(tmp_path / "run", 3, upto="train")
    (tmp_path / "out").mkdir()
    for name in ("metrics", "adapter", "config"):
        shutil.move(run.path(name), tmp_path / "out")
    assert "metrics" in [each.name for each in write_report(run).absent]
    done = write_report(run, trained_in=tmp_path / "out")
    assert "metrics" not in [each.name for each in done.absent]
    assert re.search(r"\b60 steps\b[^<]*\bwarm-up\b\D*20\b", done.html.read_text(encoding="utf-8"))


def test_a_sub_agent_belongs_to_the_session_that_called_it(tmp_path):
    from composer_replication.evaluation.report.build import _conversations_by_session, _list_sessions
    from composer_replication.evaluation.report.records import RunRecords
    from composer_replication.runs.files import CONVERSATIONS_SCHEMA, CONVERSATIONS_VERSION, conversation_to_row
    from composer_replication.types import Link
    from session_pieces import Session

    parts = [
        Session("one").user("first").conversation(),
        Session("two").user("second").conversation(),
        Session("one/agent", parent=Link(kind="subagent", conversation_id="one")).user("inner").conversation(),
    ]
    run = RunDir.create(tmp_path / "run")
    run.write_jsonl(
        "conversations", map(conversation_to_row, parts), schema=CONVERSATIONS_SCHEMA, version=CONVERSATIONS_VERSION
    )
    records = RunRecords(run, run.root)
    listed = _list_sessions(records)
    assert [(each.name, each.conversations) for each in listed.sessions] == [
        ("first", ["one", "one/agent"]),
        ("second", ["two"]),
    ]
    read = [
        (session.id, [each.id for each in several]) for session, several in _conversations_by_session(records, listed)
    ]
    assert read == [("two", ["two"]), ("one", ["one", "one/agent"])]
