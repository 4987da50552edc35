"""What our adapter takes for granted about verifiers. A failure after an upgrade names what moved."""

from __future__ import annotations

from dataclasses import fields

import pytest
from library_names import assert_parameters, named

verifiers = pytest.importorskip("verifiers")
vf = pytest.importorskip("verifiers.v1")
pytestmark = [pytest.mark.envs, pytest.mark.filterwarnings("ignore")]

SAYS = f"verifiers {verifiers.__version__}"
PARAMETERS = {
    "Harness.launch": ["self", "ctx", "trace", "runtime", "endpoint", "secret", "mcp_urls", "data"],
    "Harness.resolve_text_prompt": ["self", "task"],
    "Taskset.load": ["self"],
    "Taskset.take": ["self", "num_tasks"],
    "Task.__init__": ["self", "data", "config"],
    "Env.run": ["self", "task", "agents"],
    "Env.run_episode": ["self", "task", "ctx", "on_trace", "on_discard"],
    "Env.serving": ["self"],
    "Agent.run": ["self", "task", "runtime", "tools", "on_trace", "collect_artifacts"],
    "load_environment": ["config"],
    "resolve_env_config": ["data"],
    "reward": ["func", "weight", "priority"],
    "metric": ["func", "priority"],
}
FIELDS = {
    "TaskData": {"name", "prompt", "system_prompt", "idx"},
    "TasksetConfig": {"id", "task", "system_prompt"},
    "HarnessConfig": {"id"},
    "SingleAgentEnvConfig": {"agent", "taskset"},
    "AgentConfig": {"harness", "runtime", "max_turns"},
    "EvalClientConfig": {"base_url", "api_key_var"},
    "Trace": {"info", "rewards", "metrics", "errors", "ok", "stop_condition", "state"},
    "Episode": {"traces", "ok"},
}


@pytest.mark.parametrize(("path", "expected"), PARAMETERS.items(), ids=list(PARAMETERS))
def test_a_function_keeps_its_parameters(path, expected):
    assert_parameters(vf, path, expected, SAYS)


@pytest.mark.parametrize(("path", "expected"), FIELDS.items(), ids=list(FIELDS))
def test_a_record_keeps_its_fields(path, expected):
    missing = expected - named(vf, path, SAYS).model_fields.keys()
    assert not missing, f"{SAYS}: {path} has no {sorted(missing)} any more"


def test_a_harness_says_with_these_flags_where_it_may_run():
    flags = {name: getattr(vf.Harness, name) for name in ("APPENDS_SYSTEM_PROMPT", "EXECUTES_CODE", "NEEDS_CONTAINER")}
    expected = {"APPENDS_SYSTEM_PROMPT": False, "EXECUTES_CODE": True, "NEEDS_CONTAINER": True}
    assert flags == expected, f"{SAYS}: a harness's flags are {flags}; ours sets all three the other way round"
    assert vf.Taskset.INFINITE is False, f"{SAYS}: tasksets are without end unless they say otherwise"


def test_a_program_s_result_is_three_values():
    found = [each.name for each in fields(vf.ProgramResult)]
    assert found == ["exit_code", "stdout", "stderr"], f"{SAYS}: ProgramResult is {found}"


def test_a_trace_keeps_its_info_and_drops_its_state():
    kept = {name: not field.exclude for name, field in vf.Trace.model_fields.items() if name in ("info", "state")}
    assert kept == {"info": True, "state": False}, f"{SAYS}: of a trace, what is written to disk changed: {kept}"


def test_agents_run_in_a_remote_box_unless_told_otherwise():
    kind = vf.AgentConfig().runtime.type
    assert kind == "prime", f"{SAYS}: agents run in {kind!r} by default; does WorkspaceEnvConfig still say something?"
    assert vf.SubprocessConfig().type == "subprocess"


def test_environments_are_found_by_the_name_of_a_top_level_module():
    module = vf.import_taskset("composer-workspace")
    assert module.__name__ == "composer_workspace", f"{SAYS}: the id became the module {module.__name__}"
    assert vf.environment_class("composer-workspace") is module.WorkspaceEnv, f"{SAYS}: a module's own Env is not used"
    assert vf.default_harness_id("composer-workspace") == "composer-workspace", f"{SAYS}: nor its own harness"
    with pytest.raises(ModuleNotFoundError):  # once this works, src/composer_workspace.py is not needed any more
        vf.import_taskset("composer_replication.envs.verifiers_environment")
