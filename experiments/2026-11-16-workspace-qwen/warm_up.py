"""A model that knows its harness: plain fine-tuning on scripted sessions of the workspace, errors and all.

    python warm_up.py rows TOKENIZER rows.json [--episodes 640]
    python warm_up.py train MODEL rows.json OUT [--steps 80] [--part 4]

The sessions are those of the careless agent on tasks 30,000 and up, which no arm trains on or is judged on. No hint is
among them: whether the model heeds one is what the arms ask. Writes a folder that `from_pretrained` reads. After each
round of steps 16 tasks are played; where too few of them hold a call, another round follows, three at the most.
`--part`: sessions that are on the device at once.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch

from composer_replication.batch.model_folder import load_model, load_tokenizer
from composer_replication.envs.policies import CARELESS, Episode, play
from composer_replication.envs.workspace import TOOLS, generate_task
from composer_replication.evaluation.ablation.workspace import TaskEpisode as Talk
from composer_replication.evaluation.ablation.workspace import _shared_runner, play_all

FIRST, LONGEST, BATCH, LR, WARM = 30_000, 3072, 16, 3e-5, 5
PLAYED, FEWEST, ROUNDS = range(29_000, 29_016), 0.8, 3


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
    play_all(model, tokenizer, talks, max_tokens=1024)
    solved = sum(each.workspace.reward().solved for each in talks)
    calls, failing = (sum(each) for each in zip(*((e.workspace.calls, e.failures.total()) for e in talks), strict=True))
    print(f"of {len(talks)} tasks {solved} solved, {calls} calls, {failing} failing", flush=True)
    return sum(each.workspace.calls > 0 for each in talks) / len(talks)


class Training:
    """AdamW over all weights, batches of sessions in parts that fit beside a large vocabulary."""

    def __init__(self, model: Any, rows: list[tuple[list[int], list[int]]], *, pad: int, part: int) -> None:
        self.model, self.rows, self.pad, self.part, self.step = model, rows, pad, part, 0
        self.draw = random.Random(0)  # noqa: S311 (the order of sessions)
        self.optimiser = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)

    def run(self, steps: int) -> None:
        self.model.train()
        for _ in range(steps):
            self.step += 1
            self.optimiser.param_groups[0]["lr"] = LR * min(1.0, self.step / WARM)
            batch = self.draw.sample(self.rows, BATCH)
            total = sum(label != -100 for _, row in batch for label in row)
            parts = [batch[at : at + self.part] for at in range(0, BATCH, self.part)]
            loss = sum(self._add_gradient(part, total) for part in parts)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimiser.step()
            self.optimiser.zero_grad()
            print(f"step {self.step} loss {loss:.3f}", flush=True)

    def _add_gradient(self, part: list[tuple[list[int], list[int]]], total: int) -> float:
        device, width = self.model.device, max(len(ids) for ids, _ in part)
        ids = torch.tensor([ids + [self.pad] * (width - len(ids)) for ids, _ in part], device=device)
        labels = torch.tensor([row + [-100] * (width - len(row)) for _, row in part], device=device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = self.model(input_ids=ids, labels=labels, num_items_in_batch=total).loss
        loss.backward()
        return loss.item()


def write_rows(tokenizer_name: str, out: Path, episodes: int) -> None:
    tokenizer = load_tokenizer(tokenizer_name)
    tasks = [generate_task(seed, difficulty="easy") for seed in range(FIRST, FIRST + episodes)]
    rows = [tokens_of(tokenizer, messages_of(play(task, CARELESS, runner=_shared_runner()))) for task in tasks]
    out.write_text(json.dumps(rows), encoding="utf-8")


def train(model_name: str, rows: Path, out: Path, steps: int, part: int) -> None:
    torch.manual_seed(0)
    tokenizer = load_tokenizer(model_name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(model_name, what="model", dtype=torch.float32).to(device)
    begin_unlearnt_rows(model, tokenizer)
    training = Training(model, json.loads(rows.read_text(encoding="utf-8")), pad=tokenizer.pad_token_id, part=part)
    for _ in range(ROUNDS):
        training.run(steps)
        share = share_with_a_call(model, tokenizer)
        print(f"after {training.step} steps, tasks with a call: {share:.0%}", flush=True)
        if share >= FEWEST:
            model.save_pretrained(out)
            tokenizer.save_pretrained(out)
            return
    raise SystemExit(f"only {share:.0%} of {len(PLAYED)} tasks hold a call: no arm could be judged")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    rows = verbs.add_parser("rows")
    rows.add_argument("tokenizer")
    rows.add_argument("out", type=Path)
    rows.add_argument("--episodes", type=int, default=640)
    training = verbs.add_parser("train")
    training.add_argument("model")
    training.add_argument("rows", type=Path)
    training.add_argument("out", type=Path)
    training.add_argument("--steps", type=int, default=80)
    training.add_argument("--part", type=int, default=4)
    given = parser.parse_args()
    if given.verb == "rows":
        write_rows(given.tokenizer, given.out, given.episodes)
    else:
        train(given.model, given.rows, given.out, given.steps, given.part)


if __name__ == "__main__":
    main()
