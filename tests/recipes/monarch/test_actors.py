"""Monarch's actors for real: a run in the workspace whose actors are killed, one by one and all at once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fault_server import FaultServer

pytestmark = [pytest.mark.monarch, pytest.mark.timeout(1800)]
pytest.importorskip("monarch", reason="needs Monarch (make test-monarch)")

from composer_replication.errors import RunError  # noqa: E402
from composer_replication.recipes.monarch.actors import RewarderActor, TrainerActor  # noqa: E402
from composer_replication.recipes.monarch.policy_trainer import PolicyTrainer  # noqa: E402
from composer_replication.recipes.monarch.rewarder import RewarderSettings  # noqa: E402
from composer_replication.recipes.monarch.run import _SupervisedActor  # noqa: E402
from recipes.monarch.recorded import recorded_settings, save_recorded  # noqa: E402
from recipes.monarch.small_run import BATCHES, PRICES, read_settings, train  # noqa: E402
from recipes.recorded_steps import ITERATIONS, recorded_steps, start_weights, weight_sums  # noqa: E402

ROLES = {"trainer", "generator", "rewarder", "teacher_pool"}


@pytest.fixture(scope="module")
def server():
    before = os.environ.get("OPENROUTER_API_KEY")
    os.environ["OPENROUTER_API_KEY"] = "a key of nobody"
    os.environ["PYTHONPATH"] = os.pathsep.join(each for each in sys.path if each)  # the actors import the tests' world
    with FaultServer(prices=PRICES, agreement=1.0, latency_s=(0.3, 0.3)) as server:
        yield server
    if before is None:
        del os.environ["OPENROUTER_API_KEY"]
    else:
        os.environ["OPENROUTER_API_KEY"] = before


class Ended(NamedTuple):
    """What a run left."""

    records: list[dict[str, Any]]
    deaths: dict[str, int]
    state: dict[str, torch.Tensor]


def last_state(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "checkpoints" / f"state-{BATCHES:06d}.safetensors")


@pytest.fixture(scope="module")
def undisturbed(server, tmp_path_factory) -> Ended:
    folder = tmp_path_factory.mktemp("undisturbed")
    records, deaths = asyncio.run(train(read_settings(folder, server.base_url)))
    return Ended(records, deaths, last_state(folder))


def assert_same_end(found: dict[str, torch.Tensor], wanted: Ended) -> None:
    assert found.keys() == wanted.state.keys()
    assert [name for name in found if not torch.equal(found[name], wanted.state[name])] == []


def test_a_run_uses_all_channels_and_moves_the_weights(undisturbed):
    assert set(undisturbed.deaths) == ROLES
    assert set(undisturbed.deaths.values()) == {0}
    assert [each["batch_id"] for each in undisturbed.records] == list(range(BATCHES))
    assert undisturbed.records[0]["steps"][0]["active"] == ["grpo", "sdpo", "replay"]
    assert all(len(each["steps"]) == 2 and each["equal_groups"] == 0 for each in undisturbed.records)
    from composer_replication.envs.student import load_student

    start = dict(load_student(dtype=torch.float32)[0].named_parameters())
    moved = [not torch.equal(undisturbed.state[f"weight.{name}"], each) for name, each in start.items()]
    assert all(moved)


# Killed while it works (so long after it was asked), or just before it is asked: a reward takes no time at all.
KILLS = {"rewarder": (0, 0.0), "teacher_pool": (0, 0.15), "generator": (1, 0.2), "trainer": (2, 0.5)}


def test_every_actor_is_killed_in_turn_and_the_weights_are_the_same(server, tmp_path, undisturbed):
    killed: dict[str, int] = {}

    def prepare(run: Any, pids: dict[str, int]) -> None:
        asked = dict.fromkeys(pids, 0)

        def watch(event: str, role: str) -> None:
            if event != "call":
                return
            asked[role] += 1
            batch, delay = KILLS[role]
            # `train` asks everybody for its pid first, and the trainer how far it is.
            if role in killed or asked[role] != batch + 2 + (role == "trainer"):
                return
            killed[role] = pids[role]
            if delay:
                threading.Timer(delay, os.kill, (pids[role], signal.SIGKILL)).start()
            else:
                os.kill(pids[role], signal.SIGKILL)

        for actor in run.actors.values():
            actor.on_event = watch

    records, deaths = asyncio.run(train(read_settings(tmp_path, server.base_url), prepare))
    assert killed.keys() == ROLES
    assert deaths == dict.fromkeys(ROLES, 1)
    assert records == undisturbed.records
    assert_same_end(last_state(tmp_path), undisturbed)


def test_the_whole_program_is_killed_and_started_again(server, tmp_path, undisturbed):
    command = [sys.executable, str(Path(__file__).with_name("small_run.py")), str(tmp_path), server.base_url]
    with subprocess.Popen(command) as program:
        wait_for(lambda: (tmp_path / "steps" / "000000.json").is_file(), program)
        program.kill()
    pids = json.loads((tmp_path / "pids.json").read_text())
    wait_for(lambda: not any(is_alive(pid) for pid in pids.values()))  # nobody is left behind
    assert not (tmp_path / "checkpoints" / f"state-{BATCHES:06d}.safetensors").exists()
    shared = Path(json.loads((tmp_path / "shared_memory.json").read_text())["folder"])
    assert shared.is_dir()
    subprocess.run(command, check=True, timeout=900)
    assert_same_end(last_state(tmp_path), undisturbed)
    assert not shared.exists()


def wait_for(is_so: Any, program: subprocess.Popen | None = None, seconds: float = 900) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "waited in vain"
        assert program is None or program.poll() is None, "the program ended by itself"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_twenty_steps_by_the_trainers_actor_are_those_of_the_trl_trainer(tmp_path, note):
    save_recorded(tmp_path)
    settings, wanted = recorded_settings(tmp_path), recorded_steps()
    trainer = _SupervisedActor(TrainerActor, settings)

    async def all_steps() -> list[dict[str, Any]]:
        steps: list[dict[str, Any]] = []
        for number in range(len(wanted) // ITERATIONS):
            if number == 4:
                os.kill(await trainer.pid(), signal.SIGKILL)
            steps += (await trainer.call("train_outer_step", number))["steps"]
        await trainer.stop()
        return steps

    steps = asyncio.run(all_steps())
    assert trainer.num_deaths == 1
    gaps = [abs(step[f"loss/{name}"] - getattr(each, name)) for step, each in zip(steps, wanted, strict=True)
            for name in ("grpo", "sdpo", "total")]  # fmt: skip
    note(f"twenty recorded steps by Monarch's trainer: losses within {max(gaps):.1e} of TRL's")
    assert max(gaps) < 1e-4
    start = start_weights(PolicyTrainer(recorded_settings(tmp_path / "start")).model)
    ended = PolicyTrainer(settings)
    assert ended.num_batches == len(wanted) // ITERATIONS
    torch.testing.assert_close(weight_sums(ended.model, start), wanted[-1].weights, atol=1e-4, rtol=1e-4)


def test_an_error_in_an_endpoint_is_raised_and_nobody_dies(server):
    rewarder = _SupervisedActor(RewarderActor, RewarderSettings(rewards=("recipes.monarch.world:files_worth",)))

    async def ask() -> tuple[int, int, list[float]]:
        before = await rewarder.pid()
        with pytest.raises(Exception, match=r"\['files_worth'\]") as raised:
            await rewarder.call("score", ["text"])
        assert type(raised.value).__name__ == "ActorError"
        scores = await rewarder.call("score", ["text"], rows=[{"info": {"files_worth": 0.25}}])
        after = await rewarder.pid()
        await rewarder.stop()
        return before, after, scores

    before, after, scores = asyncio.run(ask())
    assert before == after
    assert scores == [0.25]
    assert rewarder.num_deaths == 0


def test_an_actor_that_cannot_live_ends_the_run(server):
    rewarder = _SupervisedActor(RewarderActor, RewarderSettings(rewards=("no_such_module:reward",)), max_deaths=1)
    with pytest.raises(RunError, match=r"\b2 deaths\b") as raised:
        asyncio.run(rewarder.pid())
    assert "no_such_module" in str(raised.value)
