"""Every channel of a session from one pass over its tree."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from composer_replication.batch.tree_batch import TreeBatch
from composer_replication.objective.attention.forward import tree_hidden_states
from composer_replication.objective.channels import (
    Channel,
    Options,
    hint_channel,
    in_head_dtype,
    pair_channel,
    response_channel,
    summed_logprobs,
)
from composer_replication.objective.model_head import head_of
from composer_replication.objective.noise import is_noisy
from composer_replication.objective.row_weighting import Contrast, HintTargets, split_rows
from composer_replication.objective.teachers import LIVE, Teacher, is_live, models_of, teacher_rows
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
        teachers, targets = _taught(model, batch, hidden_LH, options)
        if has_sites:
            sdpo = hint_channel(head, hidden_LH[batch.student_rows], teachers, options, targets)
    if options.beta > 0 and batch.pairs is not None:
        sides = batch.pairs
        sums, lengths = summed_logprobs(head, hidden_LH[sides.rows], sides.targets, sides.response, 2 * sides.num_pairs)
        references = sides.references() if options.preference.needs_reference else None
        replay = pair_channel(sums, lengths, references, options.preference, options.divide)
    return lm_ce, sdpo, replay


def _taught(
    model: nn.Module, batch: TreeBatch, hidden_LH: Tensor, options: Options
) -> tuple[list[Teacher], HintTargets]:
    """Rows with the right hint, and for the contrast, from the same passes, those with a wrong hint and with none.

    The live teacher is the pass that was made, without its gradient, unless dropout made it noisy.
    """
    contrast = batch.contrast if options.contrasts else None
    wanted = [batch.teacher_rows]
    if contrast is not None:
        wanted += [contrast.rows, batch.student_rows[contrast.numbers]]
    rows_of_all = torch.cat(wanted)

    def rows_of(teacher: nn.Module) -> Tensor:
        return tree_hidden_states(teacher, batch.tree).hidden[rows_of_all]

    made = None if is_noisy(model) else hidden_LH[rows_of_all].detach()
    shares = options.teachers or (LIVE,)
    found = teacher_rows(model, shares, batch.tree.input_ids[None], rows_of, made)
    known = HintTargets(batch.target_tokens, batch.site_position, None, batch.sites_without_contrast)
    if contrast is None:
        return found, known
    right, wrong, unhinted = split_rows(found, [each.numel() for each in wanted])
    if made is not None and all(is_live(each, model) for each in shares):
        unhinted = []  # they are the student's rows, which the loss has already
    return right, known._replace(contrast=Contrast(contrast.numbers, wrong, unhinted))
