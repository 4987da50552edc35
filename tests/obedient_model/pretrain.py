"""Teaches a tiny model the world's habits, and to obey a rule in its context where there is one about the task."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from composer_replication.types import Message
from obedient_model import tasks

HABIT_SHARE = 0.85  # of the tasks without a rule; the others spread over what a rule could ask for
_IGNORED = -100
_BATCHES_AT_ONCE = 8

Example = tuple[list[int], list[int]]  # ids and labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    num_steps: int = 320
    batch_size: int = 12
    learning_rate: float = 4e-3
    num_conversations: int = 3000


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretraining:
    """How it went: seconds by the clock and of the processor, and the mean loss of the last twenty steps."""

    seconds: float
    cpu_seconds: float
    final_loss: float


def new_model(tokenizer: PreTrainedTokenizerBase, seed: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.1,
        attention_dropout=0.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def pretrain(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, seed: int, schedule: Schedule) -> Pretraining:
    """Plain cross-entropy on what the assistant says."""
    began, cpu_began = time.perf_counter(), time.process_time()
    draw = random.Random(seed)
    examples = _examples(tokenizer, draw, schedule.num_conversations)
    optimizer = torch.optim.AdamW(model.parameters(), lr=schedule.learning_rate, weight_decay=0.0)
    warm_up = max(1, schedule.num_steps // 10)
    rates = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, schedule.learning_rate, total_steps=schedule.num_steps, pct_start=warm_up / schedule.num_steps
    )
    losses: list[float] = []
    model.train()
    for batch in islice(_batches(examples, draw, schedule.batch_size), schedule.num_steps):
        ids, labels = _padded(batch, int(tokenizer.pad_token_id))
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    model.eval()
    recent = losses[-20:]
    return Pretraining(
        seconds=time.perf_counter() - began,
        cpu_seconds=time.process_time() - cpu_began,
        final_loss=sum(recent) / len(recent),
    )


def _conversation(draw: random.Random) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """One task or two, with a rule about the task (precise or vague), with one about another, or with none."""
    messages: list[Message] = []
    for _ in range(1 if draw.random() < 0.75 else 2):
        kind, hint = draw.choice(tasks.KINDS), None
        value = kind.habit if draw.random() < HABIT_SHARE else draw.choice(kind.values)
        about = draw.choice(("nothing", "task", "task", "task", "task, vaguely", "other"))
        if about == "task":
            value = draw.choice(kind.values)
            hint = kind.hint(value)
        elif about == "task, vaguely":
            value, hint = draw.choice(kind.values), kind.vague_hint()
        elif about == "other":
            other = draw.choice([each for each in tasks.KINDS if each is not kind])
            hint = other.hint(draw.choice(other.values))
        messages += tasks.task_messages(kind, draw.choice(tasks.FILES), value, hint)
    listed = draw.random()
    if listed < 0.2:
        return messages, None
    # In any order and number, so that a list of some other length is nothing new.
    count = len(tasks.TOOLS) if listed < 0.6 else draw.randint(1, len(tasks.TOOLS))
    return messages, tasks.TOOLS if listed < 0.4 else draw.sample(tasks.TOOLS, count)


def _examples(tokenizer: PreTrainedTokenizerBase, draw: random.Random, count: int) -> list[Example]:
    texts = []
    for _ in range(count):
        messages, tools = _conversation(draw)
        texts.append(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))
    header = tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    end = tokenizer.eos_token_id
    return [(ids, _labels(ids, header, end)) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def _labels(ids: list[int], header: list[int], end: int | None) -> list[int]:
    """What stands after an assistant's header, its end token with it; the loss shifts them itself."""
    labels, at = [_IGNORED] * len(ids), 0
    while at < len(ids):
        if ids[at : at + len(header)] != header:
            at += 1
            continue
        at += len(header)
        stop = ids.index(end, at) + 1
        labels[at:stop] = ids[at:stop]
        at = stop
    return labels


def _batches(examples: list[Example], draw: random.Random, batch_size: int) -> Iterator[list[Example]]:
    """Examples of about one length in each: a third of the work was padding when they came as drawn."""
    while True:
        drawn = sorted(draw.sample(examples, batch_size * _BATCHES_AT_ONCE), key=lambda example: len(example[0]))
        batches = [drawn[at : at + batch_size] for at in range(0, len(drawn), batch_size)]
        draw.shuffle(batches)
        yield from batches


def _padded(batch: list[Example], pad: int) -> tuple[Tensor, Tensor]:
    """Padding on the right needs no mask: a causal model looks to the left only."""
    width = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([row + [pad] * (width - len(row)) for row, _ in batch])
    labels = torch.tensor([row + [_IGNORED] * (width - len(row)) for _, row in batch])
    return ids, labels
