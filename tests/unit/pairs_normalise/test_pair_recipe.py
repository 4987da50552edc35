"""Recipes: what is read, and what is refused with the name of what was meant."""

from __future__ import annotations

import contextlib
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.errors import ArtefactNotFoundError, InputError, MissingExtraError
from composer_replication.pairs.normalise.normalizer import DEFAULT_RECIPE, DJNormalizer
from composer_replication.pairs.normalise.operators import native_operator
from composer_replication.pairs.normalise.recipe import read_recipe, steps_of

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
    assert native_operator(steps[1]).min_num == 3


def test_two_steps_of_one_kind_are_counted_apart(recipe):
    steps = read_recipe(recipe(f"process:\n  - {LENGTH}\n  - {LENGTH}\n")).steps
    assert [step.reason for step in steps] == ["text_length_filter(chosen)", "text_length_filter(chosen)#2"]


BAD = {
    "": "got nothing, expected names with values",
    "[]": "got a list, expected names with values",
    "process: 3": "'process': got a int, expected a list of operators",
    "process: []": "expected a list of operators",
    "proces: []": "Did you mean 'process'",
    f"process: [{{{LENGTH}}}]\nopen_tracer: true": "got 'open_tracer'",
    "process: [text_length_filter]": "operator 1: got a str",
    f"process: [{{{LENGTH}, b: {{}}}}]": "expected one name with its parameters",
    "process: [{text_lenght_filter: {text_key: chosen}}]": "Did you mean 'text_length_filter'",
    "process: [{alphanumeric_filter: {text_key: chosen}}]": 'backend="data_juicer"',
    "process: [{text_length_filter: {text_key: chosen, min_length: 3}}]": "Did you mean 'min_len'",
    "process: [{text_length_filter: {text_key: choosen}}]": "Did you mean 'chosen'",
    "process: [{text_length_filter: {}}]": "'text_key': got none, expected one of chosen",
    "text_keys: [chosen, rejected]\nprocess: []": "expected a list of operators",
    "text_keys: [chosen, rejected]\nprocess: [{text_length_filter: {}}]": "'text_keys'",
    "process: [{text_length_filter: {text_key: chosen, min_len: '8'}}]": "'min_len': got '8', expected a number",
    "process: [{text_length_filter: {text_key: chosen, min_len: true}}]": "got True, expected a number",
    "process: [{text_length_filter: {text_key: chosen, max_len: .nan}}]": "got nan, expected a number",
    "process: [{text_length_filter: {text_key: chosen, reversed_range: 1}}]": "got 1, expected true or false",
    "process: [{document_deduplicator: {text_key: chosen, lowercase: 'yes'}}]": "got 'yes', expected true or false",
    "process: [{words_num_filter: {text_key: chosen, tokenization: true}}]": "expected false",
    "process: [{text_length_filter: {text_key: chosen, min_len: 1, min_len: 2}}]": "'min_len' twice",
    "process: [{3: {text_key: chosen}}]": "operator 1: got a dict",
    "process: [": "not valid YAML",
    "process: !!python/object/apply:os.system [ls]": "not valid YAML",
    "process: 2001-99-99": "month must be in 1..12",
    "a: &a [*a]": "got 'a'",
    "process: &a [*a]": "operator 1: got a list",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_recipe_is_an_input_error_that_says_what_was_meant(text, recipe):
    with pytest.raises(InputError) as caught:
        DJNormalizer(recipe(text))
    assert BAD[text] in str(caught.value)


def test_files_that_are_no_recipes(recipe, tmp_path):
    with pytest.raises(InputError, match="not valid YAML"):
        read_recipe(recipe(b"\xff\xfe\x00"))
    with pytest.raises(InputError, match="more than 65536 bytes"):
        read_recipe(recipe("# " * 65536))
    with pytest.raises(InputError, match="deeper nesting"):
        read_recipe(recipe("[" * 30_000))
    with pytest.raises(InputError, match="cannot be read"):
        read_recipe(tmp_path)


def test_a_bomb_of_aliases_is_read_in_no_time(recipe):
    lines = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60))]
    with pytest.raises(InputError, match="expected one of"):
        read_recipe(recipe("\n".join(lines)))


def test_a_missing_recipe_is_a_file_not_found_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.yaml: no such file"):
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
    with pytest.raises(MissingExtraError, match=rf"{missing} is not installed.*composer-replication\[replaysim\]"):
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
        for step in steps_of(parsed, "recipe"):
            native_operator(step).judge()("any text")
