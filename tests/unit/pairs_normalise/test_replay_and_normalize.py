"""States to normalised pairs in one call, with a replay that answers from memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from composer_replication import teacher_replay
from composer_replication.errors import ArtefactNotFoundError, InputError
from composer_replication.pairs.export import replay_and_normalize_trace, replay_and_normalize_trace_sync
from composer_replication.pairs.normalise import DJNormalizer
from refusals import refusal

STATES: Any = [
    {"state_id": f"s{n}", "messages": [{"role": "user", "content": f"Task {n}"}], "student_action": "Give up now."}
    for n in range(3)
]


@pytest.fixture
def asked(monkeypatch) -> list[dict[str, Any]]:
    """What the replay and the extraction were called with; they are put where a lookup finds them first."""
    calls: list[dict[str, Any]] = []

    async def replay_trace(states: Any, **given: Any) -> list[Any]:
        calls.append(given)
        return [{"state_id": state["state_id"], "response_text": "Run the tests."} for state in states]

    def extract_dpo_pairs(states: Any, actions: Any, agreement_threshold: int = 2) -> list[Any]:
        calls.append({"agreement_threshold": agreement_threshold})
        texts = ["Run the tests.", "no", "Read the file."]
        return [
            {
                "state_id": state["state_id"],
                "state_messages": state["messages"],
                "chosen": text,
                "rejected": state["student_action"],
                "n_teachers_agreeing": 2,
            }
            for state, text in zip(states, texts, strict=True)
        ]

    monkeypatch.setitem(vars(teacher_replay), "replay_trace", replay_trace)
    monkeypatch.setitem(vars(teacher_replay), "extract_dpo_pairs", extract_dpo_pairs)
    return calls


def test_actions_and_the_pairs_that_the_recipe_keeps(asked):
    actions, pairs = replay_and_normalize_trace_sync(states=STATES)
    assert [action["state_id"] for action in actions] == ["s0", "s1", "s2"]
    assert [pair.state_id for pair in pairs] == ["s0", "s2"]
    assert asked == [{"max_total_usd": 5.0}, {"agreement_threshold": 2}]  # the replay has its own default teachers


def test_every_setting_reaches_the_part_it_is_for(asked):
    normalizer = DJNormalizer(skip_dj=True)
    teachers: Any = [{"slug": slug, "input_per_mtok": 1.0, "output_per_mtok": 1.0} for slug in "tuv"]
    work = replay_and_normalize_trace(
        states=STATES,
        teachers=teachers,
        agreement_threshold=3,
        max_total_usd=0.5,
        normalizer=normalizer,
        api_key="k",
        cache="c.sqlite",
    )
    _, pairs = asyncio.run(work)
    assert asked == [
        {"max_total_usd": 0.5, "teachers": teachers, "api_key": "k", "cache": "c.sqlite"},
        {"agreement_threshold": 3},
    ]
    assert len(pairs) == 3
    assert normalizer.counts == {"kept": 3}


@pytest.mark.parametrize("teachers", [[{"slug": "t", "input_per_mtok": 1.0, "output_per_mtok": 1.0}], []])
def test_fewer_teachers_than_votes_of_a_consensus_are_refused_before_anybody_is_asked(asked, teachers):
    with refusal(InputError, what="threshold", got=f"{len(teachers)} teacher", fix="agreement_threshold"):
        replay_and_normalize_trace_sync(states=STATES, teachers=teachers)
    assert asked == []


def test_a_recipe_that_is_missing_costs_nothing(asked, monkeypatch, tmp_path):
    monkeypatch.setattr(DJNormalizer, "DEFAULT_RECIPE", tmp_path / "gone.yaml")
    with pytest.raises(ArtefactNotFoundError):
        replay_and_normalize_trace_sync(states=STATES)
    assert asked == []


def test_inside_an_event_loop_the_other_function_is_named(asked):
    async def inside() -> None:
        replay_and_normalize_trace_sync(states=STATES)

    with pytest.raises(InputError, match="await replay_and_normalize_trace"):
        asyncio.run(inside())
