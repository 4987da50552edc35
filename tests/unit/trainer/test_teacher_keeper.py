"""Who teaches over a run: what each kind keeps, how an average moves, and what a resumed run gets back."""

from __future__ import annotations

import copy

import pytest
import torch
from offline_pieces import tiny

from composer_replication.errors import InputError, StaleArtefactError
from composer_replication.trainer.logged_batches import _CyclingSampler
from composer_replication.trainer.objective.channels import ChannelSettings
from composer_replication.trainer.teacher_keeper import TeacherKeeper
from refusals import refusal


def moved(model, amount=0.5):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(amount)


def adapted(model):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))


def test_an_average_moves_by_its_rate_and_the_others_stay():
    model = tiny()
    start = copy.deepcopy(model.state_dict())
    keepers = {kind: TeacherKeeper(kind, ema_rate=0.25) for kind in ("frozen", "ema", "trust_region")}
    for keeper in keepers.values():
        keeper.attach(model)
    for _ in range(2):
        moved(model)
        for keeper in keepers.values():
            keeper.after_step(model)
    for name, value in keepers["frozen"].model.state_dict().items():
        assert torch.equal(value, start[name])
    # 0.25 of 0.5, then 0.25 of what is left to 1.0: 0.125 + 0.25 * 0.875
    for name, value in keepers["ema"].model.named_parameters():
        torch.testing.assert_close(value, start[name] + 0.34375)
    assert not any(module.training for module in keepers["ema"].model.modules())
    assert not any(parameter.requires_grad for parameter in keepers["ema"].model.parameters())


def test_an_average_of_half_precision_weights_moves_all_the_way():
    model = tiny().to(torch.bfloat16)
    keeper = TeacherKeeper("ema", ema_rate=0.05)
    keeper.attach(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.02)
    for _ in range(200):
        keeper.after_step(model)
    for name, value in keeper.model.named_parameters():
        assert torch.equal(value, dict(model.named_parameters())[name]), name
    assert {each.dtype for each in keeper.state()["weights"].values()} == {torch.float32}


def test_shares_add_up_and_a_live_teacher_is_none():
    model = tiny()
    trust = TeacherKeeper("trust_region", live_share=0.1)
    trust.attach(model)
    reference, live = trust.shares()
    assert (reference.model, reference.coefficient, live.model, live.coefficient) == (trust.model, 0.9, None, 0.1)
    assert TeacherKeeper("live").shares() is None
    with pytest.raises(InputError, match="attach"):
        TeacherKeeper("frozen").shares()


def test_under_an_adapter_only_an_average_has_weights_and_only_the_adapters():
    model = adapted(tiny())
    for kind in ("frozen", "trust_region"):
        keeper = TeacherKeeper(kind)
        keeper.attach(model)
        assert keeper.model is None
        assert keeper.shares()[0].without_adapter
    ema = TeacherKeeper("ema")
    ema.attach(model)
    mine, theirs = dict(ema.model.named_parameters()), dict(model.named_parameters())
    own = {name for name in mine if mine[name].data_ptr() != theirs[name].data_ptr()}
    assert own == {name for name in theirs if "lora_" in name} == set(ema.state()["weights"])


def test_a_copy_runs_its_own_weights_where_the_model_has_a_patched_forward():
    model = tiny()
    original = model.forward
    model.forward = lambda *args, **named: original(*args, **named)  # as TRL does, bound to the first model
    keeper = TeacherKeeper("ema", ema_rate=0.5)
    keeper.attach(model)
    ids = torch.tensor([[1, 2, 3]])
    before = keeper.model(input_ids=ids).logits
    moved(model)
    assert torch.equal(keeper.model(input_ids=ids).logits, before)


def test_state_comes_back_bit_for_bit_and_not_into_another_kind():
    model = tiny()
    keeper = TeacherKeeper("ema")
    keeper.attach(model)
    moved(model)
    keeper.after_step(model)
    saved = copy.deepcopy(keeper.state())
    fresh = TeacherKeeper("ema")
    fresh.attach(tiny())
    fresh.load_state(saved)
    for name, value in fresh.model.named_parameters():
        assert torch.equal(value, saved["weights"][name])
    with refusal(StaleArtefactError, what="teacher", got="frozen", expected="ema"):
        TeacherKeeper("frozen").load_state(saved)


@pytest.mark.parametrize("kind", ["frozen", "trust_region"])
def test_a_resumed_run_is_told_when_its_start_weights_are_others(kind):
    keeper, other = TeacherKeeper(kind), TeacherKeeper(kind)
    keeper.attach(tiny())
    other.attach(tiny(seed=1))
    again = TeacherKeeper(kind)
    again.attach(tiny())
    again.load_state(keeper.state())
    with refusal(StaleArtefactError, what=kind, got="weights"):
        other.load_state(keeper.state())


@pytest.mark.parametrize("wrong", [{"kind": "dead"}, {"kind": "ema", "ema_rate": 0.0}, {"live_share": 1.0}])
def test_unsuitable_settings_are_refused(wrong):
    with pytest.raises(InputError):
        TeacherKeeper(**wrong)


def test_a_linear_anneal_goes_from_the_weight_to_its_end():
    settings = ChannelSettings(alpha_sdpo=0.2, anneal="linear", anneal_end=0.5)
    assert [settings.alpha_at(step, 5) for step in range(5)] == pytest.approx([0.2, 0.175, 0.15, 0.125, 0.1])
    assert settings.alpha_at(9, 5) == pytest.approx(0.1)
    assert ChannelSettings(alpha_sdpo=0.2).alpha_at(4, 5) == 0.2
    with pytest.raises(InputError, match="anneal_end"):
        ChannelSettings(anneal_end=2.0)


def test_a_sampler_gives_every_item_once_a_round_and_goes_on_after_a_restart():
    one = _CyclingSampler(5, seed=3)
    rounds = [[one.draw(1)[0] for _ in range(5)] for _ in range(3)]
    assert all(sorted(each) == list(range(5)) for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1
    two = _CyclingSampler(5, seed=3)
    two.draw(7)
    three = _CyclingSampler(5, seed=3)
    three.load_state(two.state())
    assert three.draw(4) == two.draw(4)
    with refusal(StaleArtefactError, got="6 items", expected="5 items"):
        _CyclingSampler(6, seed=3).load_state(two.state())


def test_processes_share_out_what_one_would_draw():
    alone = _CyclingSampler(5, seed=3)
    both = [_CyclingSampler(5, seed=3, process=rank, num_processes=2) for rank in (0, 1)]
    for _ in range(4):
        assert [number for each in both for number in each.draw(2)] == alone.draw(4)
