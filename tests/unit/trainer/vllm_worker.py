"""Two steps of our trainer with `use_vllm`, in a process that finds the stand-in under that name; prints what it saw."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import vllm
from datasets import Dataset

from composer_replication.envs.student import student_folder
from composer_replication.envs.trl_environment import WorkspaceEnvironment, task_rows
from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer
from rollouts.trainers import quick_config


def main(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = quick_config(
        folder,
        use_vllm=True,
        vllm_mode="colocate",
        max_steps=2,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=12,
        learning_rate=1e-4,
    )
    trainer = ComposerReplicationTrainer(
        model=AutoModelForCausalLM.from_pretrained(student_folder(), dtype=torch.float32),
        args=config,
        reward_funcs=lambda completion_ids, **_: [float(len(ids) % 5) for ids in completion_ids],
        train_dataset=Dataset.from_list(task_rows(range(20_000, 20_004))),
        processing_class=AutoTokenizer.from_pretrained(student_folder()),
        environment_factory=WorkspaceEnvironment,
        alpha_sdpo=0.5,
        teacher="frozen",
    )
    trainer.train()
    llm = trainer.vllm_generation.llm
    before = dict(AutoModelForCausalLM.from_pretrained(student_folder(), dtype=torch.float32).named_parameters())
    sent = dict(llm.copy.named_parameters())
    print(
        json.dumps(
            {
                "names": sorted({name for name, _ in vllm.CALLS}),
                "llm": next(given for name, given in vllm.CALLS if name == "LLM"),
                "loaded": sum(name == "load_weights" for name, _ in vllm.CALLS),
                "parameters": len(sent),
                "moved": sum(not torch.equal(sent[name], before[name]) for name in before),
                "prompt_keys": next(given for name, given in vllm.CALLS if name == "generate")[0],
                "ratios": [
                    line["sampling/importance_sampling_ratio/mean"]
                    for line in trainer.state.log_history
                    if "sampling/importance_sampling_ratio/mean" in line
                ],
                "gaps": [
                    line["sampling/sampling_logp_difference/max"]
                    for line in trainer.state.log_history
                    if "sampling/sampling_logp_difference/max" in line
                ],
            },
            default=str,
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
