"""What channel 2 unlearns belongs to the hint with a trust-region teacher, and does not with a live one.

Several worlds (models pretrained independently of each other), sessions of a good task and an erring one, held-out
sessions of other files. A drop is how much less likely a call has become without a hint, in nats. The same with
intervals, in worlds of their own: `experiments/2026-11-16-hints-and-controls`.
"""

from __future__ import annotations

import os
from functools import cache
from statistics import mean

import pytest

from obedient_model import KINDS, build_world, one_thread
from obedient_model.evidence import outcome
from obedient_model.evidence_table import control_holds
from obedient_model.teaching import Training

# A world's weights, data and order are all of its own seed.
ALL_WORLDS, ALL_SEEDS = range(6), range(3)
IS_FULL = os.environ.get("CRF_TEST_PROFILE") == "full"
WORLDS, SEEDS = (ALL_WORLDS, ALL_SEEDS) if IS_FULL else (ALL_WORLDS[:2], ALL_SEEDS[:1])
CUT = f"{len(WORLDS)} of {len(ALL_WORLDS)} worlds, {len(SEEDS)} of {len(ALL_SEEDS)} seeds"
ADAMW = Training(batch_size=4, learning_rate=5e-4, optimizer="adamw")
SGD = Training(batch_size=4, learning_rate=0.1)
pytestmark = pytest.mark.timeout(1200 if IS_FULL else 300)  # the first test pretrains every world


@pytest.fixture(scope="module", autouse=True)
def _in_one_thread():
    with one_thread():
        yield


@cache
def outcomes(how, teacher, hint):
    """By world, the outcomes of every seed."""
    return [[outcome(build_world(at), seed, hint=hint, teacher=teacher, how=how) for seed in SEEDS] for at in WORLDS]


def drops(how, teacher, hint, part, name):
    """By world, the mean over seeds of one figure."""
    return [mean(getattr(getattr(run, part), name) for run in runs) for runs in outcomes(how, teacher, hint)]


def differences(how, teacher, hint, part, of):
    """By world, what the erring call lost beyond what good calls of the same sessions lost."""
    erring, good = (drops(how, teacher, hint, part, f"{which}_{of}") for which in ("erring", "good"))
    return [ours - theirs for ours, theirs in zip(erring, good, strict=True)]


def told(how, teacher):
    """The held-out figures in one line."""
    columns = [
        f"{hint} hint: erring call {mean(drops(how, teacher, hint, 'held_out', 'erring_call')):.2f}, "
        f"good call {mean(drops(how, teacher, hint, 'held_out', 'good_call')):.2f}"
        for hint in ("right", "shuffled")
    ]
    return f"channel 2, {how.optimizer}, {teacher}, {CUT}: drop of log p without a hint in nats, {'; '.join(columns)}"


@pytest.mark.parametrize("part", ["training", "held_out"])
def test_with_adamw_and_a_trust_region_only_the_right_hint_unlearns_the_erring_call(part, note):
    if part == "held_out":
        note(told(ADAMW, "trust_region"))
    for measure in (drops, differences):
        for of in ("call", "decision"):
            name = f"erring_{of}" if measure is drops else of
            right, shuffled = (measure(ADAMW, "trust_region", hint, part, name) for hint in ("right", "shuffled"))
            assert min(right) >= 1.5, (measure, of)
            assert all(map(control_holds, right, shuffled)), (measure, of, right, shuffled)
    for name in ("good_call", "good_decision"):  # what the model did well it goes on doing
        assert max(drops(ADAMW, "trust_region", "right", part, name)) < 0.5, name


def test_with_adamw_and_a_trust_region_every_kind_of_task_is_unlearnt():
    """Not only the easy ones; sessions come in turn, one kind after the other."""
    for runs in outcomes(ADAMW, "trust_region", "right"):
        for run in runs:
            for at, kind in enumerate(KINDS):
                assert mean(run.erring_calls_held_out[at :: len(KINDS)]) >= 0.5, kind.name


def test_with_adamw_and_a_live_teacher_the_control_is_not_clean(note):
    """A known weakness, held here so that nobody reads a live teacher's drop as the hint's doing.

    The right hint's drop is large, and so is that of a hint about something else.
    """
    note(told(ADAMW, "live"))
    right, shuffled = (drops(ADAMW, "live", hint, "held_out", "erring_call") for hint in ("right", "shuffled"))
    assert min(right) >= 1.5
    assert not all(map(control_holds, right, shuffled))
    trusted = drops(ADAMW, "trust_region", "shuffled", "held_out", "erring_call")
    assert mean(shuffled) >= 1.0
    assert mean(shuffled) >= 5 * abs(mean(trusted))


@pytest.mark.full
def test_with_plain_sgd_and_a_trust_region_the_control_holds_at_the_decision_against_good_calls(note):
    """Not for whole calls in every world: now and then plain SGD takes a step that breaks the model, good calls too."""
    note(told(SGD, "trust_region"))
    right, shuffled = (
        mean(differences(SGD, "trust_region", hint, "held_out", "decision")) for hint in ("right", "shuffled")
    )
    assert right >= 1.5
    assert control_holds(right, shuffled)
