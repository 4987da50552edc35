"""What the recipe takes for granted about Monarch. Where one of these fails after an upgrade, it says what moved."""

from __future__ import annotations

import importlib
import inspect
from importlib.metadata import version

import pytest

pytestmark = pytest.mark.monarch
pytest.importorskip("monarch", reason="needs Monarch (make test-monarch)")

from composer_replication.recipes.monarch import actors  # noqa: E402
from composer_replication.recipes.monarch import run as supervision  # noqa: E402

SAYS = f"torchmonarch {version('torchmonarch')}"
PARAMETERS = {
    "monarch.actor:endpoint": ["method", "propagate", "explicit_response_port", "instrument"],
    "monarch.actor:this_host": [],
    "monarch.actor:HostMesh.spawn_procs": [
        "self",
        "per_host",
        "bootstrap",
        "name",
        "proc_bind",
        "bootstrap_command",
    ],
    "monarch.actor:ProcMesh.spawn": ["self", "name", "Class", "args", "kwargs"],
    "monarch.actor:ProcMesh.stop": ["self", "reason"],
    "monarch.actor:unhandled_fault_hook": ["failure"],
}


def named(path: str) -> object:
    module, _, rest = path.partition(":")
    value = importlib.import_module(module)
    for part in rest.split("."):
        assert hasattr(value, part), f"{SAYS}: {path} is gone"
        value = getattr(value, part)
    return value


@pytest.mark.parametrize(("path", "expected"), PARAMETERS.items(), ids=list(PARAMETERS))
def test_a_function_keeps_its_parameters(path, expected):
    found = list(inspect.signature(named(path)).parameters)
    assert found == expected, f"{SAYS}: {path} takes {found}, the recipe expects {expected}"


def test_the_version_is_the_one_that_was_looked_at():
    assert version("torchmonarch").startswith("0.7."), f"{SAYS}: read this file's other messages, then move the pin"


def test_a_death_is_a_supervision_error_and_an_exception_an_actor_error():
    died = named("monarch._rust_bindings.monarch_hyperactor.supervision:SupervisionError")
    raised = named("monarch.actor:ActorError")
    assert issubclass(died, RuntimeError), f"{SAYS}: SupervisionError is no RuntimeError; `stop` would not survive one"
    assert not issubclass(raised, died), f"{SAYS}: an exception in an endpoint would be taken for a death"
    assert supervision._supervision_error() is died


def test_a_failure_names_its_mesh():
    failure = named("monarch.actor:MeshFailure")
    assert hasattr(failure, "mesh_name"), f"{SAYS}: MeshFailure has no mesh_name; whose fault it is cannot be told"


def test_the_fault_hook_is_looked_up_when_a_fault_comes():
    client = named("monarch._src.actor.actor_mesh:RootClientActor")
    source = inspect.getsource(client.__supervise__)
    message = f"{SAYS}: the client no longer looks up monarch.actor.unhandled_fault_hook; a death would end the program"
    assert "from monarch.actor import unhandled_fault_hook" in source, message


def test_our_hook_passes_on_what_is_not_ours(monkeypatch):
    module = importlib.import_module("monarch.actor")
    seen = []
    monkeypatch.setattr(module, "unhandled_fault_hook", seen.append)
    supervision._install_fault_hook()
    hook = module.unhandled_fault_hook
    supervision._install_fault_hook()
    assert module.unhandled_fault_hook is hook  # put there once
    failures = [type("F", (), {"mesh_name": name})() for name in ("composer_trainer-x", "logger-x", "somebody-x")]
    for each in failures:
        hook(each)
    assert seen == failures[2:]


@pytest.mark.parametrize("name", actors.__all__)
def test_an_actors_endpoints_are_all_async(name):
    kind = named("monarch._src.actor.actor_mesh:_actor_kind")(getattr(actors, name))
    assert str(kind).endswith("ASYNC"), f"{SAYS}: {name} is a {kind}"


def test_a_class_that_mixes_both_kinds_is_refused():
    actor, endpoint = named("monarch.actor:Actor"), named("monarch.actor:endpoint")

    class Mixed(actor):
        @endpoint
        def one(self) -> None: ...

        @endpoint
        async def other(self) -> None: ...

    with pytest.raises(ValueError, match="mixes both async and sync"):
        named("monarch._src.actor.actor_mesh:_actor_kind")(Mixed)


def test_an_endpoint_is_called_by_call_one():
    found = named("monarch._src.actor.endpoint:Endpoint")
    assert hasattr(found, "call_one"), f"{SAYS}: endpoints have no call_one"


def test_processes_of_one_host_talk_over_unix_sockets_and_die_with_their_program():
    config = importlib.import_module("monarch.config").get_global_config()
    assert str(config["default_transport"]).lower().endswith("unix"), f"{SAYS}: {config['default_transport']}"
    assert config["mesh_bootstrap_enable_pdeathsig"] is True, f"{SAYS}: actors would outlive a killed program"
