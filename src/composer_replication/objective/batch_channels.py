"""Every channel of a batch from the passes that its rows are of: one over a tree, or several over padded sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from composer_replication.batch.alignment import Sequences
from composer_replication.batch.tree_batch import ContrastRows, FlatBatch, Tokens, TreeBatch
from composer_replication.objective.attention.causality import check_causal
from composer_replication.objective.attention.forward import hidden_rows
from composer_replication.objective.channels import (
    Channel,
    Options,
    hint_channel,
    in_head_dtype,
    pair_channel,
    response_channel,
    summed_logprobs,
)
from composer_replication.objective.distributed import agreed_most
from composer_replication.objective.model_head import causal_lm_of, head_of
from composer_replication.objective.row_weighting import Contrast, HintTargets, split_rows
from composer_replication.objective.teacher_rows import Teacher, WeightedTeacher, is_live, models_of, teacher_rows


def batch_channels(
    model: nn.Module, batch: TreeBatch | FlatBatch, options: Options
) -> tuple[Channel, Channel, Channel, str]:
    """Cross-entropy, the hinted teacher and the pairs, in that order, and how the student was run."""
    passes = batch.passes
    head = head_of(model, passes.student.input_ids.reshape(1, -1))
    if isinstance(passes.student, Sequences):
        check_causal(model, passes.student.longest())
    has_sites = options.alpha > 0 and batch.student_rows.numel() > 0
    pairs = batch.pairs if options.beta > 0 else None
    contrast = batch.contrast if options.contrasts else None
    are_apart = passes.pairs is not passes.student
    flags = [int(has_sites), int(contrast is not None), int(are_apart and pairs is not None)]
    sites_anywhere, contrast_anywhere, pairs_anywhere = agreed_most(models_of(model, options.teachers), flags)
    ran = hidden_rows(model, passes.student)
    hidden_LH = in_head_dtype(ran.hidden, head)
    lm_ce = response_channel(
        head, hidden_LH[batch.response.rows], batch.response.targets, options.label_smoothing, options.divide
    )
    sdpo = replay = Channel(lm_ce.value.new_zeros(()), 0)
    if sites_anywhere:
        teachers, taught = _taught(model, batch, hidden_LH, options, bool(contrast_anywhere))
        targets = HintTargets(batch.target_tokens, batch.site_position, taught, batch.sites_without_contrast)
        if has_sites:
            sdpo = hint_channel(head, hidden_LH[batch.student_rows], teachers, options, targets)
    paired_LH = in_head_dtype(hidden_rows(model, passes.pairs).hidden, head) if pairs_anywhere else hidden_LH
    if pairs is not None:
        rows_NH = paired_LH[pairs.rows]
        sums, lengths = summed_logprobs(head, rows_NH, pairs.targets, pairs.response, 2 * pairs.num_pairs)
        references = pairs.references() if options.preference.needs_reference else None
        replay = pair_channel(sums, lengths, references, options.preference, options.divide)
    elif pairs_anywhere:
        replay = Channel(paired_LH.sum() * 0.0, 0)
    return lm_ce, sdpo, replay, ran.ran_as


def _taught(
    model: nn.Module, batch: TreeBatch | FlatBatch, hidden_LH: Tensor, options: Options, with_contrast: bool
) -> tuple[list[Teacher], Contrast | None]:
    """Rows with the right hint, and for the contrast those with a wrong hint and with none.

    Rows that the student's own pass has are the live teacher's too, without their gradient, unless dropout made them
    noisy; then rows without a hint are left to the loss, which has them already.
    """
    passes, noisy = batch.passes, is_noisy(model)
    only_live = not noisy and all(is_live(teacher, model) for teacher in options.teachers)
    parts = [(passes.hinted, batch.teacher_rows)]
    contrast = batch.contrast or ContrastRows(batch.student_rows[:0], batch.student_rows[:0])
    if with_contrast:
        parts.append((passes.contrast, contrast.rows))
    if with_contrast and not only_live:
        parts.append((passes.student, batch.student_rows[contrast.numbers]))
    teachers_by_part: dict[int, list[Teacher]] = {}
    for is_own in (True, False):
        numbers = [number for number, (tokens, _) in enumerate(parts) if (tokens is passes.student) == is_own]
        if numbers:
            these = [parts[number] for number in numbers]
            live_rows = hidden_LH[torch.cat([rows for _, rows in these])].detach() if is_own and not noisy else None
            teachers_by_part |= zip(numbers, rows_by_part(model, options.teachers, these, live_rows), strict=True)
    if not with_contrast or batch.contrast is None:
        return teachers_by_part[0], None
    return teachers_by_part[0], Contrast(contrast.numbers, teachers_by_part[1], teachers_by_part.get(2, ()))


def rows_by_part(
    model: nn.Module,
    teachers: Sequence[WeightedTeacher],
    parts: Sequence[tuple[Tokens, Tensor]],
    live_rows: Tensor | None = None,
) -> list[list[Teacher]]:
    """For each part the teachers' rows of it, from one pass a teacher over each of the tokens."""

    def rows_of(teacher: nn.Module) -> Tensor:
        hidden: dict[int, Tensor] = {}
        for tokens, _ in parts:
            if id(tokens) not in hidden:
                hidden[id(tokens)] = hidden_rows(teacher, tokens).hidden
        return torch.cat([hidden[id(tokens)][rows] for tokens, rows in parts])

    shares = teacher_rows(model, teachers, parts[0][0].input_ids.reshape(1, -1), rows_of, live_rows)
    return split_rows(shares, [rows.numel() for _, rows in parts])


_NOISE = ("drop", "jitter", "neftune_noise_alpha")
# Rates of heads that a causal language model has none of, though its config may name them.
_OTHER_HEADS = ("classifier", "summary", "seq_classif", "pooler", "head_dropout")
# Draws its experts in training mode, whatever its settings are.
_SAMPLING_ROUTERS = ("PhimoeTopKRouter", "PhimoeSparseMoeBlock")


def is_noisy(model: nn.Module) -> bool:
    """Whether two passes of the model as it is now may differ: dropout, noise on the embeddings, jitter of a router.

    Decided by what modules are set to, not by comparing two passes: below a fresh adapter, whose B is 0, LoRA's dropout
    changes nothing yet, and a run resumed later would have another teacher. A model that is called noisy without being
    so costs one more pass of the live teacher, and no figure changes.
    """
    body = causal_lm_of(model)
    return any(module.training and _adds_noise(module) for module in body.modules())


def _adds_noise(module: nn.Module) -> bool:
    name = type(module).__name__
    if name in _SAMPLING_ROUTERS:
        return True
    if "dropout" in name.lower() and _is_rate(getattr(module, "p", 0.0)):
        return True
    return any(_is_rate(value) for settings in (vars(module), _config_of(module)) for value in _rates(settings))


def _rates(settings: Mapping[str, Any]) -> Iterator[Any]:
    """Settings that name a noise: a number, or of an adapter layer one number an adapter."""
    for name, value in settings.items():
        if not any(part in name for part in _NOISE) or any(part in name for part in _OTHER_HEADS):
            continue
        if isinstance(value, dict):
            yield from cast("dict[str, Any]", value).values()
        else:
            yield value


def _config_of(module: nn.Module) -> Mapping[str, Any]:
    """Some layers read a rate from their config at every call (Falcon, GPT-Neo, GPT-J)."""
    config = vars(module).get("config")
    return {} if config is None or not hasattr(config, "__dict__") else vars(config)


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
