"""Every target token is one that the student's chat template would have generated at that place, and nothing else is.

What `crf train` batches by its defaults is judged by an oracle that knows the tokenizer's own `apply_chat_template` and
offsets, and nothing of `batch/` (benchmarks/session_oracle.py). The judge itself is tested in test_target_judge.py.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

import real_logs
from composer_replication.batch.model_folder import load_tokenizer
from composer_replication.batch.render.renderer import Renderer
from composer_replication.cli.sites import write_sites
from composer_replication.config import SitesConfig
from composer_replication.config.presets import load_with_preset
from composer_replication.errors import AlignmentError
from composer_replication.ingestion.ingest_run import ingest_into
from composer_replication.runs import RunDir
from composer_replication.runs import files as rows
from composer_replication.runs import files as site_rows
from composer_replication.trainer.from_config.inputs import read_inputs
from composer_replication.trainer.from_config.offline import offline_data
from composer_replication.types import Conversation, ToolCall, ToolResult, Turn
from judged_run import Pair, judge_run, write_pairs
from random_conversations import STUDENT, RandomSession, sessions, site_of
from session_pieces import HERE, Session
from student_templates import EMBEDDED, STUDENTS, save_student
from target_check import Tally
from target_runs import BatchRuns
from template_oracle import MARK, Student

FAMILIES = [*STUDENTS, EMBEDDED]
REFUSED = "gemma4_late_like"
"""It shows a result inside the turn that comes after it: a run with such a template stops, and names it."""
WHOLE = ("train.batch.budget=65536",)
CUT = ("train.batch.budget=192", "train.batch.overlap=48")
_SCHEMA = {"type": "object", "properties": {"path": {}}}
_TOOLS = [
    {"name": name, "format": format_name, "parameters": _SCHEMA, "source": "inferred", "num_calls": 1}
    for name, format_name in (("Read", "claude_code"), ("bash", "claude_code"), ("another_agents", "codex"))
]
KNOWN: dict[str, Student] = {}
"""What was read of each tokenizer."""
pytestmark = pytest.mark.timeout(1800)
# Each session is batched, and every turn of it rendered by the judge: a tenth of a second.
NUM_EXAMPLES = 300 if os.environ.get("CRF_TEST_PROFILE") == "full" else 10
quick = settings(
    max_examples=NUM_EXAMPLES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="session")
def students(tmp_path_factory):
    """A folder with a tokenizer for each family; its name is the student's."""
    return {name: save_student(name, tmp_path_factory.mktemp(name) / STUDENT) for name in FAMILIES}


def judged(session, student: Path, *, whole: bool = True, tools: bool = True) -> Tally:
    """A session written as the steps before training leave it, batched as `crf train` does, and judged."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir.create(Path(folder) / "run")
        settings_ = {"scrubbed": True}
        row = rows.conversation_to_row(session.conversation)
        run.write_jsonl(
            "conversations",
            [row],
            schema=rows.CONVERSATIONS_SCHEMA,
            version=rows.CONVERSATIONS_VERSION,
            settings=settings_,
        )
        if tools:
            run.write_jsonl("tools", _TOOLS, schema="tool", version=3, sources=["conversations"])
        kept = [site_rows.site_to_row(site, hint) for site, hint in session.sites]
        run.write_jsonl(
            "sites", kept, schema=site_rows.SITES_SCHEMA, version=site_rows.SITES_VERSION, sources=["conversations"]
        )
        write_pairs(run, session.pairs)
        overrides = WHOLE if whole else CUT
        options = {"student_names": [STUDENT, str(student)], "whole": whole, "sample": None, "students": KNOWN}
        try:
            return judge_run(run, student, pairs=session.pairs, overrides=overrides, **options)
        except AlignmentError as error:  # the run stops, and trains nothing
            if not student.parent.name.startswith(REFUSED) or "render.chat_template" not in str(error):
                raise
            return Tally()


def blamed(tally: Tally) -> str:
    lines = [
        f"{channel}: {kind} x {n}\n    {tally.examples[channel, kind]}"
        for (channel, kind), n in tally.violations.items()
    ]
    return "\n".join(["violations:", *lines])


@pytest.mark.parametrize("family", FAMILIES)
@quick
@given(session=sessions())
def test_every_target_is_what_the_template_would_have_generated(family, students, session):
    tally = judged(session, students[family])
    assert not tally.violations, blamed(tally)


@pytest.mark.parametrize("family", FAMILIES)
@quick
@given(session=sessions())
def test_it_holds_in_windows_that_are_cut_and_without_tools(family, students, session):
    tally = judged(session, students[family], whole=False, tools=False)
    assert not tally.violations, blamed(tally)


@pytest.mark.parametrize("family", FAMILIES)
@quick
@given(session=sessions(late_texts=True))
def test_it_holds_where_a_turn_speaks_after_its_calls(family, students, session):
    tally = judged(session, students[family])
    assert not tally.violations, blamed(tally)


def plain_session(*, flag: bool | None = False) -> Session:
    session = Session(identity="s").user("Run the tests, then tell me.")
    session.call("bash", "4 passed", is_error=flag, command="pytest -q")
    session.says("All four pass.").user("And the linter?")
    session.calls(
        [("bash", {"command": "ruff check"}, "ok", False, None), ("Read", {"path": "a"}, "x = 1", False, None)]
    )
    return session.says("It is content.")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_good_turn_is_a_target_once(family, students, note):
    """The property would hold of a trainer that trains nothing."""
    if family == FAMILIES[0]:
        note(f"targets are generated: {NUM_EXAMPLES} sessions a property and template (make test-full: 300)")
    session = RandomSession(plain_session().conversation(), [], [])
    tally = judged(session, students[family])
    assert not tally.violations, blamed(tally)
    assert tally.runs == ({} if family == REFUSED else {"good turn": 4})


@pytest.mark.parametrize("family", FAMILIES)
def test_sites_and_pairs_are_targets_of_their_channels(family, students):
    conversation = plain_session(flag=True).conversation()
    answer = Turn(id="a", role="assistant", origin="model", text="I look first.", provenance=HERE)
    session = RandomSession(conversation, [site_of(conversation.turns[1], "Look first.")], [Pair("s", 2, answer)])
    tally = judged(session, students[family])
    assert not tally.violations, blamed(tally)
    if family != REFUSED:
        assert tally.runs == {"good turn": 2, "student": 1, "teacher": 1, "chosen": 1, "rejected": 1}


def claude_lines(content: list[dict]) -> str:
    """A log of one question, one turn with these blocks, results of its calls, and a last turn."""
    common = {"sessionId": "s", "cwd": "/w", "version": "2.0.0", "isSidechain": False, "userType": "external"}
    results = [
        {"type": "tool_result", "tool_use_id": each["id"], "content": "done", "is_error": False}
        for each in content
        if each["type"] == "tool_use"
    ]
    said = [
        ("user", {"role": "user", "content": "Do both."}),
        ("assistant", {"role": "assistant", "id": "m1", "model": "m", "content": content}),
        ("user", {"role": "user", "content": results}),
        ("assistant", {"role": "assistant", "id": "m2", "model": "m", "content": [{"type": "text", "text": "Done."}]}),
    ]
    records = [
        {"type": kind, "uuid": f"u{n}", "parentUuid": f"u{n - 1}" if n else None, "message": message, **common}
        | {"timestamp": f"2026-01-01T00:00:0{n}.000Z"}
        for n, (kind, message) in enumerate(said)
    ]
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def logged_targets(students, tmp_path):
    """What a log's good turns train, as text without marks, for a tokenizer that takes tools."""

    def made(content: list[dict]) -> list[str]:
        log = tmp_path / "log" / "s.jsonl"
        log.parent.mkdir()
        log.write_text(claude_lines(content), encoding="utf-8")
        run = RunDir.create(tmp_path / "run")
        ingest_into(run, [log], scrub=None)
        write_sites(SitesConfig(), run)
        model = students["qwen2_5_like"]
        config = load_with_preset(None, [f'train.model="{model}"', f'train.run="{run.root}"', *WHOLE])
        inputs = read_inputs(config)
        table = Student(inputs.tokenizer).bytes_of
        batches = [window.batch() for window in offline_data(inputs).train.windows]
        runs = [run for batch in batches for run in BatchRuns(batch, table).good_turns()]
        return [run.target.replace(MARK, b"").decode() for run in runs]

    return made


def test_arguments_are_trained_in_the_order_in_which_they_were_written(logged_targets):
    given = {"old_string": "a", "new_string": "b", "file_path": "f", "edits": {"z": 1, "y": 2}}
    first, _ = logged_targets([{"type": "tool_use", "id": "c1", "name": "Edit", "input": given}])
    assert json.dumps(given) in first


def test_what_a_turn_says_after_a_call_is_not_trained_before_it(logged_targets):
    call = {"type": "tool_use", "id": "c1", "name": "Edit", "input": {"file_path": "f"}}
    targets = logged_targets([call, {"type": "text", "text": "That should do it."}])
    both = [each for each in targets if "Edit" in each and "That should do it." in each]
    assert all(each.index("Edit") < each.index("That should do it.") for each in both), both


def test_real_logs_judges_the_fixture_sessions(shared_dir, students, capsys):
    arguments = [str(shared_dir / "fixtures" / "sessions"), "--limit", "6", "--sample", "4"]
    tokenizers = [part for name in ("qwen2_5_like", "qwen3_like") for part in ("--tokenizer", str(students[name]))]
    code = real_logs.main([*arguments, *tokenizers])
    printed = capsys.readouterr().out
    assert code == 0, printed
    for name in ("qwen2_5_like", "qwen3_like"):
        compared = re.search(rf"\b{name}.*\b(\d+) of (\d+) turns\b", printed)
        assert compared, printed
        assert 0 < int(compared[1]) <= int(compared[2])


def test_an_empty_result_inside_the_turn_after_it_is_refused_too(students):
    """Found among 300 random sessions: an empty text could not be told from what the template writes around it."""
    who = {"model": STUDENT, "origin": "model", "provenance": HERE}
    calls = [(ToolCall(id=f"c{number}", name="bash", arguments={}),) for number in range(2)]
    turns = (
        Turn(id="t0", role="user", origin="human", provenance=HERE),
        Turn(id="t1", role="assistant", calls=calls[0], **who),
        Turn(
            id="t2",
            role="tool",
            origin="tool",
            results=(ToolResult(call_id="c0", text="", is_error=False),),
            provenance=HERE,
        ),
        Turn(id="t3", role="assistant", calls=calls[1], **who),
    )
    renderer = Renderer(load_tokenizer(students[REFUSED]))
    with pytest.raises(AlignmentError, match=r"\bconversation s\b.*\bturn t3\b.*\brender\.chat_template\b"):
        renderer.render(Conversation(id="s", format="claude_code", turns=turns))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_that_says_only_a_line_end_before_its_call_is_what_its_template_writes(family, students):
    """Found among 300 random sessions: Qwen3's template keeps that line end behind its empty block.

    Behind an earlier turn, which has lost its own block by then, the judge took it for a part of the header.
    """
    call = ToolCall(id="c2", name="bash", arguments={})
    who = {"role": "assistant", "origin": "model", "model": STUDENT, "provenance": HERE}
    before = Session(identity="s").user("Go on.").says("I look.", model=STUDENT).conversation()
    last = Turn(id="t2", text="\n", calls=(call,), **who)
    answer = Turn(id="a", text="I look first.", **who)
    session = RandomSession(replace(before, turns=(*before.turns, last)), [], [Pair("s", 1, answer)])
    tally = judged(session, students[family])
    assert not tally.violations, blamed(tally)
    assert family == REFUSED or tally.runs["rejected"] == 1
