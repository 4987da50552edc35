"""The workspace in verifiers says which turns erred, as rollouts read it; with the version that PRIME-RL names, too."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest

from adapters.scripted_model import serving

vf = pytest.importorskip("verifiers.v1")
from composer_replication.envs import verifiers_environment as adapter  # noqa: E402

pytestmark = [pytest.mark.envs, pytest.mark.filterwarnings("ignore")]

SPOKEN = [
    [("Glob", '{"pattern": "*"}')],
    [("Reed", "{}"), ("Read", '{"path": "/workspace"}')],
    [("Read", '{"file_path": "/workspace/nowhere.py"}')],
    [("Finish", "{}")],
]


def played():
    env = adapter.load_environment(first_seed=0)
    (task,) = itertools.islice(env.taskset.load(), 1)

    async def run(url: str):
        client = vf.EvalClientConfig(base_url=url, api_key_var="NO_SUCH_KEY")
        async with env.serving():
            return await env.run_episode(task, vf.ModelContext(model="erring", client=client))

    with serving({"erring": SPOKEN}) as url:
        (trace,) = asyncio.run(run(url)).traces
    return trace


def test_erring_turns_are_in_the_trace_that_leaves_the_environment() -> None:
    trace = played()
    assert trace.errors == []
    info = json.loads(trace.model_dump_json())["info"]
    assert [(site["turn"], site["kind"], site["tool"]) for site in info["sites"]] == [
        (1, "tool_not_found", "Reed"),
        (1, "input_validation", "Read"),
        (2, "file_not_found", "Read"),
    ]
    failed = [call["text"] for call in info["calls"] if call["failed"]]
    assert [site["message"] for site in info["sites"]] == failed


def test_rollouts_read_them_as_signals() -> None:
    pytest.importorskip("torch")
    from composer_replication.recipes.prime_rl.hinted_turns import SITES
    from composer_replication.trainer.rollouts.sites import Rollout, _signalled_sites, conversation_of, sampled_runs

    signals = played().info[SITES]
    spoken = [{"role": "assistant", "content": "", "tool_calls": []} for _ in SPOKEN]
    rollout = Rollout(
        rollout_id="one",
        prompt_ids=[1],
        completion_ids=[2, 3] * len(SPOKEN),
        sampled=[1, 0] * len(SPOKEN),
        prompt=[],
        messages=spoken,
        signals=signals,
    )
    sites = _signalled_sites(rollout, conversation_of(rollout, sampled_runs(rollout)))
    assert [(site.turn_id, site.kind, site.is_kept) for site in sites] == [
        ("assistant-1", "tool_not_found", True),
        ("assistant-1", "input_validation", True),
        ("assistant-2", "file_not_found", True),
    ]
