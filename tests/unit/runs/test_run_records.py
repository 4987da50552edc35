"""Records: what is written comes back, and whatever is not exactly what was written is refused before its first row."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from composer_replication.errors import ArtefactCorruptError, ArtefactNotFoundError, InputError, RunError
from composer_replication.runs import ARTEFACTS, RunDir
from refusals import refusal

ROWS: list[dict[str, object]] = [
    {"id": "a", "turn": 1, "cost_usd": 0.25},
    {"id": "ü\n", "turn": 2, "cost_usd": None},
    {"id": "", "turn": -3, "cost_usd": 1e-300},
]
TEXT = (
    '{"id":"a","turn":1,"cost_usd":0.25}\n'
    '{"id":"ü\\n","turn":2,"cost_usd":null}\n'
    '{"id":"","turn":-3,"cost_usd":1e-300}\n'
).encode()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run")


def write(run: RunDir, rows: list[dict[str, object]] = ROWS) -> None:
    run.write_jsonl("pairs", rows, schema="pair", version=2)


def read(run: RunDir, *, verify: bool = True) -> list[dict[str, object]]:
    return list(run.read_jsonl("pairs", schema="pair", version=2, verify=verify))


def test_the_file_is_one_json_object_per_line_with_keys_as_they_are_and_reads_back(run: RunDir) -> None:
    write(run)
    assert run.path("pairs").read_bytes() == TEXT
    assert read(run) == ROWS
    assert [list(row) for row in read(run)] == [list(row) for row in ROWS]


def test_the_sidecar_says_what_the_file_is(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "log").write_bytes(b"log")
    run.write_jsonl(
        "pairs",
        ROWS,
        schema="pair",
        version=2,
        sources=[tmp_path / "log"],
        config_hash="c0ffee",
        counts={"kept": 3},
        drops={"tie": 4},
        settings={"scrubbed": True},
    )
    meta = json.loads((run.root / "pairs.meta.json").read_text())
    assert meta.pop("created").endswith("+00:00")
    assert meta.pop("tool_version") == json.loads((run.root / "run.json").read_text())["tool_version"]
    assert meta == {
        "artefact": "pairs",
        "schema": "pair",
        "version": 2,
        "keys": ["cost_usd", "id", "turn"],
        "rows": 3,
        "num_bytes": len(TEXT),
        "sha256": hashlib.sha256(TEXT).hexdigest(),
        "sources": [{"kind": "file", "name": str(tmp_path / "log"), "sha256": hashlib.sha256(b"log").hexdigest()}],
        "config_hash": "c0ffee",
        "counts": {"kept": 3},
        "drops": {"tie": 4},
        "settings": {"scrubbed": True},
        "sidecar_version": 1,
    }


def test_the_same_rows_give_the_same_files_but_for_the_time(run: RunDir) -> None:
    sidecar = run.root / "pairs.meta.json"
    write(run)
    data, meta = run.path("pairs").read_bytes(), json.loads(sidecar.read_text())
    write(run, [dict(row) for row in ROWS])
    again = json.loads(sidecar.read_text())
    assert run.path("pairs").read_bytes() == data
    assert meta | {"created": ""} == again | {"created": ""}


def test_the_sidecar_read_back_is_the_one_that_was_written(run: RunDir) -> None:
    written = run.write_jsonl("pairs", ROWS, schema="pair", version=2, drops={"tie": 1}, config_hash="c0ffee")
    assert run.meta("pairs") == written


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)
@given(
    st.lists(st.fixed_dictionaries({"a": st.text(st.characters(exclude_categories=("Cs",))), "b": st.integers(-9, 9)}))
)
def test_any_rows_read_back_as_they_were(run: RunDir, rows: list[dict[str, object]]) -> None:
    write(run, rows)
    assert read(run) == rows
    assert run.meta("pairs").rows == len(rows)


def test_any_mapping_is_a_row(run: RunDir) -> None:
    run.write_jsonl("pairs", (MappingProxyType(row) for row in ROWS), schema="pair", version=2)
    assert read(run) == ROWS


def test_counts_and_drops_may_be_filled_while_the_rows_are_made(run: RunDir) -> None:
    counts: dict[str, int] = {}
    drops: dict[str, int] = {}

    def rows() -> Iterator[dict[str, object]]:
        yield from ROWS
        counts["seen"], drops["too_long"] = 5, 2

    meta = run.write_jsonl("pairs", rows(), schema="pair", version=2, counts=counts, drops=drops)
    counts["seen"] = 0
    assert (meta.counts, meta.drops) == ({"seen": 5}, {"too_long": 2})
    assert run.meta("pairs") == meta


@pytest.mark.parametrize(
    ("odd", "named"),
    [
        ({"id": "b", "turn": 1}, ["'cost_usd'"]),
        ({**ROWS[0], "x": 1, "y": 2}, ["'x'", "'y'"]),
        ({"id": "b", "turn": 1, "z": 0}, ["'z'", "'cost_usd'"]),
        (["id"], []),
        ({**ROWS[0], "turn": float("nan")}, ["'turn'"]),
    ],
)
def test_a_row_of_another_kind_is_refused_and_the_old_artefact_stays(
    run: RunDir, odd: object, named: list[str]
) -> None:
    write(run)
    before = set(run.root.iterdir())
    rows: list[object] = [ROWS[0], odd, ROWS[1]]
    with refusal(InputError, what="line 2") as caught:
        run.write_jsonl("pairs", rows, schema="pair", version=2)  # pyright: ignore[reportArgumentType]
    assert re.findall(r"'\w+'", f"{caught.value.what} {caught.value.got}") == named
    if not named:
        assert "list" in caught.value.got
    assert read(run) == ROWS
    assert set(run.root.iterdir()) == before


def test_a_generator_that_fails_half_way_leaves_the_old_artefact_and_its_own_error(run: RunDir) -> None:
    def rows() -> Iterator[dict[str, object]]:
        yield ROWS[0]
        raise KeyError("mine")

    write(run)
    before = set(run.root.iterdir())
    with pytest.raises(KeyError, match="mine"):
        run.write_jsonl("pairs", rows(), schema="pair", version=2)
    assert read(run) == ROWS
    assert set(run.root.iterdir()) == before


@pytest.mark.parametrize("verify", [True, False])
def test_every_truncation_is_found(run: RunDir, verify: bool) -> None:
    write(run)
    for length in range(len(TEXT)):
        run.path("pairs").write_bytes(TEXT[:length])
        with refusal(ArtefactCorruptError, what="pairs.jsonl", expected=f"{len(TEXT)} bytes") as caught:
            read(run, verify=verify)
        assert caught.value.got.startswith(f"{length} bytes")
        assert "3 lines" in caught.value.expected


def test_a_truncation_is_told_with_its_line(run: RunDir) -> None:
    write(run)
    run.path("pairs").write_bytes(TEXT[:-5])
    with refusal(ArtefactCorruptError, got="line 3", fix="`crf pairs`") as caught:
        read(run)
    assert "33 bytes" in caught.value.got


def test_every_edited_byte_is_found_before_the_first_row(run: RunDir) -> None:
    write(run)
    for place in range(len(TEXT)):
        run.path("pairs").write_bytes(TEXT[:place] + bytes([TEXT[place] ^ 1]) + TEXT[place + 1 :])
        rows = run.read_jsonl("pairs", schema="pair", version=2)
        with refusal(ArtefactCorruptError, what="pairs.jsonl", got="sha256", expected="sha256"):
            next(rows)


def test_an_edit_that_breaks_a_line_is_told_with_the_line_even_without_the_checksum(run: RunDir) -> None:
    write(run)
    run.path("pairs").write_bytes(TEXT.replace(b'"turn":2', b'"burn":2'))
    with refusal(ArtefactCorruptError, what="pairs.jsonl", got="line 2") as caught:
        read(run, verify=False)
    assert re.findall(r"'\w+'", caught.value.got) == ["'burn'", "'turn'"]


def test_without_verification_only_an_edit_within_a_value_passes(run: RunDir) -> None:
    write(run)
    run.path("pairs").write_bytes(TEXT.replace(b'"turn":1', b'"turn":7'))
    assert read(run, verify=False)[0]["turn"] == 7


def test_a_sidecar_with_another_row_count_is_not_believed(run: RunDir) -> None:
    write(run)
    sidecar = run.root / "pairs.meta.json"
    sidecar.write_text(sidecar.read_text().replace('"rows": 3', '"rows": 4'))
    with refusal(ArtefactCorruptError, what="pairs.jsonl", got="3 rows", expected="4 rows"):
        read(run)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"sidecar_version": 1}'])
def test_a_sidecar_that_is_none_is_refused(run: RunDir, text: str) -> None:
    write(run)
    (run.root / "pairs.meta.json").write_text(text)
    with pytest.raises(ArtefactCorruptError, match=r"pairs\.meta\.json"):
        read(run)


def test_a_sidecar_field_of_the_wrong_type_is_refused(run: RunDir) -> None:
    write(run)
    sidecar = run.root / "pairs.meta.json"
    sidecar.write_text(sidecar.read_text().replace('"rows": 3', '"rows": "3"'))
    with refusal(ArtefactCorruptError, what="pairs.meta.json", got="'3'") as caught:
        read(run)
    assert re.search(r"TypeError: rows\b.*\bint$", caught.value.got)


@pytest.mark.parametrize("odd", ['["id"]', "1", "null", "{}"])
def test_a_key_in_a_sidecar_that_is_no_string_is_refused(run: RunDir, odd: str) -> None:
    write(run)
    sidecar = run.root / "pairs.meta.json"
    sidecar.write_text(sidecar.read_text().replace('"id"', odd))
    with refusal(ArtefactCorruptError, what="pairs.meta.json") as caught:
        read(run)
    assert re.search(r"TypeError: keys\b.*\bstr$", caught.value.got)


def test_a_newer_sidecar_format_asks_for_an_upgrade(run: RunDir) -> None:
    write(run)
    sidecar = run.root / "pairs.meta.json"
    sidecar.write_text(sidecar.read_text().replace('"sidecar_version": 1', '"sidecar_version": 2'))
    with refusal(RunError, what="sidecar_version", got="2", expected="1", fix="composer-replication"):
        read(run)


def test_data_without_its_sidecar_is_refused(run: RunDir) -> None:
    write(run)
    (run.root / "pairs.meta.json").unlink()
    with refusal(ArtefactCorruptError, what="pairs.jsonl", expected="pairs.meta.json"):
        read(run)


@pytest.mark.parametrize("name", [each.name for each in ARTEFACTS.values() if each.kind == "records"])
def test_a_missing_artefact_names_the_command_that_writes_it(run: RunDir, name: str) -> None:
    with pytest.raises(ArtefactNotFoundError, match=rf"\b{name}\.jsonl\b.*`{ARTEFACTS[name].command}`"):
        run.read_jsonl(name, schema="s")


def test_the_errors_of_a_missing_or_wrong_artefact_come_before_the_first_row_is_asked_for(run: RunDir) -> None:
    write(run)
    with refusal(ArtefactCorruptError, what="schema", got="pair", expected="site"):
        run.read_jsonl("pairs", schema="site", version=2)


def test_a_newer_version_asks_for_an_upgrade_and_an_older_one_is_read(run: RunDir) -> None:
    write(run)
    with refusal(RunError, what="schema", got="2", expected="1", fix="composer-replication"):
        run.read_jsonl("pairs", schema="pair")
    assert list(run.read_jsonl("pairs", schema="pair", version=3)) == ROWS
