"""Every channel of a session from one pass over its tree."""

from __future__ import annotations

from torch import Tensor, nn

from composer_replication.objective.channels import (
    Channel,
    Options,
    hint_channel,
    in_head_dtype,
    pair_channel,
    response_channel,
    summed_logprobs,
)
from composer_replication.objective.forward import is_noisy, tree_hidden_states
from composer_replication.objective.model_head import head_of
from composer_replication.objective.teachers import LIVE, Teacher, models_of, teacher_rows
from composer_replication.objective.tree_batch import TreeBatch
from composer_replication.objective.wrapped import agreed_most


def tree_channels(
    model: nn.Module, batch: TreeBatch, options: Options, told: list[str]
) -> tuple[Channel, Channel, Channel]:
    """Cross-entropy, the hinted teacher and the pairs, in that order; `told` gets how the tree was run."""
    head = head_of(model, batch.tree.input_ids[None])
    has_sites = options.alpha > 0 and batch.student_rows.numel() > 0
    (sites_anywhere,) = agreed_most(models_of(model, options.teachers), [int(has_sites)])
    ran = tree_hidden_states(model, batch.tree)
    told.append(f"tree ({ran.kind})" if ran.flat_because is None else f"flat: {ran.flat_because}")
    hidden_LH = in_head_dtype(ran.hidden, head)
    lm_ce = response_channel(
        head, hidden_LH[batch.response.rows], batch.response.targets, options.label_smoothing, options.divide
    )
    sdpo = replay = Channel(lm_ce.value.new_zeros(()), 0)
    if sites_anywhere:
        teachers = _teacher_rows(model, batch, hidden_LH, options)
        if has_sites:
            sdpo = hint_channel(head, hidden_LH[batch.student_rows], teachers, options)
    if options.beta > 0 and batch.pairs is not None:
        sides = batch.pairs
        sums, lengths = summed_logprobs(head, hidden_LH[sides.rows], sides.targets, sides.response, 2 * sides.num_pairs)
        references = sides.references() if options.preference.needs_reference else None
        replay = pair_channel(sums, lengths, references, options.preference, options.divide)
    return lm_ce, sdpo, replay


def _teacher_rows(model: nn.Module, batch: TreeBatch, hidden_LH: Tensor, options: Options) -> list[Teacher]:
    """The live teacher is the pass that was made, without its gradient, unless dropout made it noisy."""

    def rows_of(teacher: nn.Module) -> Tensor:
        return tree_hidden_states(teacher, batch.tree).hidden[batch.teacher_rows]

    made = None if is_noisy(model, hidden_LH.device) else hidden_LH[batch.teacher_rows].detach()
    return teacher_rows(model, options.teachers or (LIVE,), batch.tree.input_ids[None], rows_of, made)
