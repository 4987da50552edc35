"""`crf inspect`: the marked tokens are the turn, exactly; nothing of a trace can pass for a mark."""

from __future__ import annotations

import json
import re

import pytest
from claude_records import Log, call, text
from crf import crf, must

from composer_replication.batch.hint_placement import PLACEMENTS
from composer_replication.batch.render.renderer import Renderer
from composer_replication.batch.site_view import SiteView, view_site
from composer_replication.cli.main import main
from composer_replication.config import CrfConfig, describe
from composer_replication.runs import RunDir
from composer_replication.runs.files import _find_site, read_conversations, read_sites
from composer_replication.trainer.from_config.inputs import tools_of
from output_facts import lines_with
from tokenizer_assets import load

NOT_READ = "<tool_use_error>File has not been read yet. Read it first before writing to it.</tool_use_error>"
HOSTILE = (
    "\x1b[31mred\x1b[0m [bold]b[/bold] <|eot_id|> ⟦│⟪⋯⏎⟫⟧ \u2039e2\u203a \u202e \U0001f99c e\u0301 \ttab\r\n  end\n\n"
)
_SPELLED = re.compile("\u2039(U\\+)?([0-9A-Fa-f ]+)\u203a")
_ANSI = re.compile("\x1b\\[[0-9;]*m")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run with a hostile kept site, a call alone, and a failure that is not taught; and a tokenizer beside it."""
    folder = tmp_path_factory.mktemp("inspect")
    log = Log(session="aaaaaaaa-1111")
    log.user(f"go {HOSTILE}")
    edit = {"file_path": "/repo/a.py", "old_string": HOSTILE, "new_string": "y"}
    log.assistant("m1", text(f"\U0001f99c I edit. {HOSTILE}"), call("t1", "Edit", **edit))
    log.result("t1", NOT_READ, is_error=True)
    log.assistant("m2", call("t2", "Edit", file_path="/repo/b.py", old_string="x", new_string="y"))
    log.result("t2", NOT_READ + " <|eot_id|><|start_header_id|>", is_error=True)
    log.assistant("m3", call("t3", "Bash", command="pytest -q"))
    log.result("t3", "Exit code 1\n1 failed", is_error=True)
    (folder / "logs").mkdir()
    (folder / "logs" / "aaaaaaaa-1111.jsonl").write_bytes(log.lines())
    must("ingest", "logs", "-o", "run", cwd=folder)
    must("sites", "run", cwd=folder)
    load("llama3").save_pretrained(folder / "model")
    return folder


@pytest.fixture
def inspect(folder, capsys, monkeypatch):
    """Runs the verb here: status, stdout, stderr."""
    monkeypatch.chdir(folder)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "90")

    def run(*arguments, tokenizer="model"):
        given = ["--tokenizer", tokenizer] if tokenizer else []
        status = main(["inspect", "run", *given, *map(str, arguments)])
        return status, *capsys.readouterr()

    return run


def sites(folder):
    return [site for site, _ in read_sites(RunDir.open(folder / "run"))]


def record(folder, identity, **options) -> SiteView:
    run = RunDir.open(folder / "run")
    (conversation,) = read_conversations(run)
    renderer = Renderer(load("llama3"), tools=tools_of(run))
    return view_site(renderer, conversation, *_find_site(run, identity), **options)


def between(page, opening, closing):
    """The text between two marks of the student's part, with every mark taken back."""
    lines = [line[10:] for line in page.split("student:")[1].split("teacher:")[0].splitlines()]
    marked = "".join(lines)
    marked = marked[marked.index(opening) + 1 : marked.index(closing)]
    shown = re.sub("[│⟪⟫⟦⟧]", "", marked).replace("⏎", "\n").replace("⇥", "\t")
    return _SPELLED.sub(_unspelled, shown).encode("utf-8", "surrogateescape").decode()


def _unspelled(match):
    if match[1]:
        return chr(int(match[2], 16))
    return bytes.fromhex(match[2]).decode("utf-8", "surrogateescape")


def test_a_site_that_no_window_holds_is_said_to_be_left_out(folder, inspect):
    identity = sites(folder)[0].id
    small = ("--set", "train.batch.budget=64", "--set", "train.batch.overlap=8")
    _, page, _ = inspect(identity, *small)
    assert lines_with(page.splitlines()[-1], "longer_than_window", "train.batch.budget", 64)
    assert json.loads(inspect(identity, "--json", *small)[1])["left_out"].startswith("longer_than_window")
    assert lines_with(inspect(identity, "--set", "loss.alpha_sdpo=0")[1], "loss.alpha_sdpo", 0)
    for enough in ((), ("--set", "train.batch.budget=30000")):
        assert json.loads(inspect(identity, "--json", *enough)[1])["left_out"] == ""
        page = inspect(identity, *enough)[1]
        assert "longer_than_window" not in page
        assert "train.batch.budget" not in page


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("colour", ["--no-color", "--color"])
def test_what_is_marked_is_the_turn_with_its_end_token(folder, inspect, number, colour):
    identity = sites(folder)[number].id
    view = record(folder, identity)
    status, page, error = inspect(identity, colour)
    assert (status, error) == (0, "")
    assert ("\x1b" in page) is (colour == "--color")
    page = _ANSI.sub("", page)
    assert "\x1b" not in page
    assert between(page, "⟦", "⟧") == view.span.text
    assert view.span.text.endswith("<|eot_id|>")
    ids = view.student_ids[view.span.call_start : view.span.call_end]
    assert between(page, "⟪", "⟫") == load("llama3").backend_tokenizer.decode(ids, skip_special_tokens=False)


def test_no_character_of_a_trace_can_act_on_the_terminal_or_pass_for_a_mark(folder, inspect):
    _, page, _ = inspect(sites(folder)[0].id, "--context", "400")
    assert all(each.isprintable() or each == "\n" for each in page)
    assert [page.split("teacher:")[0].count(mark) for mark in "⟦⟧⟪⟫"] == [2, 2, 2, 2]  # the legend's, and the turn's
    assert "\u2039f0\u203a" in page  # the first byte of an emoji
    assert "\u2039U+001B\u203a" in page
    assert re.search("\\[│?b│?o│?l│?d│?]", page)  # no markup


def test_text_that_spells_a_special_token_shows_its_edges(folder, inspect):
    _, page, _ = inspect(sites(folder)[1].id, "--context", "110")
    after = page.split("student:")[1].split("teacher:")[0].split("\n  after")[1]
    shown = "".join(line.strip() for line in after.splitlines())
    assert shown.startswith("<|start_header_id|>│")  # the template's
    assert "│<│|│e│o│t│_│i│d│|│>│" in shown  # the tool's
    assert shown.count("<|eot_id|>") == 1
    header = page.split("\n  header")[1].split("\n")[0]
    assert header.split() == ["<|start_header_id|>assistant<|end_header_id|>⏎"]


def test_the_numbers_are_those_of_the_record(folder, inspect):
    identity = sites(folder)[0].id
    view = record(folder, identity)
    _, page, _ = inspect(identity, "--tokens")
    rows = re.findall(r"^ +(\d+) → +(\d+) .* ← (\d+)$", page, re.MULTILINE)
    assert [(int(a), int(c), int(b)) for a, b, c in rows] == [tuple(pair) for pair in view.pairs]
    number, hint = len(view.pairs), view.teacher.hint_end - view.teacher.hint_start
    assert lines_with(page, "target", number, "call", view.num_call_tokens, "hint", hint, "before_turn")
    first, last = view.pairs[0], view.pairs[-1]
    of_student, of_teacher = f"{first.student}..{last.student}", f"{first.teacher}..{last.teacher}"
    (line,) = lines_with(page, "student", of_student, "teacher", of_teacher)
    assert re.search(rf"\b{number}\D+{number}\b", line)  # so many of the targets have a row on both sides
    _, short, _ = inspect(identity)
    assert len(re.findall("→", short)) == 8
    assert lines_with(short, number - 8, "--tokens")


def test_json_is_the_record(folder, inspect):
    for site in sites(folder):
        status, printed, _ = inspect(site.id, "--json", "--placement", "head")
        assert status == 0
        shown = {**record(folder, site.id, placement="head").as_json(), "left_out": ""}
        assert json.loads(printed) == json.loads(json.dumps(shown))


def test_the_hint_is_shown_where_it_was_put(folder, inspect):
    site, hint = list(read_sites(RunDir.open(folder / "run")))[1]
    identity = site.id
    for placement in PLACEMENTS:
        _, page, _ = inspect(identity, "--placement", placement, "--context", "3")
        teacher = page.split("teacher:")[1]
        assert f"({placement})" in teacher.splitlines()[0]
        labels = re.findall("^  ([a-z]+) ", teacher.split("\n\n")[0], re.MULTILINE)
        between = [] if placement == "before_turn" else ["context", "context"][: 2 if placement == "head" else 1]
        assert labels == ["context", "hint", *between, "header", "target"]
        part = teacher.split("\n  hint")[1].split("\n  header")[0]
        assert "".join(hint.text.split()) in "".join(part.replace("⏎", "").split())


def test_a_placement_that_the_template_does_not_allow_is_named(folder, inspect):
    template = folder / "no_hint.jinja"
    template.write_text(load("gemma").chat_template.replace("<start_of_turn>", "<|start_header_id|>"))
    _, page, _ = inspect(sites(folder)[1].id, "--chat-template", template)
    assert lines_with(page, "in_last_message", "before_turn")


def test_a_site_that_is_not_kept_is_shown_with_the_reason_and_nothing_to_teach(folder, inspect):
    site = sites(folder)[2]
    status, page, _ = inspect(site.id)
    assert (status, site.is_kept) == (0, False)
    assert site.reason == "blame task: rule test_failure"
    assert lines_with(page, "target", "hint", site.reason)
    assert "teacher:" not in page
    assert "⟦⟪" in page  # a call alone


def test_lines_keep_to_the_width_of_the_terminal(folder, inspect, monkeypatch):
    from rich.cells import cell_len

    for width in (60, 100):
        monkeypatch.setenv("COLUMNS", str(width))
        _, page, _ = inspect(sites(folder)[0].id)
        lines = page.split("student:")[1].split("→")[0].splitlines()[1:]
        assert max(cell_len(line) for line in lines if line.startswith("          ")) <= width


def test_context_of_no_tokens_and_of_all(folder, inspect):
    identity = sites(folder)[1].id
    _, none, _ = inspect(identity, "--context", "0")
    _, every, _ = inspect(identity, "--context", "100000")
    assert "context <|begin_of_text|>" in every
    assert "begin_of_text" not in none
    assert len(re.findall("⋯ [0-9,]+ tokens ⋯", every)) == 0
    status, _, error = inspect(identity, "--context", "-1")
    assert status == 1
    assert lines_with(error, "--context", "-1", 0, "tokens")


def test_colour_is_for_terminals_that_want_it(folder, inspect, monkeypatch):
    identity = sites(folder)[1].id
    assert "\x1b" not in inspect(identity)[1]
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert "\x1b[" in inspect(identity)[1]
    assert "\x1b" not in inspect(identity, "--no-color")[1]
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in inspect(identity)[1]
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in inspect(identity)[1]
    assert "\x1b[" in inspect(identity, "--color")[1]


def test_what_goes_wrong_is_said_in_one_line(folder, inspect, tmp_path):
    identity = sites(folder)[0].id
    near = identity[:-1] + ("0" if identity[-1] != "0" else "1")
    (tmp_path / "tools.json").write_text('{"not": "a list"}')
    load("llama3").save_pretrained(tmp_path / "plain")
    for file in ("chat_template.jinja", "tokenizer_config.json"):
        (tmp_path / "plain" / file).unlink(missing_ok=True)
    (tmp_path / "plain" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    wrong = [
        ((near,), {}, [f"'{near}'", identity]),
        ((identity[:2],), {}, [f"'{identity[:2]}'", identity]),
        ((identity,), {"tokenizer": ""}, ["--tokenizer", "none"]),
        ((identity,), {"tokenizer": "nowhere/"}, ["tokenizer", "'nowhere/'"]),
        ((identity,), {"tokenizer": str(tmp_path / "plain")}, [f"'{tmp_path / 'plain'}'", "--chat-template"]),
        ((identity, "--tools", tmp_path / "tools.json"), {}, [f"--tools {tmp_path / 'tools.json'}", "JSON"]),
        ((identity, "--tools", tmp_path / "no.json"), {}, [f"--tools {tmp_path / 'no.json'}", "No such file"]),
        ((identity, "--chat-template", tmp_path), {}, [f"render.chat_template {tmp_path}", "Is a directory"]),
    ]
    for arguments, options, facts in wrong:
        status, page, error = inspect(*arguments, **options)
        assert (status, page) == (1, ""), facts
        assert lines_with(error, *facts)


def test_as_a_process_it_says_what_is_missing_and_prints_no_traceback(folder, tmp_path):
    must("ingest", folder / "logs", "-o", "run", cwd=tmp_path)
    done = crf("inspect", "run", "abcd", "--tokenizer", folder / "model", cwd=tmp_path)
    assert done.returncode == 1
    assert "crf sites" in done.stderr
    identity = sites(folder)[0].id
    done = crf("inspect", folder / "run", identity, "--tokenizer", "no/model", cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert (done.returncode, done.stdout) == (1, "")
    assert lines_with(done.stderr, "tokenizer", "'no/model'")
    assert "Traceback" not in done.stderr
    done = crf("inspect", folder / "run", identity, "--tokenizer", folder / "model", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["site"]["id"] == identity


def test_the_placements_on_offer_are_those_there_are():
    (documented,) = [each.type_text for each in describe(CrfConfig) if each.path == "train.batch.placement"]
    assert documented == " | ".join(f'"{each}"' for each in PLACEMENTS)
