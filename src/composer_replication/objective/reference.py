"""Reference log-probs for channel 3: what the frozen start weights thought of both sides of each pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from composer_replication.batch.eval_mode import evaluating
from composer_replication.batch.tree import build_tree
from composer_replication.batch.tree_batch import TreeBatch, check_ids
from composer_replication.errors import InputError, explain
from composer_replication.objective import contract
from composer_replication.objective.attention.forward import tree_hidden_states
from composer_replication.objective.channels import in_head_dtype, summed_logprobs
from composer_replication.objective.flat_channels import sequence_logprobs
from composer_replication.objective.model_head import causal_lm_of, embedding_count, head_of
from composer_replication.objective.wrapped import agreed_most, inside_forward

Response = tuple[Sequence[int], int]
"""Token ids of a context and its response, and where the response begins."""


def reference_logprobs(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`dpo_{chosen,rejected}_ref_logprobs` (P,) of the batch's pairs under the model as it is now, in eval mode.

    Call it once, before the first optimizer step, and keep the result: `batch |= reference_logprobs(model, batch)`.
    """
    inputs = {key: value for key, value in inputs.items() if value is not None}
    contract.check_keys(inputs)
    contract.check_ids_in_vocabulary(inputs, embedding_count(model))
    pairs = contract.read_pair_channel(inputs, needs_reference=False)
    if pairs is None:
        raise InputError(explain("batch", got=sorted(inputs), expected="the dpo_chosen_* and dpo_rejected_* keys"))
    both = pairs

    def work() -> Tensor:
        head = head_of(model, both.chosen.sequences.input_ids)
        return sequence_logprobs(model, head, both.chosen, both.rejected)[0]

    with torch.no_grad(), evaluating(model):
        chosen, rejected = inside_forward(model, causal_lm_of(model), work).chunk(2)
    return {"dpo_chosen_ref_logprobs": chosen.clone(), "dpo_rejected_ref_logprobs": rejected.clone()}


def with_reference(model: nn.Module, batch: TreeBatch) -> TreeBatch:
    """The batch with reference log-probs of its pairs: what the model as it is now thinks in these very contexts.

    A window may cut a context; numbers computed on the whole session would then belong to another one.
    """
    pairs = batch.pairs
    batch.check(embedding_count(model))
    (anywhere,) = agreed_most([model], [int(pairs is not None)])
    if not anywhere:
        return batch

    def work() -> Tensor:
        head = head_of(model, batch.tree.input_ids[None])
        hidden = tree_hidden_states(model, batch.tree).hidden
        if pairs is None:  # only here so that processes that have some are not left alone
            return hidden[:0].sum()
        rows = in_head_dtype(hidden[pairs.rows], head)
        return summed_logprobs(head, rows, pairs.targets, pairs.response, 2 * pairs.num_pairs)[0]

    with torch.no_grad(), evaluating(model):
        found = inside_forward(model, causal_lm_of(model), work)
    if pairs is None:
        return batch
    chosen, rejected = found.chunk(2)
    return replace(batch, pairs=replace(pairs, chosen_reference=chosen.clone(), rejected_reference=rejected.clone()))


def response_logprobs(model: nn.Module, responses: Sequence[Response]) -> Tensor:
    """Summed log-probs (R,) of responses, each the tokens of its sequence from `start` on, in one pass over their tree.

    Under the model as it is now, in eval mode; responses that share a context share its computation.
    """
    for number, (ids, start) in enumerate(responses):
        if not 0 < start < len(ids):
            expected = f"0 < start < {len(ids)}: nothing predicts a first token"
            raise InputError(explain(f"start of response {number}", got=start, expected=expected))
    device = next(causal_lm_of(model).parameters()).device
    tree = build_tree([ids for ids, _ in responses]).to(device)
    check_ids(tree.input_ids, embedding_count(model))
    rows = torch.cat([row[start - 1 : -1] for row, (_, start) in zip(tree.rows, responses, strict=True)])
    tokens = torch.cat([row[start:] for row, (_, start) in zip(tree.rows, responses, strict=True)])
    lengths = torch.tensor([len(ids) - start for ids, start in responses], device=device)
    owner = torch.arange(len(responses), device=device).repeat_interleave(lengths)

    def work() -> Tensor:
        head = head_of(model, tree.input_ids[None])
        hidden = in_head_dtype(tree_hidden_states(model, tree).hidden[rows], head)
        return summed_logprobs(head, hidden, tree.input_ids[tokens], owner, len(responses))[0]

    with torch.no_grad(), evaluating(model):
        return inside_forward(model, causal_lm_of(model), work)
