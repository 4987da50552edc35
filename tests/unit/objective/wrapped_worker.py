"""What each of two processes does in test_wrapped_models.py: the same step on its own session, wrapped.

python wrapped_worker.py WRAPPER RANK FOLDER  ->  FOLDER/RANK.safetensors, its keys "case|name"
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from composer_replication import compose_loss
from composer_replication.batch.tree_batch import SessionTargets
from composer_replication.trainer.objective.reference import with_reference
from composer_replication.trainer.objective.row_weighting import RowWeighting, WeightedTeacher

OPTIONS = {"alpha_sdpo": 0.7, "beta_replay": 0.3}
TRUNKS = ([5, 9, 13, 21, 8, 34, 55, 3, 17, 29, 41, 2, 11, 7], [4, 6, 8, 30, 31, 32, 33, 12, 1])


def session(rank: int, *, with_sites: bool = True, with_pairs: bool = True, wrong_hint: bool = False):
    """Rank 1's session is another one; it may lack channels that rank 0's has."""
    trunk = TRUNKS[rank]
    targets = SessionTargets()
    targets.add_response(trunk, 2, 6)
    if with_sites:
        contrast = {"contrast_ids": wrongly_hinted(trunk), "contrast_start": 6} if wrong_hint else {}
        targets.add_site(trunk, 3, 7, [*trunk[:2], 60, 61, *trunk[2:7]], 5, **contrast)  # type: ignore[arg-type]
    if with_pairs:
        targets.add_pair([*trunk[:4], 50, 51], 4, trunk[:8], 4, references=(-3.0, -4.0))
    return targets.build()


def wrongly_hinted(trunk: list[int]) -> list[int]:
    return [*trunk[:2], 52, 53, 54, *trunk[2:7]]


def flat(
    rank: int, *, with_sites: bool = True, with_pairs: bool = True, wrong_hint: bool = False
) -> dict[str, torch.Tensor]:
    """The same session as a mapping."""
    trunk = TRUNKS[rank]
    mask = torch.zeros(1, len(trunk), dtype=torch.long)
    mask[0, 2:6] = 1
    batch = {"input_ids": torch.tensor([trunk]), "response_mask": mask}
    if with_sites:
        batch["ctx_teacher_input_ids"] = torch.tensor([[*trunk[:2], 60, 61, *trunk[2:7]]])
        batch["sdpo_student_index"] = torch.tensor([[0, row] for row in range(2, 6)])
        batch["sdpo_teacher_index"] = torch.tensor([[0, row] for row in range(4, 8)])
        if wrong_hint:
            batch["ctx_contrast_input_ids"] = torch.tensor([wrongly_hinted(trunk)])
            batch["sdpo_contrast_index"] = torch.tensor([[0, row] for row in range(5, 9)])
    if with_pairs:
        for side, ids, reference in (("chosen", [*trunk[:4], 50, 51], -3.0), ("rejected", trunk[:8], -4.0)):
            counted = torch.ones(1, len(ids), dtype=torch.long)
            counted[0, :4] = 0
            batch[f"dpo_{side}_input_ids"], batch[f"dpo_{side}_response_mask"] = torch.tensor([ids]), counted
            batch[f"dpo_{side}_ref_logprobs"] = torch.tensor([reference], dtype=torch.float64)
    return batch


def build(lora: bool, *, tied: bool = True, window: int | None = None) -> nn.Module:
    from transformers import AutoModelForCausalLM, MistralConfig, Qwen2Config

    size = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": tied,
    }
    config = Qwen2Config(**size) if window is None else MistralConfig(**size, sliding_window=window)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config).double()
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        model.double()
    return model


def wrap(name: str, model: nn.Module, *, half_output: bool = False) -> nn.Module:
    if name == "none":
        return model
    if name == "ddp":
        return nn.parallel.DistributedDataParallel(model) if any(p.requires_grad for p in model.parameters()) else model
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(output_dtype=torch.bfloat16 if half_output else None)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    for layer in inner.model.layers:
        fully_shard(layer)
    return fully_shard(model, mp_policy=policy)


CASES = {
    "tree": {},
    "flat": {"as_tree": False},
    "tree, untied": {"tied": False},
    "tree, lora": {"lora": True},
    "tree, lora, adapter off": {"lora": True, "teachers": True},
    "tree, checkpointing": {"checkpointing": True},
    "tree, only rank 0 has sites and pairs": {"missing": True},
    "flat, only rank 0 has sites and pairs": {"missing": True, "as_tree": False},
    "tree, a window that only rank 0 is longer than": {"window": 10},
    "tree, a teacher of its own, only rank 0 has sites": {"missing": True, "frozen": True},
    "flat, a teacher of its own, only rank 0 has sites": {"missing": True, "frozen": True, "as_tree": False},
    "tree, results cast to half precision by the wrapper": {"half_output": True},
    "tree, references where only rank 0 has pairs": {"missing": True, "references": True},
    "tree, all switches, only rank 0 has sites": {"switches": True, "missing": True},
    "flat, all switches, only rank 0 has sites": {"switches": True, "missing": True, "as_tree": False},
    "flat, all switches, a teacher of its own, only rank 0 has wrong hints": {
        "switches": True,
        "frozen": True,
        "as_tree": False,
    },
}
SWITCHES = RowWeighting(sigmoid_gate_tau=0.8, teacher_entropy=True, position_decay=0.7, contrast=1.5)


def one_case(wrapper: str, rank: int, **case: object) -> dict[str, torch.Tensor]:
    model = build(bool(case.get("lora")), tied=bool(case.get("tied", True)), window=case.get("window"))  # type: ignore[arg-type]
    if case.get("checkpointing"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    model.train()
    wrapped = wrap(wrapper, model, half_output=bool(case.get("half_output")))
    keep = not (case.get("missing") and rank == 1)
    make = session if case.get("as_tree", True) else flat
    weighting = SWITCHES if case.get("switches") else None
    batch = make(rank, with_sites=keep, with_pairs=keep, wrong_hint=weighting is not None and rank == 0)
    teachers = [WeightedTeacher(None, 0.9, True), WeightedTeacher(None, 0.1)] if case.get("teachers") else None
    if case.get("frozen"):
        teacher = build(False)
        with torch.no_grad():
            for parameter in teacher.parameters():
                parameter.mul_(1.1)
        teachers = [WeightedTeacher(wrap(wrapper, teacher.requires_grad_(False)))]
    components = compose_loss(wrapped, batch, sdpo_teachers=teachers, sdpo_weighting=weighting, **OPTIONS)  # type: ignore[arg-type]
    components.total.backward()
    found = {"total": components.total.detach().clone()}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is not None:
            found[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()  # pyright: ignore
    if case.get("references"):
        referenced = with_reference(wrapped, batch)  # type: ignore[arg-type]
        if referenced.pairs is not None:
            found["total"] = torch.stack(referenced.pairs.references()).flatten().clone()
    return found


def main() -> None:
    wrapper, rank, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    results = {name: one_case(wrapper, rank, **case) for name, case in CASES.items()}
    flat_names = {f"{case}|{name}": value for case, found in results.items() for name, value in found.items()}
    save_file({name: value.contiguous() for name, value in flat_names.items()}, folder / f"{rank}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
