"""An environment of verifiers that asks the policy in training: ids verbatim, rewards and sites the environment's."""

from __future__ import annotations

import json
import re

import pytest

from composer_replication.errors import ConfigError, InputError
from composer_replication.trainer.rollouts.worlds import policy_endpoint
from composer_replication.trainer.rollouts.worlds.policy_endpoint import SpokenEpisode, speak
from refusals import refusal

vf = pytest.importorskip("verifiers.v1")
from composer_replication.envs import verifiers_environment  # noqa: E402
from composer_replication.trainer.rollouts.worlds.verifiers import VerifiersWorld, is_verifiers, world_reward  # noqa: E402

pytestmark = [pytest.mark.envs, pytest.mark.filterwarnings("ignore")]
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    from composer_replication.envs.student import student_folder

    return AutoTokenizer.from_pretrained(student_folder())


@pytest.fixture(scope="module")
def world():
    return VerifiersWorld("verifiers:composer-workspace")


class Scripted:
    """A generation that says its lines; `rounds` are the prompts of each call of it."""

    def __init__(self, tokenizer, turns: dict[int, list[str]]) -> None:
        self._tokenizer, self._turns, self.rounds = tokenizer, turns, []

    def __call__(self, prompts):
        self.rounds.append(prompts)
        said = []
        for ids in prompts:
            number = next(each for each in self._turns if self._mark(each) in self._tokenizer.decode(ids))
            text = self._turns[number].pop(0)
            said.append([*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id])
        return said, [[-0.5] * len(each) for each in said]

    def _mark(self, number: int) -> str:
        return self.marks[number]

    marks: dict[int, str]


def lines(*calls: tuple[str, dict]) -> list[str]:
    return [CALL % (name, json.dumps(arguments)) for name, arguments in calls]


def played(world, tokenizer, turns: dict[int, list[str]], budget=4000, context=None):
    rows = world.rows()
    generate = Scripted(tokenizer, {number: list(each) for number, each in turns.items()})
    generate.marks = {number: rows[number]["prompt"][-1]["content"] for number in turns}
    episodes = [SpokenEpisode(tokenizer, {}, budget, context=context) for _ in turns]
    traces = world.play(list(turns), episodes, generate)
    return episodes, traces, generate


def test_ids_of_later_requests_continue_those_of_the_earlier_ones(world, tokenizer):
    turns = {
        0: lines(("Glob", {"pattern": "*"}), ("Reed", {}), ("Finish", {})),
        1: lines(("Read", {"file_path": "/workspace/nowhere.py"}), ("Finish", {})),
    }
    episodes, traces, generate = played(world, tokenizer, turns)
    for number, (episode, trace) in enumerate(zip(episodes, traces, strict=True)):
        text = tokenizer.decode(episode.ids)
        said = [tokenizer.decode(run) for run in runs(episode)]
        assert said == [f"{line}{tokenizer.eos_token}" for line in turns[number]]
        assert len(episode.sampled) == len(episode.ids) == len(episode.logprobs)
        assert {each for each, mine in zip(episode.logprobs, episode.sampled, strict=True) if mine} == {-0.5}
        assert all(call["text"] in text for call in trace.info["calls"][:-1])
        whole = tokenizer.apply_chat_template(
            [{"role": "user", "content": world.rows()[number]["prompt"][-1]["content"]}],
            tools=episode.tools,
            add_generation_prompt=True,
        )["input_ids"]
        assert episode.prompt_ids == list(whole)
    assert [len(each) for each in generate.rounds] == [2, 2, 1]
    for earlier, later in zip(generate.rounds, generate.rounds[1:], strict=False):
        assert later[0][: len(earlier[0])] == earlier[0]


def runs(episode):
    found, open_run = [], None
    for token, mine in zip(episode.ids, episode.sampled, strict=True):
        if mine and open_run is None:
            found.append(open_run := [])
        open_run = open_run if mine else None
        if open_run is not None:
            open_run.append(token)
    return found


def test_rewards_and_sites_are_the_environments_own(world, tokenizer):
    turns = {0: lines(("Reed", {}), ("Finish", {})), 1: ["I do not know."]}
    episodes, traces, _ = played(world, tokenizer, turns)
    assert [trace.reward for trace in traces] == [0.0, 0.0]
    assert [site["kind"] for site in traces[0].info["sites"]] == ["tool_not_found"]
    assert episodes[1].messages == [{"role": "assistant", "content": "I do not know."}]
    assert world_reward([trace.reward for trace in traces]) == [0.0, 0.0]
    assert [each["role"] for each in episodes[0].messages] == ["assistant", "tool", "assistant"]
    assert episodes[0].messages[0]["tool_calls"][0]["function"] == {"name": "Reed", "arguments": "{}"}


ONE_CALL = lines(("Glob", {"pattern": "*"}), ("Glob", {"pattern": "*"}), ("Finish", {}))


@pytest.mark.parametrize("harness", ["ours", "one that fails when it is refused"])
@pytest.mark.parametrize("budget", [20, 0], ids=["after a tool call", "before the first turn"])
def test_an_episode_without_room_for_a_turn_ends_and_is_judged(world, tokenizer, monkeypatch, budget, harness):
    if harness != "ours":
        monkeypatch.setattr(verifiers_environment, "_is_context_overflow", lambda _reply: False)
    (episode,), (trace,), generate = played(world, tokenizer, {0: ONE_CALL}, budget=budget)
    assert len(generate.rounds) == (budget > 0)
    assert episode.is_full
    assert (trace.has_error, trace.is_truncated, trace.stop_condition) == (False, True, "max_total_tokens")
    assert trace.reward == trace.info["reward"] == 0.0
    assert trace.rewards["workspace"] is not None, "scoring ran"
    assert sum(episode.sampled) == (11 if budget else 0)


def test_a_turn_that_reaches_the_limit_is_cut_there_and_judged(world, tokenizer):
    whole = played(world, tokenizer, {0: ONE_CALL})[0][0]
    second = whole.sampled.index(1, whole.sampled.index(0))
    for budget in (5, second + 3):
        (episode,), (trace,), _ = played(world, tokenizer, {0: ONE_CALL}, budget=budget)
        assert episode.ids == whole.ids[:budget]
        assert episode.messages[-1]["content"] == tokenizer.decode(runs(episode)[-1], skip_special_tokens=True)
        assert (trace.has_error, trace.is_truncated, trace.reward) == (False, True, 0.0)
        assert trace.calls[-1].finish_reason == "length"


def test_the_model_s_context_limits_prompt_and_turns_together(world, tokenizer):
    whole = played(world, tokenizer, {0: ONE_CALL})[0][0]
    context = len(whole.prompt_ids) + 5
    (episode,), (trace,), _ = played(world, tokenizer, {0: ONE_CALL}, context=context)
    assert episode.ids == whole.ids[:5]
    assert (trace.has_error, trace.is_truncated) == (False, True)


def test_an_engine_counts_each_token_once(world, tokenizer):
    (episode,), (trace,), _ = played(world, tokenizer, {0: ONE_CALL})
    assert trace.num_output_tokens == sum(episode.sampled)
    assert trace.num_total_tokens == len(episode.prompt_ids) + len(episode.ids)


def test_a_generation_that_fails_ends_the_episodes_and_is_told(world, tokenizer):
    def broken(_prompts):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        world.play([0], [SpokenEpisode(tokenizer, {}, 100)], broken)


def test_a_history_that_was_rewritten_is_refused(tokenizer):
    episode = SpokenEpisode(tokenizer, {}, 1000)
    user = {"role": "user", "content": "Do it."}
    episode.take({"messages": [user]})
    said = episode.hear(tokenizer.encode("yes", add_special_tokens=False), None)
    made_up = {"role": "assistant", "content": "made up"}
    for messages in ([user, said, user, made_up, user], [user]):
        with refusal(InputError, what="episode") as caught:
            episode.take({"messages": messages})
        assert re.findall(r"\d+", caught.value.got) == [str(len(messages)), "2"]  # and that many were heard before


def test_names_and_what_is_wrong_with_them(world):
    assert [is_verifiers(each) for each in ("verifiers:x", "module:x", "http://x")] == [True, False, False]
    assert world.rows()[3]["task"] == 3
    with pytest.raises(ConfigError, match="no-such-world"):
        VerifiersWorld("verifiers:no-such-world")


def test_no_episode_is_no_round():
    speak([], lambda _prompts: pytest.fail("nobody asked"))
    assert policy_endpoint.SECONDS > 60
