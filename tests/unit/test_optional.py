"""Optional dependencies: installed, missing, broken, and the message for each."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from composer_replication.errors import InputError, MissingExtraError
from composer_replication.optional import available, importing, require


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the import path; modules imported from it are forgotten after the test."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    importlib.invalidate_caches()
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def add(packages: Path, name: str, code: str) -> None:
    (packages / name).mkdir()
    (packages / name / "__init__.py").write_text(code)


def test_an_installed_package_is_returned(packages: Path) -> None:
    add(packages, "crf_fine", "answer = 42")
    assert require("crf_fine", extra="replay").answer == 42


def test_a_missing_package_names_the_command_to_type() -> None:
    with pytest.raises(MissingExtraError) as caught:
        require("crf_absent", extra="replay")
    assert str(caught.value) == 'crf_absent is not installed. Type: pip install "composer-replication[replay]"'
    assert caught.value.name == "crf_absent"
    assert isinstance(caught.value, ImportError)


@pytest.mark.parametrize(
    ("code", "cause", "words"),
    [
        ("import crf_absent", ModuleNotFoundError, "ModuleNotFoundError: No module named 'crf_absent'"),
        ("from os import nothing_like_it", ImportError, "ImportError: cannot import name 'nothing_like_it'"),
        ("import crf_broken.absent", ModuleNotFoundError, "No module named 'crf_broken.absent'"),
        ("raise OSError('libcudart.so: no such file')", OSError, "OSError: libcudart.so: no such file"),
        ("raise ValueError('numpy.dtype size changed')", ValueError, "ValueError: numpy.dtype size changed"),
    ],
)
def test_a_package_whose_own_import_fails_is_called_installed_and_the_cause_is_named(
    packages: Path, code: str, cause: type[Exception], words: str
) -> None:
    add(packages, "crf_broken", code)
    with pytest.raises(MissingExtraError) as caught:
        require("crf_broken", extra="replay")
    assert str(caught.value).startswith("crf_broken is installed, but importing it failed with ")
    assert words in str(caught.value)
    assert type(caught.value.__cause__) is cause


def test_a_missing_parent_of_a_dotted_module_is_a_missing_package() -> None:
    with pytest.raises(MissingExtraError, match=r'crf_absent\.part is not installed. Type: pip install "composer-'):
        require("crf_absent.part", extra="diloco")


def test_a_dotted_module_is_imported_even_from_a_namespace_package(packages: Path) -> None:
    (packages / "crf_space").mkdir()
    (packages / "crf_space" / "part.py").write_text("answer = 7")
    assert require("crf_space.part", extra="diloco").answer == 7


def test_availability_is_found_out_without_running_the_package(packages: Path) -> None:
    add(packages, "crf_loud", "raise SystemExit('imported')")
    assert available("crf_loud")
    assert "crf_loud" not in sys.modules
    assert not available("crf_absent")


def test_a_folder_that_happens_to_have_the_name_is_not_the_package(packages: Path) -> None:
    (packages / "crf_results").mkdir()
    assert not available("crf_results")
    with pytest.raises(MissingExtraError, match="crf_results is not installed"):
        require("crf_results", extra="report")


def test_a_module_that_is_blocked_in_sys_modules_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "json", None)
    assert not available("json")
    with pytest.raises(MissingExtraError, match="json is not installed"):
        require("json", extra="replay")


def test_a_stand_in_without_a_spec_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = ModuleType("crf_stand_in")
    monkeypatch.setitem(sys.modules, "crf_stand_in", stand_in)
    assert available("crf_stand_in")
    assert require("crf_stand_in", extra="replay") is stand_in


def test_availability_of_a_dotted_name_is_refused_since_it_would_import_the_parent() -> None:
    with pytest.raises(InputError, match=r"top-level package, got 'os\.path'"):
        available("os.path")


def test_import_statements_of_a_missing_package_name_the_command_to_type() -> None:
    with pytest.raises(MissingExtraError) as caught, importing("crf_absent", extra="replay"):
        import json.no_such_module  # never reached  # noqa: F401  # pyright: ignore
    assert str(caught.value) == 'crf_absent is not installed. Type: pip install "composer-replication[replay]"'
    assert caught.value.name == "crf_absent"


def test_import_statements_of_a_package_bind_their_names(packages: Path) -> None:
    add(packages, "crf_fine", "answer = 42")
    with importing("crf_fine", extra="replay"):
        from crf_fine import answer
    assert answer == 42


def test_an_import_statement_that_fails_names_its_cause(packages: Path) -> None:
    add(packages, "crf_half", "answer = 42")
    with (
        pytest.raises(MissingExtraError, match="crf_half is installed, but importing it failed with ") as caught,
        importing("crf_half", extra="replay"),
    ):
        import crf_absent  # noqa: F401
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert "No module named 'crf_absent'" in str(caught.value)


def test_what_is_explained_already_is_not_explained_twice(packages: Path) -> None:
    add(packages, "crf_fine", "answer = 42")
    with (
        pytest.raises(MissingExtraError, match=r"^crf_absent is not installed"),
        importing("crf_fine", extra="replay"),
    ):
        require("crf_absent", extra="replay")


def test_what_is_no_failed_import_passes_as_it_is(packages: Path) -> None:
    add(packages, "crf_fine", "answer = 42")
    with pytest.raises(KeyboardInterrupt), importing("crf_fine", extra="replay"):
        raise KeyboardInterrupt
