"""A run goes on only with the settings its buffers were cut by, and with those its trainer names."""

from __future__ import annotations

import pytest

from composer_replication.errors import InputError, StaleArtefactError
from composer_replication.trainer.checkpoints.manifest import read_manifest
from kill_and_resume.small_runs import small_trainer, weights_of
from refusals import refusal

GENERATION = {"steps_per_generation": 4, "num_generations": 4, "num_iterations": 1}
OWN = {"sites": True, "logged": False, "sizes": (1, 2)}


def trainer_with(output, *, generation=None, own=None, **settings):
    trainer = small_trainer(output, **({"max_steps": 2} | settings))
    for name, value in (GENERATION if generation is None else generation).items():
        setattr(trainer.args, name, value)
    trainer.resume_geometry = lambda: OWN if own is None else own
    return trainer


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    output = tmp_path_factory.mktemp("saved")
    trainer_with(output).train()
    return output


def test_a_checkpoint_keeps_the_settings_and_a_run_with_the_same_goes_on(saved):
    kept = read_manifest(saved / "checkpoint-2")["about"]["data"]
    assert kept == {
        **GENERATION,
        "sites": True,
        "logged": False,
        "sizes": [1, 2],
        "num_processes": 1,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_examples": 24,
    }
    later = trainer_with(saved, max_steps=3, save_strategy="no")
    assert later.train(resume_from_checkpoint=True).global_step == 3
    assert len(later.seen) == 2


@pytest.mark.parametrize("ignore_data_skip", [False, True])
@pytest.mark.parametrize("name", GENERATION)
def test_another_size_of_a_generation_is_refused(saved, name, ignore_data_skip):
    generation = {**GENERATION, name: 8}
    later = trainer_with(saved, generation=generation, ignore_data_skip=ignore_data_skip)
    before = weights_of(later.model)
    with pytest.raises(StaleArtefactError) as refused:
        later.train(resume_from_checkpoint=True)
    assert (refused.value.got, refused.value.expected) == (f"{name} {GENERATION[name]}", f"{name} 8")
    assert weights_of(later.model) == before


def test_a_trainer_that_generates_nothing_is_another_one(saved):
    got = "num_generations 4, num_iterations 1, steps_per_generation 4"
    with refusal(StaleArtefactError, got=got, expected="num_generations None"):
        trainer_with(saved, generation={}).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("ignore_data_skip", [False, True])
@pytest.mark.parametrize(
    ("own", "got", "expected"),
    [
        ({**OWN, "sites": False}, "sites True", "sites False"),
        ({**OWN, "sites": False, "logged": True}, "logged False, sites True", "logged True, sites False"),
        ({**OWN, "more": 3}, "more None", "more 3"),
        ({"sites": True, "logged": False}, "sizes [1, 2]", "sizes None"),
    ],
)
def test_what_a_trainer_names_is_compared_too(saved, own, got, expected, ignore_data_skip):
    later = trainer_with(saved, own=own, ignore_data_skip=ignore_data_skip)
    with pytest.raises(StaleArtefactError) as refused:
        later.train(resume_from_checkpoint=True)
    assert (refused.value.got, refused.value.expected) == (got, expected)


def test_what_a_trainer_names_has_to_be_json(tmp_path):
    with pytest.raises(InputError, match=r"resume_geometry.*kind"):
        trainer_with(tmp_path, own={"kind": object()}).train()
    assert small_trainer(tmp_path / "other").resume_geometry() == {}
