"""An interrupted run goes on bit for bit: weights, batches, losses, and whatever a subclass adds."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from torch.utils.data import RandomSampler

from composer_replication.errors import ArtefactCorruptError, ArtefactNotFoundError, ConfigError, StaleArtefactError
from composer_replication.trainer.checkpoints import newest_complete
from kill_and_resume.small_runs import VOCAB, small_model, small_trainer, weights_of, write_weights_manifest
from refusals import refusal

OWN_FILES = {"manifest.json", "trainer_state.json"} | {
    f"{name}.{kind}"
    for name in ("optimizer", "scheduler", "rng-0", "cursor-0", "extra-0")
    for kind in ("json", "safetensors")
}


def losses(trainer):
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def resumed(folder, output, **settings):
    """A run in a new folder that holds nothing but one checkpoint of another run."""
    shutil.copytree(folder, output / folder.name)
    trainer = small_trainer(output, **settings)
    trainer.train(resume_from_checkpoint=True)
    return trainer


def assert_goes_on(whole, later, step):
    assert weights_of(later.model) == weights_of(whole.model)
    assert later.seen == whole.seen[2 * step :]
    assert later.examples_so_far == whole.examples_so_far == 48
    assert losses(later) == losses(whole)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "lora"])
def whole_run(request, tmp_path_factory):
    trainer = small_trainer(tmp_path_factory.mktemp("whole"), lora=request.param)
    trainer.train()
    return trainer, request.param


@pytest.mark.parametrize("step", [2, 6, 8])  # within the first epoch, between the two, within the second
def test_a_resumed_run_ends_bit_equal(tmp_path, whole_run, step):
    whole, lora = whole_run
    folder = newest_complete(whole.args.output_dir).with_name(f"checkpoint-{step}")
    assert_goes_on(whole, resumed(folder, tmp_path, lora=lora), step)


def test_a_checkpoint_holds_safetensors_and_json_only(whole_run):
    whole, lora = whole_run
    files = {path.name for path in newest_complete(whole.args.output_dir).iterdir()}
    weights = {"adapter_model.safetensors", "adapter_config.json", "README.md"}
    assert files - OWN_FILES == (weights if lora else {"model.safetensors", "config.json", "generation_config.json"})
    whole.save_model()
    assert not list(newest_complete(whole.args.output_dir).parent.rglob("*.bin"))


@pytest.mark.parametrize(
    "settings",
    [
        {"train_sampling_strategy": "group_by_length"},
        {"accelerator_config": {"use_seedable_sampler": False}},
        {"dataloader_num_workers": 1},
        {"eval_strategy": "epoch", "save_steps": 3},
        {"eval_strategy": "steps", "eval_steps": 3, "save_steps": 3},
    ],
    ids=lambda settings: next(iter(settings.values())) if "eval_strategy" in settings else next(iter(settings)),
)
def test_order_drawn_in_other_ways_is_the_same_after_a_resume(tmp_path, settings):
    whole = small_trainer(tmp_path / "whole", **settings)
    whole.train()
    for step in (6, 9) if "eval_strategy" in settings else (8,):
        later = resumed(tmp_path / "whole" / f"checkpoint-{step}", tmp_path / f"{step}", **settings)
        assert_goes_on(whole, later, step)


def test_a_sampler_with_a_generator_of_its_own_goes_on_where_it_was(tmp_path, monkeypatch):
    def sampler(self, dataset=None):
        return RandomSampler(range(24), generator=torch.Generator().manual_seed(1))

    monkeypatch.setattr("kill_and_resume.small_runs.SmallTrainer._get_train_sampler", sampler)
    settings = {"accelerator_config": {"use_seedable_sampler": False}}
    whole = small_trainer(tmp_path / "whole", **settings)
    whole.train()
    assert whole.seen[:12] != whole.seen[12:]
    for step in (4, 6, 8):
        later = resumed(tmp_path / "whole" / f"checkpoint-{step}", tmp_path / f"{step}", **settings)
        assert_goes_on(whole, later, step)


def test_a_seed_set_between_building_and_resuming_does_not_change_the_order(tmp_path, whole_run):
    whole, lora = whole_run
    shutil.copytree(newest_complete(whole.args.output_dir).with_name("checkpoint-8"), tmp_path / "checkpoint-8")
    later = small_trainer(tmp_path, lora=lora)
    torch.manual_seed(999)
    later.train(resume_from_checkpoint=True)
    assert_goes_on(whole, later, 8)


def test_a_path_resumes_that_checkpoint_and_one_that_is_damaged_raises(tmp_path, whole_run):
    whole, lora = whole_run
    shutil.copytree(whole.args.output_dir, tmp_path / "run")
    later = small_trainer(tmp_path / "run", lora=lora)
    later.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert_goes_on(whole, later, 4)
    (tmp_path / "run" / "checkpoint-4" / "scheduler.json").unlink()
    with pytest.raises(ArtefactNotFoundError, match=r"scheduler\.json"):
        small_trainer(tmp_path / "run", lora=lora).train(str(tmp_path / "run" / "checkpoint-4"))


def test_resuming_where_nothing_is_complete_says_so(tmp_path):
    with refusal(ArtefactNotFoundError, what=str(tmp_path), fix="train.output"):
        small_trainer(tmp_path).train(resume_from_checkpoint=True)


def test_a_checkpoint_of_another_model_is_refused(tmp_path, whole_run):
    whole, lora = whole_run
    other = small_model(lora=lora, hidden=32)
    with pytest.raises(StaleArtefactError, match=r"\bn_embd 16\b[^;]*\b32\b"):
        resumed(newest_complete(whole.args.output_dir), tmp_path, model=other)
    if lora:
        with refusal(StaleArtefactError, got="base_weights"):
            resumed(newest_complete(whole.args.output_dir), tmp_path / "seed", model=small_model(lora=True, seed=8))


@pytest.mark.parametrize(
    ("settings", "got", "expected"),
    [
        ({"size": 32}, "num_examples 24", "num_examples 32"),
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps 2", "gradient_accumulation_steps 1"),
        ({"per_device_train_batch_size": 4}, "per_device_train_batch_size 2", "per_device_train_batch_size 4"),
    ],
)
def test_a_place_in_other_data_is_refused(tmp_path, whole_run, settings, got, expected):
    whole, lora = whole_run
    with refusal(StaleArtefactError, got=got, expected=expected):
        resumed(newest_complete(whole.args.output_dir), tmp_path, lora=lora, **settings)


def test_weights_alone_cannot_be_resumed(tmp_path):
    small_trainer(tmp_path, max_steps=2, save_only_model=True).train()
    assert not (tmp_path / "checkpoint-2" / "optimizer.json").exists()
    with refusal(ArtefactNotFoundError, what="checkpoint-2", fix="save_only_model"):
        small_trainer(tmp_path, save_only_model=True).train(resume_from_checkpoint=True)


def test_weights_that_do_not_fit_name_themselves(tmp_path, whole_run):
    from composer_replication.trainer.checkpoints.weights import load_weights

    whole, lora = whole_run
    other = small_model(lora=lora)
    if lora:
        other.add_adapter("second", other.peft_config["default"])
        with refusal(ArtefactNotFoundError, what="'second'"):
            load_weights(other, newest_complete(whole.args.output_dir))
    else:
        other.extra = torch.nn.Linear(2, 2)
        with pytest.raises(StaleArtefactError, match=r"extra\.bias"):
            load_weights(other, newest_complete(whole.args.output_dir))


def test_every_adapter_is_restored_and_every_layer_trained_beside_them(tmp_path):
    from peft import LoraConfig, get_peft_model

    from composer_replication.trainer.checkpoints.weights import load_weights, save_weights

    def adapted():
        settings = LoraConfig(r=2, target_modules=["c_attn"], modules_to_save=["ln_f"], fan_in_fan_out=True)
        model = get_peft_model(small_model(), settings)
        model.add_adapter("reference", settings)
        return model

    model, other = adapted(), adapted()
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if "lora_" in name or "modules_to_save" in name:
                parameter.fill_(number)
    save_weights(model, tmp_path, None, own_names=True)
    write_weights_manifest(tmp_path, model)
    load_weights(other, tmp_path)
    assert weights_of(other) == weights_of(model)


def test_names_of_modules_are_saved_in_one_order_whatever_the_order_of_a_set(tmp_path):
    from peft import LoraConfig, get_peft_model

    from composer_replication.trainer.checkpoints.weights import save_weights

    model = get_peft_model(small_model(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    several = {f"layer.{number}.{name}" for number in range(8) for name in ("q", "k", "v")}
    model.peft_config["default"].target_modules = several
    save_weights(model, tmp_path, None, own_names=True)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == sorted(several)
    assert list(several) != sorted(several)


def test_a_model_whose_files_have_other_names_than_its_weights_is_restored(tmp_path):
    from transformers import MixtralConfig, MixtralForCausalLM

    from composer_replication.trainer.checkpoints.weights import load_weights, save_weights

    def mixture(seed):
        torch.manual_seed(seed)
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        return MixtralForCausalLM(MixtralConfig(vocab_size=VOCAB, num_key_value_heads=2, num_local_experts=2, **sizes))

    one, other = mixture(1), mixture(2)
    save_weights(one, tmp_path, None, own_names=True)
    write_weights_manifest(tmp_path, one)
    load_weights(other, tmp_path)
    assert weights_of(other) == weights_of(one)
    assert weights_of(MixtralForCausalLM.from_pretrained(tmp_path)) == weights_of(one)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda trainer: setattr(trainer, "is_deepspeed_enabled", True), "deepspeed"),
        (lambda trainer: setattr(trainer, "is_fsdp_enabled", True), "fsdp_version"),
        (lambda trainer: setattr(trainer.args, "push_to_hub", True), "hub_strategy"),
    ],
)
def test_ways_of_training_that_pickle_are_refused(tmp_path, change, said):
    trainer = small_trainer(tmp_path)
    change(trainer)
    with pytest.raises(ConfigError, match=said):
        trainer.train()


def test_a_pickle_in_a_checkpoint_is_not_read(tmp_path, whole_run):
    whole, lora = whole_run
    shutil.copytree(newest_complete(whole.args.output_dir), tmp_path / "checkpoint-12")
    (tmp_path / "checkpoint-12" / "optimizer.pt").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(ArtefactCorruptError, match=r"optimizer\.pt"):
        small_trainer(tmp_path, lora=lora).train(str(tmp_path / "checkpoint-12"))


def test_the_best_model_is_loaded_at_the_end_and_the_newest_checkpoint_stays(tmp_path, monkeypatch):
    trainer = small_trainer(
        tmp_path,
        max_steps=6,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        save_total_limit=1,
    )
    scores, after = iter([3.0, 1.0, 2.0]), {}

    def evaluate(*_args, **_options):
        after[trainer.state.global_step] = weights_of(trainer.model)
        trainer.control.should_evaluate = False
        return {"eval_loss": next(scores)}

    monkeypatch.setattr(trainer, "_evaluate", evaluate)
    trainer.train()
    assert weights_of(trainer.model) == after[4] != after[6]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "checkpoint-6"]


def test_a_new_run_in_the_folder_of_an_old_one_is_warned_of(tmp_path, caplog):
    small_trainer(tmp_path, max_steps=2).train()
    small_trainer(tmp_path, max_steps=2).train()
    [warning] = [each.getMessage() for each in caplog.records if "checkpoint-2" in each.getMessage()]
    assert str(tmp_path) in warning
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


def test_a_finished_run_is_not_trained_further(tmp_path):
    first = small_trainer(tmp_path, max_steps=4)
    first.train()
    again = small_trainer(tmp_path, max_steps=4)
    result = again.train(resume_from_checkpoint=True)
    assert (result.global_step, again.seen) == (4, [])
    assert weights_of(again.model) == weights_of(first.model)
    assert not (tmp_path / "checkpoint-5").exists()
