"""The tiny world in one object: tokenizer, a model that obeys rules in its context, and sessions in which it erred."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_model, save_model
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from composer_replication.batch.render.renderer import RenderedSequence, Renderer, TurnSpan
from obedient_model import tasks
from obedient_model.language import build_tokenizer
from obedient_model.pretrain import Pretraining, Schedule, new_model, pretrain
from obedient_model.tasks import Kind, ToySession
from warm_crf import shared_folder


class Split(NamedTuple):
    training: list[ToySession]
    held_out: list[ToySession]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class World:
    """`model` is shared by everyone who asked for this seed: train `new_model()`, a copy, instead."""

    tokenizer: PreTrainedTokenizerFast
    model: LlamaForCausalLM
    pretraining: Pretraining
    renderer: Renderer
    kinds: tuple[Kind, ...] = tasks.KINDS
    tools: list[dict[str, Any]] = field(default_factory=lambda: tasks.TOOLS)

    @property
    def hints(self) -> dict[str, str]:
        """The right rule of every kind of task."""
        return {kind.name: kind.hint() for kind in self.kinds}

    def new_model(self) -> LlamaForCausalLM:
        return copy.deepcopy(self.model).requires_grad_(True)

    def sessions(
        self, seed: int, count: int, *, num_tasks_before: int = 0, files: Sequence[str] = tasks.FILES
    ) -> list[ToySession]:
        """As many of each kind, in turn."""
        draw = random.Random(seed)
        kinds = [self.kinds[at % len(self.kinds)].name for at in range(count)]
        return [
            tasks.sample_session(
                draw, kind, identity=f"toy-{seed}-{at}", num_tasks_before=num_tasks_before, files=files
            )
            for at, kind in enumerate(kinds)
        ]

    def split(self, seed: int, count: int, *, num_tasks_before: int = 0) -> Split:
        """Sessions to train on and as many held out; their files are different ones, so no task is in both."""
        files = random.Random(seed).sample(tasks.FILES, len(tasks.FILES))
        half = len(files) // 2
        trained, unseen = (
            self.sessions(seed + offset, count, num_tasks_before=num_tasks_before, files=part)
            for offset, part in ((0, files[:half]), (1000, files[half:]))
        )
        return Split(training=trained, held_out=unseen)

    def prompt_rows(self, seed: int, count: int) -> list[dict[str, Any]]:
        """Rows of a data set for a trainer that lets the model act in a `ToyEnvironment`."""
        return [
            {
                "prompt": [{"role": "user", "content": session.kind.request.format(file=session.file)}],
                "kind": session.kind.name,
                "file": session.file,
            }
            for session in self.sessions(seed, count)
        ]

    def rendered(self, session: ToySession) -> tuple[RenderedSequence, TurnSpan]:
        """A session's ids, and where its erring turn stands in them."""
        (sequence,) = self.renderer.render(session.conversation)
        return sequence, next(span for span in sequence.spans if span.turn_id == session.turn_id)

    def save(self, folder: Path) -> Path:
        """A folder that `from_pretrained` reads, model and tokenizer."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        return folder


@cache
def build_world(seed: int = 0) -> World:
    """Pretrained once per seed, in one thread: the same weights however many cores there are."""
    tokenizer = build_tokenizer(tasks.VOCABULARY)
    with one_thread():
        model = new_model(tokenizer, seed)
        how = _pretrained_once(model, tokenizer, seed)
    model.requires_grad_(False)
    return World(tokenizer=tokenizer, model=model, pretraining=how, renderer=Renderer(tokenizer, tools=tasks.TOOLS))


def _pretrained_once(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> Pretraining:
    """By the first process of a run of pytest that asks; the others wait for its weights."""
    folder = shared_folder()
    if folder is None:
        return pretrain(model, tokenizer, seed, Schedule())
    import fcntl  # where processes share a folder there is one

    weights, account = folder / f"world-{seed}.safetensors", folder / f"world-{seed}.json"
    with (folder / f"world-{seed}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if account.exists():
            load_model(model, weights)
            model.eval()
            return Pretraining(**json.loads(account.read_text()))
        how = pretrain(model, tokenizer, seed, Schedule())
        save_model(model, str(weights))
        account.write_text(json.dumps(asdict(how)))
    return how


@contextmanager
def one_thread() -> Iterator[None]:
    """More threads only wait for each other on matrices this small, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
