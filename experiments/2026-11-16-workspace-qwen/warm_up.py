"""A model that knows its harness: plain fine-tuning on scripted sessions of the workspace, errors and all.

    python warm_up.py MODEL OUT [--episodes 640] [--steps 120]

The sessions are those of the careless agent on tasks 30,000 and up, which no arm trains on or is judged on. No hint is
among them: whether the model heeds one is what the arms ask. Writes a folder that `from_pretrained` reads.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import torch

from composer_replication.ablation.episodes import Episode as Talk
from composer_replication.ablation.episodes import play_all, world_runner
from composer_replication.batch.model_folder import load_model, load_tokenizer
from composer_replication.envs.policies import CARELESS, Episode, play
from composer_replication.envs.workspace import TOOLS, generate_task

FIRST, LONGEST, BATCH, LR, WARM = 30_000, 2048, 8, 3e-5, 5
PLAYED, FEWEST = range(29_000, 29_016), 0.5


def messages_of(episode: Episode) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": episode.task.prompt}]
    for turn in episode.turns:
        call = {"type": "function", "function": {"name": turn.move.tool, "arguments": dict(turn.move.arguments)}}
        messages.append({"role": "assistant", "content": turn.move.text, "tool_calls": [call]})
        messages.append({"role": "tool", "name": turn.move.tool, "content": turn.outcome.text})
    return messages[:-1]  # behind the last call nothing is said


def tokens_of(tokenizer: Any, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Ids, and labels that are the ids of the agent's own turns, end token included, and -100 elsewhere."""
    text = tokenizer.apply_chat_template(messages, tools=list(TOOLS), tokenize=False)
    ids, labels = list[int](), list[int]()
    begin, end = "<|im_start|>assistant\n", "<|im_end|>"
    head, *turns = text.split(begin)
    for number, piece in enumerate([head, *turns]):
        said, stop, rest = piece.partition(end) if number else ("", "", piece)
        for part, is_said in ((begin if number else "", False), (said + stop, True), (rest, False)):
            new = tokenizer(part, add_special_tokens=False)["input_ids"] if part else []
            ids += new
            labels += new if is_said else [-100] * len(new)
    return ids[:LONGEST], labels[:LONGEST]


def begin_unlearnt_rows(model: Any, tokenizer: Any, marks: tuple[str, ...] = ("<tool_call>", "</tool_call>")) -> None:
    """Tokens of the format whose rows nobody trained begin as the mean of the pieces that spell them."""
    rows = model.get_input_embeddings().weight.data
    for mark in marks:
        (whole,) = tokenizer(mark, add_special_tokens=False)["input_ids"]
        pieces = [piece for part in (mark[0], mark[1:-1], mark[-1]) for piece in tokenizer(part)["input_ids"]]
        rows[whole] = rows[pieces].mean(0)


def share_with_a_call(model: Any, tokenizer: Any) -> float:
    """Of tasks that nothing else uses, played by the model."""
    talks = [Talk(tokenizer, seed, f"warm:{seed}") for seed in PLAYED]
    play_all(model, tokenizer, talks, most=768)
    return sum(each.workspace.calls > 0 for each in talks) / len(talks)


def train(model: Any, rows: list[tuple[list[int], list[int]]], *, steps: int, pad: int, device: str) -> None:
    draw = random.Random(0)  # noqa: S311 (the order of sessions)
    optimiser = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    model.train()
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = LR * min(1.0, (step + 1) / WARM)
        batch = draw.sample(rows, BATCH)
        width = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in batch], device=device)
        labels = torch.tensor([row + [-100] * (width - len(row)) for _, row in batch], device=device)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        print(f"step {step + 1} loss {loss.item():.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--episodes", type=int, default=640)
    parser.add_argument("--steps", type=int, default=120)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    tokenizer = load_tokenizer(given.model)
    tasks = [generate_task(seed, difficulty="easy") for seed in range(FIRST, FIRST + given.episodes)]
    rows = [tokens_of(tokenizer, messages_of(play(task, CARELESS, runner=world_runner()))) for task in tasks]
    model = load_model(given.model, what="model", dtype=torch.float32).to(device)
    begin_unlearnt_rows(model, tokenizer)
    train(model, rows, steps=given.steps, pad=tokenizer.pad_token_id, device=device)
    share = share_with_a_call(model, tokenizer)
    print(f"tasks with a call: {share:.0%}")
    model.save_pretrained(given.out)
    tokenizer.save_pretrained(given.out)
    if share < FEWEST:
        raise SystemExit(f"only {share:.0%} of {len(PLAYED)} tasks hold a call: train longer, or no arm can be judged")


if __name__ == "__main__":
    main()
