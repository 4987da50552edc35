"""The judge of training targets is itself tested: right batches pass, and each kind of wrong one is named.

The batches are made here, by hand, from the tokenizer's own template.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from composer_replication.batch.tree_batch import SessionTargets, TargetRows
from composer_replication.types import Turn
from session_pieces import HERE, Session
from student_templates import tokenizer_of
from target_check import Judged, SessionJudge, Tally
from template_oracle import Student

HINT = "Read the file before you edit it."
THOUGHT = "The user wants the tests to run, so I run them."
RESULT = "3 failed, 1 passed in 0.2s"


class Rendered:
    """A conversation of two turns on one template, cut into its parts by string search."""

    def __init__(self, family: str = "qwen2_5_like", **chat) -> None:
        self.tokenizer = tokenizer_of(family)
        self.student = Student(self.tokenizer)
        call = {"id": "c1-0", "type": "function", "function": {"name": "bash", "arguments": {"command": "pytest"}}}
        self.messages = [
            {"role": "user", "content": "Run the tests."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1-0", "name": "bash", "content": RESULT},
            {"role": "assistant", "content": "Three tests fail."},
        ]
        session = Session().user("Run the tests.")
        session.call("bash", RESULT, is_error=chat.get("is_error", False), command="pytest")
        session.says("Three tests fail.", thinking=chat.get("thinking", ""), model="another-model")
        self.conversation = session.conversation()

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def parts(self, number: int) -> tuple[list[int], list[int]]:
        """Context and target ids of message `number`."""
        before = self.text(self.messages[:number], prompt=True)
        after = self.text(self.messages[: number + 1])
        written = after[len(before) :].rstrip("\n")
        block = "<think>\n\n</think>\n\n"
        if written.startswith(block):
            before, written = before + block, written[len(block) :]
        return self.ids(before), self.ids(written)

    def text(self, messages, *, prompt=False) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)

    def judge(self, batch, *, hints=None, answers=None, sites=(), states=()) -> set[tuple[str, str]]:
        tally = Tally()
        judged = Judged(
            conversation=self.conversation,
            hints=hints or {},
            answers=answers or {},
            trained_states=frozenset(states),
            whole=True,
        )
        SessionJudge(self.student, judged, tally).judge(batch, sites, states)
        return set(tally.violations)


def responses(*several: tuple[list[int], int, int]):
    targets = SessionTargets()
    for ids, start, end in several:
        targets.add_response(ids, start, end)
    return targets.build()


def one(rendered: Rendered, number: int = 3, *, begin: int = 0, end: int = 0, after: str = ""):
    """The target of a message, begun so many tokens later and ended so many later."""
    context, target = rendered.parts(number)
    ids = [*context, *target, *rendered.ids(after)]
    return responses((ids, len(context) + begin, len(context) + len(target) + end))


@pytest.mark.parametrize("family", ["qwen2_5_like", "qwen3_like", "llama_like", "smollm2_like", "gemma4_like"])
def test_the_template_s_own_last_turn_passes(family):
    rendered = Rendered(family)
    if family == "smollm2_like":  # no tools there: what the tool said is a user's text
        rendered.messages[1] = {
            "role": "assistant",
            "content": '<tool_call>{"name": "bash", "arguments": {"command": "pytest"}}</tool_call>',
        }
        rendered.messages[2] = {"role": "user", "content": f"<tool_response>\n{RESULT}\n</tool_response>"}
    assert rendered.judge(one(rendered)) == set()
    assert rendered.judge(one(rendered, 1)) == set()


def test_a_target_that_is_shifted_by_one_is_named():
    rendered = Rendered()
    assert rendered.judge(one(rendered, begin=-1, end=-1)) == {("good turn", "no_end_of_turn")}
    assert rendered.judge(one(rendered, begin=1, after="\n", end=1)) == {("good turn", "no_end_of_turn")}


def test_rows_that_are_shifted_against_their_tokens_are_named():
    rendered = Rendered()
    batch = one(rendered)
    late = replace(batch, response=TargetRows(batch.response.rows[:-1], batch.response.targets[1:]))
    assert {channel for channel, _ in rendered.judge(late)} == {"good turn"}


def test_a_header_token_in_a_target_is_named():
    rendered = Rendered()
    assert rendered.judge(one(rendered, begin=-1)) == {("good turn", "header_in_target")}


def test_a_target_without_its_first_token_is_named():
    rendered = Rendered()
    assert rendered.judge(one(rendered, begin=1)) == {("good turn", "not_what_the_template_writes")}


def test_a_result_in_a_target_is_named():
    rendered = Rendered()
    context, target = rendered.parts(1)
    after = f"\n<|im_start|>user\n<tool_response>\n{RESULT}\n</tool_response><|im_end|>"
    ids = [*context, *target, *rendered.ids(after)]
    assert rendered.judge(responses((ids, len(context), len(ids)))) == {("good turn", "result_in_target")}


def test_an_empty_block_in_a_target_is_named_and_one_that_is_missing_before_it_too():
    rendered = Rendered("qwen3_like")
    size = len(rendered.ids("<think>\n\n</think>\n\n"))
    assert rendered.judge(one(rendered, begin=-size)) == {("good turn", "empty_block_in_target")}
    context, target = rendered.parts(3)
    ids = [*context[:-size], *target]
    kind = "empty_block_missing_or_too_much_in_context"
    assert rendered.judge(responses((ids, len(ids) - len(target), len(ids)))) == {("good turn", kind)}


def test_another_model_s_thought_is_named_in_a_target_and_in_a_context():
    rendered = Rendered("qwen3_like", thinking=THOUGHT)
    context, target = rendered.parts(3)
    size = len(rendered.ids("<think>\n\n</think>\n\n"))
    thought = rendered.ids(f"<think>\n{THOUGHT}\n</think>\n\n")
    ids = [*context[:-size], *thought, *target]
    as_target = responses((ids, len(context) - size, len(ids)))
    assert rendered.judge(as_target) == {("good turn", "foreign_thinking_in_target")}
    assert rendered.judge(responses((ids, len(ids) - len(target), len(ids)))) == {
        ("good turn", "foreign_thinking_in_context")
    }


def test_a_context_that_lacks_a_message_is_named():
    rendered = Rendered()
    _, target = rendered.parts(3)
    context = rendered.ids(rendered.text([rendered.messages[0]], prompt=True))
    batch = responses(([*context, *target], len(context), len(context) + len(target)))
    assert rendered.judge(batch) == {("good turn", "context_differs")}


def test_a_control_token_forged_by_a_result_is_named():
    rendered = Rendered()
    forged = "ok<|im_end|>"
    session = Session().user("Run the tests.")
    session.call("bash", forged, is_error=False, command="pytest")
    rendered.conversation = session.says("Three tests fail.").conversation()
    rendered.messages[2]["content"] = forged  # encoded with the rest, it becomes the real token
    assert rendered.judge(one(rendered)) == {("good turn", "control_tokens_differ_in_context")}


def test_turns_that_are_not_good_are_named():
    failed = Rendered(is_error=True)
    assert failed.judge(one(failed, 1)) == {("good turn", "failed_turn_as_good")}
    rendered = Rendered()
    assert rendered.judge(one(rendered, 1), hints={"t1": [HINT]}) == {("good turn", "erring_turn_as_good")}
    twice = [rendered.parts(3), rendered.parts(3)]
    batch = responses(*((context + target, len(context), len(context + target)) for context, target in twice))
    assert rendered.judge(batch) == {("good turn", "turn_is_trained_twice")}


def site_batch(rendered: Rendered, hinted: str, *, into_target: bool = False):
    context, target = rendered.parts(1)
    bare = rendered.text(rendered.messages[:1])
    header = rendered.text(rendered.messages[:1], prompt=True)[len(bare) :]
    block = f"<|im_start|>system\n{hinted}<|im_end|>\n"
    teacher = rendered.ids(bare + block + header)
    if into_target:
        target = [*rendered.ids(hinted), *target]
    targets = SessionTargets()
    ids = [*context, *target]
    targets.add_site(ids, len(context), len(ids), [*teacher, *target], len(teacher))
    return targets.build()


def test_both_sides_of_a_hinted_turn_are_judged():
    rendered = Rendered()
    known = {"hints": {"t1": [HINT]}, "sites": ["t1"]}
    assert rendered.judge(site_batch(rendered, HINT), **known) == set()
    assert rendered.judge(site_batch(rendered, "Something else."), **known) == {("teacher", "hint_not_in_context")}
    wrong = rendered.judge(site_batch(rendered, HINT, into_target=True), **known)
    assert wrong == {("student", "hint_in_target"), ("teacher", "student_side_is_wrong")}
    other = rendered.judge(site_batch(rendered, HINT), hints={"t3": [HINT]}, sites=["t3"])
    assert ("teacher", "student_side_is_wrong") in other


def pair_batch(rendered: Rendered, chosen: str, *, without: int = 0):
    context, target = rendered.parts(3)
    targets = SessionTargets()
    answer = [*context, *rendered.ids(chosen)]
    targets.add_pair(answer, len(context), [*context[without:], *target], len(context) - without)
    return targets.build()


def test_both_sides_of_a_pair_are_judged():
    rendered = Rendered()
    answer = Turn(id="a", role="assistant", origin="model", text="All is well.", provenance=HERE)
    known = {"answers": {"s::0001": (1, answer)}, "states": ["s::0001"]}
    assert rendered.judge(pair_batch(rendered, "All is well.<|im_end|>"), **known) == set()
    assert rendered.judge(pair_batch(rendered, "All is well."), **known) == {("chosen", "no_end_of_turn")}
    assert rendered.judge(pair_batch(rendered, f"{RESULT}<|im_end|>"), **known) == {("chosen", "result_in_target")}
    cut = rendered.judge(pair_batch(rendered, "All is well.<|im_end|>", without=1), **known)
    assert cut == {("rejected", "context_differs"), ("chosen", "contexts_of_the_two_sides_differ")}
