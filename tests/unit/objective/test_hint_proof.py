"""Hint proof: its log-probs equal a dense computation, and only hints that do more than any text are kept."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config
from window_checks import renderer_of

from chat_templates import SMALL_FAMILIES
from composer_replication.batch.hint_placement import teacher_context
from composer_replication.errors import InputError
from composer_replication.trainer.objective import hint_proof
from composer_replication.trainer.objective.hint_proof import ProvableSite, prove_hints
from session_pieces import Session

HINTS = {"cmd_not_found": "The program is called pytest.", "file_not_found": "List the folder before you read."}


def sites_of(family, words=""):
    renderer = renderer_of(family)
    found = []
    for number, (kind, hint) in enumerate(HINTS.items()):
        session = Session().user("Go on.")
        session.call("Bash", "error", words=words, command=f"pytset {number}")
        session.says("Then not.")
        rendered = renderer.render(session.conversation())[-1]
        found += [
            ProvableSite(site_id=f"{kind}-{at}", rendered=rendered, span=span, hint=hint, kind=kind)
            for at, span in enumerate(rendered.spans)
        ]
    size = len(renderer.tokenizer)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=size, num_key_value_heads=2, initializer_range=0.3, **small)
    return renderer, AutoModelForCausalLM.from_config(config).double().eval(), found


def dense(model, ids, start):
    """The mean a token."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, start - 1 : -1]
    return float(logits.log_softmax(-1).gather(-1, torch.tensor(ids[start:])[:, None]).mean())


@pytest.mark.parametrize("family", SMALL_FAMILIES)
def test_the_three_log_probs_are_those_of_the_call_in_each_context(family):
    renderer, model, sites = sites_of(family)
    proofs = prove_hints(model, renderer, sites)
    for site, proof in zip(sites, proofs, strict=True):
        span = site.span
        start = span.start if span.call_start is None else span.call_start
        end = span.end if span.call_end is None else span.call_end
        own = site.rendered.ids[start:end]
        assert proof.num_tokens == len(own)
        assert proof.without_hint == pytest.approx(dense(model, site.rendered.ids[:end], start), rel=1e-6)
        others = {each.kind: each.hint for each in sites if each.kind != site.kind}
        for hint, got in ((site.hint, proof.with_hint), (others[proof.other_kind], proof.with_other_hint)):
            context = teacher_context(renderer, site.rendered, span, hint)
            ids = context.ids[: len(context.ids) - (span.end - end)]
            assert ids[-len(own) :] == own
            assert got == pytest.approx(dense(model, ids, len(ids) - len(own)), rel=1e-6)
        assert proof.advantage == pytest.approx(proof.with_other_hint - proof.with_hint)
        assert proof.is_kept == (proof.advantage > 0)


@pytest.mark.parametrize("part", ["turn", "call"])
def test_words_before_a_call_are_left_out_where_they_are_taught_with_it(part):
    """They have decided: the call is asked for as if it were made at once, with each hint and without."""
    renderer, model, sites = sites_of("folding", words="I run it now.")
    spoken = [site for site in sites if site.span.call_start is not None]
    for site, proof in zip(spoken, prove_hints(model, renderer, spoken, part=part), strict=True):
        span = site.span
        num_words = span.call_start - span.start
        assert num_words >= 4
        own = site.rendered.ids[span.call_start : span.call_end]
        for hint, got in (("", proof.without_hint), (site.hint, proof.with_hint)):
            context = teacher_context(renderer, site.rendered, span, hint)
            ids = context.ids[: len(context.ids) - (span.end - span.call_end)]
            words = slice(len(ids) - len(own) - num_words, len(ids) - len(own))
            if part == "turn":
                del ids[words]
            assert got == pytest.approx(dense(model, ids, len(ids) - len(own)), rel=1e-6)


def test_a_margin_drops_sites_by_name():
    renderer, model, sites = sites_of("llama3")
    advantages = sorted(proof.advantage for proof in prove_hints(model, renderer, sites))
    assert advantages[-1] > 0
    at_the_top = prove_hints(model, renderer, sites, margin=advantages[-1])
    assert Counter(proof.reason for proof in at_the_top) == {hint_proof.HINT_DOES_NOTHING: len(sites)}
    just_below = prove_hints(model, renderer, sites, margin=advantages[-1] * 0.999)
    assert Counter(proof.reason for proof in just_below)["kept"] == 1


def test_an_empty_hint_does_nothing_and_is_not_kept():
    renderer, model, sites = sites_of("llama3")
    silent = [ProvableSite(site_id=s.site_id, rendered=s.rendered, span=s.span, hint="", kind=s.kind) for s in sites]
    for proof in prove_hints(model, renderer, silent):
        assert proof.without_hint == proof.with_hint == proof.with_other_hint
        assert not proof.is_kept


def test_alone_a_site_cannot_be_proved():
    renderer, model, sites = sites_of("llama3")
    (proof,) = prove_hints(model, renderer, sites[:1])
    assert (proof.is_kept, proof.reason, proof.advantage) == (False, hint_proof.NO_OTHER_KIND, None)
    assert prove_hints(model, renderer, []) == []
    with pytest.raises(InputError, match="margin"):
        prove_hints(model, renderer, sites, margin=-1.0)


def test_a_shorter_context_is_cut_on_the_left_only():
    renderer, model, sites = sites_of("llama3")
    whole, cut = (prove_hints(model, renderer, sites, max_context=most) for most in (None, 6))
    assert [proof.num_tokens for proof in whole] == [proof.num_tokens for proof in cut]
    assert [proof.without_hint for proof in whole] != [proof.without_hint for proof in cut]


def test_the_same_seed_draws_the_same_others():
    renderer, model, sites = sites_of("llama3")
    assert prove_hints(model, renderer, sites, seed=3) == prove_hints(model, renderer, sites, seed=3)


def test_known_proofs_are_those_of_their_sites_whatever_their_order():
    renderer, model, sites = sites_of("llama3")
    proofs, made = prove_hints(model, renderer, sites), []
    again = prove_hints(model, renderer, sites, stored=[proofs[2], proofs[0]], on_proof=made.append)
    assert again == proofs
    assert [proof.site_id for proof in made] == [site.site_id for at, site in enumerate(sites) if at not in (0, 2)]
