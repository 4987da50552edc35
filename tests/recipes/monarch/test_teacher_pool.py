"""The pool's work without Monarch: one budget, whoever spends it, and nobody asked twice."""

from __future__ import annotations

import asyncio

import pytest

from composer_replication.errors import InputError
from composer_replication.recipes.monarch.rewarder import TeacherPool, TeacherPoolSettings
from fault_server import FaultServer
from refusals import refusal

PRICES = {"a/one": (1.0, 2.0), "b/two": (1.0, 2.0)}


def read_settings(server, folder, **changes):
    teachers = tuple(
        {"slug": slug, "input_per_mtok": price[0], "output_per_mtok": price[1], "base_url": server.base_url}
        for slug, price in PRICES.items()
    )
    return TeacherPoolSettings(**{"folder": str(folder), "teachers": teachers, "max_total_usd": 5.0, **changes})


def states(count):
    return [
        {
            "state_id": f"s{number}::1",
            "messages": [{"role": "user", "content": f"Fix test {number}."}],
            "student_action": "I give up.",
        }
        for number in range(count)
    ]


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("OPENROUTER_API_KEY", "a key of nobody")
    with FaultServer(prices=PRICES, agreement=1.0) as server:
        yield server


def test_a_pool_started_anew_asks_nobody_twice_and_knows_what_is_spent(server, tmp_path):
    settings = read_settings(server, tmp_path)
    pairs = asyncio.run(TeacherPool(settings).pairs(states(3)))
    assert [each["state_id"] for each in pairs] == ["s0::1", "s1::1", "s2::1"]
    assert all(each["rejected"] == "I give up." and each["n_teachers_agreeing"] == 2 for each in pairs)
    asked, spent = len(server.ledger()), asyncio.run(TeacherPool(settings).spent())
    assert asked == 6
    assert spent["spent_usd"] == pytest.approx(float(server.total_usd()))
    assert asyncio.run(TeacherPool(settings).pairs(states(3))) == pairs
    assert len(server.ledger()) == asked


def test_the_cap_holds_over_all_pools_of_a_folder(server, tmp_path):
    first = TeacherPool(read_settings(server, tmp_path))
    asyncio.run(first.replay(states(2)))
    spent = asyncio.run(first.spent())["spent_usd"]
    second = TeacherPool(read_settings(server, tmp_path, max_total_usd=spent))
    assert len(asyncio.run(second.replay(states(4)))) == 4  # the answers that are there, and no new ones
    assert asyncio.run(second.spent()) == {"spent_usd": spent, "unknown_usd": 0.0, "max_total_usd": spent}


def test_a_pool_has_teachers(tmp_path):
    with refusal(InputError, what="teachers"):
        TeacherPoolSettings(folder=str(tmp_path), teachers=())
