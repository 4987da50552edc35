"""Channel 2 step: student forward + backward, teacher forward, JSD on the gathered target rows; Qwen2-0.5B shape.

python benchmarks/sdpo_step.py                                    # the H200 table: B2 x T4096, 256 targets each
python benchmarks/sdpo_step.py --tiny --device cpu --repeats 3    # anywhere, in seconds
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from measure import measure_all, print_table, save
from peers import load_peers

FLOOR = "body only (floor)"
FLOOR_AGAIN = "body only, again (noise)"
BODY: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
}
TINY_BODY: dict[str, Any] = {
    **BODY,
    "vocab_size": 2000,
    "hidden_size": 56,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
}


def body_only(student: Tensor, weight: Tensor, teacher: Tensor) -> Tensor:
    """Stand-in for the divergence that skips the LM head, to measure the cost of the rest of the step."""
    del weight
    return (student * teacher).float().mean()


def build_model(tiny: bool, device: torch.device) -> Any:
    torch.manual_seed(1)
    sizes = TINY_BODY if tiny else BODY
    config = Qwen2Config(**sizes, max_position_embeddings=65_536, tie_word_embeddings=True, use_cache=False)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model: Any = Qwen2ForCausalLM(config)
    return model.to(device, dtype).train()


def main() -> None:
    parser = argparse.ArgumentParser(description="Channel 2 step beside the peers.")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--targets", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--tiny", action="store_true", help="a small body and T 64, 8 targets")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", default=None, help="append the figures to this file")
    args = parser.parse_args()
    if args.tiny:
        args.length, args.targets = 64, 8
    device = torch.device(args.device)
    model = build_model(args.tiny, device)
    weight = model.lm_head.weight
    ids, hinted_ids = (torch.randint(0, weight.shape[0], (args.batch, args.length), device=device) for _ in range(2))
    targets = torch.zeros(args.batch, args.length, dtype=torch.bool, device=device)
    targets[:, args.length // 2 : args.length // 2 + args.targets] = True

    def step_with(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], None]:
        def step() -> None:
            model.zero_grad(set_to_none=True)
            student = model.model(input_ids=ids).last_hidden_state[targets]
            with torch.no_grad():
                teacher = model.model(input_ids=hinted_ids).last_hidden_state[targets]
            loss(student, weight, teacher).backward()

        return step

    calls, missing = load_peers()
    steps = {FLOOR: step_with(body_only)} | {name: step_with(call) for name, call in calls.items()}
    rows = measure_all({**steps, FLOOR_AGAIN: step_with(body_only)}, device=device, rounds=args.repeats)
    floor_gib = rows[0].peak_gib
    for row in rows:
        row.extra_gib = None if row.peak_gib is None or floor_gib is None else row.peak_gib - floor_gib
    shape = f"B{args.batch} x T{args.length}, {args.targets} targets each, vocabulary {weight.shape[0]:,}"
    print_table(f"Channel 2 step: {shape}; extra GiB is above body only", rows + missing)
    save(args.json, "sdpo_step", vars(args), rows + missing)


if __name__ == "__main__":
    main()
