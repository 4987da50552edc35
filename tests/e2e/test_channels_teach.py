"""What each channel does to a model that can be taught: rules in context become habits, preferences become margins.

The model of `obedient_model` errs by habit and obeys a rule in its context. Every figure is taken on sessions whose
files were not trained on, without any hint. Training is plain SGD on sessions of one task, so nothing but the channel's
own gradient moves the weights; `test_hint_controls.py` has AdamW, longer sessions and several pretrained models.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

import pytest
import torch

from composer_replication import compose_loss
from composer_replication.batch.hint_placement import teacher_context
from composer_replication.batch.tree_batch import pack_batches
from composer_replication.loss.taid import TAIDScheduler
from composer_replication.trainer.objective.reference import with_reference
from obedient_model import build_world, one_thread
from obedient_model.evidence import NUM_SESSIONS
from obedient_model.evidence_table import control_holds
from obedient_model.teaching import (
    Training,
    erring_logprobs,
    pair_batches,
    pair_logprobs,
    site_batches,
    teachers_of,
    train,
)

SEEDS = range(5)
KL_ST, KL_TS = {"sdpo_jsd_beta": 1.0}, {"sdpo_jsd_beta": 0.0}
STRONG, GENTLE = Training(), Training(num_steps=12, learning_rate=0.1)  # gentle: stops before all ways have arrived


@pytest.fixture(scope="module")
def world():
    with one_thread():
        yield build_world(0)


def training_sessions(world, seed=0):
    return world.split(seed, NUM_SESSIONS).training


def held_out(world, seed=0):
    return world.split(seed, NUM_SESSIONS).held_out


@cache
def taught(world, hint, *, seed=0, teacher="frozen", how=STRONG, **options):
    """A model after channel 2 with one sort of hint: `hint`, `shuffled_hint`, `vague_hint`, or none."""
    model, sessions = world.new_model(), training_sessions(world, seed)
    batches = site_batches(world, sessions, [getattr(each, hint) if hint else "" for each in sessions])
    teachers = teachers_of(world, teacher)
    train(model, batches, seed, how, alpha_sdpo=1.0, sdpo_teachers=teachers, **options)
    return model


def drop(world, model, sessions):
    """How much less likely each erring call has become without a hint, in nats."""
    return erring_logprobs(world, world.model, sessions) - erring_logprobs(world, model, sessions)


def largest_change(world, model):
    pairs = zip(model.parameters(), world.model.parameters(), strict=True)
    return max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs)


def test_held_out_sessions_share_no_task_with_those_trained_on(world):
    """Not one (kind, file): what is measured on them is not what a step has seen."""
    for seed in SEEDS:
        trained, unseen = (
            {(session.kind.name, session.file) for session in sessions}
            for sessions in (training_sessions(world, seed), held_out(world, seed))
        )
        assert sorted(trained & unseen) == [], seed


# Channel 2


@pytest.mark.parametrize("teacher", ["live", "trust_region"])
def test_in_sessions_of_one_task_sgd_passes_its_control_with_either_teacher(world, teacher, note):
    """The mildest setting: nothing stands before the erring call that a drifting teacher could unlearn as well."""
    models = [taught(world, hint, teacher=teacher, **KL_ST) for hint in ("hint", "shuffled_hint")]
    right, shuffled = (float(drop(world, model, held_out(world)).mean()) for model in models)
    note(f"channel 2, sgd, {teacher}, sessions of one task, 1 world: right {right:.2f}, shuffled {shuffled:+.3f} nats")
    assert right >= 1.5
    assert control_holds(right, shuffled)


@pytest.mark.parametrize("teacher", ["live", "trust_region"])
def test_what_the_hint_asked_for_takes_the_place_of_the_erring_call(world, teacher):
    unseen = held_out(world)
    models = [world.model, taught(world, "hint", teacher=teacher, **KL_ST)]
    before, after = (pair_logprobs(world, model, unseen)[0] for model in models)
    assert float(before[:, 0].exp().mean()) < 0.15  # the right call
    assert float(before[:, 1].exp().mean()) > 0.75  # the erring one
    assert float(after[:, 0].exp().mean()) > 0.75
    assert float(after[:, 1].exp().mean()) < 0.05


@pytest.mark.parametrize("teacher", ["live", "trust_region"])
def test_an_empty_hint_changes_nothing(world, teacher):
    model = taught(world, "", teacher=teacher, **KL_ST)
    assert float(drop(world, model, held_out(world)).abs().max()) < 1e-4
    assert largest_change(world, model) < 1e-4
    assert largest_change(world, taught(world, "hint", teacher=teacher, **KL_ST)) > 0.01


# TAID


def test_taid_at_zero_asks_for_what_the_student_says_already(world):
    model = taught(world, "hint", how=GENTLE, sdpo_wrapper="taid", taid_t=0.0)
    assert largest_change(world, model) < 1e-4
    assert float(drop(world, model, held_out(world)).abs().max()) < 1e-4


def test_taid_at_one_is_the_cross_entropy_to_the_teacher(world):
    """Its loss is kl_ts and the teacher's own entropy, and it moves the weights as kl_ts does."""
    sessions = training_sessions(world)
    batch = pack_batches(site_batches(world, sessions, [each.hint for each in sessions]))
    entropy = float(torch.cat([teacher_entropies(world, each) for each in sessions]).mean())
    frozen = {"alpha_sdpo": 1.0, "sdpo_teachers": teachers_of(world, "frozen")}
    taid = compose_loss(world.model, batch, sdpo_wrapper="taid", taid_t=1.0, **frozen)
    kl_ts = compose_loss(world.model, batch, **KL_TS, **frozen)
    assert float(taid.sdpo_jsd) == pytest.approx(float(kl_ts.sdpo_jsd) + entropy, rel=1e-4)
    as_taid, as_kl = (
        taught(world, "hint", how=GENTLE, sdpo_wrapper="taid", taid_t=1.0),
        taught(world, "hint", how=GENTLE, **KL_TS),
    )
    unseen = held_out(world)
    torch.testing.assert_close(drop(world, as_taid, unseen), drop(world, as_kl, unseen), rtol=0.01, atol=0.01)
    assert float(drop(world, as_taid, unseen).mean()) > 1.0


def teacher_entropies(world, session):
    """Of the hinted model at every token of the erring turn, by its own forward."""
    rendered, span = world.rendered(session)
    context = teacher_context(world.renderer, rendered, span, session.hint)
    with torch.no_grad():
        logits = world.model(input_ids=torch.tensor([context.ids])).logits[0, context.start - 1 : -1]
    return torch.distributions.Categorical(logits=logits.double()).entropy()


def test_taid_moves_further_the_more_of_the_teacher_is_in_the_mix(world, note):
    unseen = held_out(world)
    shares = (0.0, 0.4, 1.0)
    models = [taught(world, "hint", how=GENTLE, sdpo_wrapper="taid", taid_t=t) for t in shares]
    drops = [float(drop(world, model, unseen).mean()) for model in models]
    note(f"TAID, t = {shares}: mean drop {[round(each, 2) for each in drops]} nats")
    assert all(later > earlier + 0.3 for earlier, later in pairwise(drops))


def test_the_scheduler_raises_t_from_its_start_to_the_teacher(world, note):
    schedule = TAIDScheduler(GENTLE.num_steps)
    used: list[float] = []

    def options_at(_step):
        used.append(schedule.t)
        return {"taid_t": schedule.t}

    model, sessions = world.new_model(), training_sessions(world)
    train(
        model,
        site_batches(world, sessions, [each.hint for each in sessions]),
        0,
        GENTLE,
        alpha_sdpo=1.0,
        sdpo_wrapper="taid",
        sdpo_teachers=teachers_of(world, "frozen"),
        options_at=options_at,
        after_step=lambda components, step: schedule.update_t(components.sdpo_jsd, step + 1),
    )
    assert used[0] == pytest.approx(0.4)
    assert used[2:] == sorted(set(used[2:]))  # each step more; the first loss is only remembered
    assert all(t >= 0.4 + 0.6 * step / GENTLE.num_steps - 1e-6 for step, t in enumerate(used) if step > 1)
    assert schedule.t == pytest.approx(1.0)
    start, end = (taught(world, "hint", how=GENTLE, sdpo_wrapper="taid", taid_t=t) for t in (0.4, 1.0))
    low, moved, high = (float(drop(world, each, held_out(world)).mean()) for each in (start, model, end))
    note(f"TAID, mean drop with t = 0.4 / scheduled / t = 1: {low:.2f} / {moved:.2f} / {high:.2f} nats")
    assert low + 0.1 < moved < high - 0.03


# Entropy-aware distillation


def test_entropy_opd_is_kl_ts_where_the_teacher_is_unsure_and_kl_st_where_it_is_sure(world, note):
    """0 is where kl_ts ends and 1 where kl_st does; a vague rule leaves the teacher three values to choose from."""
    how, unseen, places = Training(num_steps=8, learning_rate=0.05), held_out(world), {}
    for hint in ("vague_hint", "hint"):
        settings = (KL_TS, KL_ST, {"sdpo_wrapper": "entropy_opd", "entropy_opd_h_max": 1.0})
        models = [taught(world, hint, how=how, **options) for options in settings]
        kl_ts, kl_st, gated = (float(drop(world, model, unseen).mean()) for model in models)
        assert kl_st - kl_ts > 0.2  # far enough apart for a place between them to mean something
        places[hint] = (gated - kl_ts) / (kl_st - kl_ts)
    note("entropy OPD between kl_ts (0) and kl_st (1): unsure {vague_hint:.2f}, sure {hint:.2f}".format(**places))
    assert abs(places["vague_hint"]) < 0.1
    assert places["hint"] > places["vague_hint"] + 0.3  # 0.45 to 0.81 in four worlds


# Channel 3


def margins(world, model, sessions):
    """log p(right) - log p(erring): of the sums, and of the averages per token."""
    sums, lengths = pair_logprobs(world, model, sessions)
    averages = sums / lengths
    return sums[:, 0] - sums[:, 1], averages[:, 0] - averages[:, 1]


def test_dpo_raises_the_margin_over_the_reference(world, note):
    sessions, unseen = training_sessions(world), held_out(world)
    batches = [with_reference(world.model, batch) for batch in pair_batches(world, sessions)]
    gained = []
    for beta in (0.1, 0.5):
        model = world.new_model()
        how = Training(learning_rate=0.05)
        losses = train(model, batches, 0, how, alpha_sdpo=0.0, beta_replay=1.0, replay_dpo_beta=beta)
        assert losses[0] == pytest.approx(math.log(2), abs=1e-5)  # at the reference the margin is 0
        gain = margins(world, model, unseen)[0] - margins(world, world.model, unseen)[0]
        assert float(gain.min()) > 1.0
        gained.append(float(gain.mean()))
        # The loss of the sessions it trained on is that of their margins.
        own = margins(world, model, sessions)[0] - margins(world, world.model, sessions)[0]
        whole = compose_loss(model, pack_batches(batches), alpha_sdpo=0.0, beta_replay=1.0, replay_dpo_beta=beta)
        wanted = torch.nn.functional.softplus(-beta * own).mean()
        assert float(whole.trace_replay_dpo.detach()) == pytest.approx(float(wanted), rel=1e-3)
    note(f"DPO, beta 0.1 and 0.5: mean margin over the reference {gained[0]:.1f} and {gained[1]:.1f} nats, held out")
    assert gained[0] > 3.0


def test_simpo_raises_the_average_margin_past_gamma_over_beta(world, note):
    unseen, ended = held_out(world), []
    batches = pair_batches(world, training_sessions(world))  # no reference log-probs
    assert float(margins(world, world.model, unseen)[1].mean()) < -0.1
    for gamma in (0.0, 1.0, 3.0):
        options = {"dpo_variant": "simpo", "simpo_beta": 2.0, "simpo_gamma": gamma}
        model = world.new_model()
        losses = train(model, batches, 0, STRONG, alpha_sdpo=0.0, beta_replay=1.0, **options)
        margin = margins(world, model, unseen)[1]
        assert float(margin.min()) > gamma / 2.0
        assert losses[-1] < losses[0] / 3
        ended.append(float(margin.mean()))
    note(f"SimPO, gamma 0, 1, 3 at beta 2: mean average margin {[round(each, 2) for each in ended]}, held out")
    assert ended[0] + 0.1 < ended[1] < ended[2] - 0.1
