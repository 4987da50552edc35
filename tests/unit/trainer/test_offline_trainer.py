"""OfflineTrainer against loops written out by hand, and what it does with accumulation, adapters and teachers."""

from __future__ import annotations

import re
from copy import deepcopy

import pytest
import torch
from offline_pieces import arguments, logged, sessions_of, tiny, trainer_of

from composer_replication import compose_loss
from composer_replication.batch.tree_batch import CHANNELS, denominators_of, pack_batches
from composer_replication.errors import ConfigError, InactiveChannelError, InputError, MissingExtraError
from composer_replication.runs.journal import read_journal
from composer_replication.trainer import start_model
from composer_replication.trainer.objective.channels import ChannelSettings
from composer_replication.trainer.objective.row_weighting import WeightedTeacher
from composer_replication.trainer.offline_trainer import OfflineTrainer
from composer_replication.trainer.teacher_keeper import TeacherKeeper
from refusals import refusal

BOTH = ChannelSettings(alpha_sdpo=0.7, beta_replay=0.3)


def lora():
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def by_hand(model, sessions, settings, *, steps=3, size=2, total=None, teachers=None, after=None):
    """`steps` of AdamW on packed batches of `size` items in order, again from the start where they end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    found = []
    items = list(sessions.batches())
    groups = [items[at : at + size] for at in range(0, len(items), size)]
    model.train()
    for step in range(steps):
        group = groups[step % len(groups)]
        batch = pack_batches(group) if len(group) > 1 else group[0]
        components = compose_loss(
            model,
            batch,
            alpha_sdpo=settings.alpha_at(step, steps),
            beta_replay=settings.beta_replay,
            denominators=denominators_of(group),
            sdpo_teachers=teachers,
            **settings.loss_options(),
        )
        loss = components.total if total is None else total(components)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(components)
        if after is not None:
            after(model)
    return found


def same_weights(one, other):
    names = dict(one.named_parameters())
    assert names.keys() == dict(other.named_parameters()).keys()
    return all(torch.equal(names[name], value) for name, value in other.named_parameters())


def losses(trainer, name):
    return [row[f"loss/{name}"] for row in trainer.state.log_history if f"loss/{name}" in row]


def test_three_steps_are_bit_for_bit_those_of_a_loop_by_hand(tmp_path):
    sessions = sessions_of(0, 1, 2, 3)
    settings = ChannelSettings(alpha_sdpo=0.7, beta_replay=0.3, anneal="linear", anneal_end=0.5)
    trainer = trainer_of(tmp_path, sessions, settings=settings, teacher=TeacherKeeper("live"))
    trainer.train()
    model = tiny()
    found = by_hand(model, sessions.with_references(tiny()), settings)
    assert same_weights(model, trainer.model)
    assert not same_weights(tiny(), trainer.model)
    for name, component in zip(("lm_ce", "sdpo_kl", "trace_replay_dpo"), CHANNELS, strict=True):
        assert losses(trainer, name) == [float(getattr(each, component).detach()) for each in found]
    assert losses(trainer, "alpha_sdpo") == pytest.approx([0.7, 0.525, 0.35], abs=1e-12)
    assert losses(trainer, "beta_replay") == [0.3] * 3
    assert losses(trainer, "total") == pytest.approx([float(each.total.detach()) for each in found], abs=1e-6)


def test_accumulated_micro_batches_are_one_batch(tmp_path):
    # Sessions differ in which channels they have: means of means would be another loss.
    made = [logged(0), logged(1, with_site=False), logged(2, with_pair=False), logged(3), logged(4), logged(5)]
    trained = []
    for size, steps in ((1, 3), (3, 1)):
        changes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps, "max_steps": 2}
        model = tiny().double()
        trainer = trainer_of(tmp_path, sessions_of(made=made), model=model, settings=BOTH, arguments_changes=changes)
        trainer.train()
        trained.append(trainer)
    assert losses(trained[0], "total") == pytest.approx(losses(trained[1], "total"), abs=1e-6)
    assert [row["loss"] for row in trained[0].state.log_history[:2]] == pytest.approx(
        losses(trained[1], "total"), abs=1e-5
    )
    others = dict(trained[1].model.named_parameters())
    for name, value in trained[0].model.named_parameters():
        torch.testing.assert_close(value, others[name], rtol=0, atol=1e-6)


def test_an_adapter_trains_and_nothing_below_it(tmp_path):
    trainer = trainer_of(tmp_path, sessions_of(0, 1), settings=BOTH, peft_config=lora(), lm_weight=0.5)
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    changed = {name for name, value in trainer.model.named_parameters() if not torch.equal(before[name], value)}
    assert changed == {name for name in before if "lora_" in name}
    assert len(changed) == 8


@pytest.mark.parametrize("kind", ["live", "frozen", "ema", "trust_region"])
def test_each_teacher_teaches_as_it_is_defined(tmp_path, kind):
    sessions = sessions_of(0, 1)
    settings = ChannelSettings(alpha_sdpo=0.7, beta_replay=0.0)
    keeper = TeacherKeeper(kind, ema_rate=0.2, live_share=0.1)
    trainer = trainer_of(tmp_path, sessions, settings=settings, teacher=keeper)
    trainer.train()
    model, start = tiny(), tiny().requires_grad_(False).eval()
    average = deepcopy(start)

    def follow(student):
        with torch.no_grad():
            for old, new in zip(average.parameters(), student.parameters(), strict=True):
                old.lerp_(new, 0.2)

    teachers = {
        "live": None,
        "frozen": [WeightedTeacher(start)],
        "ema": [WeightedTeacher(average)],
        "trust_region": [WeightedTeacher(start, 0.9), WeightedTeacher(coefficient=0.1)],
    }[kind]
    found = by_hand(model, sessions, settings, teachers=teachers, after=follow if kind == "ema" else None)
    assert losses(trainer, "sdpo_kl") == [float(each.sdpo_jsd.detach()) for each in found]
    assert same_weights(model, trainer.model)


def test_under_an_adapter_the_frozen_teacher_is_the_model_below_it(tmp_path):
    sessions = sessions_of(0, 1)
    settings = ChannelSettings(alpha_sdpo=0.7, beta_replay=0.0)
    rates = []
    for peft_config in (lora(), None):
        keeper = TeacherKeeper("frozen")
        options = {"settings": settings, "teacher": keeper, "peft_config": peft_config}
        trainer = trainer_of(tmp_path, sessions, arguments_changes={"max_steps": 1}, **options)
        trainer.train()
        rates.append(losses(trainer, "sdpo_kl"))
        assert (keeper.model is None) == (peft_config is not None)
    assert rates[0] == pytest.approx(rates[1], abs=1e-6)


def test_taid_moves_only_on_steps_on_which_the_channel_ran(tmp_path):
    made = [logged(0), logged(1, with_site=False), logged(2), logged(3, with_site=False)]
    settings = ChannelSettings(alpha_sdpo=0.5, beta_replay=0.0, sdpo_wrapper="taid")
    changes = {"per_device_train_batch_size": 1, "max_steps": 4}
    trainer = trainer_of(tmp_path, sessions_of(made=made), settings=settings, arguments_changes=changes)
    trainer.train()
    # The first loss is stored; of the steps after it only the third has sites: t = 0.4 + 0.6 * 3 / 4.
    assert losses(trainer, "taid_t") == pytest.approx([0.4, 0.4, 0.85, 0.85])
    assert [row["ran/sdpo_kl"] for row in trainer.state.log_history[:4]] == [1.0, 0.0, 1.0, 0.0]
    assert trainer.taid.state_dict()["previous_loss"] == pytest.approx(losses(trainer, "sdpo_kl")[1])


def test_a_weight_of_channel_one_multiplies_it(tmp_path):
    sessions = sessions_of(0, 1)
    settings = ChannelSettings(alpha_sdpo=0.7, beta_replay=0.0)
    trainer = trainer_of(tmp_path, sessions, settings=settings, lm_weight=0.25, teacher=TeacherKeeper("live"))
    trainer.train()
    model = tiny()
    by_hand(model, sessions, settings, total=lambda each: 0.25 * each.lm_ce + 0.7 * each.sdpo_jsd)
    for mine, theirs in zip(model.parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_without_a_weight_channel_one_is_not_computed_and_says_so(tmp_path, caplog):
    trainer = trainer_of(tmp_path, sessions_of(0, 1), settings=BOTH, lm_weight=0.0)
    trainer.train()
    rows = trainer.state.log_history
    assert all("loss/lm_ce" not in row for row in rows)
    assert [row["ran/lm_ce"] for row in rows[:3]] == [0.0] * 3
    assert rows[-1]["ran_steps/lm_ce"] == 0
    assert rows[-1]["ran_steps/sdpo_kl"] == 3
    figures = r"\blm_ce\b.*\b3 steps\b.*\b0\b.*\b0\b.*\blm_weight 0\b"
    assert [each for each in caplog.records if re.search(figures, each.getMessage())]
    assert losses(trainer, "total")[0] == pytest.approx(
        0.7 * losses(trainer, "sdpo_kl")[0] + 0.3 * losses(trainer, "trace_replay_dpo")[0], abs=1e-6
    )


def test_sessions_without_sites_or_pairs_train_on_their_turns_and_say_what_cannot_run(tmp_path, caplog):
    made = [logged(0, with_site=False, with_pair=False)]
    trainer = trainer_of(tmp_path, sessions_of(made=made), settings=BOTH)
    told = [each.getMessage() for each in caplog.records]
    for channel, weight in (
        ("sdpo_jsd", r"\balpha_sdpo\b.*\b0\.7\b"),
        ("trace_replay_dpo", r"\bbeta_replay\b.*\b0\.3\b"),
    ):
        assert [each for each in told if channel in each and re.search(weight, each)]
    trainer.train()
    assert trainer.state.log_history[-1]["ran_steps/lm_ce"] == 3
    assert trainer.state.log_history[-1]["ran_steps/sdpo_kl"] == 0


def test_a_run_in_which_no_channel_can_run_is_refused(tmp_path):
    made = [logged(0, with_site=False, with_pair=False)]
    with pytest.raises(InactiveChannelError, match=r"\balpha_sdpo 0\.1\b[^,]*\b0 items\b"):
        trainer_of(tmp_path, sessions_of(made=made), lm_weight=0.0)
    with refusal(InputError, what="sessions", fix="budget"):
        trainer_of(tmp_path, sessions_of(made=made, budget=3))


def test_a_window_without_a_target_that_counts_changes_nothing_and_does_not_fail(tmp_path):
    """Annealed to 0 at the last step, on a window that has nothing but sites."""
    settings = ChannelSettings(alpha_sdpo=0.5, beta_replay=0.0, anneal="linear")
    sessions = sessions_of(0, 1, responses="none", use_pairs=False)
    trainer = trainer_of(tmp_path, sessions, settings=settings, arguments_changes={"max_steps": 2})
    trainer.train()
    rows = trainer.state.log_history
    assert [row["ran/sdpo_kl"] for row in rows[:2]] == [1.0, 0.0]
    assert rows[1]["grad_norm"] == 0.0


def test_the_hint_proof_of_the_trainer_drops_sites(tmp_path):
    sessions = sessions_of(*range(6))
    trainer = trainer_of(tmp_path, sessions, settings=BOTH, hint_margin=0.0)
    kept = sessions.prove(tiny())
    assert 0 < kept.counts["sites"] < 6
    assert trainer.train_dataset.counts["sites"] == kept.counts["sites"]
    assert trainer.train_dataset.proofs == kept.proofs


def test_pairs_get_references_of_the_start_weights_and_simpo_needs_none(tmp_path):
    path = tmp_path / "ref.safetensors"
    trainer = trainer_of(tmp_path, sessions_of(0, 1), settings=BOTH, reference_path=path)
    assert path.exists()
    trainer.train()
    assert losses(trainer, "trace_replay_dpo")[0] == pytest.approx(0.693147, abs=1e-6)
    simpo = ChannelSettings(alpha_sdpo=0.0, beta_replay=0.3, dpo_variant="simpo")
    other = trainer_of(tmp_path, sessions_of(0, 1), settings=simpo)
    assert not other.train_dataset.has_references


def test_an_evaluation_is_the_loss_over_all_its_items(tmp_path):
    held_out = sessions_of(made=[logged(5), logged(6, with_site=False), logged(7, with_pair=False)])
    changes = {"per_device_eval_batch_size": 1}
    trainer = trainer_of(tmp_path, sessions_of(0, 1), settings=BOTH, eval_sessions=held_out, arguments_changes=changes)
    found = trainer.evaluate()
    whole = pack_batches(list(held_out.with_references(tiny()).batches()))
    with torch.no_grad():
        wanted = compose_loss(tiny().eval(), whole, alpha_sdpo=0.7, beta_replay=0.3)
    assert found["eval_loss"] == pytest.approx(float(wanted.total), abs=1e-5)
    assert found["eval_sdpo_kl"] == pytest.approx(float(wanted.sdpo_jsd), abs=1e-6)
    assert found["eval_trace_replay_dpo"] == pytest.approx(float(wanted.trace_replay_dpo), abs=1e-6)


def test_checkpointed_activations_give_the_same_step(tmp_path):
    trained = []
    for checkpointing in (False, True):
        changes = {"gradient_checkpointing": checkpointing, "max_steps": 1}
        trainer = trainer_of(tmp_path, sessions_of(0, 1), settings=BOTH, peft_config=lora(), arguments_changes=changes)
        trainer.train()
        trained.append(trainer.model)
    assert same_weights(*trained)


def test_half_precision_runs_the_body_in_it_and_keeps_whole_weights(tmp_path):
    seen = []
    model = tiny()
    model.model.layers[0].mlp.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    options = {"settings": BOTH, "teacher": TeacherKeeper("live")}  # a copy's head is looked at in fp32, once
    trainer = trainer_of(tmp_path, sessions_of(0, 1), model=model, arguments_changes={"bf16": True}, **options)
    seen.clear()
    trainer.train()
    assert set(seen) == {torch.bfloat16}
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    whole = trainer_of(tmp_path, sessions_of(0, 1), **options)
    whole.train()
    assert losses(trainer, "total") == pytest.approx(losses(whole, "total"), rel=0.02)
    assert losses(trainer, "total") != losses(whole, "total")


def test_every_log_call_is_a_line_of_the_metrics_file(tmp_path):
    trainer = trainer_of(tmp_path, sessions_of(0, 1), settings=BOTH)
    trainer.train()
    rows = read_journal(tmp_path / "metrics.jsonl").rows
    assert rows == trainer.state.log_history
    assert [row["step"] for row in rows] == [1, 2, 3, 3]


def test_four_bits_without_bitsandbytes_is_an_error_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(start_model, "available", lambda name: name != "bitsandbytes")
    with pytest.raises(MissingExtraError, match="pip install bitsandbytes"):
        OfflineTrainer("model", arguments(tmp_path), sessions_of(0), quantization="4bit")
    monkeypatch.setattr(start_model, "available", lambda name: True)
    with refusal(ConfigError, what='quantization="4bit"', got="Qwen2ForCausalLM"):
        trainer_of(tmp_path, sessions_of(0), quantization="4bit", peft_config=lora())
    with refusal(ConfigError, what="peft_config", got="None", fix="peft.LoraConfig"):
        OfflineTrainer("model", arguments(tmp_path), sessions_of(0), quantization="4bit")
    with pytest.raises(InputError, match="quantization"):
        trainer_of(tmp_path, sessions_of(0), quantization="2bit")


def test_a_model_is_loaded_by_its_name(tmp_path):
    tiny().save_pretrained(tmp_path / "model")
    trainer = OfflineTrainer(str(tmp_path / "model"), arguments(tmp_path / "out"), sessions_of(0), settings=BOTH)
    assert same_weights(trainer.model, tiny())


def test_an_adapter_on_an_adapter_is_refused(tmp_path):
    from peft import get_peft_model

    with refusal(ConfigError, what="peft_config", got="adapter"):
        trainer_of(tmp_path, sessions_of(0), model=get_peft_model(tiny(), lora()), peft_config=lora())
