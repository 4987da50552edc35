"""Which token comes next, as transformers chooses it: the same processors, the same draw by the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composer_replication.errors import InputError, explain

# Of a row's scores and ids they make other scores and remember nothing: rows may be left out between two calls.
_PROCESSORS = {
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "RepetitionPenaltyLogitsProcessor",
    "SuppressTokensLogitsProcessor",
}
_CRITERIA = {"MaxLengthCriteria", "EosTokenCriteria"}
_MODES = {"sample", "greedy_search"}


class Choice(NamedTuple):
    """How tokens are chosen and where rows end."""

    processors: Any
    is_drawn: bool
    eos: Tensor
    pad: Tensor
    """On the device, as the ends are: a number would be copied there in every step."""
    max_length: int


def why_not_chosen(processors: Sequence[Any], criteria: Sequence[Any], config: Any) -> str | None:
    """What of a generation config is not done here, in plain words."""
    unsupported = sorted({type(processor).__name__ for processor in processors} - _PROCESSORS)
    unsupported += sorted({type(criterion).__name__ for criterion in criteria} - _CRITERIA)
    if unsupported:
        return f"the generation config asks for {', '.join(unsupported)}"
    mode = str(getattr(config.get_generation_mode(), "value", config.get_generation_mode()))
    if mode not in _MODES:
        return f"the generation config asks for {mode}"
    if config.return_dict_in_generate:
        return "the generation config asks for return_dict_in_generate"
    if not config.use_cache:
        return "the generation config asks for use_cache=False"
    return None


def choice_of(processors: Any, criteria: Sequence[Any], config: Any, device: torch.device) -> Choice:
    ends: list[Any] = [criterion.eos_token_id for criterion in criteria if hasattr(criterion, "eos_token_id")]
    eos = ends[0].to(device) if ends else torch.empty(0, dtype=torch.long, device=device)
    pad = config.pad_token_id if config.pad_token_id is not None else (int(eos[0]) if len(eos) else 0)
    return Choice(
        processors, bool(config.do_sample), eos, torch.tensor(int(pad), device=device), int(config.max_length)
    )


class Chooser:
    """Chooses for the rows that are still running, of a batch that began with `num_rows`."""

    def __init__(self, choice: Choice, num_rows: int) -> None:
        self._choice, self._num_rows = choice, num_rows
        self._is_sound: Tensor | None = None

    def next_tokens(self, ids_BT: Tensor, logits_BV: Tensor, running: Tensor | None) -> Tensor:
        """One token a row. `running` are the numbers of these rows in the whole batch, where some are left out.

        Random numbers are drawn for the whole batch: what a row gets does not depend on who ended before.
        """
        scores = self._choice.processors(ids_BT, logits_BV.to(torch.float32, copy=True))
        if not self._choice.is_drawn:
            return scores.argmax(-1)
        probs = scores.softmax(-1)
        # torch.multinomial's own way for one token, without its look at the device in every step.
        noise = torch.empty(self._num_rows, probs.shape[1], device=probs.device).exponential_(1)
        noise = noise if running is None else noise[running]
        sound = probs.sum(-1).isfinite().all()
        self._is_sound = sound if self._is_sound is None else self._is_sound & sound
        return (probs / noise).argmax(-1)

    def check(self) -> None:
        """Raise where a probability was no number, as torch.multinomial does."""
        if self._is_sound is not None and not bool(self._is_sound):
            fix = "Look at the weights: a step with too large a learning rate, or half precision, may have broken them."
            raise InputError(explain("probabilities of the next token", got="NaN", expected="numbers", fix=fix))
