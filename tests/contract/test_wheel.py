"""The built wheel, installed alone, is the package: every file of src, the licence, and every public name."""

from __future__ import annotations

import email
import json
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from expected_surface import PACKAGE
from repository import ROOT, SRC, fresh_python, repository_files
from surface_text import COVERED, expected

import composer_replication

IMPORT_ALONE = """
import json, sys
sys.path.insert(0, {target!r})
import composer_replication
foreign = {{name.partition(".")[0] for name in sys.modules}} - set(sys.stdlib_module_names) - {{"__main__"}}
print(json.dumps([composer_replication.__version__, composer_replication.__file__, sorted(foreign)]))
"""

# The checkout leaves the path, so that an editable install cannot answer for the wheel.
RESOLVE = """
import importlib, json, sys
sys.path.insert(0, {target!r})
sys.path[:] = [path for path in sys.path if path != {src!r}]
for module, names in json.load(sys.stdin).items():
    for name in names:
        value = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
ours = [module for name, module in sys.modules.items() if name.partition(".")[0] == "composer_replication"]
print(json.dumps(sorted({{module.__file__ for module in ours}})))
"""


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    fresh_python("-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT), cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def target(wheel, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--no-compile", "--target"]
    fresh_python("-m", "pip", "install", *options, str(folder), str(wheel), cwd=folder)
    return folder


@pytest.fixture(scope="session")
def metadata(wheel) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_holds_every_file_of_src_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    wanted = {path.relative_to(SRC).as_posix() for path in repository_files() if path.is_relative_to(SRC)}
    assert f"{PACKAGE}/py.typed" in wanted
    assert held == wanted


def test_the_wheel_is_for_every_platform_and_carries_the_licence(wheel, metadata):
    assert wheel.name == f"{PACKAGE}-{composer_replication.__version__}-py3-none-any.whl"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
        assert archive.read(name) == (ROOT / "LICENSE").read_bytes()


def test_the_metadata_says_what_the_package_says(metadata):
    assert metadata["Name"] == "composer-replication"
    assert metadata["Version"] == composer_replication.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata.get_payload(decode=True) == (ROOT / "README.md").read_bytes()


def test_installing_it_brings_the_core_dependencies_and_no_extra(metadata):
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    names = {line.partition(">")[0].strip() for line in needed}
    assert names == {
        "huggingface-hub",
        "numpy",
        "orjson",
        "packaging",
        "rich",
        "safetensors",
        "shtab",
        "torch",
        "transformers",
    }


def test_the_installed_wheel_imports_with_nothing_but_the_standard_library(target, tmp_path):
    code = IMPORT_ALONE.format(target=str(target))
    version, file, foreign = json.loads(fresh_python("-I", "-S", "-c", code, cwd=tmp_path))
    assert version == composer_replication.__version__
    assert file == str(target / PACKAGE / "__init__.py")
    assert foreign == [PACKAGE]


def test_every_public_name_resolves_in_the_installed_wheel(target, tmp_path):
    names = {f"{PACKAGE}.{path}".rstrip("."): sorted(expected(path)) for path in COVERED}
    code = RESOLVE.format(target=str(target), src=str(SRC))
    files = json.loads(fresh_python("-I", "-c", code, cwd=tmp_path, given=json.dumps(names)))
    assert len(files) > len(COVERED)
    assert [file for file in files if not Path(file).is_relative_to(target)] == []


def test_submodules_of_distillation_are_reached_through_the_package(target, tmp_path):
    names = ["simpo.avg_sequence_logprob", "taid.taid_loss", "entropy_aware_opd.teacher_entropy"]
    code = RESOLVE.format(target=str(target), src=str(SRC))
    fresh_python("-I", "-c", code, cwd=tmp_path, given=json.dumps({f"{PACKAGE}.distillation": names}))
