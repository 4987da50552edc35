"""An adapter on the embedded student, with weights drawn at random."""

from __future__ import annotations

import json


def make_adapter(folder, base, *, scale=4.0, **changes):
    """A LoRA with weights drawn at random; `base` is how its config names the start weights."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from composer_replication.envs.student import student_folder

    model = AutoModelForCausalLM.from_pretrained(student_folder(), dtype=torch.float32)
    torch.manual_seed(3)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], **changes))
    with torch.no_grad():
        for name, each in adapted.named_parameters():
            if "lora_B" in name:
                each.normal_(std=scale * 0.05)
    adapted.save_pretrained(folder)
    AutoTokenizer.from_pretrained(student_folder()).save_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(base)}))
    return folder
