"""`crf doctor`: a line a question, what to do beside what is wrong, and an exit status that a script can ask for."""

from __future__ import annotations

import json
import re
import shutil
import sys
from types import SimpleNamespace

import pytest

from composer_replication.cli import doctor
from composer_replication.cli.main import main
from composer_replication.envs.student import student_folder
from fault_server import FaultServer


@pytest.fixture
def ask(capsys, tmp_path):
    """Exit status, and lines by name."""

    def asked(*given):
        capsys.readouterr()
        status = main(["doctor", "--json", "--run", str(tmp_path), *given])
        told = json.loads(capsys.readouterr().out)
        return status, {each["name"]: each for each in told["lines"]}

    return asked


def disk_of(lines, folder):
    """The line about the disk that the folder is on."""
    [line] = [line for name, line in lines.items() if str(folder) in name]
    return line


def test_a_machine_that_can_do_the_work_passes(ask, tmp_path):
    status, lines = ask("--model", str(student_folder()))
    assert status == 0
    assert {each["status"] for each in lines.values()} <= {"ok", "warn"}
    assert lines["tokenizer"]["status"] == lines["template"]["status"] == "ok"
    assert re.search(r"\b2,048 tokens\b.*\bwindows\b.*\b2,048\b", lines["model"]["found"])
    assert "'<|im_end|>'" in lines["template"]["found"]
    assert disk_of(lines, tmp_path)["status"] in ("ok", "warn")
    assert all(each["fix"] for each in lines.values() if each["status"] != "ok")


def test_what_is_missing_is_named_with_the_command_that_installs_it(ask, monkeypatch):
    real, changed = doctor._installed_version, {"orjson": None, "trl": None, "peft": "0.1"}
    monkeypatch.setattr(doctor, "_installed_version", lambda name: changed[name] if name in changed else real(name))
    status, lines = ask()
    assert status == 1
    assert lines["extra train"]["status"] == "warn"
    assert re.search(r"\btrl\b.*\bpeft 0\.1\b.*>=0\.18", lines["extra train"]["found"])
    assert f"{sys.executable} -m pip install " in lines["extra train"]["fix"]
    assert lines["extra train"]["fix"].endswith("[train]'")
    assert lines["orjson"]["status"] == "fail"


def test_models_that_cannot_be_used_fail(ask, tmp_path):
    bare = shutil.copytree(student_folder(), tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    (bare / "model.safetensors").unlink()
    status, lines = ask("--model", str(bare))
    assert status == 1
    assert lines["template"]["status"] == lines["weights"]["status"] == "fail"
    status, lines = ask("--model", str(tmp_path / "nowhere"))
    assert (status, lines["model"]["status"]) == (1, "fail")


def test_little_room_is_a_warning(ask, monkeypatch, tmp_path):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage._replace(free=2**20))
    monkeypatch.setattr("composer_replication.trainer.watch.memory_plan.free_memory", lambda: 2**30)
    status, lines = ask()
    assert status == 0
    assert lines["memory"]["status"] == disk_of(lines, tmp_path)["status"] == "warn"


def test_an_endpoint_is_asked_only_where_it_is_named(ask, monkeypatch):
    with FaultServer(seed=1) as server:
        status, lines = ask("--base-url", server.base_url)
        assert (status, lines["endpoint"]["status"]) == (0, "ok")
        assert re.search(rf"{re.escape(server.base_url)}\b.*\b\d+ models\b", lines["endpoint"]["found"])
    status, lines = ask("--base-url", "http://127.0.0.1:9/v1")
    assert (status, lines["endpoint"]["status"]) == (1, "fail")
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    status, lines = ask("--base-url", "http://127.0.0.1:9/v1", "--api-key-env", "NO_SUCH_KEY")
    assert "NO_SUCH_KEY" in lines["endpoint"]["found"]
    assert "127.0.0.1" not in lines["endpoint"]["found"]  # which was not asked
    assert "endpoint" not in ask()[1]


def test_lines_say_what_to_do_below_what_is_wrong(capsys, tmp_path):
    main(["doctor", "--run", str(tmp_path)])
    told = capsys.readouterr()
    assert told.out.split()[:2] == ["ok", "python"]
    statuses = [line.split()[0] for line in told.out.splitlines() if line.split()[0] in ("ok", "warn", "fail")]
    counted = "\\b.*\\b".join(str(statuses.count(status)) for status in ("ok", "warn", "fail"))
    assert re.search(rf"\b{counted}\b", told.err)


@pytest.mark.parametrize(
    ("noted", "expected"),
    [
        ('{"url": "file:///somewhere/my%20code", "dir_info": {}}', "'/somewhere/my code[train]'"),
        ('{"url": "https://host/x.whl"}', "'composer-replication[train]'"),
        (None, "'composer-replication[train]'"),
    ],
)
def test_an_extra_comes_from_where_the_package_came_from(monkeypatch, noted, expected):
    found = SimpleNamespace(read_text=lambda _name: noted)
    monkeypatch.setattr(doctor.importlib.metadata, "distribution", lambda _name: found)
    assert doctor._install_line(extra="train") == f"{sys.executable} -m pip install {expected}"


@pytest.mark.parametrize(
    ("absent", "status"),
    [("", "ok"), ("the hub cannot be reached (ConnectError)", "warn"), ("HF_HUB_OFFLINE is set", "warn")],
)
def test_a_hub_that_does_not_answer_is_a_warning(ask, monkeypatch, absent, status):
    monkeypatch.setattr("composer_replication.batch.model_folder.hub_absence_reason", lambda _name: absent)
    line = ask()[1]["hub"]
    assert line["status"] == status
    assert line["found"].startswith(absent)
