"""Teacher replay against a real server of a real model: `transformers serve` with a tiny one, on this machine."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny import tiny_model, tiny_tokenizer
from transformers.utils.import_utils import is_serve_available

from composer_replication.teacher_replay import replay_trace
from composer_replication.teacher_replay.ask_and_retry import RetryPolicy
from composer_replication.teacher_replay.replay import ReplayOptions
from composer_replication.teacher_replay.requests import RequestSettings

pytestmark = pytest.mark.full
TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(base url, name of the model)."""
    if not is_serve_available():
        pytest.skip("transformers serve needs fastapi, uvicorn and openai")
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = Path(sys.executable).with_name("transformers")
    with subprocess.Popen(
        [command, "serve", "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path_factory.mktemp("hub"))},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            _wait_for(port, process)
            yield f"http://127.0.0.1:{port}/v1", str(folder)
        finally:
            process.terminate()


def _wait_for(port, process):
    for _ in range(600):
        if process.poll() is not None:
            raise AssertionError(process.stderr.read().decode()[-2000:])
        with socket.socket() as probe:
            probe.settimeout(0.2)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise AssertionError("the server did not come up in two minutes")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_a_real_server_answers_counts_its_tokens_and_is_not_asked_twice(served, tmp_path, tools):
    base_url, model = served
    teacher = {"slug": model, "input_per_mtok": 1.0, "output_per_mtok": 2.0, "base_url": base_url}
    asked = [
        {
            "state_id": f"s::{number}",
            "messages": [{"role": "user", "content": f"Say {number}."}],
            "student_action": "x",
            **({"tools": tools} if tools else {}),
        }
        for number in range(3)
    ]
    options = ReplayOptions(
        cache=tmp_path / "s.sqlite",
        max_concurrency=2,
        settings=RequestSettings(max_tokens=8),
        patience=RetryPolicy(max_attempts=2),
        environment={},
    )
    first = asyncio.run(replay_trace(asked, [teacher], 1.0, options=options))
    assert [result["state_id"] for result in first] == ["s::0", "s::1", "s::2"]
    for result in first:
        # A random model babbles until it is cut off: that is an answer of the server, and none to vote with.
        assert result["error"] in (None, "finish_reason length")
        assert result["prompt_tokens"] > 0
        assert 0 < result["completion_tokens"] <= 8
        price = (result["prompt_tokens"] * 1.0 + result["completion_tokens"] * 2.0) / 1e6
        assert result["cost_usd"] == pytest.approx(price, abs=1e-8)
    again = asyncio.run(replay_trace(asked, [teacher], 1.0, options=options))
    assert all(result["is_cached"] for result in again)
