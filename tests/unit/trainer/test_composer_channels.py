"""Channel 2 on rollouts and channel 3 beside them: what they compute, how they are scaled, and what is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOTrainer

from composer_replication import compose_loss
from composer_replication.errors import AlignmentError, InputError
from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer
from composer_replication.trainer.data_collator import CollatorConfig, ComposerDataCollator
from composer_replication.trainer.objective.row_weighting import RowWeighting
from composer_replication.trainer.rollouts.hint_distillation import ErringTurn, place_turns
from composer_replication.trainer.rollouts.sites import RolloutOptions
from refusals import refusal
from rollouts.tiny_policy import ScriptedGeneration, load_tokenizer, save_policy
from rollouts.trainers import make, questions, quick_config, spy, weights

CALL = '<tool_call>\n{{"name": "{0}", "arguments": {1}}}\n</tool_call>'
SCRIPTS = {
    "Look": [
        [CALL.format("read_file", '{"path": "nowhere.py"}'), "There is no such file."],
        [CALL.format("grep", '{"pattern": "total"}'), CALL.format("read_file", '{"path": "src/main.py"}'), "Done."],
        [CALL.format("read_file", '{"path": "src/main.py"}'), "Done."],
        [CALL.format("add", '{"first": 1'), "Done."],
    ]
}


class Desk:
    """One file and a tool to read it: a short prompt keeps these tests quick."""

    def reset(self, **_row: Any) -> None:
        self.signals: list[dict[str, Any]] = []

    def read_file(self, path: str) -> str:
        """Reads.

        Args:
            path: where
        """
        if path != "src/main.py":
            raise FileNotFoundError(2, "No such file or directory", path)
        return "total = 0"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


def by_length(completion_ids: list[list[int]], **_columns: Any) -> list[float]:
    return [float(len(ids) % 7) for ids in completion_ids]


def scripted(
    policy: Path,
    folder: Path,
    grpo: dict[str, Any] | None = None,
    reward: Callable[..., Any] = by_length,
    **named: Any,
) -> ComposerReplicationTrainer:
    chosen = {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 400,
        "learning_rate": 0.01,
    }
    cases = named.pop("cases", ["c"] * 4)
    trainer: Any = make(
        named.pop("trainer_class", ComposerReplicationTrainer),
        policy,
        quick_config(folder, **chosen | (grpo or {})),
        reward_funcs=reward,
        train_dataset=questions(["Look"] * len(cases), case=cases),
        environment_factory=Desk,
        **named,
    )
    ScriptedGeneration(trainer, SCRIPTS)
    return trainer


def flat_batch(inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The same micro-batch as `compose_loss` takes it: one padded teacher row a site."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    sites = [(sample, site) for sample, each in enumerate(inputs["sdpo_sites"]) for site in each]
    width = max(len(site.teacher_ids) for _, site in sites)
    teacher = torch.zeros(len(sites), width, dtype=torch.int64)
    student_index, teacher_index = [], []
    for row, (sample, site) in enumerate(sites):
        teacher[row, : len(site.teacher_ids)] = site.teacher_ids
        padding = int((inputs["prompt_mask"][sample] == 0).sum())
        for offset in range(site.end - site.start):
            student_index.append([sample, padding + site.start - 1 + offset])
            teacher_index.append([row, site.teacher_start - 1 + offset])
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "response_mask": torch.zeros_like(ids),
        "ctx_teacher_input_ids": teacher,
        "sdpo_student_index": torch.tensor(student_index),
        "sdpo_teacher_index": torch.tensor(teacher_index),
    }


def test_the_channel_is_what_compose_loss_gives_on_the_same_rows(policy: Path, tmp_path: Path) -> None:
    trainer = scripted(policy, tmp_path, alpha_sdpo=0.7, sdpo_jsd_beta=1.0)
    calls = spy(trainer, "_compute_loss")
    start = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    (_, inputs), _, _ = calls[0]
    trainer.model.load_state_dict(start)
    wanted = compose_loss(trainer.model, flat_batch(inputs), alpha_sdpo=0.7, beta_replay=0.0, sdpo_jsd_beta=1.0)
    logged = trainer.state.log_history[0]
    assert wanted.counts["sdpo_jsd"] == sum(s.end - s.start for each in inputs["sdpo_sites"] for s in each) > 40
    value = wanted.detached()["sdpo_jsd"]
    assert logged["loss/sdpo_kl"] == pytest.approx(value, rel=1e-4)
    assert logged["loss/total"] - logged["loss/grpo"] == pytest.approx(0.7 * value, rel=1e-3)


def test_the_gradient_is_the_sum_of_the_policys_and_the_channels(policy: Path, tmp_path: Path) -> None:
    trainer = scripted(policy, tmp_path, alpha_sdpo=0.7, sdpo_jsd_beta=1.0)
    trainer.train()
    inputs = trainer._generate_and_score_completions(questions(["Look"] * 4).to_list())
    trainer.model.train()

    def gradients(loss: torch.Tensor) -> dict[str, torch.Tensor]:
        trainer.model.zero_grad()
        loss.backward()
        return {name: each.grad.clone() for name, each in trainer.model.named_parameters() if each.grad is not None}

    trainer.current_gradient_accumulation_steps = 1
    both = gradients(trainer._compute_loss(trainer.model, inputs))
    policy_only = gradients(GRPOTrainer._compute_loss(trainer, trainer.model, inputs))
    channel = gradients(
        0.7
        * compose_loss(trainer.model, flat_batch(inputs), alpha_sdpo=1.0, beta_replay=0.0, sdpo_jsd_beta=1.0).sdpo_jsd
    )
    for name, each in both.items():
        wanted = policy_only[name] + channel[name]
        assert float((each - wanted).norm()) <= 2e-5 * float(wanted.norm()) + 1e-9, name
        assert float(channel[name].norm()) > 0


@pytest.mark.parametrize("loss_type", ["dapo", "dr_grpo"])
def test_micro_batches_add_up_to_the_step_of_the_whole_batch(policy: Path, tmp_path: Path, loss_type: str) -> None:
    found = []
    for number, (size, accumulation) in enumerate(((4, 1), (2, 2), (1, 4))):
        settings = {
            "per_device_train_batch_size": size,
            "gradient_accumulation_steps": accumulation,
            "steps_per_generation": accumulation,
            "loss_type": loss_type,
            "optim": "sgd",
            "learning_rate": 1.0,
        }
        trainer = scripted(policy, tmp_path / str(number), settings, alpha_sdpo=2.0, sdpo_jsd_beta=1.0)
        trainer.train()
        found.append(weights(trainer))
    for other in found[1:]:
        for name, value in found[0].items():
            torch.testing.assert_close(other[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_teacher_without_a_hint_teaches_nothing(policy: Path, tmp_path: Path, bf16: bool) -> None:
    trainer = scripted(policy, tmp_path, {"bf16": bf16}, alpha_sdpo=1.0)
    original = trainer._generate_and_score_completions

    def unhinted(inputs: Any) -> Any:
        batch = original(inputs)
        for sample, each in enumerate(batch["sdpo_sites"]):
            ids = torch.cat([batch["prompt_ids"][sample], batch["completion_ids"][sample]])
            padding = int((batch["prompt_mask"][sample] == 0).sum())
            each[:] = [
                turn._replace(teacher_ids=ids[padding : padding + turn.end], teacher_start=turn.start) for turn in each
            ]
        return batch

    trainer._generate_and_score_completions = unhinted  # type: ignore[method-assign]
    trainer.train()
    assert abs(trainer.state.log_history[0]["loss/sdpo_kl"]) < 1e-6


def test_a_rollout_that_trl_masks_is_not_taught(policy: Path, tmp_path: Path) -> None:
    """Its attention mask hides the turn from the policy, so there is no row to teach."""
    cut = {"Look": [[SCRIPTS["Look"][0][0], "There is no such file. " * 40], *SCRIPTS["Look"][1:]]}
    found = {}
    for masked in (False, True):
        settings = {"mask_truncated_completions": masked, "max_completion_length": 150}
        trainer = scripted(policy, tmp_path / str(masked), settings, alpha_sdpo=1.0)
        ScriptedGeneration(trainer, cut)
        trainer.train()
        found[masked] = trainer.sampling.site_counts
    assert found[False]["dropped:masked_by_trl"] == 0
    assert found[True]["dropped:masked_by_trl"] == 1


def test_evaluating_first_does_not_shorten_taids_schedule(policy: Path, tmp_path: Path) -> None:
    knobs = {"sdpo_wrapper": "taid", "taid_start": 0.2, "taid_end": 0.6}
    trainer = scripted(policy, tmp_path, {"max_steps": 4}, alpha_sdpo=1.0, **knobs)
    trainer.eval_dataset = questions(["Look"] * 4)
    trainer.evaluate()
    assert trainer.channels.taid is None
    trainer.train()
    assert trainer.channels.taid is not None
    assert trainer.channels.taid.num_train_steps == 4
    assert trainer.channels.taid.t == pytest.approx(0.6)


def test_sites_that_were_shuffled_without_their_batch_are_an_error() -> None:
    ids = torch.arange(1, 13)[None].repeat(2, 1) + torch.tensor([[0], [100]])
    mask = torch.ones(2, 4, dtype=torch.int64)
    turn = ErringTurn(6, 9, torch.tensor([1, 2, 3, 4, 5, 6, 50, 51, 7, 8, 9]), 8, "other", "hint", "assistant-0")
    placed = place_turns([[turn], []], mask, ids)
    assert placed is not None
    assert placed.tokens_N.tolist() == [7, 8, 9]
    assert placed.tree.input_ids[placed.hinted_N + 1].tolist() == [7, 8, 9]
    with refusal(AlignmentError, got="assistant-0"):
        place_turns([[], [turn]], mask, ids)
    with refusal(AlignmentError, got="assistant-0"):
        place_turns([[turn._replace(start=7, end=10)], []], mask, ids)


@pytest.mark.parametrize("kind", ["frozen", "ema", "trust_region"])
def test_teachers_begin_as_the_student_and_part_from_it(policy: Path, tmp_path: Path, kind: Any) -> None:
    live = scripted(policy, tmp_path / "live", {"max_steps": 3}, alpha_sdpo=1.0, sdpo_jsd_beta=1.0)
    other = scripted(policy, tmp_path / kind, {"max_steps": 3}, alpha_sdpo=1.0, sdpo_jsd_beta=1.0, teacher=kind)
    live.train()
    other.train()
    first, second = (
        [e["loss/sdpo_kl"] for e in each.state.log_history if "loss/sdpo_kl" in e] for each in (live, other)
    )
    assert second[0] == pytest.approx(first[0], rel=1e-4)
    assert second[2] > 1.2 * first[2]  # what does not move with the student is further from it


@pytest.mark.parametrize(
    "switch", [RowWeighting(contrast=1.0), RowWeighting(position_decay=0.5), RowWeighting(sigmoid_gate_tau=0.1)]
)
def test_switches_reach_the_rollouts(policy: Path, tmp_path: Path, switch: RowWeighting) -> None:
    plain = scripted(policy, tmp_path / "a", alpha_sdpo=1.0)
    switched = scripted(policy, tmp_path / "b", alpha_sdpo=1.0, sdpo_weighting=switch)
    plain.train()
    switched.train()
    before, after = (each.state.log_history[0]["loss/sdpo_kl"] for each in (plain, switched))
    assert abs(after - before) > 1e-3 * before


def test_tokens_that_older_weights_sampled_are_weighed_by_how_likely_they_are_now(policy: Path, tmp_path: Path) -> None:
    settings = {"max_steps": 2, "num_iterations": 2, "temperature": 0.7}
    found = {}
    for clip in (None, 2.0, 0.5):
        folder = tmp_path / str(clip)
        trainer = scripted(policy, folder, settings, alpha_sdpo=1.0, sdpo_is_clip=clip, teacher="frozen")
        trainer.train()
        found[clip] = [entry["loss/sdpo_kl"] for entry in trainer.state.log_history if "loss/sdpo_kl" in entry]
    assert found[2.0][0] == pytest.approx(found[None][0], rel=1e-4)  # at the first pass every ratio is 1
    assert found[0.5][0] == pytest.approx(0.5 * found[None][0], rel=1e-4)
    assert abs(found[2.0][1] / found[None][1] - 1) > 1e-3


def test_k1_is_taken_off_each_tokens_advantage(policy: Path, tmp_path: Path) -> None:
    trainer = scripted(policy, tmp_path, {"max_steps": 2}, rollouts=RolloutOptions(k1_coefficient=0.5))
    calls = spy(trainer, "_compute_loss")
    trainer.train()
    plain = scripted(policy, tmp_path / "plain", {"max_steps": 1}, trainer_class=GRPOTrainer)
    of_plain = spy(plain, "_compute_loss")
    plain.train()
    first, second = calls[0][0][1], calls[1][0][1]
    wanted = of_plain[0][0][1]["advantages"].sort().values
    torch.testing.assert_close(first["advantages"][:, 0].sort().values, wanted)  # at the start k1 is 0
    assert first["advantages"].shape == first["completion_ids"].shape
    # Where nothing was sampled the advantage is the rollout's own; where something was, k1 moves it.
    outside = second["completion_mask"] * second["tool_mask"] == 0
    for row, hidden in zip(second["advantages"], outside, strict=True):
        base = row[hidden]
        assert float((base - base[0]).abs().max()) == 0
        assert float((row[~hidden] - base[0]).abs().max()) > 1e-4


def test_groups_of_equal_reward_are_drawn_again(policy: Path, tmp_path: Path) -> None:
    given = iter([0.0] * 4 + [1.0, 2.0, 3.0, 4.0])

    def reward(completion_ids: list[list[int]], **_columns: Any) -> list[float]:
        return [next(given) for _ in completion_ids]

    trainer = scripted(policy, tmp_path, reward=reward, alpha_sdpo=1.0, rollouts=RolloutOptions(max_resamples=2))
    trainer.train()
    entry = trainer.state.log_history[0]
    assert (entry["groups/equal"], entry["groups/equal_after"], entry["groups/resample_rounds"]) == (1.0, 0.0, 1.0)
    assert entry["reward"] == 0.0, "of the first draw: the alarm must not see how often hard groups are drawn again"
    assert entry["loss/sdpo_kl"] > 0


def test_a_group_that_nobody_judges_is_drawn_again_and_does_not_end_the_run(policy: Path, tmp_path: Path) -> None:
    def reward(completion_ids: list[list[int]], case: list[str], **_columns: Any) -> list[float | None]:
        return [None if each == "a" else float(len(ids)) for ids, each in zip(completion_ids, case, strict=True)]

    trainer = scripted(
        policy,
        tmp_path,
        {"per_device_train_batch_size": 8},
        reward=reward,
        rollouts=RolloutOptions(max_resamples=1),
        cases=["a", "b"],
    )
    trainer.train()
    entry = trainer.state.log_history[0]
    assert (entry["groups/equal"], entry["groups/equal_after"]) == (0.5, 0.5)


@pytest.mark.parametrize("value", [None, math.nan])
def test_rewards_that_judge_nothing_are_an_error_and_some_are_named(policy: Path, tmp_path: Path, value: Any) -> None:
    trainer = scripted(policy, tmp_path / "a", reward=lambda completion_ids, **_: [value] * len(completion_ids))
    with refusal(InputError, what="rewards", got="<lambda>") as refused:
        trainer.train()
    assert re.search(r"\b4 rollouts\b", refused.value.got)
    half = scripted(policy, tmp_path / "b", reward=lambda completion_ids, **_: [value, 1.0, 2.0, 3.0])
    half.train()
    (name,) = [key for key in half.state.log_history[0] if key.endswith("/unjudged")]
    assert half.state.log_history[0][name] == 0.25


def test_a_batch_without_sites_says_so_and_trains_the_policy(policy: Path, tmp_path: Path) -> None:
    trainer = scripted(policy, tmp_path / "a", alpha_sdpo=1.0)
    ScriptedGeneration(trainer, {"Look": [["Nothing."], ["Nothing at all."], ["No."], ["It is not here."]]})
    trainer.train()
    plain = scripted(policy, tmp_path / "b", trainer_class=GRPOTrainer)
    ScriptedGeneration(plain, {"Look": [["Nothing."], ["Nothing at all."], ["No."], ["It is not here."]]})
    plain.train()
    entry = trainer.state.log_history[0]
    assert entry["sites/per_100_turns"] == 0
    assert "loss/sdpo_kl" not in entry
    assert all(torch.equal(value, weights(plain)[name]) for name, value in weights(trainer).items())


TRACE = {
    "trace_id": "t",
    "turns": [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": "I look.", "tool_error": "file_not_found", "error_meta": {}},
    ],
    "dpo_pairs": [
        {
            "state_id": "s",
            "state_messages": [{"role": "user", "content": "Look"}],
            "chosen": "I will look at the file first.",
            "rejected": "The answer is 7.",
            "n_teachers_agreeing": 2,
        }
    ],
}


def channels_on(trainer: ComposerReplicationTrainer) -> list[str]:
    """The channels that run, by name and by where their sites are from."""
    return [" ".join(re.findall(r"grpo|sdpo|trace_replay_dpo|rollouts|logged", each)) for each in trainer.channels_on()]


def test_logged_pairs_raise_their_margin_beside_the_rollouts(policy: Path, tmp_path: Path) -> None:
    config = CollatorConfig(hint_generator=lambda kind, meta: "Use the tools.", pad_token_id=0)
    collator = ComposerDataCollator(load_tokenizer(policy), config)
    settings = {"max_steps": 6, "learning_rate": 1e-3}
    trainer = scripted(
        policy, tmp_path, settings, beta_replay=1.0, alpha_sdpo=0.1, trace_dataset=[TRACE], data_collator=collator
    )
    trainer.train()
    losses = [entry["loss/trace_replay_dpo"] for entry in trainer.state.log_history if "loss/trace_replay_dpo" in entry]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)  # the policy is its own reference at the start
    assert losses[-1] < losses[0] - 0.02
    assert all(entry["loss/sdpo_kl_logged"] > 0 for entry in trainer.state.log_history[:6])
    assert channels_on(trainer) == ["grpo", "sdpo rollouts", "sdpo logged", "trace_replay_dpo"]


def test_half_of_what_logged_traces_need_is_an_error(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="data_collator"):
        scripted(policy, tmp_path, beta_replay=1.0, trace_dataset=[TRACE])
