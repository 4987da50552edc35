"""Packed records hold the same values as plain JSON, damage is named, and every published table is made from them."""

from __future__ import annotations

import json
import lzma
import os
import shutil
import subprocess
import sys
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hints
from composer_replication.atomic import atomic_write_json
from composer_replication.cli.main import main
from composer_replication.errors import ArtefactCorruptError
from composer_replication.evaluation.ablation import job as record_files
from composer_replication.evaluation.ablation.job import PACKED, pack, packed_path, read_stored, stored_path, unpack
from composer_replication.evaluation.ablation.jobs import read_results
from refusals import refusal

EXPERIMENTS = Path(__file__).parents[3] / "experiments"
PACKED_FILES = sorted(EXPERIMENTS.rglob(f"*{PACKED}"))
TABLES = sorted(EXPERIMENTS.rglob("table.md"))
MAX_TEXT_BYTES = 200_000
MAX_BYTES = 4_000_000


def in_experiments(path: Path) -> str:
    return path.relative_to(EXPERIMENTS).as_posix()


def as_text(value: object) -> str:
    """JSON with keys in their order and every digit: equal texts are equal values of equal types."""
    return json.dumps(value)


narrow_floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
wide_floats = st.floats(allow_nan=False, allow_infinity=False)
numbers = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | narrow_floats | wide_floats
json_values = st.recursive(
    numbers | st.text(st.characters(codec="utf-8"), max_size=5),
    lambda children: (
        st.lists(children, max_size=4)
        | st.lists(narrow_floats, max_size=4)
        | st.dictionaries(st.sampled_from("abc"), children, max_size=3)
        | st.lists(st.dictionaries(st.sampled_from("abc"), children, max_size=3), max_size=4)
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=3), json_values, max_size=4))
def test_a_packed_record_comes_back_with_every_value_type_and_order_of_keys(record):
    data = pack(record)
    assert as_text(unpack(data)) == as_text(record)
    assert pack(record) == data


@pytest.mark.parametrize(
    ("values", "column"),
    [
        (
            [{"a": 1, "b": 2}, {"b": 3}],
            {"shapes": [["a", "b"], ["b"]], "rows": [0, 1], "columns": {"a": [1], "b": [2, 3]}},
        ),
        ([[1, 2], [], [3]], {"lengths": [2, 0, 1], "items": [1, 2, 3]}),
        (array("f", [0.1, -2.5]).tolist(), {"float32": [0.1, -2.5]}),
        ([0.1, 0.5], [0.1, 0.5]),  # 0.1 has more than 32 bits
        ([1, {"a": 1}], [1, {"a": 1}]),
        ([], []),
    ],
)
def test_a_list_is_stored_as_the_column_that_the_module_describes(values, column):
    text = lzma.decompress(pack({"values": values}))
    stored = json.loads(text)["column"]
    assert stored == {
        "shapes": [["values"]],
        "rows": [0],
        "columns": {"values": {"lengths": [len(values)], "items": column}},
    }


def test_a_packed_file_is_read_by_the_name_of_the_plain_one_unless_that_is_there_too(tmp_path):
    plain = tmp_path / "results.json"
    assert stored_path(plain) == plain
    packed_path(plain).write_bytes(pack({"from": "packed"}))
    assert stored_path(plain) == packed_path(plain) == tmp_path / "results.columns.json.xz"
    assert read_stored(plain) == read_stored(packed_path(plain)) == {"from": "packed"}
    plain.write_text('{"from": "plain"}')
    assert read_stored(plain) == {"from": "plain"}


def columns(column: object, **changes: object) -> bytes:
    document = {"schema": "composer_replication.columns", "version": 1, "column": column, **changes}
    return lzma.compress(json.dumps(document).encode())


GOOD = pack({"results": [{"arm": "plain", "loss": 0.5}] * 40})


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b'{"results": []}', id="plain JSON"),
        pytest.param(GOOD[:-9], id="cut off"),
        pytest.param(GOOD[:60] + bytes([GOOD[60] ^ 1]) + GOOD[61:], id="one bit"),
        pytest.param(GOOD + b"more", id="more after it"),
        pytest.param(lzma.compress(b"[1"), id="no JSON"),
        pytest.param(columns([{}], version=2), id="another version"),
        pytest.param(columns([]), id="no record"),
        pytest.param(columns([{}, {}]), id="two records"),
        pytest.param(columns([1]), id="a record that is no object"),
        pytest.param(columns(3), id="a number for a column"),
        pytest.param(columns({"lengths": [2], "items": [1]}), id="too few items"),
        pytest.param(columns({"lengths": [-1, 2], "items": [1]}), id="a length below 0"),
        pytest.param(columns({"float32": ["x"]}), id="a word for a number"),
        pytest.param(columns({"shapes": [["a"]], "rows": [0], "columns": {"a": []}}), id="a column that is short"),
        pytest.param(columns({"shapes": [["a"]], "rows": [0], "columns": {"a": [1, 2]}}), id="a column that is long"),
        pytest.param(columns({"shapes": [["a"]], "rows": [1], "columns": {"a": [1]}}), id="a shape that is not there"),
        pytest.param(columns({"shapes": [["a"]], "rows": [0], "columns": {}}), id="a column that is not there"),
    ],
)
def test_a_damaged_packed_file_is_named_with_what_to_do(tmp_path, capfd, data):
    path = tmp_path / "results.columns.json.xz"
    path.write_bytes(data)
    for read in (lambda: read_stored(tmp_path / "results.json"), lambda: read_results(tmp_path)):
        with refusal(ArtefactCorruptError, what=str(path), got="Error"):
            read()
    assert main(["ablate", "--table", "-o", str(tmp_path)]) == 1
    printed = capfd.readouterr().err
    assert str(path) in printed
    assert "crf ablate --config" in printed
    assert "CRF_DEBUG" not in printed  # which is asked for where nobody foresaw what happened


def test_a_few_bytes_that_stand_for_more_than_the_limit_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(record_files, "_MAX_TEXT_BYTES", 10_000)
    path = tmp_path / "results.columns.json.xz"
    path.write_bytes(columns([{"text": "a" * 20_000}]))
    with pytest.raises(ArtefactCorruptError, match=r"\b10,000 bytes\b"):
        read_stored(path)


def run_pack(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXPERIMENTS / "pack.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_script_packs_and_unpacks_to_the_same_bytes_and_overwrites_no_plain_file(tmp_path):
    plain, packed = tmp_path / "results.json", tmp_path / f"results{PACKED}"
    atomic_write_json(plain, {"results": [{"arm": "plain", "loss": 0.1, "steps": 1}, {"arm": "hints", "steps": 2}]})
    before = plain.read_bytes()
    assert run_pack(plain).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == [packed.name]
    plain.write_text("newer")
    refused = run_pack("--unpack", packed)
    assert (refused.returncode, plain.read_text()) == (1, "newer")
    assert str(plain) in refused.stderr
    plain.unlink()
    assert run_pack("--unpack", packed).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == [plain.name]
    assert plain.read_bytes() == before


def test_scores_print_the_same_table_packed_and_plain(tmp_path, capsys, monkeypatch):
    [packed] = EXPERIMENTS.glob(f"2026-11-17-hinted-warm-up/start-0.5b{PACKED}")
    (tmp_path / "start.json").write_text(json.dumps(read_stored(packed)))
    printed = []
    for path in (tmp_path / "start.json", packed, packed.with_name("start-0.5b.json")):
        monkeypatch.setattr(sys, "argv", ["hints.py", "table", str(path), "--rounds", "20"])
        hints.main()
        printed.append(capsys.readouterr().out)
    assert printed[0].startswith("## Qwen2.5-Coder-0.5B-Instruct")
    assert printed == [printed[0]] * 3


def test_every_folder_with_a_table_has_its_results_packed():
    assert len(TABLES) == 18
    assert {path.parent for path in TABLES} == {
        path.parent for path in PACKED_FILES if path.name.startswith("results.")
    }


@pytest.mark.parametrize("table", TABLES, ids=lambda path: in_experiments(path.parent))
def test_a_published_table_and_its_plots_are_made_from_the_packed_results_byte_for_byte(table, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="plots are drawn by it")
    shutil.copy(table.with_name(f"results{PACKED}"), tmp_path)
    main(
        ["ablate", "--table", "-o", str(tmp_path)]
    )  # the status is 1 where a table names jobs that failed or budgets that differ
    [line] = [line for line in capsys.readouterr().err.splitlines() if f"results{PACKED}" in line]
    assert f"crf ablate --table -o {tmp_path}" in line
    assert pages_of(tmp_path) == pages_of(table.parent)


def pages_of(folder: Path) -> dict[str, bytes]:
    """What `crf ablate --table` makes, by name."""
    paths = [folder / "table.md", *(folder / "plots").glob("*.svg")]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def published_files() -> list[Path]:
    """Files of the experiments as a clone has them: the jobs of a run in progress are none of it."""
    folders = (Path(folder, name) for folder, _, names in os.walk(EXPERIMENTS) for name in names)
    return [path for path in folders if not {"jobs", "__pycache__"} & set(path.parts)]


def test_experiments_stay_small_and_no_text_file_of_them_is_large():
    sizes = {in_experiments(path): path.stat().st_size for path in published_files()}
    large = [name for name, size in sizes.items() if size > MAX_TEXT_BYTES and not name.endswith(".xz")]
    assert not large, f"pack them: python experiments/pack.py {' '.join(large)}"
    assert sum(sizes.values()) < MAX_BYTES
