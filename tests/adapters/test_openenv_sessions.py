"""The workspace behind an OpenEnv server: its own client, over a WebSocket on this machine."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request

import pytest

from adapters.scripted_episodes import MAX_CALLS, Script, happened, record, recorded, scripts

pytest.importorskip("openenv.core")
import uvicorn

from composer_replication.envs import openenv_server as adapter
from composer_replication.envs.workspace import TOOLS, Workspace, generate_task

pytestmark = [pytest.mark.envs, pytest.mark.filterwarnings("ignore")]
SCRIPTS = scripts()
MAX_SESSIONS = 2


@pytest.fixture(scope="module")
def url():
    app = adapter.create_app(max_sessions=MAX_SESSIONS, max_calls=MAX_CALLS)
    server = uvicorn.Server(adapter.server_settings(app, port=0))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    (socket,) = server.servers[0].sockets
    yield "http://{}:{}".format(*socket.getsockname())
    server.should_exit = True
    thread.join()


@pytest.fixture
def client(url):
    with adapter.WorkspaceClient(base_url=url).sync() as session:
        yield session


def played(client, script: Script):
    """Every call with its outcome, and every reward that was paid. An agent that just stops is said to be done."""
    client.reset(seed=script.seed, difficulty=script.difficulty)
    calls, paid = [], []
    for name, arguments in script.calls:
        result = client.step(adapter.WorkspaceAction(name=name, arguments=arguments))
        calls.append(happened(name, arguments, result.observation))
        paid += [] if result.reward is None else [result.reward]
    if not paid:
        paid.append(client.step(adapter.WorkspaceAction(name="Finish", arguments={})).reward)
    return calls, paid


@pytest.mark.parametrize("number", range(len(SCRIPTS)), ids=[script.name for script in SCRIPTS])
def test_an_episode_has_the_calls_and_the_reward_that_it_has_without_openenv(client, number):
    script = SCRIPTS[number]
    calls, paid = played(client, script)
    assert len(paid) == 1, "the reward is paid once, by the end of the episode"
    assert record(script, calls, paid[0]) == recorded()[number]
    assert client.state().reward["value"] == paid[0]


def test_reset_says_what_is_asked_and_which_tools_there_are(client):
    result = client.reset(seed=7, difficulty="medium")
    assert result.observation.text == generate_task(7, difficulty="medium").prompt
    about = {"tools": json.loads(json.dumps(TOOLS)), "root": Workspace.root, "end": {"name": "Finish", "arguments": {}}}
    assert result.observation.metadata == about
    assert (result.done, result.reward) == (False, None)


def test_the_state_follows_the_episode(client):
    client.reset(seed=7, difficulty="medium", episode_id="mine")
    client.step(adapter.WorkspaceAction(name="LS", arguments={"path": "/workspace"}))
    state = client.state()
    assert (state.episode_id, state.step_count, state.seed, state.difficulty) == ("mine", 1, 7, "medium")
    assert (state.finished, state.reward) == (False, None)
    assert client.step(adapter.WorkspaceAction(name="Finish", arguments={})).done
    state = client.state()
    assert (state.finished, state.reward["value"], state.reward["calls"]) == (True, 0.0, 2)
    client.reset(seed=7, difficulty="medium")
    state = client.state()
    assert (state.finished, state.step_count, state.reward) == (False, 0, None)


@pytest.mark.parametrize(
    ("name", "arguments"), [("Reed", {}), ("Read", "{"), ("Read", None), ("Read", {"path": "/workspace"})]
)
def test_a_call_that_is_none_is_answered_by_the_world(client, name, arguments):
    client.reset(seed=0)
    seen = client.step(adapter.WorkspaceAction(name=name, arguments=arguments)).observation
    expected = Workspace(generate_task(0)).call(name, arguments)
    assert (seen.text, seen.failed, seen.kind) == (expected.text, True, expected.kind)


def test_two_sessions_are_two_worlds_and_a_third_is_refused(url):
    clients = [adapter.WorkspaceClient(base_url=url).sync() for _ in range(MAX_SESSIONS + 1)]
    prompts = [clients[seed].reset(seed=seed).observation.text for seed in range(MAX_SESSIONS)]
    assert prompts == [generate_task(seed).prompt for seed in range(MAX_SESSIONS)]
    assert [clients[seed].state().seed for seed in range(MAX_SESSIONS)] == list(range(MAX_SESSIONS))
    with pytest.raises(RuntimeError, match="CAPACITY_REACHED"):
        clients[-1].reset(seed=0)
    for each in clients:
        each.close()


def test_a_message_above_the_limit_ends_the_session_and_not_the_server(url, client):
    client.reset(seed=0)
    content = "x" * (adapter.MAX_MESSAGE_BYTES + 1)
    with pytest.raises(Exception, match=r"1009|too big"):
        client.step(adapter.WorkspaceAction(name="Write", arguments={"file_path": "/workspace/a", "content": content}))
    with adapter.WorkspaceClient(base_url=url).sync() as other:
        assert other.reset(seed=1).observation.text == generate_task(1).prompt


def test_a_step_without_a_task_says_what_to_do(client):
    with pytest.raises(RuntimeError, match=r"\bstep\b.*\btask\b.*\breset\(\)"):
        client.step(adapter.WorkspaceAction(name="LS", arguments={}))


def test_a_difficulty_that_there_is_not_is_refused(client):
    with pytest.raises(RuntimeError, match="impossible"):
        client.reset(seed=0, difficulty="impossible")


def test_it_listens_on_this_machine_alone(url):
    assert url.startswith("http://127.0.0.1:")
    assert adapter.server_settings(adapter.create_app(), port=0).host == "127.0.0.1"


def test_the_schema_names_the_fields_of_a_call(url):
    with urllib.request.urlopen(f"{url}/schema") as answer:
        schema = json.load(answer)
    assert {"name", "arguments"} <= schema["action"]["properties"].keys()
    assert {"text", "failed", "kind"} <= schema["observation"]["properties"].keys()
    assert {"seed", "difficulty", "reward"} <= schema["state"]["properties"].keys()
