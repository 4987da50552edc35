"""The embedded student: it loads, its words come back, its turns are what the renderer expects, and its card holds."""

from __future__ import annotations

import json
import random

import pytest
import torch
from acting import Acting, Retrial, hinted_sites, read_call
from card import CARD, differences, measure, weights_hash
from card_table import tables
from decoding import Decoder
from lessons import COPYING, FIRST_SEED, conversation_of, encoded, foreign_hints, lesson

from composer_replication import compose_loss
from composer_replication.batch.hint_placement import teacher_context
from composer_replication.batch.render.renderer import Renderer
from composer_replication.batch.trace_messages import to_conversation
from composer_replication.batch.tree_batch import SessionTargets
from composer_replication.envs.policies import CARELESS, EXPERT, FlawedAgent, RememberingRunner, play
from composer_replication.envs.student import load_student, student_folder
from composer_replication.envs.workspace import TOOLS, TestRunner, generate_task
from obedient_model import one_thread

LARGEST = 12_000_000


@pytest.fixture(scope="module")
def student():
    model, tokenizer = load_student(dtype=torch.float32)
    with one_thread():
        yield model.eval(), tokenizer


@pytest.fixture(scope="module")
def renderer(student):
    return Renderer(student[1], tools=list(TOOLS))


@pytest.fixture(scope="module")
def runner():
    return RememberingRunner(TestRunner())


def test_the_weights_are_small_and_of_a_stock_architecture(student):
    model, tokenizer = student
    assert (student_folder() / "model.safetensors").stat().st_size <= LARGEST
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.vocab_size == len(tokenizer)


@pytest.mark.parametrize(
    "text",
    ['def f(x):\n    return {"a": x}\n', "Grüße → 你好 \x00\t\r\n", "     1→from bank.lamps import lamp_with_fee\n"],
)
def test_any_text_comes_back_from_its_tokens(student, text):
    tokenizer = student[1]
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_a_line_is_the_same_tokens_in_a_listing_and_in_a_call(student):
    """What an edit copies; a quote alone gets its backslash."""
    tokenizer = student[1]
    for seed in range(30):
        for edit in generate_task(seed).solution:
            line = edit.old.partition("\n")[0]
            if not line or '"' in line:
                continue
            own = tokenizer(line, add_special_tokens=False)["input_ids"]
            call = tokenizer.apply_chat_template(
                [{"role": "assistant", "content": "", "tool_calls": [_call("Edit", {"old_string": line})]}]
            )["input_ids"]
            listing = tokenizer(f"     7→{line}\n", add_special_tokens=False)["input_ids"]
            assert _contains(call, own), line
            assert _contains(listing, own), line


def _call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _contains(ids, part):
    return any(ids[at : at + len(part)] == part for at in range(len(ids)))


class _Scripted:
    """Turns of an episode as the student would say them."""

    def __init__(self, tokenizer, episode):
        self._said = iter(
            tokenizer(
                f"{turn.move.text}<tool_call>{json.dumps({'name': turn.move.tool, 'arguments': turn.move.arguments})}"
                "</tool_call><|im_end|>",
                add_special_tokens=False,
            )["input_ids"]
            for turn in episode.turns
        )

    def lead(self, acting):
        heard = acting.begin()
        while heard is not None:
            heard = acting.hear(next(self._said))
        return acting


def led(tokenizer, runner, agent, seed):
    episode = play(generate_task(seed), agent, seed, runner=runner)
    return episode, _Scripted(tokenizer, episode).lead(Acting(tokenizer, runner, seed, "easy", random.Random(0)))


@pytest.mark.parametrize("seed", range(3))
def test_an_acted_episode_is_what_the_renderer_writes_of_it(student, renderer, runner, seed):
    """The expert's turns, said by token: the same outcome, and the ids that training would read."""
    episode, acting = led(student[1], runner, EXPERT, seed)
    assert acting.workspace.reward().solved
    assert [step.outcome for step in acting.steps] == [turn.outcome for turn in episode.turns]
    (rendered,) = renderer.render(conversation_of(episode.task.prompt, episode.turns))
    assert [*acting.prompt_ids, *acting.ids] == rendered.ids
    runs = [index for index, flag in enumerate(acting.sampled) if flag]
    spans = [at - len(acting.prompt_ids) for span in rendered.spans for at in range(span.start, span.end)]
    assert runs == spans


def test_a_hint_stands_in_a_lesson_where_the_pipeline_puts_it(student, renderer, runner):
    """A lesson's ids up to its hinted turn are the teacher's context of that turn."""
    tokenizer, foreign = student[1], foreign_hints(4, runner)
    lessons = (lesson(FIRST_SEED + number, foreign, runner) for number in range(40))
    hinted = [each for each in lessons if each.said is not None and each.has_tools][:5]
    assert hinted
    for each in hinted:
        place = next(at for at, message in enumerate(each.messages) if message["role"] == "system")
        ids, is_target = encoded(tokenizer, each)
        plain = [message for message in each.messages[: place + 2] if message["role"] != "system"]
        (rendered,) = renderer.render(to_conversation(plain, conversation_id="lesson"))
        context = teacher_context(renderer, rendered, rendered.spans[-1], each.said.text)
        assert context.placement == "before_turn"
        assert ids[: len(context.ids)] == context.ids
        assert all(is_target[context.start : len(context.ids)])
        assert not any(is_target[context.hint_start : context.start])


def test_after_a_hint_about_copying_a_file_is_read_again_before_it_is_changed(runner):
    foreign = [each for each in foreign_hints(8, runner) if each.kind == COPYING]
    lessons = (lesson(FIRST_SEED + number, foreign, runner) for number in range(60))
    num_edits = 0
    for each in (each for each in lessons if each.said is not None and each.said.kind == COPYING):
        place = next(at for at, message in enumerate(each.messages) if message["role"] == "system")
        read = set()
        for message, result in zip(each.messages[place + 1 :: 2], each.messages[place + 2 :: 2], strict=True):
            call = message["tool_calls"][0]["function"]
            if call["name"] == "Read":
                read.add(call["arguments"].get("file_path"))
            if call["name"] == "Edit" and "updated successfully" in result["content"]:
                assert call["arguments"]["file_path"] in read
                num_edits += 1
    assert num_edits >= 5


def test_a_turn_taken_again_goes_on_for_as_many_calls_as_it_may_make(student, runner):
    tokenizer = student[1]
    acting = Acting(tokenizer, runner, 0, "easy", random.Random(0))
    again = Retrial(tokenizer, [1, 2], acting.state_before(0), random.Random(0), 3)
    heard = [
        again.hear(tokenizer(f'Now.<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>')["input_ids"])
        for name, arguments in (("LS", '{"path": "/workspace"}'), ("Open", "{}"), ("LS", '{"path": "/workspace"}'))
    ]
    assert again.begin() == [1, 2]
    assert again.kinds == [None, "tool_not_found", None]
    assert "- /workspace/" in tokenizer.decode(heard[0])
    assert heard[1] is not None
    assert heard[2] is None


def test_error_sites_of_an_acted_episode_are_those_of_its_script(student, runner):
    """Hints by the path that GRPO takes, each with one of another kind beside it."""
    agent = FlawedAgent(rates=dict(CARELESS.rates))
    played = [led(student[1], runner, agent, seed) for seed in range(12)]
    found = hinted_sites(student[1], [acting for _, acting in played])
    for (episode, _), own in zip(played, found, strict=True):
        assert [(int(each.turn_id.rpartition("-")[2]), each.kind) for each in own.turns] == [
            (each.turn, each.kind) for each in episode.script
        ]
    taught = [each for own in found for each in own.turns]
    assert len({each.kind for each in taught}) >= 3
    for each in taught:
        said = student[1].decode(each.teacher_ids[: each.teacher_start])
        assert f"<|im_start|>system\n{each.hint}<|im_end|>\n<|im_start|>assistant\n" in said


def test_decoding_many_at_once_says_what_the_plain_model_finds_likeliest(student, runner):
    model, tokenizer = student
    episodes = [Acting(tokenizer, runner, seed, "easy", random.Random(0)) for seed in range(3)]
    Decoder(model, end=tokenizer.eos_token_id, num_places=2, room=900, temperature=0).run(episodes)
    for episode in episodes:
        ids = [*episode.prompt_ids, *episode.ids]
        with torch.inference_mode():
            likeliest = model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
        first = len(episode.prompt_ids)
        said = [at for at, flag in enumerate(episode.sampled, start=first) if flag]
        assert [ids[at] for at in said] == [likeliest[at - 1] for at in said]


def test_a_tree_of_the_students_episode_gives_the_losses_of_its_sequences(student, runner):
    """Both channels, from the plain model's logits of each sequence by itself."""
    model, tokenizer = student
    agent = FlawedAgent(rates={"edit_unread": 1.0})
    _, acting = led(tokenizer, runner, agent, 1)
    (found,) = hinted_sites(tokenizer, [acting])
    site, ids = found.turns[0], found.sequence.ids
    good = found.sequence.spans[0]
    targets = SessionTargets()
    targets.add_response(ids, good.start, good.end)
    targets.add_site(ids, site.start, site.end, site.teacher_ids.tolist(), site.teacher_start)
    losses = compose_loss(model, targets.build(), alpha_sdpo=0.5, sdpo_jsd_beta=1.0)
    assert losses.ran_as == "tree (dense)"

    def logprobs(sequence):
        return model(torch.tensor([sequence])).logits[0].log_softmax(-1)

    with torch.inference_mode():
        own, hinted = logprobs(ids), logprobs(site.teacher_ids.tolist())
        lm_ce = -own[range(good.start - 1, good.end - 1), ids[good.start : good.end]].mean()
        ours = own[site.start - 1 : site.end - 1]
        theirs = hinted[site.teacher_start - 1 : site.teacher_start - 1 + len(ours)]
        sdpo = (ours.exp() * (ours - theirs)).sum(-1).mean()
    assert float(losses.lm_ce.detach()) == pytest.approx(float(lm_ce), abs=1e-5)
    assert float(losses.sdpo_jsd.detach()) == pytest.approx(float(sdpo), abs=1e-5)


def test_transformers_reads_a_call_of_the_template_back(student):
    tokenizer = student[1]
    call = _call("Edit", {"file_path": "/workspace/a.py", "old_string": 'x = "a"', "new_string": "x = 1"})
    message = {"role": "assistant", "content": "I change a.py.", "tool_calls": [call]}
    text = tokenizer.apply_chat_template([{"role": "user", "content": "u"}, message], tokenize=False)
    said = text.partition("<|im_start|>assistant\n")[2]
    assert (
        tokenizer.parse_response(
            tokenizer(said, add_special_tokens=False)["input_ids"], prefix="<|im_start|>assistant\n"
        )
        == message
    )
    assert read_call(said) == (call["function"]["name"], call["function"]["arguments"])


def test_the_card_is_of_these_weights_and_says_what_was_measured():
    card = json.loads((student_folder() / CARD).read_text(encoding="utf-8"))
    assert card["weights_sha256"] == weights_hash(student_folder())
    assert 0.3 <= card["easy"]["success"]["value"] <= 0.7
    assert card["easy"]["invalid_calls_per_100"]["value"] >= 15
    assert card["hints"]["times_rarer_than_with_another_kinds"]["value"] >= 3
    assert card["hints"]["times_rarer_than_with_another_kinds"]["low"] > 1


@pytest.mark.full
def test_a_small_cut_of_the_card_lies_within_wide_bounds():
    """Sixteen episodes: the figures that `make card` measures, each within the interval that so few allow."""
    with one_thread():
        card = measure(student_folder(), {"easy": 16, "medium": 0, "hard": 0})
    committed = json.loads((student_folder() / CARD).read_text(encoding="utf-8"))
    success, invalid = committed["easy"]["success"]["value"], committed["easy"]["invalid_calls_per_100"]["value"]
    assert card["easy"]["success"]["low"] <= success <= card["easy"]["success"]["high"]
    assert card["easy"]["invalid_calls_per_100"]["value"] == pytest.approx(invalid, abs=14)
    same = card["hints"]["same_error"]
    assert same["own hint"]["value"] < same["another kind's hint"]["value"]


def test_a_figure_outside_its_interval_is_named():
    held = {"easy": {"success": {"value": 0.5, "low": 0.4, "high": 0.6}, "episodes": 3}}
    assert differences({"easy": {"success": {"value": 0.59}, "episodes": 9}}, held) == []
    (line,) = differences({"easy": {"success": {"value": 0.61}, "episodes": 3}}, held)
    assert "/easy/success" in line


def test_the_page_shows_the_card():
    card = json.loads((student_folder() / CARD).read_text(encoding="utf-8"))
    assert tables(card) in (student_folder().parent / "README.md").read_text(encoding="utf-8")
