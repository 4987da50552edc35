"""A warm-up is channel 1 alone, ends where its rule says, and what comes after begins with its weights, bit for bit."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from offline_pieces import arguments, logged, renderer, sessions_of, tiny, trainer_of
from transformers import TrainingArguments

from composer_replication.errors import InputError, StaleArtefactError
from composer_replication.trainer import warmup
from composer_replication.trainer.checkpoints.manifest import read_manifest
from composer_replication.trainer.checkpoints.weights import load_weights
from composer_replication.trainer.from_config.offline import _tool_name_logprob
from composer_replication.trainer.objective.channels import ChannelSettings
from composer_replication.trainer.objective.row_weighting import WeightedTeacher
from composer_replication.trainer.offline_trainer import OfflineTrainer
from composer_replication.trainer.sessions.reference import precompute_ref_logprobs
from composer_replication.trainer.teacher_keeper import TeacherKeeper
from composer_replication.trainer.warmup import FinishedWarmUp, warm_up
from refusals import refusal

BOTH = ChannelSettings(alpha_sdpo=0.7, beta_replay=0.3)
MADE = [logged(number) for number in range(6)]
SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "logging_steps": 2}


def adapted(model=None):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(model or tiny(), config)


def weights(model):
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def loaded(model, checkpoint):
    load_weights(model, checkpoint)
    return model


@pytest.mark.parametrize("make", [tiny, adapted])
def test_it_is_a_run_of_channel_one_alone(tmp_path, make):
    sessions = sessions_of(made=MADE)
    done = warm_up(make(), arguments(tmp_path / "warm", **SAVING), sessions)
    assert (done.checkpoint, done.steps, done.held_out) == ("checkpoint-4", 4, [])
    bare = sessions.only_responses()
    assert bare.channels == {**sessions.channels, "sdpo_jsd": 0, "trace_replay_dpo": 0}
    assert bare.longest_tree < sessions.longest_tree
    off = ChannelSettings(alpha_sdpo=0.0, beta_replay=0.0)
    steps = {"max_steps": 4}
    trainer = trainer_of(tmp_path / "plain", bare, model=make(), settings=off, arguments_changes=steps)
    trainer.train()
    assert same(weights(loaded(make(), tmp_path / "warm" / done.checkpoint)), weights(trainer.model))
    about = read_manifest(tmp_path / "warm" / done.checkpoint)["about"]["data"]
    assert about["phase"] == "warm-up"


@pytest.mark.parametrize("make", [tiny, adapted])
@pytest.mark.parametrize("kind", ["trust_region", "frozen"])
def test_teacher_references_and_proof_begin_with_the_warmed_up_weights(tmp_path, make, kind):
    sessions = sessions_of(made=MADE)
    done = warm_up(make(), arguments(tmp_path / "warm", **SAVING), sessions)
    checkpoint = tmp_path / "warm" / done.checkpoint
    keeper = TeacherKeeper(kind, live_share=0.1)
    options = {"settings": BOTH, "teacher": keeper, "hint_margin": 0.0, "warmed_up": checkpoint}
    trainer = trainer_of(tmp_path / "main", sessions, model=make(), **options)
    warmed = loaded(make(), checkpoint)
    assert same(weights(trainer.model), weights(warmed))
    # As a model without anything special about it: the proof, the references, and the teacher's copy.
    assert trainer.train_dataset.proofs == sessions.prove(warmed, with_adapter=True).proofs
    assert trainer.train_dataset.proofs != sessions.prove(make()).proofs
    store = precompute_ref_logprobs(
        warmed, renderer(), [p for w in trainer.train_dataset.windows for p in w.pair_ids()], with_adapter=True
    )
    for window in trainer.train_dataset.windows:
        for pair, chosen in zip(window.pair_ids(), window.small.pairs.chosen_reference.tolist(), strict=True):
            assert chosen == pytest.approx(store.lookup(*pair.chosen, *pair.rejected)[0], rel=1e-5)
    copy = keeper.model
    assert same(weights(copy), weights(warmed))
    assert keeper.shares()[0] == WeightedTeacher(copy, 1.0 if kind == "frozen" else 0.9)
    trainer.train()
    assert not same(weights(trainer.model), weights(warmed))
    assert same(weights(copy), weights(warmed))
    first = trainer.state.log_history[0]
    assert first["loss/trace_replay_dpo"] == pytest.approx(0.693147, abs=1e-6)
    below = [each for name, each in copy.named_parameters() if "lora_" not in name]
    if make is adapted:  # the weights below the adapter are not copied
        mine = dict(trainer.model.named_parameters())
        assert all(each is mine[name] for name, each in copy.named_parameters() if "lora_" not in name)
        assert below


def dying(monkeypatch, step):
    """The process dies in the step after this one: whatever the last checkpoint does not hold is lost."""
    original = warmup._WarmUpCallback.on_step_end

    def on_step_end(self, args, state, control, **named):
        original(self, args, state, control, **named)
        if state.global_step == step:
            raise RuntimeError("killed")

    monkeypatch.setattr(warmup._WarmUpCallback, "on_step_end", on_step_end)


def test_killed_in_the_warm_up_after_it_or_in_the_steps_it_ends_as_if_it_had_not_been(tmp_path, monkeypatch):
    sessions = sessions_of(made=MADE)

    def main(folder, **changes):
        done = warm_up(adapted(tiny(dropout=0.1)), arguments(folder / "warm", **SAVING), sessions)
        changes = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "logging_steps": 4} | changes
        trainer = trainer_of(
            folder,
            sessions,
            model=adapted(tiny(dropout=0.1)),
            settings=BOTH,
            hint_margin=0.0,
            warmed_up=folder / "warm" / done.checkpoint,
            arguments_changes=changes,
        )
        trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
        return trainer

    whole = main(tmp_path / "whole")
    cut = tmp_path / "cut"
    with monkeypatch.context() as patch:
        dying(patch, 3)
        with pytest.raises(RuntimeError, match="killed"):
            main(cut)
    assert FinishedWarmUp.read(cut / "warm") is None
    warm_up(adapted(tiny(dropout=0.1)), arguments(cut / "warm", **SAVING), sessions)
    (cut / "warm" / warmup.FINISHED).unlink()  # died between the last checkpoint and this
    main(cut, max_steps=4)
    for later in ("checkpoint-4",):
        shutil.rmtree(cut / later)
    resumed = main(cut)
    assert resumed.resumed_from.name == "checkpoint-2"
    assert same(weights(resumed.model), weights(whole.model))
    assert resumed.train_dataset.proofs == whole.train_dataset.proofs


def test_it_ends_where_the_held_out_loss_stays_above_its_lowest_and_takes_that_checkpoint(tmp_path, monkeypatch):
    """Losses are scripted; stopped in the middle or after the last evaluation it ends the same."""
    losses = {1: 3.0, 2: 2.0, 3: 2.5, 4: 2.2, 5: 1.0}
    original = OfflineTrainer.evaluation_loop

    def scripted(self, *args, **named):
        output = original(self, *args, **named)
        output.metrics["eval_lm_ce"] = losses[self.state.global_step]
        return output

    monkeypatch.setattr(OfflineTrainer, "evaluation_loop", scripted)
    changes = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 5}
    changes |= {"save_total_limit": 1}
    held_out, told = sessions_of(7, 8), []

    def run(folder):
        options = {"held_out": held_out, "patience": 2, "on_held_out": lambda *each: told.append(each)}
        return warm_up(tiny(), arguments(folder, **changes), sessions_of(made=MADE), **options)

    done = run(tmp_path / "whole")
    assert (done.checkpoint, done.steps) == ("checkpoint-2", 4)
    assert done.held_out == [[1, 3.0], [2, 2.0], [3, 2.5], [4, 2.2]] == [list(each) for each in told]
    assert FinishedWarmUp.read(tmp_path / "whole") == done
    assert re.search(r"\bheld-out\b.*\b3\.000\b.*\b2\.000\b", done.describe())
    with monkeypatch.context() as patch:
        dying(patch, 4)
        with pytest.raises(RuntimeError, match="killed"):
            run(tmp_path / "cut")
    assert run(tmp_path / "cut") == done
    (tmp_path / "cut" / warmup.FINISHED).unlink()
    losses[4] = losses[5] = 0.0  # evaluations that are not made again
    assert run(tmp_path / "cut") == done
    one, other = (loaded(tiny(), tmp_path / name / "checkpoint-2") for name in ("whole", "cut"))
    assert same(weights(one), weights(other))


def test_what_does_not_belong_together_is_refused(tmp_path):
    done = warm_up(tiny(), arguments(tmp_path / "warm", **SAVING), sessions_of(made=MADE))
    checkpoint = tmp_path / "warm" / done.checkpoint
    with refusal(StaleArtefactError, what=str(checkpoint), got="sessions"):
        warm_up(tiny(), arguments(tmp_path / "warm", **SAVING), sessions_of(0, 1))
    with pytest.raises(StaleArtefactError, match="checkpoint-4"):
        trainer_of(tmp_path / "main", sessions_of(0, 1), model=tiny(layers=1), warmed_up=checkpoint)
    main = trainer_of(tmp_path / "main", sessions_of(made=MADE), settings=BOTH, arguments_changes=SAVING)
    main.train()
    with refusal(StaleArtefactError, what=str(tmp_path / "main" / "checkpoint-4"), fix="trainer.warmup.warm_up"):
        trainer_of(tmp_path / "other", sessions_of(made=MADE), warmed_up=tmp_path / "main" / "checkpoint-4")
    later = trainer_of(
        tmp_path / "main",
        sessions_of(made=MADE),
        settings=BOTH,
        warmed_up=checkpoint,
        arguments_changes={"max_steps": 6},
    )
    with refusal(StaleArtefactError, got="phase None", expected="phase after a warm-up"):  # what a manifest stores
        later.train(resume_from_checkpoint=True)
    with refusal(InputError, what="patience", got="sessions"):
        warm_up(tiny(), arguments(tmp_path / "until", **SAVING), sessions_of(made=MADE), patience=1)


@pytest.mark.parametrize("make", [tiny, adapted])
def test_other_start_weights_or_settings_than_a_FinishedWarmUps_are_refused_by_name(tmp_path, make):
    folder, sessions = tmp_path / "warm", sessions_of(made=MADE)
    done = warm_up(make(), arguments(folder, **SAVING), sessions)
    assert warm_up(make(), arguments(folder, **SAVING), sessions) == done

    def other():
        return tiny(seed=1) if make is tiny else adapted(tiny(seed=1))

    with refusal(StaleArtefactError, what="warmup.json", got="start_weights", fix="train.output"):
        warm_up(other(), arguments(folder, **SAVING), sessions)
    changes = {"learning_rate": 2e-2, "max_steps": 6, "seed": 4}
    for name, value in changes.items():
        with refusal(StaleArtefactError, got=name, expected=f"{name} {value}", fix="train.output"):
            warm_up(make(), arguments(folder, **SAVING | {name: value}), sessions)
    told = {"logging_steps": 1, "save_total_limit": 2}  # which change nothing of the weights
    assert warm_up(make(), arguments(folder, **SAVING | told), sessions) == done
    with refusal(StaleArtefactError, got="start_weights" if make is tiny else "base_weights"):
        trainer_of(tmp_path / "main", sessions, model=other(), warmed_up=folder / done.checkpoint)


def test_another_trained_adapter_or_number_of_processes_than_a_FinishedWarmUps_is_refused_by_name(
    tmp_path, monkeypatch
):
    """The weights below are the same; a fresh adapter's first values are the seed's, and change nothing yet."""
    folder, sessions = tmp_path / "warm", sessions_of(made=MADE)

    def trained(value):
        model = adapted()
        with torch.no_grad():
            next(each for name, each in model.named_parameters() if "lora_B" in name)[0, 0] = value
        return model

    with monkeypatch.context() as patch:
        dying(patch, 3)
        with pytest.raises(RuntimeError, match="killed"):
            warm_up(trained(0.5), arguments(folder, **SAVING), sessions)
    with pytest.raises(StaleArtefactError, match="start_adapter"):
        warm_up(trained(0.25), arguments(folder, **SAVING), sessions)
    done = warm_up(trained(0.5), arguments(folder, **SAVING), sessions)
    assert warm_up(trained(0.5), arguments(folder, **SAVING), sessions) == done
    for other in (trained(0.25), adapted()):
        with refusal(StaleArtefactError, what="warmup.json") as refused:
            warm_up(other, arguments(folder, **SAVING), sessions)
        got, expected = refused.value.got, refused.value.expected
        assert all(re.fullmatch(r"start_adapter \w+", each) for each in (got, expected))
        with refusal(StaleArtefactError, what=done.checkpoint, got="start_adapter"):
            trainer_of(tmp_path / "main", sessions, model=other, warmed_up=folder / done.checkpoint)
    main = trainer_of(tmp_path / "main", sessions, model=trained(0.5), warmed_up=folder / done.checkpoint)
    assert same(weights(main.model), weights(loaded(adapted(), folder / done.checkpoint)))
    # Died between the last checkpoint and this file.
    shutil.copytree(folder, tmp_path / "cut", ignore=shutil.ignore_patterns(warmup.FINISHED))
    with refusal(StaleArtefactError, got="start_adapter"):
        warm_up(adapted(), arguments(tmp_path / "cut", **SAVING), sessions)
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    with refusal(StaleArtefactError, got="world_size 1", expected="world_size 2"):
        warm_up(trained(0.5), arguments(folder, **SAVING), sessions)


def test_a_warm_up_of_an_earlier_version_is_read_and_refused_for_what_it_does_not_know(tmp_path):
    sessions = sessions_of(made=MADE)
    warm_up(tiny(), arguments(tmp_path, **SAVING), sessions)
    earlier = json.loads((tmp_path / warmup.FINISHED).read_bytes())
    del earlier["start_adapter"], earlier["settings"]["world_size"]
    (tmp_path / warmup.FINISHED).write_text(json.dumps(earlier))
    with refusal(StaleArtefactError, fix="train.output") as refused:
        warm_up(tiny(), arguments(tmp_path, **SAVING), sessions)
    assert (refused.value.got, refused.value.expected) == ("world_size None", "world_size 1")


def test_a_warm_up_that_was_cut_short_goes_on_from_its_own_start_weights_alone(tmp_path, monkeypatch):
    sessions = sessions_of(made=MADE)
    with monkeypatch.context() as patch:
        dying(patch, 3)
        with pytest.raises(RuntimeError, match="killed"):
            warm_up(tiny(), arguments(tmp_path, **SAVING), sessions)
    with pytest.raises(StaleArtefactError, match="start_weights"):
        warm_up(tiny(seed=1), arguments(tmp_path, **SAVING), sessions)
    assert warm_up(tiny(), arguments(tmp_path, **SAVING), sessions).checkpoint == "checkpoint-4"


def test_the_log_prob_of_names_is_the_mean_over_calls_of_the_sum_up_to_the_name():
    model, sessions = tiny().double().eval(), sessions_of(made=MADE)
    tokenizer, found = renderer().tokenizer, []
    for session in sessions.rendered:
        for place in session.good_calls:
            span, ids = place.span, place.rendered.ids
            end = next(
                at
                for at in range(span.call_start, span.call_end)
                if "bash" in tokenizer.decode(ids[span.call_start : at])
            )
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids[:end]])).logits[0, span.call_start - 1 : -1].log_softmax(-1)
            targets = torch.tensor(ids[span.call_start : end])
            found.append(float(logits.gather(-1, targets[:, None]).sum()))
    assert _tool_name_logprob(model, sessions) == pytest.approx(sum(found) / len(found), rel=1e-9)
    assert _tool_name_logprob(model, sessions_of(made=[logged(0)], responses="none")) is not None
