"""Measure the JSD from hidden states and the LM head, forward + backward: our kernel and those of other libraries.

python benchmarks/jsd_kernel.py                 # the H200 table: 4096 rows x hidden 2048 x vocabulary 248,320, bf16
python benchmarks/jsd_kernel.py --rows 64 --hidden 32 --vocab 1000 --device cpu    # anywhere, in seconds
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from measure import measure_all, print_table, save
from peers import JsdCall, load_peers

FLOOR = "four matrix products only (floor)"


def floor_step(student: Tensor, weight: Tensor, teacher: Tensor, chunk: int = 1024) -> None:
    """Compute the matrix products that no kernel can avoid: two for the logits and two for the gradients."""
    weight = weight.detach()
    for start in range(0, student.shape[0], chunk):
        rows = student.detach()[start : start + chunk]
        logits = rows @ weight.T
        _ = teacher[start : start + chunk] @ weight.T
        _ = logits @ weight
        _ = logits.T @ rows


def gradient_error(call: JsdCall, student: Tensor, weight: Tensor, teacher: Tensor) -> str:
    """Return the relative L2 errors of the value and the gradients against fp64, for a slice of the rows."""
    rows = slice(0, 64)
    wide = [x.detach()[rows].double().requires_grad_() for x in (student, teacher)]
    wide_weight = weight.detach().double().requires_grad_()
    log_q, log_p = ((h @ wide_weight.T).log_softmax(-1) for h in (wide[0], wide[1]))
    log_p = log_p.detach()
    log_m = torch.logaddexp(log_q, log_p) - torch.tensor(2.0).log().item()
    value = 0.5 * ((log_p.exp() * (log_p - log_m)).sum(-1) + (log_q.exp() * (log_q - log_m)).sum(-1)).mean()
    wanted = torch.autograd.grad(value, (wide[0], wide_weight))
    narrow = student.detach()[rows].clone().requires_grad_()
    narrow_weight = weight.detach().clone().requires_grad_()
    result = call(narrow, narrow_weight, teacher[rows])
    got = torch.autograd.grad(result, (narrow, narrow_weight))
    pairs = zip(got, wanted, strict=True)
    errors = [((ours.double() - want).norm() / want.norm()).item() for ours, want in pairs]
    return f"error vs fp64: value {abs(result.item() / value.item() - 1):.1e}, grads {errors[0]:.1e} {errors[1]:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description="JSD kernels side by side.")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=248_320)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", default=None, help="append the figures to this file")
    args = parser.parse_args()
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    student = torch.randn(args.rows, args.hidden, device=device, dtype=dtype, requires_grad=True)
    teacher = torch.randn(args.rows, args.hidden, device=device, dtype=dtype)
    weight = (torch.randn(args.vocab, args.hidden, device=device, dtype=dtype) * 0.02).requires_grad_()
    inputs_bytes = sum(x.numel() * x.element_size() for x in (student, teacher, weight))

    def step_of(call: JsdCall) -> Callable[[], None]:
        def step() -> None:
            student.grad = weight.grad = None
            call(student, weight, teacher).backward()

        return step

    calls, missing = load_peers()
    steps = {FLOOR: lambda: floor_step(student, weight, teacher)} | {
        name: step_of(call) for name, call in calls.items()
    }
    rows = measure_all(steps, device=device, rounds=args.repeats, base_bytes=inputs_bytes)
    student.grad = weight.grad = None
    for row in rows:
        if row.ms is not None and row.variant in calls:
            row.note = gradient_error(calls[row.variant], student, weight, teacher)
    shape = f"{args.rows} rows x hidden {args.hidden} x vocabulary {args.vocab:,}"
    title = f"JSD, forward + backward: {shape}, {dtype}; extra GiB is above weights and inputs, so it holds their .grad"
    print_table(title, rows + missing)
    save(args.json, "jsd_kernel", vars(args), rows + missing)


if __name__ == "__main__":
    main()
