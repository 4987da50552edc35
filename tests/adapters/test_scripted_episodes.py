"""The world alone plays the twenty episodes as they were recorded; what other engines play is compared with that."""

from __future__ import annotations

import pytest

from adapters.scripted_episodes import MAX_CALLS, NUM_EPISODES, played_alone, record, recorded, scripts

SCRIPTS = scripts()


@pytest.mark.parametrize("number", range(NUM_EPISODES), ids=[script.name for script in SCRIPTS])
def test_an_episode_is_what_was_recorded(number):
    message = "the world changed: python tests/adapters/scripted_episodes.py records it anew"
    assert record(SCRIPTS[number], *played_alone(SCRIPTS[number])) == recorded()[number], message


def test_the_episodes_hold_what_engines_could_get_wrong():
    episodes = [played_alone(script) for script in SCRIPTS]
    kinds = {call["kind"] for calls, _ in episodes for call in calls if call["failed"]}
    assert kinds >= {"file_not_found", "edit_not_read", "edit_no_match", "edit_noop", "edit_ambiguous", "is_directory"}
    rewards = {reward for _, reward in episodes}
    assert rewards >= {0.0, 1.0}
    assert any(0 < reward < 1 for reward in rewards)
    assert {script.difficulty for script in SCRIPTS if script.style == "expert"} == {"easy", "medium", "hard"}
    assert {len(calls) for calls, _ in episodes} >= {3, MAX_CALLS}, "one ends without Finish, one by its last call"
    assert any("ü" in str(call["arguments"]) for calls, _ in episodes for call in calls)
