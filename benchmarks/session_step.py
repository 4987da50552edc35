"""Measure one step on all three channels of a session: as a tree, as separate sequences, and a plain SFT step.

python benchmarks/session_step.py                      # Qwen2-0.5B shape, three session lengths, on a CUDA device
python benchmarks/session_step.py --tiny               # anywhere, in seconds: shows that it runs, not how fast
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM

from composer_replication import compose_loss
from composer_replication.batch.tree_batch import SessionTargets, TreeBatch
from composer_replication.trainer.objective.attention.forward import tree_hidden_states
from composer_replication.trainer.objective.row_weighting import WeightedTeacher

SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "intermediate_size": 4864},
    "1.5B": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "intermediate_size": 8960},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128},
}
ALPHA, BETA = 0.1, 0.05


def build_model(shape: str, vocab: int, device: str, checkpointing: bool) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=vocab,
        num_key_value_heads=2,
        max_position_embeddings=262_144,
        tie_word_embeddings=True,
        use_cache=False,
        **SHAPES[shape],
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(1)
    with torch.device(device):
        model = Qwen2ForCausalLM(config).train()
    model.to(torch.device(device), torch.bfloat16 if device == "cuda" else torch.float32)  # pyright: ignore[reportCallIssue, reportArgumentType]
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


class Session:
    """A session as a trunk with pairs at several turns, sites with a hint before the turn, and responses at the end."""

    def __init__(self, length: int, pairs: int, sites: int, turn: int, hint: int, responses: int, vocab: int) -> None:
        generator = torch.Generator().manual_seed(length)

        def some(number: int) -> list[int]:
            return torch.randint(0, vocab, (number,), generator=generator).tolist()

        self.trunk, self.turn, self.hint = some(length), turn, hint
        self.first_response = length - responses
        self.pairs = [(length * k // pairs - turn, some(turn)) for k in range(1, pairs + 1)]
        self.sites = [(length * k // sites - turn, some(hint)) for k in range(1, sites + 1)]

    def tree(self, device: str) -> TreeBatch:
        targets = SessionTargets()
        targets.add_response(self.trunk, self.first_response, len(self.trunk))
        for start, hint in self.sites:
            end = start + self.turn
            teacher = self.trunk[:start] + hint + self.trunk[start:end]
            targets.add_site(self.trunk, start, end, teacher, start + self.hint)
        for start, chosen in self.pairs:
            rejected = self.trunk[: start + self.turn]
            targets.add_pair(self.trunk[:start] + chosen, start, rejected, start, references=(-1.0, -1.0))
        return targets.build(device)


def flat_step(model: Qwen2ForCausalLM, session: Session, device: str) -> Callable[[], None]:
    """Return a step with separate sequences that accumulate gradients: the trunk with its teachers, then each pair."""
    trunk = torch.tensor([session.trunk], device=device)
    mask = torch.zeros_like(trunk)
    mask[:, session.first_response :] = 1
    turn, hint = session.turn, session.hint
    teachers = [session.trunk[:at] + words + session.trunk[at : at + turn] for at, words in session.sites]
    width = max(map(len, teachers))
    padded = torch.tensor([ids + [0] * (width - len(ids)) for ids in teachers], device=device)
    lengths = torch.tensor([len(ids) for ids in teachers], device=device)
    student = [[0, row] for at, _ in session.sites for row in range(at - 1, at + turn - 1)]
    teacher = [[n, row + hint] for n, (at, _) in enumerate(session.sites) for row in range(at - 1, at + turn - 1)]
    first = {
        "input_ids": trunk,
        "response_mask": mask,
        "ctx_teacher_input_ids": padded,
        "ctx_teacher_attention_mask": torch.arange(width, device=device)[None] < lengths[:, None],
        "sdpo_student_index": torch.tensor(student, device=device),
        "sdpo_teacher_index": torch.tensor(teacher, device=device),
    }
    batches = [(first, ALPHA, 0.0)]
    for at, chosen in session.pairs:
        sides = {"chosen": session.trunk[:at] + chosen, "rejected": session.trunk[: at + turn]}
        batch = {"input_ids": trunk[:, :2], "response_mask": torch.zeros_like(trunk[:, :2])}
        for side, ids in sides.items():
            tokens = torch.tensor([ids], device=device)
            counted = torch.zeros_like(tokens)
            counted[:, at:] = 1
            batch[f"dpo_{side}_input_ids"], batch[f"dpo_{side}_response_mask"] = tokens, counted
            batch[f"dpo_{side}_ref_logprobs"] = torch.tensor([-1.0], device=device)
        batches.append((batch, 0.0, BETA))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        for batch, alpha, beta in batches:
            compose_loss(model, batch, alpha_sdpo=alpha, beta_replay=beta).total.backward()

    return step


def steps_of(
    model: Qwen2ForCausalLM, reference: Qwen2ForCausalLM, session: Session, device: str
) -> dict[str, Callable[[], None]]:
    batch = session.tree(device)
    trunk = torch.tensor([session.trunk], device=device)

    def plain() -> None:
        model.zero_grad(set_to_none=True)
        hidden = model.model(input_ids=trunk).last_hidden_state[0, session.first_response - 1 : -1]
        targets = trunk[0, session.first_response :]
        weight = model.lm_head.weight
        pieces = zip(hidden.split(1024), targets.split(1024), strict=True)
        losses = [F.cross_entropy((rows @ weight.T).float(), ids, reduction="sum") for rows, ids in pieces]
        torch.stack(losses).sum().backward()

    def tree() -> None:
        model.zero_grad(set_to_none=True)
        compose_loss(model, batch, alpha_sdpo=ALPHA, beta_replay=BETA).total.backward()

    def tree_and_reference() -> None:
        model.zero_grad(set_to_none=True)
        teachers = [WeightedTeacher(reference, 0.99), WeightedTeacher(coefficient=0.01)]
        compose_loss(model, batch, alpha_sdpo=ALPHA, beta_replay=BETA, sdpo_teachers=teachers).total.backward()

    return {
        "plain SFT step on the trunk": plain,
        "tree, three channels": tree,
        "tree + reference pass (trust region)": tree_and_reference,
        "separate sequences, three channels": flat_step(model, session, device),
    }


def measure(step: Callable[[], None], device: str, rounds: int) -> tuple[float, float]:
    """Return the median milliseconds and the peak GiB of a step."""
    step()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return statistics.median(seconds) * 1e3, peak


def run(shape: str, lengths: list[int], device: str, checkpointing: bool, args: argparse.Namespace) -> None:
    model = build_model(shape, args.vocab, device, checkpointing)
    reference = build_model(shape, args.vocab, device, False).requires_grad_(False)
    kept = "with" if checkpointing else "without"
    how = tree_hidden_states(model, Session(64, 2, 2, 8, 4, 8, args.vocab).tree(device).tree)
    print(f"\nattention: {how.kind or how.flat_because}")
    print(f"\n### {shape}, {kept} checkpointing, lengths in this order, {args.pairs} pairs, {args.sites} sites\n")
    print("| trunk | tree / trunk tokens | variant | ms | x plain | x plain / token ratio | peak GiB |")
    print("|---|---|---|---|---|---|---|")
    for length in lengths:
        session = Session(length, args.pairs, args.sites, args.turn, args.hint, args.responses, args.vocab)
        ratio = len(session.tree("cpu").tree) / length
        plain_ms = 0.0
        for name, step in steps_of(model, reference, session, device).items():
            if args.only not in name or (name.startswith("separate") and length > args.longest_separate):
                continue
            ms, peak = measure(step, device, args.rounds_separate if name.startswith("separate") else args.rounds)
            plain_ms = plain_ms or ms
            times = ms / plain_ms
            print(
                f"| {length} | {ratio:.2f} | {name} | {ms:.0f} | {times:.2f} | {times / ratio:.2f} | {peak:.1f} |",
                flush=True,
            )
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    del model, reference


def main() -> None:
    parser = argparse.ArgumentParser(description="One step of a whole session: tree against separate sequences.")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--shapes", nargs="+", default=["0.5B"], choices=list(SHAPES))
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 16384, 12000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rounds-separate", type=int, default=1, help="of the slow rows")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--sites", type=int, default=8)
    parser.add_argument("--turn", type=int, default=256)
    parser.add_argument("--hint", type=int, default=64)
    parser.add_argument("--responses", type=int, default=4096)
    parser.add_argument("--longest-separate", type=int, default=16384, help="longer sessions leave that row out")
    parser.add_argument("--only", default="", metavar="WORD", help="rows whose name has it; ratios are to the first")
    parser.add_argument("--checkpointing", choices=["off", "on", "both"], default="both")
    args = parser.parse_args()
    if args.tiny:
        args.vocab, args.pairs, args.sites, args.turn, args.hint, args.responses = 500, 16, 4, 8, 4, 64
        run("tiny", [256, 512], "cuda" if torch.cuda.is_available() else "cpu", False, args)
        return
    for shape in args.shapes:
        for checkpointing in {"off": (False,), "on": (True,), "both": (False, True)}[args.checkpointing]:
            run(shape, args.lengths, "cuda", checkpointing, args)


if __name__ == "__main__":
    main()
