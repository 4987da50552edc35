"""No hint quotes its failing call, unless what it quotes is also what is right: then the error or the session says so.

On real weights a hint that names the wrong path makes it likelier by 14 nats: what stands before a turn is copied.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from composer_replication.hint_generator import count_sentences, write_hint
from composer_replication.hint_generator.context import CORRECT_FACTS, correct_texts
from composer_replication.hint_generator.hint_sources import quoted_call_parts
from composer_replication.ingestion import IngestReport, ingest
from composer_replication.sites import find_error_sites
from composer_replication.sites.user_corrections import CORRECTED
from composer_replication.types import ToolCall
from data.labelled import rows
from session_pieces import Session

EXAMPLES = Path(__file__).parents[3] / "examples" / "sessions"
FILE = "     1\tdef total(items):\n     2\t    subtotal = sum(items)\n     3\t    return round(subtotal, 2)\n"
NO_MATCH = "<tool_use_error>String to replace not found in file.\nString: x</tool_use_error>"


def kept(conversations):
    for conversation in conversations:
        for site in find_error_sites(conversation):
            if site.is_kept and site.kind != CORRECTED:  # what a user said stays as it was said
                yield site, conversation


def parts_of(call):
    """What a reader would call a quotation: whole values, lines, names, paths and their last parts, quoted pieces."""
    for value in leaves(call.raw_arguments or call.arguments):
        yield from {" ".join(value.split()), *(line.strip() for line in value.splitlines() if len(line.strip()) > 14)}
        yield from re.findall(r"'([^'\n]{4,80})'", value) + re.findall(r'"([^"\n]{4,80})"', value)
        for word in re.split(r"[\s'\"(){}\[\],;=|&<>]+", value):
            if re.search(r"[/\\_.]", word):
                yield from {word, re.split(r"[/\\]", word)[-1]}


def leaves(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from leaves(each)


def stands_in(part, text):
    return len(part) >= 4 and re.search(rf"(?<![\w/]){re.escape(part)}(?!\w)", text) is not None


def why_right(part, hint, site, conversation):
    """Where it is said that this part is right; None where nothing says so."""
    facts = [(name, text) for name in CORRECT_FACTS for text in correct_texts({name: hint.facts.get(name)})]
    for name, text in facts:
        if part not in text:
            continue
        if name == "advice":
            return "our own words, the same for every such call"
        end = next(n for n, turn in enumerate(conversation.turns) if turn.id == (site.result_turn_id or site.turn_id))
        for turn in conversation.turns[: end + 1]:
            for result in turn.results:
                source = "the error" if turn.id == site.result_turn_id else "the session"
                if any(piece and piece in result.text for piece in {text, text.split(": ")[0], Path(text).name}):
                    return f"{source} says {text}"
            if any(call.name == text or text in call.arguments for call in turn.calls):
                return f"a tool or a parameter: {text}"
    return None


def check(site, conversation, **options):
    """The hint's text, after it was looked through."""
    hint = write_hint(site, conversation, **options)
    calls = [call for turn in conversation.turns for call in turn.calls if call.id == site.call_id]
    assert 1 <= count_sentences(hint.text) <= 2, hint.text
    assert len(hint.text) < 900
    for part in {part for call in calls for part in parts_of(call)}:
        if stands_in(part, hint.text):
            assert why_right(part, hint, site, conversation), (part, hint.text)
    return hint.text


def test_no_hint_of_the_examples_quotes_its_call():
    conversations = list(ingest([EXAMPLES], IngestReport(), scrubber=None))
    assert sum(1 for case in kept(conversations) if check(*case)) >= 7


def test_no_hint_of_the_shared_sessions_quotes_its_call(shared_dir):
    conversations = ingest([shared_dir / "fixtures" / "sessions"], IngestReport(), scrubber=None)
    assert sum(1 for case in kept(conversations) if check(*case)) >= 25


@pytest.mark.parametrize("name", ["labelled", "held out"])
def test_no_hint_of_a_labelled_result_quotes_its_call(name):
    number = 0
    for row in rows(name):
        session = Session()
        for call in row.get("context", ()):
            text = call.get("text", call.get("result", ""))
            session.calls([(call["tool"], call["arguments"], text, call.get("is_error"), None)])
        session.calls([(row["tool"], row["arguments"], row["text"], row["is_error"], None)])
        for site, conversation in kept([session.conversation()]):
            check(site, conversation)
            number += 1
    assert number >= 50


def planted(tool, error, *before, **arguments):
    session = Session()
    for each in before:
        session.calls([each])
    session.calls([(tool, arguments, error, True, None)])
    *_, case = kept([session.conversation()])
    return case


SHELL_ERROR = "Exit code 1\n{}"
PLANTED = {
    "a path that nothing has shown": planted("Read", "File does not exist.", file_path="/repo/lib/secret_plans.py"),
    "a shell's path": planted(
        "Bash",
        SHELL_ERROR.format("cat: src/missing_thing.c: No such file or directory"),
        command="cat src/missing_thing.c",
    ),
    "a program": planted("Bash", SHELL_ERROR.format("bash: line 1: pytset: command not found"), command="pytset -q"),
    "an option": planted(
        "Bash",
        SHELL_ERROR.format("unknown flag: --stat-all\n\nUsage:  gh pr diff [flags]\n"),
        command="gh pr diff --stat-all",
    ),
    "a revision": planted(
        "Bash",
        "Exit code 128\nfatal: ambiguous argument 'feature/x_1': unknown revision or path not in the working tree.",
        command="git log feature/x_1",
    ),
    "a skill": planted("Skill", "<tool_use_error>Unknown skill: commit-all</tool_use_error>", skill="commit-all"),
    "a parameter's value": planted(
        "Task",
        "Agent type 'searcher' not found. Available agents: Explore, Plan",
        prompt="Find the parser of dates",
        subagent_type="searcher",
    ),
    "a text that is not there": planted(
        "Edit",
        NO_MATCH,
        ("Read", {"file_path": "/repo/cart.py"}, FILE, None, None),
        file_path="/repo/cart.py",
        old_string="    return round(subtotal, ndigits=2)",
        new_string="    return subtotal",
    ),
    "a tool": planted("search_everything", "Error: No such tool available: search_everything", query="parse_date_of"),
    "a call again": planted(
        "Read",
        "File does not exist.",
        ("Read", {"file_path": "/repo/lib/secret_plans.py"}, "File does not exist.", True, None),
        file_path="/repo/lib/secret_plans.py",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", PLANTED)
def test_no_planted_mistake_is_quoted(what):
    assert check(*PLANTED[what])


def test_a_template_that_quotes_the_call_speaks_without_the_facts_instead(monkeypatch):
    from composer_replication.hint_generator import templates

    def leaky(ctx=None):
        return f"Never open `{ctx['path']}`." if ctx and "path" in ctx else "Never open what is not there."

    monkeypatch.setitem(templates.HINT_TEMPLATES, "file_not_found", leaky)
    assert check(*PLANTED["a path that nothing has shown"]) == "Never open what is not there."


def test_the_check_itself_finds_every_kind_of_quotation():
    call = ToolCall(
        id="c",
        name="Bash",
        arguments={
            "command": "cat 'src/deep/file_one.py' | grep \"class Foo\" --max-count=3",
            "mode": "quick",
            "run_now": True,
        },
    )
    quoting = {
        "Open src/deep/file_one.py": "src/deep/file_one.py",
        "Open file_one.py.": "file_one.py",
        "Look for file_one first": "file_one",
        "Look for class Foo": "class Foo",
        "The flag --max-count is wrong": "--max-count",
        "Not in quick mode": "quick",
        "Set run_now otherwise": "run_now",
    }
    for text, part in quoting.items():
        assert part in quoted_call_parts(text, call, ()), text
    assert quoted_call_parts("List a folder before reading a file in it.", call, ()) == []
    assert quoted_call_parts("The file is `src/deep/file_one.pyi`.", call, ["src/deep/file_one.pyi"]) == []
    assert quoted_call_parts("Open file_one.py.", call, ["lib/file_one.py"]) == []
    assert quoted_call_parts("Open `other.py`, not file_one.py.", call, (), only_quoted=True) == []


def test_arguments_that_are_no_json_are_looked_through_too():
    call = ToolCall(
        id="c", name="Read", arguments={}, raw_arguments=json.dumps({"file_path": "/repo/odd_name.py"})[:-2]
    )
    assert "odd_name.py" in quoted_call_parts("Do not read odd_name.py.", call, ())
