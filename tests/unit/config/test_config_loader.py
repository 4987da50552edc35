"""Loading: defaults, then the file, then overrides; every mistake told with its path and where it came from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from config_classes import Inner, Outer, Root

from composer_replication.config import describe, load, loads, option, section, table
from composer_replication.errors import ConfigError

FILE = """
top = 2
[outer]
count = 5
weights = {b = 2}
[outer.inner]
mode = "none"
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(FILE)
    return path


def test_without_a_file_the_defaults_hold() -> None:
    assert load(Root) == Root()


def test_the_file_wins_over_defaults_and_overrides_win_over_the_file(path: Path) -> None:
    config = load(Root, path, ["outer.count=7", "outer.inner.ratio=0.25", "outer.count=8"])
    assert config == Root(top=2, outer=Outer(count=8, weights={"b": 2.0}, inner=Inner(mode="none", ratio=0.25)))


def test_an_override_adds_to_a_table_and_replaces_a_value(path: Path) -> None:
    config = load(Root, path, ["outer.weights.a=3", 'outer.weights."b"=4', "outer={flag=true}"])
    assert config.outer == Outer(flag=True, count=5, weights={"a": 3.0, "b": 4.0}, inner=Inner(mode="none"))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("outer.flag=true", Outer(flag=True)),
        ("outer.name=simpo", Outer(name="simpo")),
        ("outer.name='quoted'", Outer(name="quoted")),
        ("outer.name= spaced out ", Outer(name="spaced out")),
        ("outer.name=a=b", Outer(name="a=b")),
        ("outer.name=", Outer(name="")),
        ("outer.name=C:\\dir", Outer(name="C:\\dir")),
        ("outer.name=one\ntop=9", Outer(name="one\ntop=9")),
        ("outer.name='one'\ntop=9", Outer(name="'one'\ntop=9")),
        ("outer.name=none", Outer(name="none")),
        ("outer.label=none", Outer(label=None)),
        ("outer.label='none'", Outer(label="none")),
        ("outer.limit=2", Outer(limit=2.0)),
        ("outer.names=['c']", Outer(names=("c",))),
        ("outer . count = 4", Outer(count=4)),
    ],
)
def test_the_value_of_an_override_is_toml_and_else_a_string(override: str, expected: Outer) -> None:
    assert load(Root, overrides=[override]).outer == expected


def test_an_override_can_unset_what_the_file_set() -> None:
    assert loads(Root, "outer.limit = 2.5", ["outer.limit=none"]).outer.limit is None


@pytest.mark.parametrize("override", ["outer.count", "=3", "two words=3", "#=1", "[outer]\ncount=1", "a..b=1"])
def test_an_override_that_is_none_is_told_what_one_looks_like(override: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(override)) + ".*expected a dotted key"):
        load(Root, overrides=[override])


@pytest.mark.parametrize(
    ("override", "path", "suggestion"),
    [
        ("outer.coutn=1", "outer.coutn", " Did you mean outer.count?"),
        ("outr.count=1", "outr", " Did you mean outer?"),
        ("outer.inner.moed=fast", "outer.inner.moed", " Did you mean outer.inner.mode?"),
        ("ratio=0.1", "ratio", " Did you mean outer.inner.ratio?"),
        ("innr.ratio=0.1", "innr", " Did you mean outer.inner?"),
        ("zzz=0.1", "zzz", ""),
    ],
)
def test_an_unknown_key_is_told_with_its_path_and_a_suggestion_or_the_known_keys(
    override: str, path: str, suggestion: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(Root, overrides=[override])
    expected = f"a known one.{suggestion}" if suggestion else "one of top, outer. `crf train --options` lists all keys."
    assert str(caught.value) == f"override {override!r}: unknown key: got {path}, expected {expected}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[outr]", "unknown key: got outr, .*Did you mean outer"),
        ("outer.count = true", r"outer\.count: got True \(bool\), expected int"),
        ("outer.inner.ratio = 1.0", r"outer\.inner\.ratio: got 1\.0 \(float\), expected float in \[0, 1\)"),
        ("outer = 3", "outer: got 3, expected a table"),
        ("outer.count.x = 3", r"outer\.count: got {'x': 3} \(dict\), expected int"),
        ("[outer.count]", r"outer\.count: got {} \(dict\), expected int"),
        ("[[outer]]", r"outer: got \[{}\], expected a table"),
        ("outer.name = 2024-01-01", r"outer\.name: got datetime\.date.*needs quotes"),
        ("outer.size = nan", r"outer\.size: got nan .*refused"),
        ("outer = = 1", "not valid TOML: .*line 1, column 9"),
    ],
)
def test_a_mistake_in_a_file_names_the_file_and_the_path(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(ConfigError, match=f"config file {re.escape(str(tmp_path / 'bad.toml'))}: {message}"):
        load(Root, tmp_path / "bad.toml")


def test_the_error_names_the_place_that_won(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^override 'outer\.count=x': outer\.count: got 'x' \(str\), expected int"):
        load(Root, path, ["outer.count=x"])


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml cannot be read: No such file"):
        load(Root, tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(Root, tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(ConfigError, match=r"latin\.toml: not valid UTF-8"):
        load(Root, tmp_path / "latin.toml")


@table("pair")
class Pair:
    low: int = option(0, "Low.")
    high: int = option(1, "High.")
    model: str = option("", "The model.")

    def _check(self) -> None:
        if self.low > self.high:
            raise ConfigError(f"pair.low: got {self.low}, expected at most pair.high, {self.high}")


@table("")
class WithPair:
    pair: Pair = section(Pair, "A pair.")


def test_options_that_are_wrong_together_name_every_place_they_came_from() -> None:
    with pytest.raises(ConfigError) as caught:
        loads(WithPair, "pair.low = 5", ["pair.model=m", "pair.high=4"])
    origins = "config text and override 'pair.model=m' and override 'pair.high=4'"
    assert str(caught.value) == f"{origins}: pair.low: got 5, expected at most pair.high, 4"


def test_the_description_lists_every_option_once_with_type_default_and_sentence() -> None:
    rows = {row.path: tuple(row)[1:] for row in describe(Root)}
    assert rows["top"] == ("int", "1", "At the top.")
    assert rows["outer.flag"] == ("bool", "false", "A switch.")
    assert rows["outer.limit"] == ("float > 0 or none", "unset", "A limit.")
    assert rows["outer.weights"] == ("table of float >= -10", "{a = 1.0}", "Weights.")
    assert rows["outer.inner.mode"] == ('"fast" | "none"', '"fast"', "A choice.")
    assert len(rows) == len(describe(Root)) == 1 + 8 + 2
    assert [row.default for row in describe(WithPair)] == ["0", "1", '""']


def test_a_config_built_by_hand_is_checked_and_converted_like_a_loaded_one() -> None:
    assert type(Outer(size=2).size) is float
    with pytest.raises(ConfigError, match=r"^outer\.inner\.ratio: got 1 \(int\), expected float in \[0, 1\)"):
        Inner(ratio=1)


def test_each_config_has_its_own_table() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Unchecked:  # without `table`, which would copy the table too
        weights: dict[str, float] = option({"a": 1.0}, "Weights.")  # noqa: RUF009

    for config_class in (Outer, Unchecked):
        config_class().weights["new"] = 1.0
        assert config_class().weights == {"a": 1.0}


def test_an_option_must_be_documented_and_an_optional_one_must_default_to_none() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Bare:
        size: int = 3

    @dataclass(frozen=True, kw_only=True)
    class HalfSet:
        size: int | None = option(3, "A size.")

    with pytest.raises(TypeError, match=r"Bare\.size: declare it with option"):
        load(Bare)
    with pytest.raises(TypeError, match=r"HalfSet\.size: an optional option defaults to None"):
        load(HalfSet)
