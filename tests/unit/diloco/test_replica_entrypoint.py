"""What an executor calls in every replica: rank and settings from the environment, then the trainer with a manager."""

from __future__ import annotations

import pytest

from composer_replication.diloco.serverless import replica_entrypoint
from composer_replication.diloco.serverless.replica_entrypoint import _read_rank, _read_settings, main
from composer_replication.errors import InputError
from refusals import refusal

HERE = __name__


def note(**given):
    """A trainer."""
    manager = given.pop("manager")
    return {**given, "step": manager.current_step(), "generation": manager._membership.generation}


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "entrypoint_trainer", __import__("sys").modules[__name__])


def test_the_trainer_gets_its_arguments_and_the_manager(tmp_path, monkeypatch):
    monkeypatch.setenv("REPLICA_RANK", "0")
    monkeypatch.setenv("CRF_DILOCO_GENERATION", "4")
    found = main(str(tmp_path), 1, "entrypoint_trainer", "note", {"lr": 0.1})
    assert found == {"lr": 0.1, "rank": 0, "world_size": 1, "step": 0, "generation": 4}


def test_settings_go_before_variables_and_unknown_ones_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("REPLICA_RANK", "0")
    monkeypatch.setenv("CRF_DILOCO_GENERATION", "4")
    assert main(str(tmp_path), 1, "entrypoint_trainer", "note", settings={"generation": 5})["generation"] == 5
    with refusal(InputError, got="graces", expected="grace_s"):
        main(str(tmp_path), 1, "entrypoint_trainer", "note", settings={"graces": 5})


def test_a_missing_rank_is_a_runtime_error_and_a_wrong_one_a_value_error():
    with pytest.raises(RuntimeError, match="REPLICA_RANK"):
        _read_rank({}, 2)
    for text in ("2", "-1", "one", "", "٣"):
        with refusal(InputError, what="REPLICA_RANK", got=repr(text), expected="1") as caught:
            _read_rank({"REPLICA_RANK": text}, 2)
        assert isinstance(caught.value, ValueError)
    assert _read_rank({"REPLICA_RANK": "1"}, 2) == 1


def test_variables_are_read_as_what_they_are():
    given = {"CRF_DILOCO_GRACE_S": "2.5", "CRF_DILOCO_TAKEOVER": "1", "CRF_DILOCO_PAYLOAD": "int8", "OTHER": "x"}
    assert _read_settings(given) == {"grace_s": 2.5, "takeover": True, "payload": "int8"}
    for name, text in (("PARALLEL", "two"), ("TAKEOVER", "perhaps"), ("GRACE_S", "")):
        with refusal(InputError, what=f"CRF_DILOCO_{name}", got=repr(text)):
            _read_settings({f"CRF_DILOCO_{name}": text})


def test_every_setting_is_a_parameter_of_the_manager():
    import inspect

    from composer_replication.diloco.rounds.manager import ObjectStoreManager

    own = {"store", "rank", "world_size", "weight"}
    assert set(replica_entrypoint.SETTINGS) == set(inspect.signature(ObjectStoreManager).parameters) - own


def test_the_command_line_prints_what_the_trainer_returns(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("REPLICA_RANK", "0")
    given = ["--rendezvous", str(tmp_path), "--world-size", "1", "--trainer-module", "entrypoint_trainer"]
    replica_entrypoint._run([*given, "--trainer-fn", "note", "--trainer-kwargs-json", '{"a": [1]}'])
    assert '"a": [1]' in capsys.readouterr().out
