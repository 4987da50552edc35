"""Half precision in an offline run: whole weights are trained, and references are those of the steps' own precision."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from offline_pieces import arguments, logged, sessions_of, tiny, trainer_of, write_run
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from composer_replication.errors import ConfigError, StaleArtefactError
from composer_replication.trainer.objective.channels import ChannelSettings
from composer_replication.trainer.objective.compose import compose_loss
from composer_replication.trainer.offline_trainer import OfflineTrainer
from composer_replication.trainer.sessions.dataset import LoggedSessions
from composer_replication.trainer.start_model import prepare_model
from composer_replication.trainer.watch.memory_plan import _estimate_parts, _StepSettings, shape_of
from refusals import refusal

PAIRS = ChannelSettings(alpha_sdpo=0.0, beta_replay=1.0, replay_dpo_beta=1.0)
BF16 = {"bf16": True}


def lora(**changes):
    from peft import LoraConfig

    return LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | changes)


def dtypes(model, *, trained):
    return {each.dtype for each in model.parameters() if each.requires_grad == trained}


def references(sessions):
    return [
        float(each) for b in sessions.batches() for each in (*b.pairs.chosen_reference, *b.pairs.rejected_reference)
    ]


@pytest.fixture
def folder(tmp_path):
    tiny().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


# ---- weights


def test_a_named_model_without_an_adapter_is_trained_in_whole_weights(folder, tmp_path):
    args = arguments(tmp_path, **BF16, learning_rate=2e-5, max_steps=2)
    trainer = OfflineTrainer(folder, args, sessions_of(0, 1))
    assert dtypes(trainer.model, trained=True) == {torch.float32}
    start = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    changed = sum(int((value != start[name]).sum()) for name, value in trainer.model.named_parameters())
    used = sum(int((value.grad != 0).sum()) for value in tiny_with_gradients(sessions_of(0, 1)).parameters())
    assert changed == pytest.approx(used, rel=0.02)  # in bf16 weights a step of 2e-5 changes one in twenty


def tiny_with_gradients(sessions):
    model = tiny()
    for batch in sessions.batches():
        compose_loss(model, batch, alpha_sdpo=0.1, beta_replay=0.0).total.backward()
    return model


def test_weights_below_an_adapter_are_loaded_in_half_and_the_adapter_is_whole(folder):
    args = SimpleNamespace(bf16=True, fp16=False, gradient_checkpointing=False)
    config = lora(modules_to_save=["lm_head"])
    model = prepare_model(folder, args, peft_config=config, quantization="none")
    assert dtypes(model, trained=False) == {torch.bfloat16}
    assert dtypes(model, trained=True) == {torch.float32}
    later = prepare_model(folder, args, peft_config=None, quantization="none", adapter_follows=True)
    assert dtypes(later, trained=True) == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_is_not_trained_as_a_whole(tmp_path, dtype):
    with pytest.raises(ConfigError, match=r"\b27 of 27\b.*float16.*model\.float\(\).*peft_config"):
        trainer_of(tmp_path, sessions_of(0), model=tiny().to(dtype), arguments_changes=BF16)
    adapted = trainer_of(tmp_path, sessions_of(0), model=tiny().to(dtype), peft_config=lora(), arguments_changes=BF16)
    assert dtypes(adapted.model, trained=True) == {torch.float32}


def test_an_adapter_that_was_made_in_half_precision_is_refused(tmp_path):
    from peft import get_peft_model

    halves = get_peft_model(tiny().bfloat16(), lora(), autocast_adapter_dtype=False)
    with pytest.raises(ConfigError, match=r"\b8 of 8\b.*lora_A"):
        trainer_of(tmp_path, sessions_of(0), model=halves, arguments_changes=BF16)


def test_the_planner_counts_whole_weights_and_what_autocast_casts_of_them(folder, tmp_path):
    weights = sum(each.numel() for each in tiny().parameters())
    planned = OfflineTrainer(folder, arguments(tmp_path, **BF16), sessions_of(0, 1)).plan()
    assert planned.parts["weights"] == 4 * weights
    assert planned.parts["optimiser"] == 8 * weights
    shape = shape_of(tiny())
    options = {"longest_tree": 4096, "weight_bytes": 4, "compute_bytes": 2}
    kept = _estimate_parts(shape, _StepSettings(**options))["cast weights"]
    assert kept == cast_weights_in_graph(tiny(), sessions_of(0)) == 2 * shape.linear_weights
    assert "cast weights" not in _estimate_parts(shape, _StepSettings(**options | {"weight_bytes": 2}))


def cast_weights_in_graph(model, sessions):
    """Bytes of half-precision copies of the layers' matrices that the graph of a step keeps."""
    own = {tuple(each.weight.shape) for name, each in model.named_modules() if name.endswith("proj")}
    found = {}

    def note(tensor):
        if tensor.dtype == torch.bfloat16 and {tuple(tensor.shape), tuple(tensor.shape[::-1])} & own:
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    batch = next(iter(sessions.batches()))
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(note, lambda each: each):
        total = compose_loss(model, batch, alpha_sdpo=0.0, beta_replay=0.0).total
    total.backward()
    return sum(each.numel() * each.element_size() for each in found.values())


# ---- references


def test_references_are_computed_as_the_steps_compute(tmp_path):
    sessions = sessions_of(0, 1)
    trainer = trainer_of(tmp_path, sessions, settings=PAIRS, arguments_changes=BF16)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = sessions.with_references(tiny())
    assert references(trainer.train_dataset) == references(wanted)
    assert references(wanted) != references(sessions.with_references(tiny()))
    assert trainer.train_dataset.reference_precision == "bfloat16"


@pytest.mark.parametrize("with_lora", [False, True])
def test_the_first_loss_on_pairs_is_ln_2_in_half_precision_too(tmp_path, with_lora):
    """References are computed in the passes that steps make: beside other tokens, bf16 rounds the same ones otherwise.

    Where a micro-batch packs several windows they are not those of its pass, and differ by 0.004 at most here.
    """
    more = {"peft_config": lora(init_lora_weights=True)} if with_lora else {}
    for size, most in {1: 1e-6, 4: 5e-3}.items():
        changes = BF16 | {"per_device_train_batch_size": size, "learning_rate": 0.0, "max_steps": 8 // size}
        made = [logged(number) for number in range(8)]
        trainer = trainer_of(tmp_path, sessions_of(made=made), settings=PAIRS, arguments_changes=changes, **more)
        trainer.train()
        losses = [row["loss/trace_replay_dpo"] for row in trainer.state.log_history if "loss/trace_replay_dpo" in row]
        assert len(losses) == 8 // size
        assert max(abs(loss - math.log(2)) for loss in losses) < most


def test_a_store_of_other_passes_is_stale_in_half_precision(tmp_path):
    path, sessions = tmp_path / "ref.safetensors", sessions_of(0, 1)
    options = {"settings": PAIRS, "reference_path": path, "arguments_changes": BF16}
    trainer_of(tmp_path, sessions, **options)
    trainer_of(tmp_path, sessions, **options)  # one of the steps' own passes is read
    with safe_open(str(path), framework="pt") as file:
        about = file.metadata()
    save_file(load_file(str(path)), str(path), metadata=about | {"passes": "trees"})
    with refusal(StaleArtefactError, what=str(path), got="precompute_ref_logprobs"):
        trainer_of(tmp_path, sessions, **options)


def test_a_store_of_another_precision_is_stale(tmp_path):
    path, sessions = tmp_path / "ref.safetensors", sessions_of(0, 1)
    options = {"settings": PAIRS, "reference_path": path}
    trainer_of(tmp_path, sessions, **options)
    with refusal(StaleArtefactError, what=str(path), got="precision"):
        trainer_of(tmp_path, sessions, arguments_changes=BF16, **options)
    with safe_open(str(path), framework="pt") as file:
        about = file.metadata()
    assert about.pop("precision") == "float32"
    save_file(load_file(path), path, metadata=about)  # as stores were before they said their precision
    with refusal(StaleArtefactError, what=str(path), got="precision"):
        trainer_of(tmp_path, sessions, **options)


def test_sessions_that_bring_references_of_another_precision_are_refused(tmp_path):
    whole = sessions_of(0, 1).with_references(tiny())
    trainer_of(tmp_path, whole, settings=PAIRS)
    with refusal(StaleArtefactError, got="float32", expected="bfloat16"):
        trainer_of(tmp_path, whole, settings=PAIRS, arguments_changes=BF16)
    with torch.autocast("cpu", torch.bfloat16):
        half = sessions_of(0, 1).with_references(tiny())
    trainer_of(tmp_path, half, settings=PAIRS, arguments_changes=BF16)


def test_the_hint_proof_of_a_run_is_made_again_in_the_precision_of_the_steps(tmp_path):
    run = write_run(tmp_path / "run", [logged(number) for number in range(4)])
    sessions = LoggedSessions.from_run(run, sessions_of(0).renderer, budget=512)
    whole = sessions.prove(tiny()).proofs
    options = {"hint_margin": 0.0, "settings": ChannelSettings(beta_replay=0.0), "arguments_changes": BF16}
    half = trainer_of(tmp_path, sessions, **options).train_dataset.proofs
    with torch.autocast("cpu", torch.bfloat16):
        assert sessions.prove(tiny()).proofs == half
    assert [each.without_hint for each in half] != [each.without_hint for each in whole]
    assert [each.without_hint for each in half] == pytest.approx([each.without_hint for each in whole], rel=0.02)
