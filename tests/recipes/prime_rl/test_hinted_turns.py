"""The orchestrator's algorithm: which ids it has scored, what it writes on which node, and what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from composer_replication.batch.render.renderer import Renderer
from composer_replication.config import loads
from composer_replication.envs.student import load_student, student_folder
from composer_replication.errors import AlignmentError, ConfigError, MissingExtraError
from composer_replication.recipes.prime_rl.hinted_turns import (
    HintedTurns,
    HintSettings,
    composer_algorithm,
    make_finder,
    register,
    rollout_of,
    write_reference,
)
from composer_replication.trainer.rollouts.hint_distillation import ErringTurnFinder
from composer_replication.trainer.rollouts.sites import RolloutOptions
from recipes.prime_rl.engine_records import Trace
from recipes.prime_rl.recorded_traces import own_traces, verifiers_trace
from recipes.recorded_steps import Batch, recorded_batches
from refusals import refusal

ALPHA = 0.25


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_student()[1]


@pytest.fixture(scope="module")
def finder(tokenizer: Any) -> ErringTurnFinder:
    return ErringTurnFinder(Renderer(tokenizer))


def counting(asked: list[list[int]]) -> Callable[..., Any]:
    """Scores that say which place of which request they are of."""

    async def score(token_ids: list[int]) -> list[float]:
        asked.append(token_ids)
        return [-float(place) for place in range(len(token_ids))]

    return score


def assert_recorded_sites(batch: Batch, traces: list[Any], finder: ErringTurnFinder) -> None:
    """Each site of the record is scored by its own hinted ids, and its node alone has a reference and weights."""
    for row, trace in enumerate(traces):
        asked: list[list[int]] = []
        (branch,) = trace.branches
        counts = asyncio.run(HintedTurns(finder, ALPHA).annotate(trace, [branch], counting(asked)))
        sites = [site for site in batch.sites if site.row == row]
        assert asked == [site.teacher_ids.tolist() for site in sites]
        assert trace.info["composer"] == dict(counts)
        assert (counts["taught"], counts["taught_tokens"]) == (len(sites), sum(s.end - s.start for s in sites))
        expected = [0.0] * len(branch.token_ids)
        reference = [0.0] * len(branch.token_ids)
        for site in sites:
            for offset in range(site.end - site.start):
                expected[site.start + offset] = ALPHA
                reference[site.start + offset] = -float(site.teacher_start + offset)
        assert streams(branch) == (expected, reference)


def streams(branch: Any) -> tuple[list[float], list[float]]:
    """Weights and references at the places of the branch's tokens."""
    weights, references = [], []
    for node in branch.nodes:
        weights += (node.loss_weights or {}).get("ref_kl", [0.0] * len(node.token_ids))
        values = iter(node.reference_logprobs or [0.0] * sum(node.mask))
        references += [next(values) if is_sampled else 0.0 for is_sampled in node.mask]
    return weights, references


def test_the_recorded_sites_are_scored_verbatim_and_nothing_else_is_taught(tokenizer: Any, finder: Any) -> None:
    batch = recorded_batches()[0]
    assert_recorded_sites(batch, own_traces(tokenizer, batch), finder)


def test_the_same_on_verifiers_own_traces(tokenizer: Any, finder: Any) -> None:
    vf = pytest.importorskip("verifiers.v1")
    batch = recorded_batches()[0]
    traces = [verifiers_trace(vf, each) for each in own_traces(tokenizer, batch)]
    assert_recorded_sites(batch, traces, finder)


def test_a_call_s_tokens_alone_may_be_taught(tokenizer: Any) -> None:
    finder = ErringTurnFinder(Renderer(tokenizer), RolloutOptions(part="call"))
    batch = recorded_batches()[0]
    row = batch.sites[0].row
    trace = own_traces(tokenizer, batch)[row]
    asyncio.run(HintedTurns(finder, ALPHA).annotate(trace, trace.branches, counting([])))
    weights, _ = streams(trace.branches[0])
    site = batch.sites[0]
    taught = [place for place in range(site.start, site.end) if weights[place]]
    assert site.start < taught[0] < taught[-1] < site.end - 1
    assert trace.branches[0].token_ids[taught[0]] == tokenizer.convert_tokens_to_ids("<tool_call>")


def test_what_the_environment_says_is_a_site_and_a_turn_has_one_reference(tokenizer: Any, finder: Any) -> None:
    batch = recorded_batches()[0]
    row = next(row for row in range(8) if row not in {site.row for site in batch.sites})
    trace = own_traces(tokenizer, batch)[row]
    told = {"turn": 0, "kind": "other", "message": "wrong", "hint": "Look first."}
    trace.info["sites"] = [told, {**told, "hint": "Look again."}]
    asked: list[list[int]] = []
    counts = asyncio.run(HintedTurns(finder, ALPHA).annotate(trace, trace.branches, counting(asked)))
    assert counts["taught"] == 1
    assert counts["dropped:turn_has_a_reference"] == 1
    assert "Look first." in tokenizer.decode(asked[0])


def test_a_node_that_branches_share_is_taught_once(tokenizer: Any, finder: Any) -> None:
    batch = recorded_batches()[0]
    trace = own_traces(tokenizer, batch)[batch.sites[0].row]
    trace.branches = trace.branches * 2
    asked: list[list[int]] = []
    asyncio.run(HintedTurns(finder, ALPHA).annotate(trace, trace.branches, counting(asked)))
    assert len(asked) == len([site for site in batch.sites if site.row == batch.sites[0].row])


class Refused(Exception):
    """As the engine's client raises it: a status, and the server's words."""

    def __init__(self, status_code: int, text: str) -> None:
        super().__init__(text)
        self.status_code = status_code


def limited(longest: int, error: Exception, asked: list[int]) -> Callable[..., Any]:
    async def score(token_ids: list[int]) -> list[float]:
        asked.append(len(token_ids))
        if len(token_ids) > longest:
            raise error
        return [-1.0] * len(token_ids)

    return score


def test_a_hinted_context_that_the_server_refuses_is_counted_and_the_others_are_taught(
    tokenizer: Any, finder: Any
) -> None:
    batch = recorded_batches()[0]
    row, lengths = max(
        ((row, [len(site.teacher_ids) for site in batch.sites if site.row == row]) for row in range(8)),
        key=lambda each: len(set(each[1])),
    )
    assert min(lengths) < max(lengths), "some row has contexts of two lengths"
    error = Refused(400, f"This model's maximum context length is {min(lengths)} tokens.")
    trace, asked = own_traces(tokenizer, batch)[row], list[int]()
    counts = asyncio.run(
        HintedTurns(finder, ALPHA).annotate(trace, trace.branches, limited(min(lengths), error, asked))
    )
    num_short = sum(each == min(lengths) for each in lengths)
    assert (counts["taught"], counts["dropped:not_scored"]) == (num_short, len(lengths) - num_short)
    assert sum(node.reference_logprobs is not None for node in trace.branches[0].nodes) == num_short
    assert asked == lengths
    trace, asked = own_traces(tokenizer, batch)[row], list[int]()
    hinted = HintedTurns(finder, ALPHA, max_length=min(lengths))
    counts = asyncio.run(hinted.annotate(trace, trace.branches, limited(min(lengths), error, asked)))
    assert (counts["taught"], counts["dropped:too_long"]) == (num_short, len(lengths) - num_short)
    assert asked == [min(lengths)] * num_short, "the others are not even asked about"


@pytest.mark.parametrize(
    "error",
    [
        Refused(400, "prompt_logprobs is not allowed"),
        Refused(500, "length"),
        ConnectionError("length"),
        Refused(401, ""),
    ],
)
def test_any_other_failure_of_the_server_is_raised(tokenizer: Any, finder: Any, error: Exception) -> None:
    """Or a run would go on without channel 2."""
    batch = recorded_batches()[0]
    trace = own_traces(tokenizer, batch)[batch.sites[0].row]
    with pytest.raises(type(error)):
        asyncio.run(HintedTurns(finder, ALPHA).annotate(trace, trace.branches, limited(0, error, [])))


def test_a_rollout_has_its_messages_calls_and_tools(tokenizer: Any) -> None:
    batch = recorded_batches()[0]
    trace = own_traces(tokenizer, batch)[0]
    rollout = rollout_of(trace, trace.branches[0])
    assert [*rollout.prompt_ids, *rollout.completion_ids] == batch.row_ids(0)
    assert list(rollout.prompt_ids) == batch.row_ids(0)[: batch.prompt_length(0)]
    assert [each["role"] for each in rollout.prompt] == ["user"]
    assert rollout.messages[0]["role"] == "assistant"
    assert {"Read", "Edit"} <= set(rollout.tools)
    calls = [each["function"]["name"] for message in rollout.messages for each in message.get("tool_calls", [])]
    answers = [each["name"] for each in rollout.messages if each["role"] == "tool"]
    assert answers == calls[: len(answers)]


def first_turn(trace: Trace, finder: ErringTurnFinder) -> Any:
    return finder.find(rollout_of(trace, trace.branches[0])).turns[0]


def test_scores_of_other_ids_are_refused(tokenizer: Any, finder: Any) -> None:
    batch = recorded_batches()[0]
    trace = own_traces(tokenizer, batch)[batch.sites[0].row]
    (branch,) = trace.branches
    turn = first_turn(trace, finder)
    scores = [-1.0] * len(turn.teacher_ids)
    with refusal(AlignmentError, what=turn.turn_id, got=str(len(scores) - 1)):
        write_reference(branch, turn, scores[:-1], ALPHA)
    with refusal(AlignmentError, what=turn.turn_id, got=str(len(scores))):
        write_reference(branch, turn._replace(teacher_start=turn.teacher_start - 1), scores, ALPHA)
    with refusal(AlignmentError, what=turn.turn_id, expected="node"):
        write_reference(branch, turn._replace(start=0), scores, ALPHA)
    for node in branch.nodes:
        node.mask = [False] * len(node.mask)
    with refusal(AlignmentError, what=turn.turn_id, expected="token"):
        write_reference(branch, turn, scores, ALPHA)


class Grpo:
    """The hooks of the engine's algorithm, as far as ours calls them."""

    def __init__(self, policy_pool: Any, asked: list[list[int]]) -> None:
        self.policy_pool, self.asked, self.calls = policy_pool, asked, list[str]()

    async def setup(self) -> None:
        self.calls.append("setup")

    async def score_episode(self, episode: Any) -> None:
        self.calls.append("score_episode")

    async def connect(self, served: Any) -> Any:
        self.calls.append(f"connect {served.name} {served.base_url}")
        return SimpleNamespace(score=counting(self.asked))


@pytest.mark.parametrize("teacher", [None, "start"])
def test_the_algorithm_scores_with_the_live_policy_or_with_a_teacher(tokenizer: Any, teacher: str | None) -> None:
    batch, asked = recorded_batches()[0], list[list[int]]()
    trace = own_traces(tokenizer, batch)[batch.sites[0].row]
    url = "http://127.0.0.1:8001/v1" if teacher else None
    made = composer_algorithm(
        Grpo,
        HintSettings(alpha_sdpo=ALPHA, teacher_name=teacher, teacher_url=url),
        lambda episodes: ((each, trace) for each in episodes),
        lambda one: ((branch, branch.sampled_mask) for branch in one.branches),
        SimpleNamespace,
    )
    pool = SimpleNamespace(model_name=str(student_folder()), score=counting(asked))
    algorithm = made(pool, elsewhere := list[list[int]]())
    asyncio.run(algorithm.setup())
    asyncio.run(algorithm.score_episode("episode"))
    connected = [f"connect start {url}"] if teacher else []
    assert algorithm.calls == ["setup", *connected, "score_episode"]
    expected = [site.teacher_ids.tolist() for site in batch.sites if site.row == batch.sites[0].row]
    assert (elsewhere if teacher else asked) == expected
    assert (asked if teacher else elsewhere) == []
    assert any(node.reference_logprobs for node in trace.branches[0].nodes)


def test_settings_are_a_toml_table_that_says_what_is_wrong() -> None:
    text = 'alpha_sdpo = 0.2\npart = "call"\nunhinted_kinds = ["edit_no_match"]\nmax_teacher_length = 32767'
    settings = loads(HintSettings, text)
    assert settings.max_teacher_length == 32767
    assert (settings.alpha_sdpo, settings.part, settings.unhinted_kinds) == (0.2, "call", ("edit_no_match",))
    options = make_finder(str(student_folder()), settings).options
    assert (options.part, options.unhinted_kinds, options.hints) == ("call", ("edit_no_match",), "template")
    with pytest.raises(ConfigError, match=r"\bteacher_name\b.*\bteacher_url\b"):
        loads(HintSettings, 'teacher_name = "start"')
    with pytest.raises(ConfigError, match="alpha_sdpo"):
        loads(HintSettings, "alpha_sdpo = 0")


def test_without_the_engine_registering_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prime_rl", None)
    with pytest.raises(MissingExtraError, match=r"recipes/prime_rl/README\.md"):
        register()
