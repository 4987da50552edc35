"""Writing: the TOML text loads to an equal config, whatever it holds, and the hash follows the values."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from config_classes import Inner, Outer, Root
from hypothesis import example, given
from hypothesis import strategies as st

from composer_replication.config import config_hash, load, loads, option, to_toml, write_resolved
from composer_replication.config.values import value_text

text = st.text(st.characters(exclude_categories=("Cs",)))
finite = st.floats(allow_nan=False, allow_infinity=False)
int64 = st.integers(-(2**63), 2**63 - 1)
outers = st.builds(
    Outer,
    flag=st.booleans(),
    count=int64,
    size=finite,
    name=text,
    limit=st.none() | st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    label=st.none() | text,
    names=st.lists(text, max_size=3).map(tuple),
    weights=st.dictionaries(text, st.floats(-10, 10), max_size=3),
    inner=st.builds(Inner, ratio=st.floats(0, 0.99), mode=st.sampled_from(["fast", "none"])),
)
NASTY = Outer(
    name='"quotes" \\ \'\'\' """ # = [x]\r\n\t\x00\x1b\x7f\x85\u2028 é 漢 😀',
    label="",
    size=-0.0,
    limit=5e-324,
    count=-(2**63),
    names=("", "\n", "'"),
    weights={"": 1.0, "a.b": -0.0, "a b\n": 1e-300, '"': 2.0},
)


@given(st.builds(Root, top=int64, outer=outers))
@example(Root(outer=NASTY))
def test_what_is_written_loads_to_an_equal_config(config: Root) -> None:
    assert loads(Root, to_toml(config)) == config


@given(text)
@example(NASTY.name)
def test_any_text_survives_as_a_value_and_as_a_key(value: str) -> None:
    assert tomllib.loads(f"t = {value_text({value: value})}") == {"t": {value: value}}


@given(finite)
@example(-0.0)
@example(1e-300)
@example(1e16)
def test_any_float_survives_to_the_bit_and_stays_a_float(value: float) -> None:
    read = tomllib.loads(f"x = {value_text(value)}")["x"]
    assert type(read) is float
    assert read.hex() == value.hex()


def test_the_sign_of_a_negative_zero_survives_a_config() -> None:
    assert math.copysign(1.0, loads(Root, to_toml(Root(outer=NASTY))).outer.size) == -1.0


def test_the_text_is_plain_and_in_the_order_of_declaration() -> None:
    assert to_toml(Root(outer=Outer(name='a"b\n', weights={"b": 1.0, "a": 0.5}))) == (
        "top = 1\n"
        "\n"
        "[outer]\n"
        "flag = false\n"
        "count = 3\n"
        "size = 1.0\n"
        'name = "a\\"b\\n"\n'
        "# limit unset\n"
        "# label unset\n"
        'names = ["a", "b"]\n'
        "weights = {a = 0.5, b = 1.0}\n"
        "\n"
        "[outer.inner]\n"
        "ratio = 0.5\n"
        'mode = "fast"\n'
    )


def test_the_resolved_file_of_a_run_loads_to_its_config(tmp_path: Path) -> None:
    config = Root(outer=NASTY)
    path = write_resolved(config, tmp_path)
    assert list(tmp_path.iterdir()) == [path] == [tmp_path / "config.resolved.toml"]
    assert load(Root, path) == config


@given(outers, outers)
def test_the_hash_is_equal_when_the_written_configs_are_and_differs_when_they_differ(one: Outer, two: Outer) -> None:
    assert (config_hash(one) == config_hash(two)) == (to_toml(one) == to_toml(two))


def test_the_hash_does_not_see_how_a_number_was_written_or_a_table_was_ordered() -> None:
    assert config_hash(Outer(size=2)) == config_hash(Outer(size=2.0))
    one, two = Outer(weights={"a": 1.0, "b": 2.0}), Outer(weights={"b": 2, "a": 1})
    assert config_hash(one) == config_hash(two)


def test_the_hash_is_a_fixed_value_so_that_old_runs_can_be_recognised() -> None:
    # sha256 of 'mode = "fast"\nratio = 0.5'
    assert config_hash(Inner()) == "dfadee4045516fff6646463f62b14f893bc3f4ee713f45153a8e2f03eeb7b7e4"


def test_an_option_that_is_unset_does_not_change_the_hash_and_the_order_of_options_does_not_either() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Grown:
        mode: str = option("fast", "A choice.")
        added_later: int | None = option(None, "New.")
        ratio: float = option(0.5, "A number.")

    assert config_hash(Grown()) == config_hash(Inner())


def test_a_value_moved_between_two_options_changes_the_hash() -> None:
    assert config_hash(Outer(name="y", label="x")) != config_hash(Outer(name="x", label="y"))


@pytest.mark.parametrize("value", [b"bytes", {1, 2}, object()])
def test_what_toml_does_not_have_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match=rf"TOML.*\b{type(value).__name__}\b"):
        value_text(value)
