"""The workspace as a world of ablations: conversations side by side, what their errors teach, and a whole job."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from refusals import refusal

torch = pytest.importorskip("torch")

import tiny_models  # noqa: E402
from composer_replication.batch.render.renderer import Renderer  # noqa: E402
from composer_replication.envs.student import load_student  # noqa: E402
from composer_replication.envs.workspace import TOOLS  # noqa: E402
from composer_replication.errors import ConfigError, InputError, UnsupportedModelError  # noqa: E402
from composer_replication.evaluation.ablation.workspace import (  # noqa: E402
    KINDS,
    METRICS,
    SCHEMAS,
    TaskEpisode,
    _sum_entropy_and_kl,
    _text_between_turns,
    play_all,
)
from composer_replication.trainer.rollouts.effort import ErrorPenalty, _errors_in  # noqa: E402
from composer_replication.trainer.rollouts.generation import talks as recorded_talks  # noqa: E402
from composer_replication.trainer.rollouts.generation.row_cache import read_tokens  # noqa: E402
from composer_replication.trainer.rollouts.generation.talks import RecordedTalking, Talking  # noqa: E402
from composer_replication.trainer.rollouts.hint_distillation import ErringTurnFinder  # noqa: E402
from composer_replication.trainer.rollouts.sites import (  # noqa: E402
    Rollout,
    RolloutOptions,
    gather_rollouts,
)
from composer_replication.trainer.rollouts.unrelated_hints import add_unrelated_hints, replace_by_unrelated_hints  # noqa: E402
from scripted_talk import Scripted  # noqa: E402

END = 2


def spoken(places: int, *, temperature: float, count: int = 5, by: Any = Talking) -> list[list[list[int]]]:
    model = tiny_models.build("llama-tied").eval()
    talks = [Scripted(number, number % 3) for number in range(count)]
    by(model, ends=[END], places=places, room=120, temperature=temperature).run(talks)
    return [talk.heard for talk in talks]


@pytest.mark.parametrize("places", [1, 2, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_of_one_shape_say_what_conversations_side_by_side_say(places, temperature):
    assert spoken(places, temperature=temperature, by=RecordedTalking) == spoken(3, temperature=temperature)


def test_a_row_goes_on_from_what_two_prompts_share(student):
    """Tools' schemas stand before every task: of the second episode in a row only the task is read."""
    model, tokenizer = student
    usual, other = ([TaskEpisode(tokenizer, seed, f"rows:{seed}") for seed in (0, 1, 2, 3)] for _ in range(2))
    given = {"ends": [tokenizer.eos_token_id], "places": 2, "room": 1500, "most_new": 300}
    Talking(model, **given).run(usual)
    read = list[int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorded_talks, "read_tokens", lambda *told: read.append(read_tokens(*told)))
        RecordedTalking(model, **given).run(other)
    assert [each.ids for each in other] == [each.ids for each in usual]
    heard = sum(len(each.ids) - sum(each.sampled) for each in other)
    shortest = min(len(each.prompt_ids) for each in other)
    assert sum(read) < heard + 2 * shortest, "four prompts were read whole"


def test_what_a_conversation_says_does_not_depend_on_who_else_talks():
    alone = spoken(1, temperature=1.0)
    assert spoken(2, temperature=1.0) == alone
    assert spoken(5, temperature=1.0) == alone
    assert len({str(each) for each in alone}) == 5


@pytest.mark.parametrize("length", [0, 121])
def test_a_conversation_that_does_not_fit_is_refused(length):
    talk = Scripted(0, 1)
    talk.begin = lambda: [3] * length
    with refusal(InputError, got=f"{length} tokens") as caught:
        RecordedTalking(tiny_models.build("llama-tied").eval(), ends=[END], room=120).run([talk])
    assert re.findall(r"\d+", caught.value.expected) == ["1", "120"]


def test_each_conversation_has_the_same_room_beyond_its_beginning():
    model = tiny_models.build("llama-tied").eval()
    talks = [Scripted(number, 9) for number in range(0, 30, 10)]  # 2, 12 and 22 tokens to begin with
    Talking(model, ends=[END], places=3, room=120, most_new=40).run(talks)
    told = [sum(map(len, talk.heard)) for talk in talks]
    answered = [sum(9 - number for number in range(len(talk.heard) - 1)) for talk in talks]
    assert [39 <= said + heard <= 40 for said, heard in zip(told, answered, strict=True)] == [True] * 3


def test_the_likeliest_tokens_are_those_of_generate():
    model = tiny_models.build("llama-tied").eval()
    first = [each[0] for each in spoken(3, temperature=0.0)]
    for number, said in enumerate(first):
        prompt = torch.tensor([Scripted(number, 0).begin()])
        wanted = model.generate(
            prompt, do_sample=False, max_new_tokens=len(said), attention_mask=torch.ones_like(prompt)
        )
        assert wanted[0, prompt.shape[1] :].tolist()[: len(said)] == said


@pytest.fixture(scope="module")
def student():
    model, tokenizer = load_student()
    return model.float().eval(), tokenizer


@pytest.fixture(scope="module")
def episodes(student):
    model, tokenizer = student
    played = [TaskEpisode(tokenizer, seed, f"test:{seed}") for seed in (0, 1, 2, 3, 5, 8, 13, 21)]
    play_all(model, tokenizer, played, max_tokens=300)
    assert sum(each.failures.total() for each in played) >= 4, "the student errs"
    return played


def test_a_short_prompt_has_no_more_room_than_a_long_one(student):
    """Else turns would be cut away that the messages still have, and the rollout would lose all its sites."""
    model, tokenizer = student
    played = [TaskEpisode(tokenizer, seed, f"room:{seed}") for seed in (0, 1, 2, 3)]
    played[0].prompt_ids = played[0].prompt_ids + played[0].prompt_ids
    play_all(model, tokenizer, played, max_tokens=120)
    assert max(len(each.ids) for each in played) > 120, "no episode was cut off"
    assert not any(any(each.sampled[120:]) for each in played)


def rollouts_of(episodes: list[TaskEpisode]) -> list[Rollout]:
    """As a generation step hands them over: TRL knows one message of each."""
    fields = {"messages": [each.messages for each in episodes], "tools": [SCHEMAS] * len(episodes)}
    ids, sampled = [each.ids for each in episodes], [each.sampled for each in episodes]
    one = [[{"role": "assistant", "content": "all of it"}] for _ in episodes]
    generated = ([each.prompt_ids for each in episodes], ids, sampled, one, None, fields, None, [])
    return gather_rollouts(
        [each.prompt for each in episodes], generated, name="step-0", environments=None, tools_of=lambda _number: ()
    )


def found_in(episodes, student, **options):
    finder = ErringTurnFinder(Renderer(student[1], tools=list(TOOLS)), RolloutOptions(**options))
    return finder, [finder.find(each) for each in rollouts_of(episodes)]


def test_calls_that_the_workspace_failed_are_the_sites_of_a_rollout(episodes, student):
    _, found = found_in(episodes, student)
    for episode, each in zip(episodes, found, strict=True):
        assert Counter(site.kind for site in each.sites) == episode.failures
        assert _errors_in(episode.messages) == episode.failures.total()


def test_hints_of_another_kind_are_nobodys_own(episodes, student):
    finder, found = found_in(episodes, student)
    own = {turn.hint: turn.kind for each in found for turn in each.turns}
    before = [(turn.turn_id, turn.kind, turn.hint) for each in found for turn in each.turns]
    replace_by_unrelated_hints(finder, found, "0:0")
    after = [(turn.turn_id, turn.kind, turn.hint) for each in found for turn in each.turns]
    assert [each[:2] for each in after] == [each[:2] for each in before], "two kinds or more: each has another"
    assert all(own[hint] != kind for _, kind, hint in after)
    for each in found:
        for turn in each.turns:
            told = student[1].decode(turn.teacher_ids[: turn.teacher_start])
            assert turn.hint in told
            assert turn.teacher_ids[turn.teacher_start :].tolist() == each.sequence.ids[turn.start : turn.end]


def test_a_control_is_contrasted_with_a_third_kind_of_hint(episodes, student):
    finder, found = found_in(episodes, student)
    own = {turn.hint: turn.kind for each in found for turn in each.turns}
    replace_by_unrelated_hints(finder, found, "0:0")
    add_unrelated_hints(finder, found, "0:0")
    turns = [turn for each in found for turn in each.turns]
    assert all(own[turn.hint] == turn.hint_kind != turn.kind for turn in turns)
    contrasted = [turn for turn in turns if turn.wrong_ids is not None]
    assert contrasted
    for turn in contrasted:
        told = student[1].decode(turn.wrong_ids[: turn.wrong_start])
        about = {own[hint] for hint in own if hint in told}
        assert about, "no hint of the batch stands there"
        assert about == {turn.wrong_kind}
        assert not about & {turn.kind, turn.hint_kind}
    assert sum(each.counts["without_contrast"] for each in found) == len(turns) - len(contrasted)


def test_kinds_without_hints_and_hints_in_the_errors_own_words(episodes, student):
    _, found = found_in(episodes, student, hints="raw_error")
    hints = [turn.hint for each in found for turn in each.turns]
    assert hints
    results = [message["content"] for each in episodes for message in each.messages if message["role"] == "tool"]
    quoted = [re.search("`([^`]{10,30})", hint)[1] for hint in hints]
    assert all(any(words in result for result in results) for words in quoted)
    kind = next(turn.kind for each in found for turn in each.turns)
    _, without = found_in(episodes, student, unhinted_kinds=(kind,))
    left_out = sum(each.counts["not_taught:unhinted_kind"] for each in without)
    assert left_out == sum(turn.kind == kind for each in found for turn in each.turns)
    assert kind not in {turn.kind for each in without for turn in each.turns}


def test_an_error_has_a_price(episodes):
    messages = [each.messages for each in episodes]
    logged = {}
    rewards = ErrorPenalty(0.25)(
        completions=["", *[""] * (len(messages) - 1)], messages=messages, log_metric=logged.__setitem__
    )
    assert rewards == [-0.25 * each.failures.total() for each in episodes]
    assert logged["errors/per_rollout"] == sum(each.failures.total() for each in episodes) / len(episodes)
    assert ErrorPenalty(1.0)(completions=["only text"]) == [0.0]
    with refusal(InputError, what="error", got="0.0"):
        ErrorPenalty(0.0)


def test_entropy_and_divergence_are_sums_over_the_sampled_tokens(episodes, student):
    model, _tokenizer = student
    moved = load_student()[0].float().eval()
    with torch.no_grad():
        moved.model.layers[2].mlp.down_proj.weight.mul_(1.2)
    sums = _sum_entropy_and_kl(model, moved, episodes[:3])
    assert all(kl > 0 for _, kl in sums)
    episode = episodes[1]
    ids = torch.tensor([episode.prompt_ids + episode.ids])
    with torch.no_grad():
        now, then = (torch.log_softmax(each(input_ids=ids).logits[0].double(), -1) for each in (moved, model))
    places = [len(episode.prompt_ids) + place - 1 for place, sampled in enumerate(episode.sampled) if sampled]
    entropy = -(now[places].exp() * now[places]).sum()
    kl = (now[places].exp() * (now[places] - then[places])).sum()
    torch.testing.assert_close(torch.tensor(sums[1]).double(), torch.stack([entropy, kl]), rtol=1e-3, atol=1e-4)
    assert _sum_entropy_and_kl(model, model, episodes[:1])[0][1] == 0.0


def test_a_job_trains_on_rollouts_and_plays_held_out_tasks(tmp_path: Path, monkeypatch):
    pytest.importorskip("trl")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from composer_replication.config.presets import load_with_preset
    from composer_replication.evaluation.ablation.job import Job, run_in, write_job
    from composer_replication.evaluation.ablation.plan import Budget

    world = "composer_replication.evaluation.ablation.workspace"
    config = load_with_preset(
        overrides=[
            "train.mode=grpo",
            "train.adapter.kind=none",
            "train.optimiser.steps=1",
            "train.optimiser.per_device=2",
            "train.optimiser.lr=1e-3",
            "train.grpo.num_generations=2",
            "train.grpo.max_completion_length=96",
            f"train.grpo.rollouts={world}:rollouts",
            f"train.grpo.rewards=['{world}:files_worth']",
            "train.grpo.dataset=composer_replication.envs.trl_environment:easy_tasks",
            "train.grpo.error_penalty=0.1",
            "train.grpo.heed_gate=false",
            "loss.beta_replay=0",
        ]
    )
    options = {"is_trained": True, "held_out_first": 5, "held_out": 2, "most_tokens": 120}
    folder = tmp_path / "jobs" / "arm" / "3"
    write_job(Job(folder=folder, arm="arm", seed=3, world="workspace", config=config, options=options, budget=Budget()))
    result = run_in(folder)
    assert (result.spent.rollouts, result.spent.steps) == (2, 1)
    assert result.spent.tokens > 2 * 100, "prompts are read, too"
    assert [each.unit for each in result.units] == ["task-5", "task-6"]
    assert result.digests["start"] != result.digests["trained"]
    (point,) = result.curve
    assert (point["step"], point["rollouts"]) == (0, 0)
    assert 0 <= point["success"] <= 1
    assert point["alarms"] == 0
    for unit in result.units:
        known = unit.metrics
        assert {each.of or name for name, each in METRICS.items()} <= known.keys()
        assert sum(known[f"failing_calls:{kind}"] for kind in KINDS) <= known["failing_calls"] <= known["calls"]
        assert known["sampled"] < known["tokens"]
        assert known["kl"] > 0
    assert not (folder / "training" / "checkpoints").exists()
    lines = (folder / "training" / "metrics.jsonl").read_text().splitlines()
    (line,) = [json.loads(each) for each in lines if "world/calls" in each]
    assert 0 < line["tools/call_frequency"] == pytest.approx(line["world/calls"]), "what the alarm watches"


def test_a_rollout_function_beside_an_environment_is_refused():
    from composer_replication.config.train import GRPOSection
    from composer_replication.trainer.from_config.grpo import _rewards_and_environment

    both = GRPOSection(
        rollouts="composer_replication.evaluation.ablation.workspace:rollouts",
        environment="composer_replication.envs.trl_environment:WorkspaceEnvironment",
    )
    with refusal(ConfigError, what="train.grpo", got="environment") as caught:
        _rewards_and_environment(both)
    assert "rollouts" in caught.value.got


def test_between_two_turns_stands_what_the_models_own_template_has_there():
    tokenizer = load_student()[1]
    between = _text_between_turns(tokenizer, "LS", "a\nb")
    assert between == "\n<|im_start|>tool\na\nb<|im_end|>\n<|im_start|>assistant\n"
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{{ eos_token }}{% endfor %}"
    with refusal(UnsupportedModelError, what="template", expected="token"):  # a bracket stands before the end
        _text_between_turns(tokenizer, "LS", "a")
