"""Hint, then what worked: what is learnt is the correction, after the session's own words and the hint."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from offline_pieces import arguments, logged, renderer, sessions_of, tiny
from safetensors.torch import load_file

from composer_replication.errors import InputError
from composer_replication.trainer.sessions.dataset import HINTED_CORRECTIONS, OTHER_CONTEXT, _with_hinted_corrections
from composer_replication.trainer.warmup import warm_up
from refusals import refusal

SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
MADE = [
    replace(each, pairs=[pair._replace(source="correction") for pair in each.pairs])
    for each in (logged(number) for number in range(3))
]


def new_sequences(session, **options):
    more = _with_hinted_corrections(renderer(), session, **options)
    return more, more.sequences[len(session.sequences) :]


@pytest.mark.parametrize("placement", ["before_turn", "in_last_message"])
def test_the_sequence_is_the_session_the_hint_and_the_correction(placement):
    for session in sessions_of(made=MADE).rendered:
        (site,), (pair,) = session.sites, session.pairs
        more, (made,) = new_sequences(session, placement=placement)
        (span,) = [each for each in made.spans if each.turn_id in more.responses - session.responses]
        assert span is made.spans[-1]
        chosen = pair.chosen.ids(pair.rendered.ids)
        assert made.ids[span.start : span.end] == chosen[pair.chosen.start :]
        assert span.end == len(made.ids)
        added = len(made.ids) - len(chosen)
        text = renderer().tokenizer.decode(made.ids[: span.start])
        assert added > 0
        assert site.hint in text
        assert site.hint not in renderer().tokenizer.decode(chosen)
        # Without the hint's tokens it is the pair's own context.
        first = next(at for at, (mine, its) in enumerate(zip(made.ids, chosen, strict=False)) if mine != its)
        assert made.ids[:first] + made.ids[first + added :] == chosen
        for before in made.spans[:-1]:
            assert made.ids[before.start : before.end] == site.rendered.ids[before.start : before.end]


def test_only_corrections_of_the_sites_own_turn_count():
    (session,) = sessions_of(made=MADE[:1]).rendered
    teachers = replace(session, pairs=[pair._replace(kind="teachers Bash Bash") for pair in session.pairs])
    elsewhere = replace(session, pairs=[pair._replace(turn_id="another") for pair in session.pairs])
    for other in (teachers, elsewhere, replace(session, sites=[])):
        assert _with_hinted_corrections(renderer(), other).sequences == session.sequences
    moved = [pair._replace(chosen=pair.chosen._replace(num_shared=0)) for pair in session.pairs]
    assert _with_hinted_corrections(renderer(), replace(session, pairs=moved)).drops[f"lm_ce: {OTHER_CONTEXT}"] == 1


def test_a_warm_up_learns_them_and_the_steps_after_it_do_not(tmp_path):
    sessions = sessions_of(made=MADE)
    plain, more = sessions.only_responses(), sessions.only_responses(hinted_corrections=True)
    assert more.counts[HINTED_CORRECTIONS] == len(MADE)
    new = sum(len(pair.chosen.rest) for each in sessions.rendered for pair in each.pairs)
    assert more.channels["lm_ce"] - plain.channels["lm_ce"] == new
    assert more.digest != plain.digest
    folders = [tmp_path / "plain", tmp_path / "hinted"]
    for folder in folders:
        warm_up(tiny(), arguments(folder, **SAVING), sessions, hinted_corrections=folder is folders[1])
    first, second = (load_file(folder / "checkpoint-2" / "model.safetensors") for folder in folders)
    assert any(not torch.equal(value, second[name]) for name, value in first.items())


def test_a_run_without_corrections_says_so(tmp_path):
    bare = sessions_of(made=[replace(each, pairs=[]) for each in MADE])
    with refusal(InputError, fix="train.warmup.hinted_corrections"):
        warm_up(tiny(), arguments(tmp_path, max_steps=2), bare, hinted_corrections=True)
