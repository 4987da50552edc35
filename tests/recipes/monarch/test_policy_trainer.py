"""The trainer's work without Monarch: the recorded steps, a batch exactly once, the same weights after any restart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from composer_replication.errors import (
    ArtefactCorruptError,
    ArtefactNotFoundError,
    InputError,
    NonFiniteError,
    StaleArtefactError,
)
from composer_replication.recipes.monarch.policy_trainer import PolicyTrainer
from composer_replication.recipes.monarch.tensor_file import SharedWeights, StepBatch
from recipes.monarch.recorded import recorded_settings, save_recorded, step_batch
from recipes.monarch.tiny_policies import save_scaled, save_tiny, tiny_batch, tiny_settings
from recipes.recorded_steps import parameter_names, recorded_batches, recorded_steps, start_weights, weight_sums
from refusals import refusal


@pytest.mark.full  # in `make test-monarch` always
def test_two_steps_are_those_of_the_trl_trainer(tmp_path):
    save_recorded(tmp_path)
    trainer = PolicyTrainer(recorded_settings(tmp_path))
    start = start_weights(trainer.model)
    record = trainer.train_outer_step(0)
    for step, wanted in zip(record["steps"], recorded_steps(), strict=False):
        assert step["active"] == ["grpo", "sdpo"]
        for name in ("grpo", "sdpo", "total"):
            assert step[f"loss/{name}"] == pytest.approx(getattr(wanted, name), abs=1e-5), name
        assert step["grad_norm"] == pytest.approx(wanted.grad_norm, rel=1e-5)
        assert step["alpha_sdpo"] == pytest.approx(wanted.alpha)
    assert [name for name, _ in trainer.model.named_parameters()] == parameter_names()
    moved = weight_sums(trainer.model, start)
    torch.testing.assert_close(moved, recorded_steps()[1].weights, atol=1e-5, rtol=1e-5)
    assert (moved[:, 2] > 0).all()  # every tensor moved


def test_a_batch_is_the_same_after_its_file(tmp_path):
    batch = step_batch(recorded_batches()[2])
    batch.save(tmp_path, 2)
    again = StepBatch.load(tmp_path, 2)
    for name in ("prompt_ids", "completion_mask", "sampled_mask", "advantages", "old_logprobs"):
        assert torch.equal(getattr(again, name), getattr(batch, name)), name
    assert [len(each) for each in again.sites] == [len(each) for each in batch.sites]
    for mine, theirs in zip(again.sites, batch.sites, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one.teacher_ids, other.teacher_ids)
            assert one._replace(teacher_ids=other.teacher_ids) == other
    with pytest.raises(ArtefactNotFoundError):
        StepBatch.load(tmp_path, 3)
    (tmp_path / "batch-000002.safetensors").rename(tmp_path / "batch-000003.safetensors")
    with pytest.raises(ArtefactCorruptError, match="batch 2"):
        StepBatch.load(tmp_path, 3)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with a tiny model and five batches, in none of which anybody erred."""
    save_tiny(tmp_path / "model")
    for number in range(5):
        tiny_batch(number).save(tmp_path / "batches", number)
    return tmp_path


def weights_of(trainer: PolicyTrainer) -> list[torch.Tensor]:
    return [each.detach().clone() for each in trainer.model.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


@pytest.mark.parametrize("checkpoint_every", [1, 2, 10])
@pytest.mark.parametrize("done", [1, 3])
def test_a_trainer_that_starts_anew_ends_at_the_same_weights(run, checkpoint_every, done):
    settings = tiny_settings(run, checkpoint_every=checkpoint_every)
    undisturbed = PolicyTrainer(tiny_settings(run, folder_name="other"))
    wanted = [undisturbed.train_outer_step(number) for number in range(5)]
    first = PolicyTrainer(settings)
    for number in range(done):
        first.train_outer_step(number)
    second = PolicyTrainer(settings)
    assert second.num_batches == done - done % checkpoint_every
    assert [second.train_outer_step(number) for number in range(done, 5)] == wanted[done:]
    assert same(weights_of(second), weights_of(undisturbed))
    assert not same(weights_of(second), weights_of(PolicyTrainer(tiny_settings(run, folder_name="untouched"))))


def test_a_batch_that_was_trained_on_is_answered_from_its_record(run):
    trainer = PolicyTrainer(tiny_settings(run))
    said = trainer.train_outer_step(0)
    trainer.train_outer_step(1)
    before = weights_of(trainer)
    assert trainer.train_outer_step(0) == said
    with refusal(InputError, what="batch_id", got="'1'"):
        trainer.train_outer_step("1")
    assert PolicyTrainer(tiny_settings(run)).train_outer_step(0) == said
    assert same(weights_of(trainer), before)


def test_every_version_is_published_when_it_is_made_and_again_when_it_is_gone(run):
    settings = tiny_settings(run)
    trainer, shared = PolicyTrainer(settings), SharedWeights(settings.weights)
    assert shared.versions() == [0]
    trainer.train_outer_step(0)
    trainer.train_outer_step(1)
    assert shared.versions() == [1, 2]
    shared.remove()
    again = PolicyTrainer(settings)
    assert shared.versions() == [2]
    other = PolicyTrainer(tiny_settings(run, folder_name="reader"))
    shared.load_into(other.model, 2)
    assert same(weights_of(other), weights_of(again))


def test_what_samples_are_the_weights_of_the_trainer_whatever_an_earlier_start_left(run):
    """Killed before its first checkpoint, started again with another model of the same shapes."""
    save_scaled(run / "model", run / "another")
    named = {"folder": str(run / "fresh"), "weights": str(run / "fresh" / "shared")}
    first = PolicyTrainer(tiny_settings(run, **named))
    first.shared.publish(first.model, 1)
    second = PolicyTrainer(tiny_settings(run, model=str(run / "another"), **named))
    assert second.shared.versions() == [0]
    reader = PolicyTrainer(tiny_settings(run, folder_name="reader"))
    second.shared.load_into(reader.model, 0)
    assert same(weights_of(reader), weights_of(second))
    assert not same(weights_of(reader), weights_of(first))
    second.shared.publish(first.model, 0)  # something that is no version of this run
    PolicyTrainer(tiny_settings(run, model=str(run / "another"), **named)).shared.load_into(reader.model, 0)
    assert same(weights_of(reader), weights_of(second))


def test_batches_that_another_model_drew_are_refused_before_there_is_a_checkpoint(run):
    save_scaled(run / "model", run / "another")
    PolicyTrainer(tiny_settings(run))
    with refusal(StaleArtefactError, got=str(run / "another")):
        PolicyTrainer(tiny_settings(run, model=str(run / "another")))
    PolicyTrainer(tiny_settings(run))


def test_a_killed_writer_leaves_nothing_that_is_taken_for_a_checkpoint(run):
    settings = tiny_settings(run)
    PolicyTrainer(settings).train_outer_step(0)
    folder = Path(settings.folder) / "checkpoints"
    (folder / ".state-000002.safetensors.1.ab.unfinished").write_bytes(b"half")
    assert PolicyTrainer(settings).num_batches == 1
    assert [path.name for path in folder.iterdir()] == ["state-000001.safetensors"]


def test_rollouts_of_other_weights_without_their_logprobs_are_refused(run):
    tiny_batch(0, weights_version=7).save(run / "batches", 0)
    with pytest.raises(StaleArtefactError, match="version 7"):
        PolicyTrainer(tiny_settings(run)).train_outer_step(0)


def test_another_model_in_the_same_folder_is_refused(run):
    settings = tiny_settings(run)
    PolicyTrainer(settings).train_outer_step(0)
    save_tiny(run / "another")
    with refusal(StaleArtefactError, got=str(run / "another")):
        PolicyTrainer(tiny_settings(run, model=str(run / "another")))


def test_a_step_that_is_not_finite_leaves_the_weights_alone(run):
    batch = tiny_batch(0)
    batch.advantages[0] = 3e38
    batch.save(run / "batches", 0)
    trainer = PolicyTrainer(tiny_settings(run))
    before = weights_of(trainer)
    with pytest.raises(NonFiniteError):
        trainer.train_outer_step(0)
    assert same(weights_of(trainer), before)
