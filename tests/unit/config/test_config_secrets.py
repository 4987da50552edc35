"""No error of a config shows the value of a key whose name looks secret; and no nesting is too deep for an error."""

from __future__ import annotations

import re
import tomllib
import traceback
from pathlib import Path

import pytest
from config_classes import Root

from composer_replication.config import load, loads, option, section, table
from composer_replication.errors import ConfigError
from refusals import refusal

VALUE = "sk-live-4242"


@table("replay")
class Replay:
    api_key: str = option("", "A key.")
    pin_password: int = option(0, "A number.", at_least=0, at_most=9999)
    tokens: tuple[int, ...] = option((), "Numbers.")
    max_usd: float = option(5.0, "A limit.")
    tokenizer: int = option(0, "No secret.")


@table("")
class WithReplay:
    replay: Replay = section(Replay, "Replay.")


def error_of(config_class: type, text: str = "", *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        loads(config_class, text, overrides)
    assert VALUE not in "".join(traceback.format_exception(caught.value))
    return caught.value


@pytest.mark.parametrize(
    "name", ["api_key", "API_KEY", "hfToken", "client-secret", "dbPassword", "passwd", "Credentials"]
)
def test_the_value_of_an_unknown_secret_is_hidden(name: str) -> None:
    error = error_of(Root, "", f"replay.{name}={VALUE}")
    assert f"'replay.{name}=<hidden>'" in error.what
    assert error.got == "replay"


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        (f"replay.credentials.openai={VALUE}", "replay.credentials.openai=<hidden>"),
        (f'replay."\\u006bey"="{VALUE}"', 'replay."\\\\u006bey"=<hidden>'),
        (f"replay.api_key = '{VALUE}'", "replay.api_key=<hidden>"),
        (f"replay.headers={{api_key='{VALUE}'}}", "replay.headers=<hidden>"),
        (f"replay.headers=[{{api_key='{VALUE}'}}]", "replay.headers=<hidden>"),
        (f"replay.headers={{api_key={VALUE}}}", "replay.headers=<hidden>"),
        (f"replay.url=https://x?api_key={VALUE}", "replay.url=<hidden>"),
    ],
)
def test_a_secret_is_hidden_wherever_it_stands_in_an_override(override: str, shown: str) -> None:
    error = error_of(Root, "", override)
    assert f"'{shown}'" in error.what
    assert error.got == "replay"


@pytest.mark.parametrize(
    "override", [f"replay.api_key {VALUE}", f"replay.api_key: {VALUE}", f"my replay.api_key={VALUE}", f"a..key={VALUE}"]
)
def test_a_secret_is_hidden_in_an_override_that_is_none(override: str) -> None:
    error = error_of(Root, "", override)
    shown = override.partition("key")[0] + "key"
    for part in (error.what, error.got):
        assert f"'{shown}" in part
        assert "<hidden>" in part


def test_an_override_that_is_only_a_key_is_shown() -> None:
    error = error_of(Root, "", "replay.api_key")
    assert "'replay.api_key'" in error.what
    assert error.got == "'replay.api_key'"


@pytest.mark.parametrize(
    ("text", "key", "got", "expected"),
    [
        (f"replay.pin_password = '{VALUE}'", "replay.pin_password", "<hidden> (str)", "int in [0, 9999]"),
        (f"replay.tokens = ['{VALUE}']", "replay.tokens", "<hidden> (list)", "list of int"),
        (f"replay.api_key.x = '{VALUE}'", "replay.api_key", "<hidden> (dict)", "str"),
        (f"replay.max_usd.api_key = '{VALUE}'", "replay.max_usd", "{'api_key': '<hidden>'} (dict)", "float"),
        (f"[[replay]]\napi_key = '{VALUE}'", "replay", "[{'api_key': '<hidden>'}]", "table"),
        (f"replay = 'api_key={VALUE}'", "replay", "'api_key=<hidden>'", "table"),
    ],
)
def test_a_secret_of_the_wrong_type_is_hidden(text: str, key: str, got: str, expected: str) -> None:
    error = error_of(WithReplay, text)
    assert error.what.split()[-1] == key
    assert error.got == got
    assert expected in error.expected


def test_a_secret_out_of_its_range_is_hidden_in_both_places() -> None:
    parts = {"what": "replay.pin_password", "got": "<hidden> (int)", "expected": "int in [0, 9999]"}
    for make in (
        lambda: loads(WithReplay, "", ["replay.pin_password=424242"]),
        lambda: Replay(pin_password=424242),
    ):
        with refusal(ConfigError, **parts) as caught:
            make()
        assert "424242" not in str(caught.value)
    assert "'replay.pin_password=<hidden>'" in error_of(WithReplay, "", "replay.pin_password=424242").what


@pytest.mark.parametrize(
    ("quotation", "shown"),
    [
        (f"Bad line 'api_key = {VALUE}' (at line 2, column 3)", "Bad line <hidden> (at line 2, column 3)"),
        (f"Bad line api_key = {VALUE} (at line 2, column 3)", "Bad line api_key =<hidden> (at line 2, column 3)"),
        (f'Bad value "{VALUE}"', "Bad value <hidden>"),
        ("Expected '=' after a key (at end of document)", "Expected '=' after a key (at end of document)"),
    ],
)
def test_a_parser_that_quotes_a_line_with_a_secret_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch, quotation: str, shown: str
) -> None:
    def fail(_: str) -> dict[str, object]:
        raise tomllib.TOMLDecodeError(quotation)

    monkeypatch.setattr(tomllib, "loads", fail)
    error = error_of(WithReplay, f"[replay]\napi_key = {VALUE}")
    assert "TOML" in error.what
    assert error.what.endswith(f" {shown}")


@pytest.mark.parametrize(
    "line", [f"api_key = {VALUE}", f"api_key = '{VALUE}", f"api_key {VALUE}", f"key = '1' {VALUE}"]
)
def test_a_line_that_is_no_toml_is_named_and_not_quoted(line: str) -> None:
    error = error_of(Root, f"\n{line}")  # a place in the words of tomllib
    assert re.search(r"TOML.* \(at (line 2, column \d+|end of document)\)", error.what)


def test_what_is_no_secret_is_shown() -> None:
    error = error_of(WithReplay, "", "replay.tokenizer=bpe")
    assert "'replay.tokenizer=bpe'" in error.what
    assert error.got == "'bpe' (str)"


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 3000 + "]" * 3000, "a = " + "{b = " * 3000 + "1" + "}" * 3000, "a" + ".a" * 3000 + " = 1"]
)
def test_nesting_without_end_is_an_error_that_names_the_place(tmp_path: Path, text: str) -> None:
    (tmp_path / "deep.toml").write_text(text)
    with refusal(ConfigError, what=str(tmp_path / "deep.toml"), expected="100"):
        load(Root, tmp_path / "deep.toml")
    key = text.partition("=")[0].strip()
    with refusal(ConfigError, expected="100") as caught:
        load(Root, overrides=[text])
    assert caught.value.what.split()[-1] == key


@pytest.mark.parametrize("inside", ["", "1"])
def test_the_deepest_nesting_that_is_read_reaches_the_checks_of_its_key(inside: str) -> None:
    refused_value = error_of(Root, f"top = {'[' * 100}{inside}{']' * 100}")
    assert refused_value.what.split()[-1] == "top"
    assert refused_value.got.startswith("[[[")
    assert "100" in error_of(Root, f"top = {'[' * 101}{inside}{']' * 101}").expected


def test_a_number_with_thousands_of_digits_is_an_error_of_its_file() -> None:
    with refusal(ConfigError, what="TOML"):
        loads(Root, "top = " + "9" * 5000)
    with refusal(ConfigError, what="top", got=f"'{'9' * 5000}' (str)", expected="int"):
        load(Root, overrides=["top=" + "9" * 5000])
