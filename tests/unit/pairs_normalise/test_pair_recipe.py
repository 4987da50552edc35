"""Recipes: what is read, and what is refused with the name of what was meant."""

from __future__ import annotations

import contextlib
import errno
import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.errors import ArtefactNotFoundError, InputError, MissingExtraError
from composer_replication.pairs.normalise import (
    DEFAULT_RECIPE,
    DJNormalizer,
    _native_operator,
    _parse_steps,
    read_recipe,
)
from refusals import refusal

LENGTH = "text_length_filter: {text_key: chosen}"


@pytest.fixture
def recipe(tmp_path):
    def write(text: str | bytes):
        path = tmp_path / "recipe.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_the_shipped_recipe_says_the_known_values():
    steps = [(step.operator, step.text_key, dict(step.parameters)) for step in read_recipe(DEFAULT_RECIPE).steps]
    limits = [
        ("text_length_filter", {"min_len": 8, "max_len": 32000}),
        ("words_num_filter", {"min_num": 2, "max_num": 4096}),
        ("special_characters_filter", {"max_ratio": 0.9}),
    ]
    wanted = [(name, side, values) for name, values in limits for side in ("chosen", "rejected")]
    assert steps == [*wanted, ("document_deduplicator", "state_chosen_rejected", {"lowercase": True})]


def test_a_recipe_may_come_from_data_juicer_with_what_its_executor_reads(recipe):
    text = f"""
project_name: pairs
dataset_path: in.jsonl
export_path: out.jsonl
np: 4
text_keys: [rejected]
process:
  - {LENGTH}
  - words_num_filter: {{min_num: 3, num_proc: 8, batch_size: 100}}
  - document_deduplicator:
"""
    steps = read_recipe(recipe(text)).steps
    assert [step.text_key for step in steps] == ["chosen", "rejected", "rejected"]
    assert _native_operator(steps[1]).min_num == 3


def test_two_steps_of_one_kind_are_counted_apart(recipe):
    steps = read_recipe(recipe(f"process:\n  - {LENGTH}\n  - {LENGTH}\n")).steps
    assert [step.reason for step in steps] == ["text_length_filter(chosen)", "text_length_filter(chosen)#2"]


BAD = {
    "": {"expected": "`name: value`"},
    "[]": {"got": "list", "expected": "`name: value`"},
    "process: 3": {"what": "'process'", "got": "int", "expected": "list"},
    "process: []": {"what": "'process'", "expected": "list"},
    "proces: []": {"got": "'proces'", "fix": "'process'"},
    f"process: [{{{LENGTH}}}]\nopen_tracer: true": {"got": "'open_tracer'"},
    "process: [text_length_filter]": {"what": "operator 1", "got": "str"},
    f"process: [{{{LENGTH}, b: {{}}}}]": {"what": "operator 1", "got": "['b', 'text_length_filter']"},
    "process: [{text_lenght_filter: {text_key: chosen}}]": {"fix": "'text_length_filter'"},
    "process: [{alphanumeric_filter: {text_key: chosen}}]": {"fix": 'backend="data_juicer"'},
    "process: [{text_length_filter: {text_key: chosen, min_length: 3}}]": {"got": "'min_length'", "fix": "'min_len'"},
    "process: [{text_length_filter: {text_key: choosen}}]": {"what": "'text_key'", "fix": "'chosen'"},
    "process: [{text_length_filter: {}}]": {"what": "'text_key'", "expected": "chosen, rejected, state"},
    "text_keys: [chosen, rejected]\nprocess: []": {"what": "'process'", "expected": "list"},
    "text_keys: [chosen, rejected]\nprocess: [{text_length_filter: {}}]": {"what": "'text_keys'"},
    "process: [{text_length_filter: {text_key: chosen, min_len: '8'}}]": {"what": "'min_len'", "got": "'8'"},
    "process: [{text_length_filter: {text_key: chosen, min_len: true}}]": {"what": "'min_len'", "got": "True"},
    "process: [{text_length_filter: {text_key: chosen, max_len: .nan}}]": {"what": "'max_len'", "got": "nan"},
    "process: [{text_length_filter: {text_key: chosen, reversed_range: 1}}]": {"what": "'reversed_range'", "got": "1"},
    "process: [{document_deduplicator: {text_key: chosen, lowercase: 'yes'}}]": {"what": "'lowercase'", "got": "'yes'"},
    "process: [{words_num_filter: {text_key: chosen, tokenization: true}}]": {"got": "true", "expected": "false"},
    "process: [{text_length_filter: {text_key: chosen, min_len: 1, min_len: 2}}]": {"got": "'min_len'"},
    "process: [{3: {text_key: chosen}}]": {"what": "operator 1", "got": "dict"},
    "process: [": {"what": "line 1, column 11"},
    "process: !!python/object/apply:os.system [ls]": {"what": "python/object/apply:os.system"},
    "process: 2001-99-99": {"what": "month must be in 1..12"},
    "a: &a [*a]": {"got": "'a'"},
    "process: &a [*a]": {"what": "operator 1", "got": "list"},
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_recipe_is_an_input_error_that_says_what_was_meant(text, recipe):
    with refusal(InputError, **BAD[text]):
        DJNormalizer(recipe(text))


def test_files_that_are_no_recipes(recipe, tmp_path):
    with refusal(InputError, what="#x0000"):
        read_recipe(recipe(b"\xff\xfe\x00"))
    with refusal(InputError, what="recipe.yaml", got="65536 bytes"):
        read_recipe(recipe("# " * 65536))
    with refusal(InputError, what="recipe.yaml") as caught:
        read_recipe(recipe("[" * 30_000))
    assert isinstance(caught.value.__context__, RecursionError)
    with refusal(InputError, what=os.strerror(errno.EISDIR)):
        read_recipe(tmp_path)


def test_a_bomb_of_aliases_is_read_in_no_time(recipe):
    lines = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60))]
    with refusal(InputError, got="'a0'", expected="process"):
        read_recipe(recipe("\n".join(lines)))


def test_a_missing_recipe_is_a_file_not_found_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.yaml\b.*\brecipe_path\b"):
        DJNormalizer(tmp_path / "nowhere.yaml")
    with pytest.raises(ArtefactNotFoundError):
        DJNormalizer(str(tmp_path / "nowhere.yaml"))


def test_without_yaml_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(MissingExtraError, match=r"composer-replication\[replaysim\]"):
        DJNormalizer()


@pytest.mark.parametrize("missing", ["data_juicer", "ray", "aiohttp"])
def test_without_data_juicer_or_what_it_would_install_the_extra_is_named(monkeypatch, missing):
    for name in ("data_juicer", "ray", "aiohttp"):
        monkeypatch.setitem(sys.modules, name, None if name == missing else sys)
    with pytest.raises(MissingExtraError, match=rf"\b{missing}\b.*composer-replication\[replaysim\]"):
        DJNormalizer(backend="data_juicer")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(["text_length_filter", "words_num_filter", "document_deduplicator", "x"])
PARAMETERS = st.dictionaries(
    st.sampled_from(["text_key", "min_len", "lowercase", "lang", "np"]), VALUES | st.just("chosen"), max_size=4
)


@given(
    st.fixed_dictionaries({"process": VALUES | st.lists(st.dictionaries(NAMES, PARAMETERS, max_size=2), max_size=3)})
)
def test_any_parsed_yaml_is_steps_or_an_input_error(parsed):
    with contextlib.suppress(InputError):
        for step in _parse_steps(parsed, "recipe"):
            _native_operator(step).judge()("any text")
