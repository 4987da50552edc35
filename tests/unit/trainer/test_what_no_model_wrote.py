"""What stands in a log as a model's turn and is none, or is none in that order: never a target, never asked about."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from offline_pieces import logged

from composer_replication.action_text import has_late_thinking
from composer_replication.batch.render.dialect import ThinkingRules
from composer_replication.batch.render.renderer import THINKING_COMES_LATE, WITHOUT_ANSWER, Renderer
from composer_replication.cli.replay import RunStates
from composer_replication.config import ReplayConfig
from composer_replication.ingestion.ingest_run import ingest_into
from composer_replication.runs import RunDir
from composer_replication.runs.files import read_conversations
from composer_replication.trainer.sessions.rendering import LoggedSession, good_turns
from composer_replication.types import Conversation, ToolCall, ToolResult, Turn
from session_pieces import HERE, Session
from tokenizer_assets import load


def ingested(folder: Path, files: dict[str, str]) -> tuple[RunDir, list[Conversation]]:
    for name, text in files.items():
        (folder / "logs" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "logs" / name).write_text(text)
    run = RunDir.create(folder / "run")
    ingest_into(run, [folder / "logs"], scrub=None)
    return run, list(read_conversations(run))


def test_words_of_the_harness_in_the_models_place_are_context_and_nobodys_action(tmp_path: Path) -> None:
    common = {"sessionId": "s", "cwd": "/w", "version": "2.0.0", "isSidechain": False}
    said = [("user", "Hi", None), ("assistant", "Hello.", "m"), ("assistant", "API Error: 529", "<synthetic>")]
    records = [
        {"type": role, "uuid": f"u{n}", "parentUuid": f"u{n - 1}" if n else None, **common}
        | {"message": {"role": role, "id": f"m{n}", "model": model, "content": [{"type": "text", "text": text}]}}
        for n, (role, text, model) in enumerate(said)
    ]
    run, (conversation,) = ingested(tmp_path, {"s.jsonl": "".join(json.dumps(each) + "\n" for each in records)})
    assert [turn.origin for turn in conversation.turns] == ["human", "model", "meta"]
    assert good_turns(LoggedSession(conversation=conversation)).good == {"m1"}
    assert [each.state["state_id"] for each in RunStates(ReplayConfig(states="all"), run).read()] == ["s::0000"]


def test_two_answers_to_one_question_are_two_sessions(tmp_path: Path) -> None:
    def row(answer: str) -> str:
        said = [{"role": "user", "content": "Add a test."}, {"role": "assistant", "content": answer}]
        return json.dumps({"id": "task-17", "messages": said})

    _, both = ingested(tmp_path, {"a/s.json": row("I add one to the first file."), "b/s.json": row("Which file?")})
    assert {each.turns[-1].text for each in both} == {"I add one to the first file.", "Which file?"}


def test_a_turn_of_thinking_alone_has_nothing_to_learn_but_silence() -> None:
    session = Session().user("Go.")
    turns = (*session.conversation().turns, answer(thinking="Hm."))
    conversation = replace(session.conversation(), turns=turns)
    for family in ("qwen2_5", "qwen3"):
        (sequence,) = Renderer(load(family)).render(conversation)
        assert [span.no_target for span in sequence.spans] == [WITHOUT_ANSWER]
    (sequence,) = Renderer(load("qwen3"), thinking=ThinkingRules(student_models=("*",))).render(
        replace(conversation, turns=(turns[0], replace(turns[1], model="own")))
    )
    assert [span.no_target for span in sequence.spans] == [""]  # the student's own thought is something


def answer(**fields: object) -> Turn:
    return Turn(id="a", role="assistant", origin="model", provenance=HERE, **fields)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("order", "is_late"),
    [
        ([["thinking", 3], ["text", 3], ["call", 0]], False),
        ([["text", 3], ["thinking", 3], ["call", 0]], True),
        ([["text", 0], ["thinking", 3], ["call", 0]], False),
    ],
)
def test_a_thought_behind_a_text_is_not_learned_before_it(order: list[list[object]], is_late: bool) -> None:
    text = "" if ["text", 0] in order else "So."
    call = ToolCall(id="c", name="bash", arguments={"command": "ls"})
    turn = answer(text=text, thinking="Hm.", calls=(call,), extra={"blocks": order}, model="own")
    assert has_late_thinking(turn) is is_late
    conversation = replace(Session().user("Go.").conversation())
    conversation = replace(conversation, turns=(*conversation.turns, turn))
    (own,) = Renderer(load("qwen3"), thinking=ThinkingRules(student_models=("own",))).render(conversation)
    assert own.spans[-1].no_target == (THINKING_COMES_LATE if is_late else "")
    (others,) = Renderer(load("qwen3")).render(conversation)
    assert others.spans[-1].no_target == ""  # left out, it comes nowhere


def test_a_failure_belongs_to_the_latest_call_of_its_id() -> None:
    turns = [Session().user("Go.").conversation().turns[0]]
    for number, failed in enumerate((False, False, True, False)):
        call = ToolCall(id="call_0", name="bash", arguments={"command": str(number)})
        turns.append(replace(answer(calls=(call,)), id=f"a{number}"))
        result = ToolResult(call_id="call_0", text="out", is_error=failed)
        turns.append(Turn(id=f"r{number}", role="tool", origin="tool", results=(result,), provenance=HERE))
    conversation = replace(logged(0).conversation, turns=tuple(turns))
    assert good_turns(LoggedSession(conversation=conversation)).not_good == {"a2": "failed_call"}
