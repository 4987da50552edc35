"""Loading: defaults, then the file, then overrides; every mistake told with its path and where it came from."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from config_classes import Inner, Outer, Root

from composer_replication.config import describe, load, loads, option, section, table
from composer_replication.errors import ConfigError, explain
from refusals import refusal

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
    with refusal(ConfigError, what=repr(override), expected="loss.alpha_sdpo=0.2"):
        load(Root, overrides=[override])


@pytest.mark.parametrize(
    ("override", "path", "suggestion"),
    [
        ("outer.coutn=1", "outer.coutn", "outer.count"),
        ("outr.count=1", "outr", "outer"),
        ("outer.inner.moed=fast", "outer.inner.moed", "outer.inner.mode"),
        ("ratio=0.1", "ratio", "outer.inner.ratio"),
        ("innr.ratio=0.1", "innr", "outer.inner"),
        ("zzz=0.1", "zzz", None),
    ],
)
def test_an_unknown_key_is_told_with_its_path_and_a_suggestion_or_the_known_keys(
    override: str, path: str, suggestion: str | None
) -> None:
    with refusal(ConfigError, what=repr(override)) as caught:
        load(Root, overrides=[override])
    assert caught.value.got == path
    if suggestion is None:
        assert "top, outer" in caught.value.expected
        assert "`crf train --options`" in caught.value.fix
    else:  # a list of dozens would hide the one that was meant
        assert re.findall(r"outer[.\w]*", caught.value.fix) == [suggestion]
        assert "top" not in caught.value.expected


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[outr]", {"got": "outr", "fix": "outer"}),
        ("outer.count = true", {"what": "outer.count", "got": "True (bool)", "expected": "int"}),
        ("outer.inner.ratio = 1.0", {"what": "outer.inner.ratio", "got": "1.0 (float)", "expected": "float in [0, 1)"}),
        ("outer = 3", {"what": "outer", "got": "3", "expected": "table"}),
        ("outer.count.x = 3", {"what": "outer.count", "got": "{'x': 3} (dict)", "expected": "int"}),
        ("[outer.count]", {"what": "outer.count", "got": "{} (dict)", "expected": "int"}),
        ("[[outer]]", {"what": "outer", "got": "[{}]", "expected": "table"}),
        ("outer.name = 2024-01-01", {"what": "outer.name", "got": "datetime.date", "expected": "str", "fix": "quote"}),
        ("outer.size = nan", {"what": "outer.size", "got": "nan", "expected": "float", "fix": "NaN"}),
        ("outer = = 1", {"what": "line 1, column 9"}),
    ],
)
def test_a_mistake_in_a_file_names_the_file_and_the_path(tmp_path: Path, text: str, parts: dict[str, str]) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with refusal(ConfigError, **parts) as caught:
        load(Root, tmp_path / "bad.toml")
    assert str(tmp_path / "bad.toml") in caught.value.what


def test_the_error_names_the_place_that_won(path: Path) -> None:
    with refusal(ConfigError, what="'outer.count=x'", got="'x' (str)", expected="int") as caught:
        load(Root, path, ["outer.count=x"])
    assert str(path) not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    for path, said in (
        (tmp_path / "absent.toml", os.strerror(errno.ENOENT)),
        (tmp_path, os.strerror(errno.EISDIR)),
        (tmp_path / "latin.toml", "UTF-8"),
    ):
        with refusal(ConfigError, what=str(path)) as caught:
            load(Root, path)
        assert said in caught.value.what


@table("pair")
class Pair:
    low: int = option(0, "Low.")
    high: int = option(1, "High.")
    model: str = option("", "The model.")

    def _check(self) -> None:
        if self.low > self.high:
            raise ConfigError(explain("pair.low", got=self.low, expected=f"at most pair.high, {self.high}"))


@table("")
class WithPair:
    pair: Pair = section(Pair, "A pair.")


def test_options_that_are_wrong_together_name_every_place_they_came_from() -> None:
    with refusal(ConfigError, what="pair.low", got="5", expected="at most pair.high, 4") as caught:
        loads(WithPair, "pair.low = 5", ["pair.model=m", "pair.high=4"])
    assert re.search(r"\btext\b.*'pair\.model=m'.*'pair\.high=4'.*\bpair\.low$", caught.value.what)


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
    with refusal(ConfigError, what="outer.inner.ratio", got="1 (int)", expected="float in [0, 1)"):
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

    with pytest.raises(TypeError, match=r"Bare\.size\b.*option\(\)"):
        load(Bare)
    with pytest.raises(TypeError, match=r"HalfSet\.size\b.*None"):
        load(HalfSet)
