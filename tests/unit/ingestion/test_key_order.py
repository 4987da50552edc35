"""Arguments and schemas keep the order in which they were written, from the log to every artefact and to the tokens."""

from __future__ import annotations

import json

import pytest
from claude_records import Log, call, text
from run_pieces import ingested, run_states, write_chat

from composer_replication.action_text import answer_turn
from composer_replication.batch.pair_tokens import _pair_ids
from composer_replication.batch.render.renderer import Renderer
from composer_replication.cli.export import export_atif
from composer_replication.errors import RunError
from composer_replication.ingestion import IngestReport, SourceFile
from composer_replication.ingestion.formats.atif import read as read_atif
from composer_replication.ingestion.session_sources import _content_mark
from composer_replication.ingestion.states import states, trace_state
from composer_replication.pairs.export import export_preferences
from composer_replication.pairs.extract import save_pairs
from composer_replication.runs.files import CONVERSATIONS_SCHEMA, CONVERSATIONS_VERSION, read_conversations
from composer_replication.sites.actions.equality import action_key
from composer_replication.teacher_replay.requests import RequestBuilder, RequestSettings
from composer_replication.teacher_replay.teachers import read_teachers
from composer_replication.types import Action, ToolCall
from refusals import refusal
from tokenizer_assets import FAMILIES, load

WRITTEN = {"file_path": "a.py", "old_string": "1", "new_string": "2", "replace_all": False}
ORDER = list(WRITTEN)


def edit_session(arguments=None):
    log = Log(session="edits")
    log.user("change it")
    log.assistant("m1", text("Now."), call("t1", "Edit", **(arguments or WRITTEN)))
    log.result("t1", "done")
    log.assistant("m2", text("finished"))
    return log


@pytest.fixture
def run(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "edits.jsonl").write_bytes(edit_session().lines())
    return ingested(tmp_path / "run", tmp_path / "logs")[0]


def order_in(written):
    """The names of the arguments in the order in which a text first has them."""
    assert all(f'"{name}"' in written or f'\\"{name}\\"' in written or name in written for name in ORDER)
    return sorted(ORDER, key=written.index)


def the_call(conversation):
    return next(each for turn in conversation.turns for each in turn.calls)


def test_the_artefact_has_the_order_of_the_log_and_reads_it_back(run):
    assert order_in(run.path("conversations").read_text()) == ORDER
    (conversation,) = read_conversations(run)
    assert list(the_call(conversation).arguments) == ORDER


def test_a_second_ingest_that_takes_rows_over_keeps_it(run, tmp_path):
    (tmp_path / "logs" / "edits.jsonl").unlink()
    ingested(run.root, write_chat(tmp_path / "logs" / "chat.jsonl"))
    found = {each.id: each for each in read_conversations(run)}
    assert list(the_call(found["edits"]).arguments) == ORDER


def test_scrubbing_keeps_it(tmp_path):
    secret = {**WRITTEN, "new_string": "password = 'hunter2-swordfish-99'", "replace_all": True}
    (tmp_path / "edits.jsonl").write_bytes(edit_session(secret).lines())
    run, _ = ingested(tmp_path / "run", tmp_path / "edits.jsonl")
    found = the_call(next(iter(read_conversations(run)))).arguments
    assert "hunter2" not in str(found)
    assert list(found) == ORDER


def test_an_inferred_schema_has_it_and_a_given_one_its_own(tmp_path):
    (tmp_path / "edits.jsonl").write_bytes(edit_session().lines())
    given = {"Move": {"type": "object", "properties": {"to": {}, "from": {}}, "required": ["to", "from"]}}
    run, _ = ingested(tmp_path / "run", tmp_path / "edits.jsonl", tools=given)
    rows = {row["name"]: row["parameters"] for row in run.read_jsonl("tools", schema="tool", version=3)}
    assert list(rows["Edit"]["properties"]) == rows["Edit"]["required"] == ORDER
    assert list(rows["Move"]) == ["type", "properties", "required"]
    assert list(rows["Move"]["properties"]) == ["to", "from"]


def test_requests_to_teachers_have_it_in_calls_and_schemas_and_keys_do_not_depend_on_it(run):
    (teacher,) = read_teachers(
        [{"slug": "t", "base_url": "http://localhost:1/v1", "input_per_mtok": 1, "output_per_mtok": 1}], environment={}
    )
    last = run_states(run)[-1]
    request = RequestBuilder(teacher, RequestSettings()).build(last["messages"], last["tools"])
    body = json.loads(request.body)
    (tool,) = body["tools"]
    assert list(tool["function"]["parameters"]["properties"]) == ORDER
    (made,) = next(each["tool_calls"] for each in body["messages"] if each.get("tool_calls"))
    assert list(json.loads(made["function"]["arguments"])) == ORDER
    other = [{"function": dict(reversed(tool["function"].items())), "type": "function"}]
    assert RequestBuilder(teacher, RequestSettings()).build(last["messages"], other).key == request.key


def test_an_atif_document_has_it_and_reads_it_back(run, tmp_path):
    (path,) = export_atif(run, tmp_path / "atif")
    assert order_in(path.read_text()) == ORDER
    (again,) = read_atif(SourceFile(path, path.name), IngestReport())
    assert list(the_call(again).arguments) == ORDER


def the_pair(run):
    """The state of the edit; chosen is what the student did with another replacement, in the same order."""
    (conversation,) = read_conversations(run)
    messages, turn = next(iter(states(conversation)))
    state = trace_state("edits::0000", messages, turn)
    chosen = state["student_action"].replace('"2"', '"3"')
    return {
        "state_id": state["state_id"],
        "state_messages": state["messages"],
        "chosen": chosen,
        "rejected": state["student_action"],
        "n_teachers_agreeing": 2,
    }


def test_both_sides_of_a_pair_have_it_and_so_do_stored_and_exported_pairs(run, tmp_path):
    pair = the_pair(run)
    assert order_in(pair["chosen"]) == order_in(pair["rejected"]) == ORDER
    save_pairs([pair], tmp_path / "pairs.jsonl")
    assert list(json.loads((tmp_path / "pairs.jsonl").read_text())) == list(pair)
    tools = [{"type": "function", "function": {"name": "Edit", "parameters": {"properties": WRITTEN}}}]
    export_preferences([pair], tmp_path / "preferences.jsonl", tools=tools)
    row = json.loads((tmp_path / "preferences.jsonl").read_text())
    for side in ("chosen", "rejected"):
        (message,) = row[side]
        assert list(message["tool_calls"][0]["function"]["arguments"]) == ORDER
    assert list(json.loads(row["tools"])[0]["function"]["parameters"]["properties"]) == ORDER


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_of_a_session_and_of_both_sides_of_a_pair_have_it(family, run):
    tokenizer = load(family)
    renderer = Renderer(tokenizer)
    (conversation,) = read_conversations(run)
    for sequence in renderer.render(conversation):
        shown = tokenizer.decode(sequence.ids)
        assert order_in(shown) == ORDER or "old_string" not in shown
    pair = the_pair(run)
    sides = [answer_turn(pair[side], turn_id=side) for side in ("chosen", "rejected")]
    for side in _pair_ids(renderer, conversation.turns[:1], *sides, conversation_id="p"):
        assert order_in(tokenizer.decode(side.ids)) == ORDER


def test_marks_and_equality_do_not_depend_on_it():
    turned = dict(reversed(WRITTEN.items()))
    keys = [action_key(Action(text="", calls=(ToolCall(id="1", name="Edit", arguments=a),))) for a in (WRITTEN, turned)]
    assert keys[0] == keys[1]
    rows = [
        {"turns": [{"role": "assistant", "text": "", "thinking": "", "results": [], "calls": [made]}]}
        for made in ({"name": "Edit", "arguments": a, "raw_arguments": None} for a in (WRITTEN, turned))
    ]
    assert _content_mark(rows[0]) == _content_mark(rows[1])


def make_old(run):
    """The run as an earlier version would have left it."""
    for name in ("conversations", "tools"):
        sidecar = run.root / f"{name}.meta.json"
        sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | {"version": 1}))


def test_a_run_made_before_is_refused_with_the_command_that_makes_it_anew(run, tmp_path):
    make_old(run)
    for name, schema in (("conversations", CONVERSATIONS_SCHEMA), ("tools", "tool")):
        with refusal(RunError, what=f"{name}.jsonl", fix=f"`crf ingest PATH... -o {run.root}`") as caught:
            run.read_jsonl(name, schema=schema, version=CONVERSATIONS_VERSION)
        assert caught.value.got.startswith("1 (")
    _, summary = ingested(run.root, tmp_path / "logs")
    assert summary.num_read == 1
    assert [
        row["id"] for row in run.read_jsonl("conversations", schema=CONVERSATIONS_SCHEMA, version=CONVERSATIONS_VERSION)
    ] == ["edits"]


def test_an_old_run_whose_logs_are_gone_is_left_as_it_is(run, tmp_path):
    make_old(run)
    before = run.path("conversations").read_bytes()
    (tmp_path / "logs" / "edits.jsonl").unlink()
    chat = write_chat(tmp_path / "logs" / "chat.jsonl")
    with refusal(RunError, got="1 session", expected="/logs/", fix="`crf ingest PATH... -o NEW_RUN`"):
        ingested(run.root, chat)
    assert run.path("conversations").read_bytes() == before


def test_logs_of_an_old_run_that_were_not_named_are_not_said_to_be_gone(run, tmp_path):
    make_old(run)
    chat = write_chat(tmp_path / "other" / "chat.jsonl")
    with refusal(RunError, got="1 session", expected=str(tmp_path / "logs" / "edits.jsonl")):
        ingested(run.root, chat)
    _, summary = ingested(run.root, chat, tmp_path / "logs")
    assert summary.num_read == 2
