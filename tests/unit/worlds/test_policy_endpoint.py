"""The endpoint behind which the policy speaks: who may ask, and how much."""

from __future__ import annotations

import http.client
import json
import urllib.parse
from collections.abc import Iterator
from typing import Any

import pytest

from composer_replication.trainer.rollouts.worlds import policy_endpoint
from composer_replication.trainer.rollouts.worlds.policy_endpoint import SpokenEpisode, chat_endpoint

NAME = "policy-of-this-test"


@pytest.fixture
def episode() -> SpokenEpisode:
    return SpokenEpisode(None, {}, 64)


@pytest.fixture
def port(episode: SpokenEpisode) -> Iterator[int]:
    with chat_endpoint({NAME: episode}) as url:
        yield int(urllib.parse.urlsplit(url).port or 0)


def post(port: int, body: bytes, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.putrequest("POST", "/v1/chat/completions")
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            if value:
                connection.putheader(name, value)
        connection.endheaders(body)
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())
    finally:
        connection.close()


def request(model: Any, messages: Any = ()) -> bytes:
    return json.dumps({"model": model, "messages": list(messages)}).encode()


def test_the_episode_of_a_name_is_asked_and_answers(port: int, episode: SpokenEpisode) -> None:
    episode.answers.put({"role": "assistant", "content": "yes"})
    status, body = post(port, request(NAME, [{"role": "user", "content": "?"}]))
    assert (status, body["choices"][0]["message"]["content"]) == (200, "yes")
    asked = episode.requests.get_nowait()
    assert asked is not None
    assert asked["messages"] == [{"role": "user", "content": "?"}]


@pytest.mark.parametrize("model", ["policy-0", "", None, [NAME]])
def test_a_name_that_is_guessed_reaches_no_episode(port: int, episode: SpokenEpisode, model: Any) -> None:
    assert post(port, request(model))[0] == 404
    assert episode.requests.empty()


@pytest.mark.parametrize("length", ["", "-1", "1e3", "\u0663"])
def test_a_length_that_is_none_is_refused(port: int, episode: SpokenEpisode, length: str) -> None:
    headers = {"Content-Length": length.encode().decode("latin-1")}
    assert post(port, b"", **headers)[0] == 411
    assert episode.requests.empty()


def test_what_is_too_long_is_not_read(port: int, episode: SpokenEpisode) -> None:
    headers = {"Content-Length": str(policy_endpoint.MAX_BYTES + 1)}
    assert post(port, b"", **headers)[0] == 413
    assert episode.requests.empty()


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b"[" * 100_000, json.dumps({"model": NAME}).encode()])
def test_what_is_no_request_is_refused(port: int, episode: SpokenEpisode, body: bytes) -> None:
    assert post(port, body)[0] == 400
    assert episode.requests.empty()
