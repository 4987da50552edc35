"""A GRPO run with every channel on, whose rollouts are sampled: killed inside a generation window, and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kill_and_resume.small_runs import weights_of


class Complaining:
    """An environment with dice of its own, which a resumed run must find as they lay."""

    def __init__(self) -> None:
        import random

        self._dice = random.Random(3)

    def _state(self) -> list[Any]:
        version, numbers, rest = self._dice.getstate()
        return [version, list(numbers), rest]

    def _load_state(self, state: list[Any]) -> None:
        self._dice.setstate((state[0], tuple(state[1]), state[2]))

    def reset(self, **_row: Any) -> str:
        self.signals = [{"turn": 0, "kind": "other", "message": "wrong", "hint": "Use the tool `look`."}]
        return f" It shows {self._dice.randint(1, 6)}."

    def look(self, path: str) -> str:
        """Looks.

        Args:
            path: where
        """
        return f"nothing at {path}"


TRACES = [
    {
        "trace_id": f"t{number}",
        "turns": [
            {"role": "user", "content": f"Look at {number}"},
            {"role": "assistant", "content": "I look.", "tool_error": "file_not_found", "error_meta": {}},
        ],
        "dpo_pairs": [
            {
                "state_id": f"s{number}",
                "state_messages": [{"role": "user", "content": f"Look at {number}"}],
                "chosen": "I will look at the file first.",
                "rejected": f"The answer is {number}.",
                "n_teachers_agreeing": 2,
            }
        ],
    }
    for number in range(3)
]


def job(folder: Path, resume: bool, **_options: Any) -> dict[str, Any]:
    """Six steps in windows of two, a checkpoint after each: every other one lies inside a window."""
    from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer
    from composer_replication.trainer.data_collator import CollatorConfig, ComposerDataCollator
    from rollouts.tiny_policy import load_tokenizer, save_policy
    from rollouts.trainers import by_first_token, make, questions, quick_config

    policy = folder.parent / "policy"
    if not policy.exists():
        save_policy(policy)
    config = quick_config(
        folder,
        max_steps=6,
        per_device_train_batch_size=2,
        num_generations=4,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        learning_rate=0.01,
        lr_scheduler_type="linear",
        save_strategy="steps",
        save_steps=1,
    )
    collator = ComposerDataCollator(
        load_tokenizer(policy), CollatorConfig(hint_generator=lambda kind, meta: "Use the tools.")
    )
    trainer: Any = make(
        ComposerReplicationTrainer,
        policy,
        config,
        reward_funcs=by_first_token,
        train_dataset=questions(),
        environment_factory=Complaining,
        heed_gate=True,
        alpha_sdpo=1.0,
        beta_replay=0.5,
        anneal="linear",
        sdpo_wrapper="taid",
        teacher="ema",
        trace_dataset=TRACES,
        data_collator=collator,
    )
    if not resume:  # a checkpoint says what it was
        trainer.channels.hint_gate.is_open = True  # as if hints were seen to be heeded
    trainer.train(resume_from_checkpoint=resume)
    lines = [line for line in trainer.state.log_history if "loss/total" in line]
    return {
        "weights": weights_of(trainer.model),
        "teacher": weights_of(trainer.channels.teacher.model),
        "t": trainer.channels.taid.t,
        "rewards": [line.get("reward") for line in lines],
        "totals": [line["loss/total"] for line in lines],
        "rollouts": trainer.sampling.num_rollouts,
    }
