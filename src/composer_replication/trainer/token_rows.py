"""Tokens of the chat template whose rows of the head were never trained, and how an adapter trains them.

A model's vocabulary has entries that no text of its training held: such rows stay where they began, near one another.
Where a template's own token (the mark of a call, the end of a turn) is one of them, no hidden state can say it apart
from all the others, and LoRA, which leaves the head as it is, cannot teach it. The rule, over rows of the head:

    centre    the mean of rows that no text can reach: ids behind the tokenizer's last, tokens named reserved or unused
    typical   the median distance from it of ordinary tokens' rows, a sample of them
    spread    the largest distance from it among those rows themselves
    limit     the larger of spread and a tenth of typical; a row no farther from the centre was never trained

With fewer than four such rows, or where they spread as far as half of typical, nothing can be told apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from composer_replication.errors import ConfigError, explain
from composer_replication.objective.adapters import below_rows
from composer_replication.objective.model_head import causal_lm_of

_NAMED_UNUSED = re.compile(r"reserved|unused", re.IGNORECASE)
_FEWEST_UNUSED, _SAMPLED, _NEAR, _SPREAD = 4, 2048, 0.1, 0.5


class UntrainedRows(NamedTuple):
    """Tokens with rows that were never trained, by id; how far each is from the centre of `num_unused` unused rows, how
    far trained ones are, and the distance up to which a row counts as untrained."""

    tokens: dict[int, str]
    distances: list[float]
    typical: float
    limit: float
    num_unused: int

    def in_words(self) -> str:
        token_names, share = ", ".join(self.tokens.values()), max(self.distances) / self.typical
        return (
            f"these weights never learnt {token_names}, which the chat template writes: the row of the head is within"
            f" {share:.1%} (limit {self.limit / self.typical:.0%}) of a trained token's distance from those of"
            f" {self.num_unused} unused entries, so what it draws has any of those in their place"
        )


@torch.no_grad()
def untrained_rows(model: nn.Module, tokenizer: Any, said: Iterable[int]) -> UntrainedRows | None:
    """Which of the template's own tokens among `said`, ids that a model is to write, were never trained; None where
    none is, or nobody can tell. Rows that an adapter trains are not looked at."""
    layer: Any = causal_lm_of(model).get_output_embeddings()
    head: Tensor = below_rows(layer).weight
    by_adapter: dict[str, list[int]] = {} if below_rows(layer) is layer else layer.token_adapter.token_indices
    trained = {number for ids in by_adapter.values() for number in ids}
    added = {number: text for text, number in tokenizer.get_added_vocab().items() if number < head.shape[0]}
    tokens = {number: added[number] for number in sorted((set(said) & added.keys()) - trained)}
    unused = [
        *range(len(tokenizer), head.shape[0]),
        *(number for number in added if _NAMED_UNUSED.search(added[number])),
    ]
    unused = [number for number in unused if number not in tokens]
    ordinary = [number for number in range(min(len(tokenizer), head.shape[0])) if number not in added]
    if not tokens or len(unused) < _FEWEST_UNUSED or not ordinary or head.is_meta:
        return None
    centre = _rows(head, unused).mean(0)

    def distances(ids: Sequence[int]) -> Tensor:
        return (_rows(head, ids) - centre).norm(dim=1)

    typical = float(distances(ordinary[:: max(1, len(ordinary) // _SAMPLED)]).median())
    spread = float(distances(unused).max())
    limit = max(spread, _NEAR * typical)
    if not spread <= _SPREAD * typical or not typical:  # so that NaN fails too
        return None
    near = {number: far for number, far in zip(tokens, distances([*tokens]).tolist(), strict=True) if far <= limit}
    if not near:
        return None
    return UntrainedRows({number: tokens[number] for number in near}, [*near.values()], typical, limit, len(unused))


def _rows(head: Tensor, ids: Sequence[int]) -> Tensor:
    return head[torch.tensor(ids, device=head.device)].float()


def with_token_rows(peft_config: Any, model: nn.Module, ids: Sequence[int]) -> Any:
    """The adapter's settings with these rows of embedding and head trained too, one row for both if they are tied."""
    if not ids:
        return peft_config
    causal_lm = causal_lm_of(model)
    wrapped = [causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()]
    if wrapped[1].weight is wrapped[0].weight:
        wrapped = wrapped[:1]
    names = {module: name for name, module in causal_lm.named_modules()}
    peft_config.trainable_token_indices = {names[module]: sorted(ids) for module in wrapped}
    return peft_config


def settle_token_rows(model: nn.Module) -> None:
    """After PEFT has wrapped the head: trained rows are whole, since in bf16 most steps would round to nothing; and
    whoever reads the head's bias, as TRL's loss does, finds that it has none."""
    head: Any = causal_lm_of(model).get_output_embeddings()
    if below_rows(head) is head:
        return
    if "bias" not in head._parameters and below_rows(head).bias is None:
        head.register_parameter("bias", None)
    for name, weight in model.named_parameters():
        if "trainable_tokens_delta" in name:
            weight.data = weight.data.float() if weight.dtype in (torch.bfloat16, torch.float16) else weight.data


def ids_of_tokens(tokenizer: Any, tokens: Sequence[str]) -> list[int]:
    """The ids of tokens by their texts."""
    vocabulary = tokenizer.get_vocab()
    if unknown := [token for token in tokens if token not in vocabulary]:
        fix = 'Name tokens as the vocabulary has them, or "auto".'
        got = f"{', '.join(unknown)}, not in the vocabulary"
        raise ConfigError(explain("train.adapter.token_rows", got=got, expected="tokens of this model", fix=fix))
    return [vocabulary[token] for token in tokens]
