"""Compute log-probs without gradient, of preference pairs (the reference of channel 3) or of arbitrary responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from composer_replication.batch.flat_batch import check_inputs, read_pairs
from composer_replication.batch.tree import build_tree
from composer_replication.batch.tree_batch import PairRows, Tokens, TreeBatch, check_ids
from composer_replication.errors import InputError, explain
from composer_replication.loss.linear.logprobs import summed_logprobs
from composer_replication.trainer.objective.attention.forward import token_hidden_states
from composer_replication.trainer.objective.distributed import eval_mode, inside_forward, max_over_shards
from composer_replication.trainer.objective.model_head import (
    cast_to_head_dtype,
    embedding_count,
    get_causal_lm,
    get_linear_head,
)

Response = tuple[Sequence[int], int]
"""Token ids of a context followed by a response, and the index at which the response begins."""


def reference_logprobs(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `dpo_{chosen,rejected}_ref_logprobs` (P,) of the batch's pairs under the current model, in eval mode.

    Call this once, before the first optimizer step, and store the result: `batch |= reference_logprobs(model, batch)`.
    """
    tensors = check_inputs(inputs, embedding_count(model))
    sequences, pairs = read_pairs(tensors, needs_reference=False)
    if sequences is None:
        raise InputError(explain("batch", got=sorted(tensors), expected="the dpo_chosen_* and dpo_rejected_* keys"))
    chosen, rejected = _pair_logprobs(model, sequences, pairs).chunk(2)
    return {"dpo_chosen_ref_logprobs": chosen.clone(), "dpo_rejected_ref_logprobs": rejected.clone()}


def with_reference(model: nn.Module, batch: TreeBatch) -> TreeBatch:
    """Return the batch with reference log-probs of its pairs from the current model, in the batch's own contexts.

    Log-probs computed on whole sessions would not match, because a window may cut off the beginning of a context.
    """
    batch.check(embedding_count(model))
    (anywhere,) = max_over_shards([model], [int(batch.pairs is not None)])
    if not anywhere:
        return batch
    # Runs without pairs too: other processes of a sharded model that have pairs wait for this pass.
    logprobs = _pair_logprobs(model, batch.tree, batch.pairs)
    if batch.pairs is None:
        return batch
    chosen, rejected = logprobs.chunk(2)
    referenced_pairs = replace(batch.pairs, chosen_reference=chosen.clone(), rejected_reference=rejected.clone())
    return replace(batch, pairs=referenced_pairs)


def response_logprobs(model: nn.Module, responses: Sequence[Response]) -> Tensor:
    """Return the summed log-prob of each response (R,) under the current model, in eval mode and in one tree pass.

    A response consists of the tokens of its sequence from index `start` onward. A context that responses share is
    computed once.
    """
    device, lengths = _model_device(model), [len(ids) - start for ids, start in responses]
    owner = torch.arange(len(responses), device=device).repeat_interleave(torch.tensor(lengths, device=device))
    return _token_logprobs_by_owner(model, responses, owner, len(responses))


def token_logprobs(model: nn.Module, responses: Sequence[Response]) -> list[Tensor]:
    """Return the log-prob of every response token, as one tensor per response."""
    # Each token is treated as a response of its own, so that nothing is summed.
    lengths = [len(ids) - start for ids, start in responses]
    owner = torch.arange(sum(lengths), device=_model_device(model))
    return list(_token_logprobs_by_owner(model, responses, owner, sum(lengths)).split(lengths))


def pair_logprobs(model: nn.Module, batch: TreeBatch | Mapping[str, Tensor]) -> list[tuple[float, float]]:
    """Return the summed log-probs of both sides of each pair in a batch, from the same pass as in a training step.

    In half precision the log-probs depend on the other tokens in the pass, by about 0.001 to 0.01 nats per answer.
    """
    if isinstance(batch, TreeBatch):
        tokens, pairs = batch.tree, batch.pairs
    else:
        tokens, pairs = read_pairs(check_inputs(batch, embedding_count(model)), needs_reference=False)
    if tokens is None or pairs is None:
        return []
    chosen, rejected = _pair_logprobs(model, tokens, pairs).chunk(2)
    return list(zip(chosen.tolist(), rejected.tolist(), strict=True))


def _model_device(model: nn.Module) -> torch.device:
    return next(get_causal_lm(model).parameters()).device


def _token_logprobs_by_owner(model: nn.Module, responses: Sequence[Response], owner: Tensor, number: int) -> Tensor:
    for at, (ids, start) in enumerate(responses):
        if not 0 < start < len(ids):
            expected = f"0 < start < {len(ids)}, because nothing predicts the first token"
            raise InputError(explain(f"start of response {at}", got=start, expected=expected))
    tree = build_tree([ids for ids, _ in responses]).to(owner.device)
    check_ids(tree.input_ids, embedding_count(model))
    # A row predicts the next token, so the rows are those before each token of the response.
    rows = torch.cat([row[start - 1 : -1] for row, (_, start) in zip(tree.rows, responses, strict=True)])
    tokens = torch.cat([row[start:] for row, (_, start) in zip(tree.rows, responses, strict=True)])
    return _logprobs(model, tree, rows, tree.input_ids[tokens], owner, number)


def _pair_logprobs(model: nn.Module, tokens: Tokens, pairs: PairRows | None) -> Tensor:
    """Return the log-probs of both sides (2P,), with the chosen ones first."""
    if pairs is None:
        nothing = torch.empty(0, dtype=torch.int64, device=tokens.input_ids.device)
        return _logprobs(model, tokens, nothing, nothing, nothing, 0)
    return _logprobs(model, tokens, pairs.rows, pairs.targets, pairs.response, 2 * pairs.num_pairs)


def _logprobs(
    model: nn.Module, tokens: Tokens, rows_N: Tensor, targets_N: Tensor, owner_N: Tensor, num_responses: int
) -> Tensor:
    def work() -> Tensor:
        head = get_linear_head(model, tokens.input_ids.reshape(1, -1))
        rows_NH = cast_to_head_dtype(token_hidden_states(model, tokens).hidden[rows_N], head)
        return summed_logprobs(head, rows_NH, targets_N, owner_N, num_responses)[0]

    with torch.no_grad(), eval_mode(model):
        return inside_forward(model, get_causal_lm(model), work)
