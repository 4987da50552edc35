"""Wrong hints in batches: keys half there or misaligned, sessions in windows, packs, and which hint is wrong."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from switch_cases import channel_2, flat_of, sites, tree_of
from window_checks import asked, check_sites, model_for, of_channel, path, renderer_of

from composer_replication.batch.hint_placement import PLACEMENTS, draw_unrelated_hints, teacher_context
from composer_replication.batch.tree_batch import SessionTargets, denominators_of, pack_batches
from composer_replication.errors import AlignmentError, BatchKeyError, InputError, ShapeError
from composer_replication.trainer.objective import hint_proof
from composer_replication.trainer.objective.row_weighting import RowWeighting
from refusals import refusal
from tiny_models import build

CONTRAST = RowWeighting(contrast=1.0)


# Keys of a flat batch.


@pytest.fixture(scope="module")
def model():
    return build("qwen2-tied").double()


def flat(**changes):
    batch = flat_of(sites("some")) | changes
    return {key: value for key, value in batch.items() if value is not None}


@pytest.mark.parametrize("missing", ["ctx_contrast_input_ids", "sdpo_contrast_index"])
def test_half_a_contrast_is_an_error_and_none_is_counted(model, missing):
    with pytest.raises(BatchKeyError, match=missing):
        channel_2(model, flat(**{missing: None}), CONTRAST)
    none = dict.fromkeys(("ctx_contrast_input_ids", "ctx_contrast_attention_mask", "sdpo_contrast_index"))
    assert channel_2(model, flat(**none), CONTRAST).counts["sites_without_contrast"] == 5


def test_rows_of_the_contrast_must_predict_the_same_tokens(model):
    index = flat()["sdpo_contrast_index"]
    shifted = torch.where(index == -1, index, index + torch.tensor([0, -1]))
    first = shifted[shifted[:, 0] != -1][0].tolist()
    with refusal(AlignmentError, what=str(tuple(first))):
        channel_2(model, flat(sdpo_contrast_index=shifted), CONTRAST)
    with pytest.raises(ShapeError, match="sdpo_contrast_index"):
        channel_2(model, flat(sdpo_contrast_index=index[:-1]), CONTRAST)
    half = index.clone()
    half[0, 0] = -1
    with pytest.raises(InputError, match="sdpo_contrast_index"):
        channel_2(model, flat(sdpo_contrast_index=half), CONTRAST)
    with pytest.raises(InputError, match="ctx_contrast_input_ids"):
        channel_2(model, flat(ctx_contrast_input_ids=flat()["ctx_contrast_input_ids"] + 97), CONTRAST)
    with pytest.raises(BatchKeyError, match="ctx_contrast_input_ids"):
        channel_2(model, flat(ctx_contrast_ids=index), CONTRAST)


def test_wrong_hints_without_right_ones_are_an_error(model):
    batch = {key: value for key, value in flat().items() if "teacher" not in key and key != "sdpo_student_index"}
    with pytest.raises(BatchKeyError, match="contrast"):
        channel_2(model, batch, CONTRAST)


def test_a_switch_that_is_off_does_not_look_at_wrong_hints(model):
    plain = channel_2(model, flat_of(sites("none")), None)
    assert torch.equal(channel_2(model, flat(), None).total, plain.total)
    assert channel_2(model, flat(), RowWeighting()).counts == plain.counts


# Trees.


def test_a_contrast_is_given_whole_and_aligned():
    site = sites()[0]
    given = (site.ids, site.start, site.end, site.context(site.hint), site.start + len(site.hint))
    with refusal(InputError, what="contrast", got="contrast_ids"):
        SessionTargets().add_site(*given, contrast_ids=site.context(site.wrong))
    with refusal(AlignmentError, got=str(site.wrong[1:])[:-1]):
        SessionTargets().add_site(*given, contrast_ids=site.context(site.wrong), contrast_start=site.start)


def test_packed_trees_have_the_contrast_and_the_positions_of_each(model):
    trees = [tree_of(sites(kind)) for kind in ("some", "none", "all")]
    packed = pack_batches(trees)
    assert packed.sites_without_contrast == 2 + 5
    weighting = RowWeighting(0.9, True, 0.7, 1.4, normalise=False)
    denominators = denominators_of(trees)
    parts = [channel_2(model, tree, weighting, denominators=denominators) for tree in trees]
    together = channel_2(model, packed, weighting)
    torch.testing.assert_close(together.total, sum(part.total for part in parts), rtol=1e-6, atol=1e-9)
    assert together.counts["sites_without_contrast"] == 7
    by_hand_made = dataclasses.replace(trees[0], site_position=None)
    assert pack_batches([by_hand_made, trees[1]]).site_position is None


def with_wrong_hints(session, every=1):
    """The same session; of its sites each, or every second, has the hint of the next as a wrong one."""
    changed = [
        site._replace(unrelated_hint=session.sites[number - 1].hint + " No." if number % every == 0 else None)
        for number, site in enumerate(session.sites)
    ]
    return session._replace(sites=changed)


def check_contrast(session, window, placement):
    """Rows below a wrong hint see its context, and predict the site's tokens. Returns their number."""
    tree, sees, contrast = window.batch.tree, window.batch.tree.dense_mask(), window.batch.contrast
    rows = {} if contrast is None else dict(zip(contrast.numbers.tolist(), contrast.rows.tolist(), strict=True))
    at, found = 0, 0
    for number in of_channel(window, "sdpo_jsd"):
        span, _, wrong = session.sites[number]
        size = span.end - span.start
        own = [rows[row] for row in range(at, at + size) if row in rows]
        assert len(own) in (0, size)
        if own:
            context = teacher_context(*session[:2], span, wrong, placement=placement, first=window.first)
            assert path(tree, sees, own[-1]) == context.ids[: context.start + size - 1]
            assert [int(tree.position_ids[row]) for row in own] == list(
                range(context.start - 1, context.start - 1 + size)
            )
        found += len(own)
        at += size
    assert found == len(rows)
    return found


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("family", ["llama3", "gemma", "mistral_tools"])
def test_sessions_with_wrong_hints_stay_within_the_budget_and_aligned(family, placement):
    num_rows = 0
    for seed in range(2):
        session = with_wrong_hints(asked(family, seed, num_sites=5), every=1 + seed % 2)
        for budget in (150, 400, 5_000):
            made = session.batches(budget=budget, overlap=40, placement=placement)
            assert all(len(window.batch.tree) <= budget for window in made.windows)
            for window in made.windows:
                check_sites(session, window, placement)
                num_rows += check_contrast(session, window, placement)
            placed = [number for window in made.windows for number in of_channel(window, "sdpo_jsd")]
            without = sum(window.batch.sites_without_contrast for window in made.windows)
            counted = {k: n for k, n in made.counts.items() if k.startswith(("no_wrong", "wrong_hint"))}
            assert sum(counted.values()) == without
            assert counted.get("no_wrong_hint", 0) == sum(session.sites[n].unrelated_hint is None for n in placed)
    assert num_rows


def test_a_wrong_hint_that_does_not_fit_is_dropped_and_its_site_stays():
    session = asked("llama3", seed=4, num_sites=3, num_pairs=0, hint="Short.")
    long, silent, fine = "long " * 200, " \n ", "Brief."
    sites_with = [
        site._replace(unrelated_hint=hint) for site, hint in zip(session.sites, (long, silent, fine), strict=True)
    ]
    changed = session._replace(sites=sites_with)
    plain, made = session.batches(budget=180, overlap=20), changed.batches(budget=180, overlap=20)
    assert made.dropped == plain.dropped
    assert made.counts["wrong_hint:longer_than_window"] == made.counts["wrong_hint:hint_makes_no_tokens"] == 1
    assert sum(window.batch.sites_without_contrast for window in made.windows) == 2


def test_an_empty_wrong_hint_is_the_context_without_one():
    session = asked("llama3", seed=1, num_pairs=0)
    changed = session._replace(sites=[site._replace(unrelated_hint="") for site in session.sites])
    (plain,), (batch,) = (each.batches(budget=5_000).batches for each in (session, changed))
    assert len(batch.tree) == len(plain.tree)
    assert torch.equal(batch.contrast.rows, batch.student_rows)


def test_the_windows_of_a_session_teach_what_its_flat_sequences_do():
    session = with_wrong_hints(asked("llama3", seed=3, num_pairs=0))
    model, weighting = model_for(renderer_of("llama3")), RowWeighting(1.1, True, 0.9, 1.2, normalise=False)
    (window,) = session.batches(budget=5_000).windows
    batch = _flat(session)
    tree, mapping = (channel_2(model, each, weighting) for each in (window.batch, batch))
    torch.testing.assert_close(tree.sdpo_jsd, mapping.sdpo_jsd, rtol=1e-9, atol=1e-10)


def _flat(session):
    ids = session.rendered.ids
    mask = torch.zeros(1, len(ids), dtype=torch.long)
    mask[0, 1] = 1
    batch = {"input_ids": torch.tensor([ids]), "response_mask": mask}
    for key, which in (("teacher", 1), ("contrast", 2)):
        contexts = [teacher_context(*session[:2], site.span, site[which]) for site in session.sites]
        width = max(len(each.ids) for each in contexts)
        batch[f"ctx_{key}_input_ids"] = torch.tensor([each.ids + [0] * (width - len(each.ids)) for each in contexts])
        batch[f"sdpo_{key}_index"] = torch.tensor(
            [
                [number, each.start - 1 + j]
                for number, (each, site) in enumerate(zip(contexts, session.sites, strict=True))
                for j in range(site.span.end - site.span.start)
            ]
        )
    rows = [[0, row] for site in session.sites for row in range(site.span.start - 1, site.span.end - 1)]
    return batch | {"sdpo_student_index": torch.tensor(rows)}


# Which hint is the wrong one.


def test_a_wrong_hint_is_that_of_another_kind_and_the_one_the_proof_takes():
    kinds = ["a", "b", "a", "c", "b", "a"]
    hints = [f"{kind}{number}" for number, kind in enumerate(kinds)]
    for seed in range(5):
        found = draw_unrelated_hints(hints, kinds, seed=seed)
        assert all(hint in hints and hint[0] != kind for hint, kind in zip(found, kinds, strict=True))
        as_proved = [
            hint_proof.ProvableSite(site_id=hint, rendered=None, span=None, hint=hint, kind=kind)
            for hint, kind in zip(hints, kinds, strict=True)
        ]
        assert found == [other.hint for other in draw_unrelated_hints(as_proved, kinds, seed=seed)]
    assert draw_unrelated_hints(["x", "y"], ["a", "a"]) == [None, None]
    assert draw_unrelated_hints([], []) == []
    with refusal(InputError, what="hints", got="(1, 0)"):
        draw_unrelated_hints(["x"], [])
