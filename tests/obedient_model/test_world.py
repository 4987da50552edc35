"""The tiny world is what it says: habits without a rule, obedience with one, and an ordinary model folder."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from composer_replication.batch.hint_placement import teacher_context
from composer_replication.trainer.objective.hint_proof import ProvableSite, prove_hints, verdict
from composer_replication.trainer.sessions.dataset import LoggedSessions
from composer_replication.trainer.sessions.rendering import LoggedSession
from composer_replication.types import ErrorSite, Hint
from obedient_model import KINDS, ToyEnvironment, build_world
from obedient_model.tasks import TOOLS, task_messages


@pytest.fixture(scope="module")
def world():
    return build_world(0)


def completions(world, contexts):
    """What the model says after contexts, the likeliest token at each place."""
    padded = world.tokenizer.pad({"input_ids": contexts}, return_tensors="pt")
    said = world.model.generate(**padded, max_new_tokens=24, do_sample=False)
    texts = world.tokenizer.batch_decode(said[:, padded["input_ids"].shape[1] :])
    return [text.replace(world.tokenizer.pad_token, "") for text in texts]


def test_pretraining_takes_less_than_a_minute_of_one_core(world, note):
    how = world.pretraining
    seconds = f"{how.seconds:.0f} s ({how.cpu_seconds:.0f} s of one core)"
    note(f"obedient model: pretrained in {seconds}, loss {how.final_loss:.3f}")
    assert how.cpu_seconds <= 60
    assert how.final_loss < 0.06


@pytest.mark.parametrize(
    ("hint_of", "is_obeyed"),
    [(lambda s: "", False), (lambda s: s.shuffled_hint, False), (lambda s: s.hint, True)],
    ids=["no hint", "a hint about something else", "the right hint"],
)
def test_the_model_errs_by_habit_unless_a_rule_about_the_task_stands_in_its_context(world, hint_of, is_obeyed):
    sessions, contexts, wanted = world.sessions(77, 40), [], []
    for session in sessions:
        turn = session.answer() if is_obeyed else session.erring
        conversation = replace(session.conversation, turns=(*session.state, turn))
        (rendered,) = world.renderer.render(conversation)
        context = teacher_context(world.renderer, rendered, rendered.spans[-1], hint_of(session))
        contexts.append(context.ids[: context.start])
        wanted.append(rendered.spans[-1].text)
    said = completions(world, contexts)
    assert sum(ours == theirs for ours, theirs in zip(said, wanted, strict=True)) >= 38


def test_any_of_the_values_a_rule_names_is_obeyed(world):
    asked = [(kind, value, file) for kind in KINDS for value in kind.values for file in ("apple", "sage")]
    contexts, wanted = [], []
    for kind, value, file in asked:
        messages = task_messages(kind, file, value, kind.hint(value))
        before, whole = (
            world.tokenizer.apply_chat_template(part, tools=TOOLS, tokenize=False, add_generation_prompt=prompt)
            for part, prompt in ((messages[:2], True), (messages[:3], False))
        )
        contexts.append(world.tokenizer(before, add_special_tokens=False)["input_ids"])
        wanted.append(whole[len(before) :].rstrip("\n"))
    said = completions(world, contexts)
    assert sum(ours == theirs for ours, theirs in zip(said, wanted, strict=True)) >= len(asked) - 2


def test_a_hint_in_pretraining_stands_where_the_renderer_puts_one(world):
    for session in world.sessions(3, 8):
        rendered, span = world.rendered(session)
        context = teacher_context(world.renderer, rendered, span, session.hint)
        assert context.placement == "before_turn"
        messages = task_messages(session.kind, session.file, session.kind.habit, session.hint)
        text = world.tokenizer.apply_chat_template(messages[:3], tools=TOOLS, tokenize=False)
        assert context.ids == world.tokenizer(text.removesuffix("\n"), add_special_tokens=False)["input_ids"]


def logged(session, hint):
    """A session of the world as a run has it: its error site with this hint, and the right call."""
    identity = session.conversation.id
    known = dict.fromkeys(("result_turn_id", "repeat_of")) | {"evidence": (0, 1), "evidence_text": "x"}
    site = ErrorSite(
        **known,
        **{"id": identity, "conversation_id": identity, "turn_id": session.turn_id, "call_id": ""},
        **{"tool": session.erring.calls[0].name, "kind": session.kind.name, "blame": "model", "confidence": 1.0},
        **{"is_soft": False, "is_rewound": False, "repeats": 0, "between": 0, "is_kept": True, "reason": "kept"},
    )
    hinted = (site, Hint(text=hint, source="template", template="toy", version=1))
    corrections = {identity: session.answer().calls[0]}
    return LoggedSession(conversation=session.conversation, sites=[hinted], corrections=corrections)


@pytest.mark.parametrize(
    ("hint_of", "heeds"),
    [
        (lambda s: s.hint, True),
        (lambda s: s.shuffled_hint, False),
        (lambda s: " ".join([s.hint, *(good.kind.hint(good.kind.others[0]) for good in s.good_tasks)]), False),
    ],
    ids=["its own hint", "a shuffled one", "one that speaks against what went well too"],
)
def test_the_hint_proof_tells_whether_the_decision_is_moved_and_nothing_else(world, hint_of, heeds, note):
    sessions = [logged(each, hint_of(each)) for each in world.sessions(4, 24, num_tasks_before=1)]
    proved = LoggedSessions.from_sessions(sessions, world.renderer, budget=4096).prove(world.model)
    found = verdict(proved.proofs)
    note(found.summary())
    assert {proof.basis for proof in proved.proofs} == {"correction"}
    assert found.num_with_good == 24
    assert found.heeds is heeds
    if heeds:
        assert found.over_other == 24
        assert min(proof.advantage for proof in proved.proofs) > 0.5


def test_hint_proof_keeps_every_site(world):
    sites = []
    for session in world.sessions(4, 16):
        rendered, span = world.rendered(session)
        identity = session.conversation.id
        sites.append(
            ProvableSite(site_id=identity, rendered=rendered, span=span, hint=session.hint, kind=session.kind.name)
        )
    proofs = prove_hints(world.model, world.renderer, sites)
    assert Counter(proof.reason for proof in proofs) == {"kept": len(sites)}
    assert min(proof.advantage * proof.num_tokens for proof in proofs) > 2.0


def test_a_saved_world_is_an_ordinary_model_folder(world, tmp_path):
    world.save(tmp_path)
    tokenizer, model = AutoTokenizer.from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)
    session = world.sessions(5, 1)[0]
    rendered, span = world.rendered(session)
    text = world.tokenizer.decode(rendered.ids)
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == rendered.ids
    ids = torch.tensor([rendered.ids])
    torch.testing.assert_close(model(input_ids=ids).logits, world.model(input_ids=ids).logits, rtol=0, atol=0)
    message = tokenizer.parse_response(rendered.ids[span.start : span.end], prefix=rendered.ids[: span.start])
    name, arguments = session.kind.call(session.file, session.kind.habit)
    assert message["tool_calls"] == [{"type": "function", "function": {"name": name, "arguments": arguments}}]


@pytest.mark.parametrize("text", ["{'error': 'No such thing: x_grep, egrep.'}\n\tgrep", '{"a": [1, 2.5], "b": "~"}'])
def test_any_ascii_text_comes_back_from_its_ids(world, text):
    text = text.replace("\t", " ")
    assert world.tokenizer.decode(world.tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_the_environment_rewards_the_right_call_and_complains_about_the_habit():
    for kind in KINDS:
        environment = ToyEnvironment()
        environment.reset(kind=kind.name, file="sage")
        name, arguments = kind.call("sage", kind.habit)
        if name == "fetch":
            assert not hasattr(environment, name)
        else:
            with pytest.raises(ValueError, match=kind.habit):
                getattr(environment, name)(**arguments)
        assert environment.get_reward() == 0.0
        name, arguments = kind.call("sage", kind.right)
        assert getattr(environment, name)(**arguments) == "ok"
        assert environment.get_reward() == 1.0
