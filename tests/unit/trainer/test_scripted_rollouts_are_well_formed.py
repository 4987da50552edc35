"""The scripts that judge the trainer's sites say what TRL really records: tokens, masks, messages, budgets, signals."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

import pytest
from trl import GRPOTrainer

from composer_replication.sites import KINDS, USUAL_BLAME
from data.scripted_rollouts import SCRIPTS, Found, batches, completion_ids, differences, expected_sites, turn_spans
from rollouts.tiny_policy import load_tokenizer, save_policy
from rollouts.trainers import make, questions, quick_config, spy
from rollouts.workshop import Workshop


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The tokenizer, and for every script by name what `_generate` returned and what its environment signalled."""
    policy = save_policy(tmp_path_factory.mktemp("policy"))
    config = quick_config(tmp_path_factory.mktemp("out"), per_device_train_batch_size=2, num_generations=2)
    trainer = make(GRPOTrainer, policy, config, train_dataset=questions(), environment_factory=Workshop)
    calls, found = spy(trainer, "_generate"), {}
    for batch in batches(load_tokenizer(policy)):
        batch.attach(trainer)
        trainer._generate_and_score_completions(batch.rows(2))
        _, ids, masks, messages, *_ = calls[-1][2]
        for index, script in enumerate(batch.scripts_of_rows(2)):
            signals = [(each["turn"], each["kind"]) for each in trainer.environments[index].signals]
            found.setdefault(script.name, []).append((ids[index], masks[index], messages[index], signals))
    return load_tokenizer(policy), found


def test_there_are_at_least_25_scripts_and_their_names_differ(note):
    assert len({script.name for script in SCRIPTS}) == len(SCRIPTS) >= 25
    taught = Counter(site.blame for script in SCRIPTS for site in script.sites)
    clean = sum(not script.sites for script in SCRIPTS)
    note(f"scripted rollouts: {len(SCRIPTS)}, {clean} without a failure, sites by blame {dict(taught)}")


def test_every_kind_is_of_the_taxonomy_and_carries_its_usual_blame():
    for script in SCRIPTS:
        for site in script.sites:
            assert site.kinds <= set(KINDS), script.name
            if site.blame != "unknown":
                usual = {USUAL_BLAME[kind] for kind in site.kinds}
                assert site.blame in usual, (script.name, usual)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_is_recorded_token_for_token(recorded, script):
    tokenizer, found = recorded
    first, second = found[script.name]
    assert first[:2] == second[:2]
    ids, mask, messages, signals = first
    assert ids == completion_ids(script, tokenizer)
    spans = turn_spans(script, tokenizer)
    assert runs_of_ones(mask) == [(span.start, span.end) for span in spans]
    assert [tuple(ids[span.start : span.end]) for span in spans] == [span.ids for span in spans]
    assert [message["role"] for message in messages].count("assistant") == len(spans)
    said = [message["content"] for message in messages if message["role"] == "tool"]
    assert said == [text for results in script.results for text in results]
    assert signals == list(script.signals)


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script.sites], ids=lambda script: script.name)
def test_the_tokens_of_a_site_end_with_the_end_of_turn_token(recorded, script):
    tokenizer, _ = recorded
    for site in expected_sites(script, tokenizer):
        assert site.ids[-1] == tokenizer.eos_token_id
        assert site.ids.count(tokenizer.eos_token_id) == 1


def test_some_ids_are_not_what_the_tokenizer_would_write_for_their_text(recorded):
    tokenizer, found = recorded
    ids = found["words split oddly"][0][0]
    assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) != ids


def test_the_judge_accepts_what_is_planted_and_names_what_is_not(recorded):
    tokenizer, _ = recorded
    script = next(script for script in SCRIPTS if script.name == "first and last of three fail")
    planted = expected_sites(script, tokenizer)
    right = [Found(*each[:4], kind=min(each.kinds), tool=each.tool) for each in planted]
    assert differences(script, tokenizer, right) == []
    assert differences(script, tokenizer, [*right, right[0]]) == []
    first = right[0]
    for wrong in (
        first._replace(start=first.start + 1),
        first._replace(end=first.end - 1, ids=first.ids[:-1]),
        first._replace(turn=1),
        first._replace(ids=(0, *first.ids[1:])),
        first._replace(kind="timeout"),
        first._replace(tool="add"),
    ):
        lines = differences(script, tokenizer, [wrong, right[1]])
        assert ["not planted" in lines[0], "not found" in lines[1], len(lines)] == [True, True, 2], wrong
    assert len(differences(script, tokenizer, [])) == 2


def test_a_failure_that_is_not_the_models_counts_only_when_all_are_asked_for(recorded):
    tokenizer, _ = recorded
    script = next(script for script in SCRIPTS if script.name == "tests fail")
    found = [Found(*each[:4]) for each in expected_sites(script, tokenizer)]
    assert differences(script, tokenizer, found, taught_only=False) == []
    assert len(differences(script, tokenizer, found)) == 1
    assert differences(script, tokenizer, []) == []


def runs_of_ones(mask):
    runs, position = [], 0
    for value, group in groupby(mask):
        length = len(list(group))
        if value:
            runs.append((position, position + length))
        position += length
    return runs
