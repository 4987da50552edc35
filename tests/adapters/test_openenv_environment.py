"""An OpenEnv server as the environment of a training: its tools as methods, over its own WebSocket."""

from __future__ import annotations

import inspect
import threading
import time
from contextlib import contextmanager

import pytest

from adapters.scripted_episodes import MAX_CALLS, played_alone, scripts
from composer_replication.envs.workspace import TOOLS, generate_task
from composer_replication.errors import ConfigError, RunError
from composer_replication.trainer.rollouts.worlds.openenv import is_address, openenv_environment

pytest.importorskip("openenv.core")
import uvicorn
from openenv.core import env_server

from composer_replication.envs import openenv_server

pytestmark = [pytest.mark.envs, pytest.mark.filterwarnings("ignore")]
SCRIPTS = scripts()


@contextmanager
def serving(app):
    server = uvicorn.Server(openenv_server.server_settings(app, port=0))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    (socket,) = server.servers[0].sockets
    yield "http://{}:{}".format(*socket.getsockname())
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def make():
    with serving(openenv_server.create_app(max_sessions=64, max_calls=MAX_CALLS)) as url:
        yield openenv_environment(url)


def test_the_tools_are_methods_as_a_schema_is_made_of_them(make):
    environment = make()
    for tool in TOOLS:
        function = tool["function"]
        method = getattr(environment, function["name"])
        assert set(inspect.signature(method).parameters) == set(function["parameters"]["properties"])
        assert method.__doc__.startswith(function["description"])
        for name, value in function["parameters"]["properties"].items():
            assert f"    {name}: {value['description']}" in method.__doc__
    public = {name for name in vars(type(environment)) if not name.startswith("_")}
    assert public == {tool["function"]["name"] for tool in TOOLS}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_an_episode_has_the_answers_and_the_reward_that_it_has_without_a_server(make, script):
    environment = make()
    row = {"seed": script.seed, "difficulty": script.difficulty}
    assert environment.reset(**row) == generate_task(script.seed, difficulty=script.difficulty).prompt
    calls, alone = played_alone(script)
    known = {tool["function"]["name"] for tool in TOOLS}
    answers = [
        getattr(environment, name)(**arguments)
        if name in known and isinstance(arguments, dict) and set(arguments) <= properties(name)
        else environment._act({"name": name, "arguments": arguments})
        for name, arguments in script.calls
    ]
    assert answers == [call["text"] for call in calls]
    assert environment.get_reward() == pytest.approx(alone)
    assert environment.get_reward() == pytest.approx(alone), "asked again, it is paid no second time"


def properties(name: str) -> set[str]:
    return next(set(each["function"]["parameters"]["properties"]) for each in TOOLS if each["function"]["name"] == name)


def test_an_environment_is_used_again_and_a_prompt_of_the_row_is_kept(make):
    environment = make()
    environment.reset(seed=7)
    assert environment.get_reward() == 0.0
    assert environment.reset(seed=8, prompt=[{"role": "user", "content": "x"}], other=[1, 2]) is None
    assert "File does not exist" in environment.Read(file_path="/workspace/nowhere.py")


class Knock(env_server.Action):
    """Knocks at a door."""

    door: str
    times: int = 1


class Heard(env_server.Observation):
    sound: str = ""
    doors: int = 0


class House(env_server.Environment):
    """Says nothing of tools; pays for each knock, and is over after three."""

    def reset(self, seed=None, episode_id=None, **_given):
        self.knocks = 0
        return Heard(sound="silence", doors=2)

    def step(self, action, timeout_s=None):
        self.knocks += action.times
        return Heard(sound=f"{action.door}!", reward=0.5, done=self.knocks >= 3)

    @property
    def state(self):
        return env_server.State(step_count=self.knocks)


def test_a_server_without_tools_has_one_with_the_fields_of_its_action():
    with serving(env_server.create_fastapi_app(House, Knock, Heard)) as url:
        environment = openenv_environment(url)()
        assert '"sound": "silence"' in environment.reset()
        assert list(inspect.signature(environment.act).parameters) == ["door", "times"]
        assert "reward" not in (heard := environment.act(door="front", times=2))
        assert '"sound": "front!"' in heard
        environment.act(door="back", times=1)
        assert environment.get_reward() == 1.0


def test_what_cannot_be_is_said(make):
    assert [is_address(each) for each in ("http://x:1", "wss://x", "module:name", "verifiers:x")] == [True, True] + [
        False
    ] * 2
    with pytest.raises(RunError, match="reset"):
        make().LS(path="/")
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:9\b"):
        openenv_environment("http://127.0.0.1:9")
