"""A tiny random Qwen2 with a tool-calling chat template, and generation that follows a script instead of sampling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

END_OF_TURN, PAD = "<|im_end|>", "<|endoftext|>"
# As in Qwen3: the tags of thinking and tools are tokens of their own, but no special ones, so that decoding keeps them.
_SPECIAL = (PAD, "<|im_start|>", END_OF_TURN)
_ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_CORPUS = (
    '{"type": "function", "function": {"name": "read_file", "description": "Reads a file.", "parameters": {"type": '
    '"object", "properties": {"path": {"type": "string", "description": "path of the file"}}, "required": ["path"]}}}',
    '{"name": "add", "arguments": {"first": 3, "second": 4}}',
    "Traceback (most recent call last): ValueError: no such thing was found in the file; the call failed",
    "I will look at the file first, then change it and run the tests again. The answer is 7.",
)


def template_text() -> str:
    """The template TRL knows how to parse calls of; its text is compared, so it is read from the package itself."""
    return (files("trl") / "chat_templates" / "qwen3.jinja").read_text(encoding="utf-8")


def _trained_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=640, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([template_text(), *_CORPUS] * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in _ADDED])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=PAD,
        padding_side="left",
        chat_template=template_text(),
    )


def build_model(tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=4096,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


def save_policy(folder: Path, seed: int = 0) -> Path:
    """Writes model and tokenizer as `from_pretrained` reads them; TRL loads a reference model by this path."""
    tokenizer = _trained_tokenizer()
    build_model(tokenizer, seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer as every trainer sees it: beside a Qwen2 model, transformers splits words in Qwen2's own way."""
    return AutoTokenizer.from_pretrained(folder)


Turn = str | tuple[str, ...]
"""What the model says in one turn; a tuple is encoded piece by piece, as sampling is free to split words anywhere."""


def turn_ids(tokenizer: PreTrainedTokenizerBase, turn: Turn) -> list[int]:
    """The turn's tokens with the end-of-turn token."""
    pieces = (turn,) if isinstance(turn, str) else turn
    ids = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
    return [*ids, tokenizer.eos_token_id]


@dataclass
class _Rollout:
    """A rollout under way: all its ids so far, its script, and the turn that comes next."""

    ids: list[int]
    turns: Sequence[Turn]
    next_turn: int = 0


class ScriptedGeneration:
    """Makes a trainer say what a script says; parsing, tools, masks and padding remain TRL's own.

    `scripts` maps the text of a prompt's last message to the rollouts it gets; the copies of a prompt in a batch take
    them in order, and start again when they run out. Replaces `trainer._generate_single_turn` on this instance.
    """

    def __init__(self, trainer: Any, scripts: Mapping[str, Sequence[Sequence[Turn]]]) -> None:
        self.num_calls = 0
        self._trainer, self._scripts = trainer, scripts
        self._tokenizer: PreTrainedTokenizerBase = trainer.processing_class
        self._live: list[_Rollout] = []
        trainer._generate_single_turn = self._generate

    def _generate(
        self, prompt_ids: list[list[int]], *_fields: Any, **_named: Any
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        self.num_calls += 1
        continued = [self._take(ids) for ids in prompt_ids]
        if not any(continued):
            self._live.clear()  # a new batch; what is left belongs to rollouts that ended
        begun: Counter[str] = Counter()
        rollouts = [rollout or self._begin(ids, begun) for rollout, ids in zip(continued, prompt_ids, strict=True)]
        return [self._speak(rollout, ids) for rollout, ids in zip(rollouts, prompt_ids, strict=True)], None

    def _take(self, ids: list[int]) -> _Rollout | None:
        """The live rollout these ids continue, if any; of equal ones, any will do."""
        for index, rollout in enumerate(self._live):
            if len(ids) > len(rollout.ids) and ids[: len(rollout.ids)] == rollout.ids:
                return self._live.pop(index)
        return None

    def _begin(self, ids: list[int], begun: Counter[str]) -> _Rollout:
        text = self._tokenizer.decode(ids)
        question = text.rpartition("<|im_start|>user\n")[2].partition(END_OF_TURN)[0] or text
        scripts = self._scripts[question]
        begun[question] += 1
        return _Rollout(ids, scripts[(begun[question] - 1) % len(scripts)])

    def _speak(self, rollout: _Rollout, ids: list[int]) -> list[int]:
        assert rollout.next_turn < len(rollout.turns), f"the script is over, but a turn more was asked for: {rollout}"
        # as `generate` with max_new_tokens does
        said = turn_ids(self._tokenizer, rollout.turns[rollout.next_turn])[: self._trainer.max_completion_length]
        self._live.append(_Rollout(ids + said, rollout.turns, rollout.next_turn + 1))
        return said
