"""What each of two processes does in test_offline_processes.py: train its share, and leave the weights it ends with.

python offline_worker.py WRAPPER RANK PORT FOLDER  ->  FOLDER/RANK.safetensors and FOLDER/RANK.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

CASES = {
    # In the first step sessions 2 and 3 are those of the second process.
    "only one process has sites, an average teaches": {"bare": (2, 3), "teacher": "ema"},
    "two micro-batches, an adapter, trust region": {"accumulation": 2, "lora": True, "teacher": "trust_region"},
}


def run(case: dict, folder: Path, wrapper: str, *, num_processes: int):
    """Two steps on eight sessions; as many of them a step whatever the number of processes."""
    import torch
    from offline_pieces import logged, sessions_of, tiny, trainer_of
    from torch import nn

    from composer_replication.trainer.objective.channels import ChannelSettings
    from composer_replication.trainer.teacher_keeper import TeacherKeeper

    bare = case.get("bare", ())
    made = [logged(number, with_site=number not in bare, with_pair=number not in bare) for number in range(8)]
    accumulation = case.get("accumulation", 1)
    model: nn.Module = tiny().double()
    if case.get("lora"):
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = get_peft_model(model, config, autocast_adapter_dtype=False).double()
    keeper = TeacherKeeper(case.get("teacher", "live"), ema_rate=0.2, live_share=0.1)
    settings = ChannelSettings(alpha_sdpo=0.7, beta_replay=0.3)
    sessions = sessions_of(made=made).with_references(model)
    if wrapper == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        keeper.attach(model)
        inner = model.get_base_model() if case.get("lora") else model
        for layer in inner.model.layers:
            fully_shard(layer)
        fully_shard(model)
    changes = {
        "per_device_train_batch_size": 4 // num_processes // accumulation,
        "gradient_accumulation_steps": accumulation,
        "max_steps": 2,
        "ddp_backend": "gloo" if num_processes > 1 else None,
        "max_grad_norm": 1.0,
    }
    trainer = trainer_of(
        folder,
        sessions,
        model=model,
        settings=settings,
        teacher=keeper,
        eval_sessions=sessions,
        arguments_changes=changes,
    )
    trainer.train()
    evaluation = trainer.evaluate()
    weights = {name: whole(value) for name, value in trainer.model.named_parameters()}
    rows = [row for row in trainer.state.log_history if "loss" in row]
    own = next(iter(trainer.get_train_dataloader()))["session_batch"].trees.counts()
    return weights, [*rows, {name: evaluation[name] for name in ("eval_loss", "eval_sdpo_kl")}], dict(own)


def whole(value):
    value = value.detach()
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone().contiguous()


def main() -> None:
    wrapper, rank, port, folder = sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4])
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    import torch.distributed as dist
    from safetensors.torch import save_file

    dist.init_process_group("gloo")
    tensors, logs = {}, {}
    for name, case in CASES.items():
        weights, *logs[name] = run(case, folder / f"out-{rank}", wrapper, num_processes=2)
        tensors |= {f"{name}|{key}": value for key, value in weights.items()}
    save_file(tensors, folder / f"{rank}.safetensors")
    (folder / f"{rank}.json").write_text(json.dumps(logs))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
