"""Native operators and data-juicer's keep the same pairs in the same order, operator by operator."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest
from pair_records import NUM_PAIRS, pairs

from composer_replication.errors import InputError
from composer_replication.pairs.normalise import (
    TEXT_KEYS,
    DJNormalizer,
    _data_juicer_judge,
    _DocumentDeduplicator,
    _native_judge,
    _native_operator,
    _OperatorStep,
    _pair_text,
    _special_character_ratio,
)
from refusals import refusal

data_juicer = pytest.importorskip("data_juicer")
pytestmark = [pytest.mark.replaysim, pytest.mark.filterwarnings("ignore")]

CASES = {
    "text_length_filter": [
        {},
        {"min_len": 8, "max_len": 32000},
        {"min_len": 17, "max_len": 60, "min_closed_interval": False},
        {"min_len": 17, "max_len": 60, "max_closed_interval": False},
        {"min_len": 17, "max_len": 60, "reversed_range": True},
        {"min_len": 17, "max_len": 60, "reversed_range": True, "min_closed_interval": False},
        {"min_len": None, "max_len": 30},
    ],
    "words_num_filter": [
        {},
        {"min_num": 2, "max_num": 4096},
        {"min_num": 3, "max_num": 8},
        {"min_num": 3, "max_num": 8, "reversed_range": True},
        {"min_num": 0, "max_num": 0},
    ],
    "special_characters_filter": [
        {},
        {"max_ratio": 0.9},
        {"max_ratio": 0.5},
        {"min_ratio": 0.2, "max_ratio": 0.4},
        {"min_ratio": 1.0, "max_ratio": 1.0},
        {"max_ratio": 0.5, "max_closed_interval": False},
    ],
    "document_deduplicator": [
        {},
        {"lowercase": True},
        {"ignore_non_character": True},
        {"lowercase": True, "ignore_non_character": True},
    ],
}
EACH = [(name, parameters) for name, cases in CASES.items() for parameters in cases]
CHARACTERS = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]


def step(name: str, text_key: str = "chosen", **parameters: object) -> _OperatorStep:
    return _OperatorStep(operator=name, text_key=text_key, parameters=parameters, reason=name, where="test")


@cache
def texts(text_key: str) -> dict[str, str]:
    return {pair["state_id"]: _pair_text(pair, text_key) for pair in pairs()}


def kept_ids(judge, text_key: str) -> list[str]:
    return [state_id for state_id, text in texts(text_key).items() if judge(text)]


@pytest.mark.parametrize("text_key", TEXT_KEYS)
@pytest.mark.parametrize(("name", "parameters"), EACH, ids=lambda value: str(value))
def test_the_same_pairs_in_the_same_order(name, parameters, text_key, note):
    asked = step(name, text_key, **parameters)
    ours = kept_ids(_native_judge(asked), text_key)
    assert ours == kept_ids(_data_juicer_judge(asked), text_key)
    if text_key == "chosen":
        note(f"{name} {parameters}: {len(ours)} of {NUM_PAIRS} kept by both")


def test_the_cases_drop_some_pairs_and_keep_some():
    for name, parameters in EACH:
        assert 0 < len(kept_ids(_native_judge(step(name, **parameters)), "chosen")) < NUM_PAIRS, (name, parameters)


def test_every_character_is_special_for_both_or_for_neither():
    from data_juicer.ops.filter.special_characters_filter import SpecialCharactersFilter
    from data_juicer.utils.constant import Fields

    batch = {"chosen": CHARACTERS, Fields.stats: [{} for _ in CHARACTERS]}
    stats = SpecialCharactersFilter(text_key="chosen").compute_stats_batched(batch)[Fields.stats]
    theirs = [each["special_char_ratio"] for each in stats]
    assert [_special_character_ratio(each) for each in CHARACTERS] == theirs
    assert sum(theirs) == 1618


def test_every_character_is_ignored_by_both_keys_or_by_neither():
    from data_juicer.ops.deduplicator.document_deduplicator import DocumentDeduplicator as Theirs
    from data_juicer.utils.constant import HashKeys

    ours, theirs = _DocumentDeduplicator(ignore_non_character=True), Theirs(text_key="t", ignore_non_character=True)
    nothing = (ours.key("ab"), theirs.compute_hash({"t": "ab"})[HashKeys.hash])
    for character in CHARACTERS:
        text = f"a{character}b"
        same = (ours.key(text) == nothing[0], theirs.compute_hash({"t": text})[HashKeys.hash] == nothing[1])
        assert same[0] == same[1], hex(ord(character))


def test_the_defaults_are_data_juicers(note):
    from data_juicer.ops import OPERATORS

    for name in CASES:
        ours, theirs = _native_operator(step(name)), OPERATORS.modules[name](text_key="chosen")
        for field, value in vars(ours).items():
            if hasattr(theirs, field):
                assert getattr(theirs, field) == value, (name, field)
    note(f"data-juicer {data_juicer.__version__}")


@pytest.mark.parametrize("limit", [0.9, 0.5])
def test_whole_recipes_keep_the_same_pairs_and_count_the_same_drops(limit, tmp_path):
    from composer_replication.pairs.normalise import DEFAULT_RECIPE

    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(DEFAULT_RECIPE.read_text(encoding="utf-8").replace("0.9", str(limit)), encoding="utf-8")
    native, theirs = DJNormalizer(recipe), DJNormalizer(recipe, backend="data_juicer")
    ours = [pair.state_id for pair in native.normalize(pairs())]
    assert ours == [pair.state_id for pair in theirs.normalize(pairs())]
    assert native.counts == theirs.counts
    assert 0 < len(ours) < NUM_PAIRS
    assert sum(native.counts.values()) == NUM_PAIRS


def test_other_text_filters_of_data_juicer_run_in_a_recipe(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("process:\n  - alphanumeric_filter: {text_key: chosen, min_ratio: 0.5}\n", encoding="utf-8")
    with pytest.raises(InputError, match='backend="data_juicer"'):
        DJNormalizer(recipe)
    normalizer = DJNormalizer(recipe, backend="data_juicer")
    assert 0 < len(normalizer.normalize(pairs())) < NUM_PAIRS


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (
            "image_size_filter: {text_key: chosen}",
            {"got": "'image_size_filter'", "expected": "alphanumeric_filter"},
        ),
        (
            "text_length_filter: {text_key: chosen, min_length: 3}",
            {"got": "'min_length'", "expected": "min_len", "fix": "'min_len'"},
        ),
    ],
)
def test_what_data_juicer_would_ignore_or_download_is_refused(line, wanted, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"process:\n  - {line}\n", encoding="utf-8")
    with refusal(InputError, **wanted):
        DJNormalizer(recipe, backend="data_juicer")


def test_a_lone_surrogate_is_an_input_error_there(tmp_path):
    judge = _data_juicer_judge(step("document_deduplicator"))
    with pytest.raises(InputError, match="surrogate"):
        judge("a\ud800")


def test_why_each_call_has_its_own_statistics():
    """Two filters of one kind, run as data-juicer's executor runs them: the second never looks at its own text."""
    from data_juicer.ops.filter.text_length_filter import TextLengthFilter
    from data_juicer.utils.constant import Fields

    batch = {"chosen": ["long enough"], "rejected": ["no"], Fields.stats: [{}]}
    for key in ("chosen", "rejected"):
        operator = TextLengthFilter(min_len=8, text_key=key)
        assert list(operator.process_batched(operator.compute_stats_batched(batch))) == [True]
    assert not _data_juicer_judge(step("text_length_filter", "rejected", min_len=8))("no")


def test_nothing_is_written_by_running_the_operators(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    DJNormalizer(backend="data_juicer").normalize(pairs()[:50])
    assert list(Path().iterdir()) == []
