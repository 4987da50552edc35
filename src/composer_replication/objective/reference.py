"""Reference log-probs for channel 3: what the frozen start weights thought of both sides of each pair."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from composer_replication.batch.eval_mode import evaluating
from composer_replication.errors import InputError, explain
from composer_replication.objective import contract
from composer_replication.objective.flat_channels import sequence_logprobs
from composer_replication.objective.model_head import embedding_count, head_of


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
    with torch.no_grad(), evaluating(model):
        head = head_of(model, pairs.chosen.sequences.input_ids)
        sums, _ = sequence_logprobs(model, head, pairs.chosen, pairs.rejected)
    chosen, rejected = sums.chunk(2)
    return {"dpo_chosen_ref_logprobs": chosen.clone(), "dpo_rejected_ref_logprobs": rejected.clone()}
