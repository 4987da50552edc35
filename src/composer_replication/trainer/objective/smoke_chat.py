"""Build a batch for all three channels from one small fixed chat: the input of the smoke test.

The student's answer contains a bug. The teacher of channel 2 sees a hint in the last user message; channel 3 prefers a
correct answer. The ids of prompt and answer are concatenated, so the edges of masks are token boundaries with every
tokenizer, and the student's answer has the same ids in both contexts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from composer_replication.errors import InputError, explain
from composer_replication.trainer.objective.reference import reference_logprobs


@dataclass(frozen=True)
class _Chat:
    request: str
    hints: tuple[str, ...]
    wrong_answer: str
    right_answer: str


_CHATS = {
    "factorial": _Chat(
        request="Write a Python function factorial(n). Reply with code only.",
        hints=(
            "Reminder: the product over 1..n must include n itself.",
            "Reminder: range(a, b) stops before b.",
        ),
        wrong_answer=(
            "def factorial(n):\n    result = 1\n    for i in range(1, n):\n        result *= i\n    return result"
        ),
        right_answer=(
            "def factorial(n):\n    result = 1\n    for i in range(2, n + 1):\n        result *= i\n    return result"
        ),
    ),
    "binary_search": _Chat(
        request="Write a Python function binary_search(items, target). Reply with code only.",
        hints=(
            "Reminder: the interval must shrink in every round, or the loop never ends.",
            "Reminder: when the middle item is too small, go on behind it.",
        ),
        wrong_answer=(
            "def binary_search(items, target):\n    low, high = 0, len(items) - 1\n    while low <= high:\n"
            "        middle = (low + high) // 2\n        if items[middle] == target:\n            return middle\n"
            "        if items[middle] < target:\n            low = middle\n        else:\n            high = middle\n"
            "    return -1"
        ),
        right_answer=(
            "def binary_search(items, target):\n    low, high = 0, len(items) - 1\n    while low <= high:\n"
            "        middle = (low + high) // 2\n        if items[middle] == target:\n            return middle\n"
            "        if items[middle] < target:\n            low = middle + 1\n        else:\n"
            "            high = middle - 1\n    return -1"
        ),
    ),
}


def build_batch(
    tokenizer: Any,
    *,
    device: str | torch.device = "cpu",
    seed: int = 42,
    variant: str = "factorial",
    align_sdpo_shapes: bool = False,
    model: nn.Module | None = None,
) -> dict[str, Tensor]:
    """Return a batch from one chat ("factorial" or "binary_search") with the keys of all three channels.

    `seed` selects the wording of the hint. `align_sdpo_shapes` pads the shorter of the student's and the teacher's
    sequences on the right so that both have the same length; the index pairs are correct with or without it. Without a
    `model` the reference log-probs are zeros of the right shape, which are placeholders for a smoke test.
    """
    if variant not in _CHATS:
        raise InputError(explain("variant", got=repr(variant), expected=f"one of {sorted(_CHATS)}"))
    chat = _CHATS[variant]
    hint = chat.hints[seed % len(chat.hints)]
    prompt = _prompt_ids(tokenizer, chat.request)
    hinted_prompt = _prompt_ids(tokenizer, f"{chat.request}\n\n{hint}")
    wrong, right = (_answer_ids(tokenizer, chat.request, answer) for answer in (chat.wrong_answer, chat.right_answer))
    student, teacher = prompt + wrong, hinted_prompt + wrong
    # 0: each sequence keeps its own length.
    widest = max(len(student), len(teacher)) if align_sdpo_shapes else 0
    width, teacher_width = widest or len(student), widest or len(teacher)
    offsets = torch.arange(len(wrong))
    # A row predicts the next token, so the first row for the answer is the last one of the prompt.
    batch = {
        "input_ids": _padded(student, width),
        "attention_mask": _padded([1] * len(student), width),
        "response_mask": _padded([0] * len(prompt) + [1] * len(wrong), width),
        "ctx_teacher_input_ids": _padded(teacher, teacher_width),
        "sdpo_loss_mask": _padded([0] * len(prompt) + [1] * len(wrong), width),
        "sdpo_student_index": torch.stack([torch.zeros_like(offsets), len(prompt) - 1 + offsets], dim=1),
        "sdpo_teacher_index": torch.stack([torch.zeros_like(offsets), len(hinted_prompt) - 1 + offsets], dim=1),
    }
    batch |= _pair_side("chosen", prompt, right) | _pair_side("rejected", prompt, wrong)
    if model is not None:
        model_device = next(model.parameters()).device
        batch |= reference_logprobs(model, {key: tensor.to(model_device) for key, tensor in batch.items()})
    return {key: tensor.to(device) for key, tensor in batch.items()}


def _pair_side(side: str, prompt: list[int], answer: list[int]) -> dict[str, Tensor]:
    return {
        f"dpo_{side}_input_ids": torch.tensor([prompt + answer]),
        f"dpo_{side}_response_mask": torch.tensor([[0] * len(prompt) + [1] * len(answer)]),
        f"dpo_{side}_ref_logprobs": torch.zeros(1),
    }


def _prompt_ids(tokenizer: Any, request: str) -> list[int]:
    text = _render(tokenizer, [{"role": "user", "content": request}], generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _answer_ids(tokenizer: Any, request: str, answer: str) -> list[int]:
    """Return the answer's tokens up to its end-of-turn token; text that the template adds after it is left out."""
    messages = [{"role": "user", "content": request}]
    before = _render(tokenizer, messages, generation_prompt=True)
    whole = _render(tokenizer, [*messages, {"role": "assistant", "content": answer}], generation_prompt=False)
    # Find the last occurrence, in case the request quotes the answer.
    answer_at = whole.rfind(answer)
    if answer_at < 0:
        raise InputError(explain("chat template", got="a rendering without the answer", expected="the answer verbatim"))
    # A template may end the generation prompt with text (an empty think block) that it omits from earlier turns.
    start = len(before) if whole.startswith(before) else answer_at
    ids, ends = _encode_from(tokenizer, whole, start)
    special = set(tokenizer.all_special_ids)
    for index, (token, end) in enumerate(zip(ids, ends, strict=True)):
        if token in special and end > answer_at + len(answer):
            return ids[: index + 1]
    raise InputError(
        explain("chat template", got="an answer without an end-of-turn token", expected="a special token after it")
    )


def _encode_from(tokenizer: Any, text: str, start: int) -> tuple[list[int], list[int]]:
    """Return the token ids of text[start:], and the index in the text at which each token ends.

    If a token begins exactly at `start`, the ids are taken from those of the whole text, because some tokenizers put a
    space before a text that is tokenized separately. If a token spans `start`, text[start:] is tokenized separately.
    """
    ids, offsets = _encode_with_offsets(tokenizer, text)
    for index, (token_start, _) in enumerate(offsets):
        if token_start == start:
            return ids[index:], [end for _, end in offsets[index:]]
    ids, offsets = _encode_with_offsets(tokenizer, text[start:])
    return ids, [start + end for _, end in offsets]


def _render(tokenizer: Any, messages: list[dict[str, str]], *, generation_prompt: bool) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            explain(
                "tokenizer",
                got="no chat_template",
                expected="a chat_template",
                fix="Use an instruction-tuned model's tokenizer.",
            )
        )
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)


def _encode_with_offsets(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            explain("tokenizer", got="a slow tokenizer without character offsets", expected="a fast tokenizer")
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return list(encoded["input_ids"]), [tuple(span) for span in encoded["offset_mapping"]]


def _padded(values: list[int], width: int) -> Tensor:
    return torch.tensor([values + [0] * (width - len(values))])
