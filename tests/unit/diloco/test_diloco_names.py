"""The names of `diloco`, and the one at the top level, with torchft and without it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import composer_replication
from composer_replication import diloco

WITHOUT = """
import sys
sys.modules["torchft"] = None
import composer_replication
from composer_replication import diloco, make_diloco_outer_loop
from composer_replication.diloco import DiLoCo, Manager, _DummyWork
assert "torch" not in sys.modules
assert composer_replication._DILOCO_AVAILABLE is False and diloco._TORCHFT_AVAILABLE is False
assert make_diloco_outer_loop is DiLoCo is Manager is _DummyWork is None
try:
    diloco.make_diloco_outer_loop(None, [], None)
except RuntimeError as error:
    print(error)
"""


def test_without_torchft_the_name_is_none_and_the_call_names_the_extra(tmp_path):
    command = [sys.executable, "-I", "-c", WITHOUT]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == 'torchft.local_sgd is not installed. Type: pip install "composer-replication[diloco]"\n'


def test_with_torchft_the_names_are_torchfts():
    local_sgd = pytest.importorskip("torchft.local_sgd")
    assert composer_replication._DILOCO_AVAILABLE
    assert diloco._TORCHFT_AVAILABLE
    assert diloco.DiLoCo is local_sgd.DiLoCo
    assert {diloco.Manager.__module__, diloco._DummyWork.__module__} == {"torchft.manager", "torchft.work"}
    assert {"DiLoCo", "Manager", "_DummyWork", "make_diloco_outer_loop"} <= set(dir(diloco))


def test_an_unknown_name_is_an_attribute_error_that_names_it():
    with pytest.raises(AttributeError, match=r"composer_replication\.diloco\b.*'LocalSGD'"):
        diloco.LocalSGD  # noqa: B018
