"""Compute channel 2 on the rollouts of a micro-batch, taking the student's hidden states from the policy's own pass.

The trainer's loss runs the policy over prompt + completion. A forward hook on the body captures the last hidden states
and computes the divergence while still inside the forward of any wrapper. The student therefore needs no second pass,
and has whole weights under FSDP2. The teachers run before that, without gradient, over one tree of all hinted contexts:
rollouts in a group share their prompt, and sites in a rollout share their history.

Unrelated hints come from other turns in the batch. In a control they replace a turn's own hint (`exchange_hints`); for
a comparison or contrast they are added to it (`add_wrong_hints`). The same seed gives the same hints.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from composer_replication.batch.hint_placement import draw_unrelated_hints
from composer_replication.batch.tree import TokenTree, build_tree
from composer_replication.errors import AlignmentError, InputError, explain
from composer_replication.loss.linear import LinearHead, TeacherTerm, linear_token_logprobs
from composer_replication.loss.linear.logprobs import linear_row_stats
from composer_replication.trainer.objective.channels import Channel, ChannelOptions, hint_channel, in_head_dtype
from composer_replication.trainer.objective.compose import rows_by_part
from composer_replication.trainer.objective.distributed import agreed_most
from composer_replication.trainer.objective.model_head import causal_lm_of, decoder_of, head_of
from composer_replication.trainer.objective.row_weighting import Contrast, HintTargets, TeacherRows, models_of
from composer_replication.trainer.rollouts.sites import NO_HINT, FoundSites, RolloutSites, TaughtTurn


class Importance(NamedTuple):
    """Log-probs of completion tokens at sampling time, the sampling temperature, and the maximum importance weight."""

    old_logprobs_BC: Tensor
    temperature: float
    clip: float

    def weights(self, head: LinearHead, rows_NH: Tensor, sites: _MicroBatchSites, length: int) -> Tensor:
        """Return min(clip, p now / p then) for each target token, without gradient."""
        tempered = replace(head, scale=head.scale / self.temperature)
        now_N = linear_token_logprobs(rows_NH.detach(), tempered.detached(), sites.targets_N)
        # Row t predicts token t + 1; the log-probs start at the first token of the completion.
        completion = sites.position_N + 1 - (length - self.old_logprobs_BC.shape[1])
        then_N = self.old_logprobs_BC[sites.sequence_N, completion]
        # Clamp before exp(), which would overflow for large differences.
        return (now_N - then_N).clamp(-20.0, 20.0).exp().clamp(max=self.clip)


class _MicroBatchSites(NamedTuple):
    """Rows in the padded batch that predict the tokens of erring turns, and the tree of the teachers' contexts.

    `contrast_numbers_M` are the indices of the rows that have an unrelated hint; `wrong_rows_M` and `unhinted_rows_M`
    are the matching rows in the tree.
    """

    sequence_N: Tensor
    position_N: Tensor
    targets_N: Tensor
    turn_position_N: Tensor
    tree: TokenTree
    teacher_rows_N: Tensor
    contrast_numbers_M: Tensor
    wrong_rows_M: Tensor
    unhinted_rows_M: Tensor
    without_contrast: int


def place_sites(
    sites: Sequence[Sequence[TaughtTurn]], prompt_mask: Tensor, input_ids: Tensor, completion_mask: Tensor | None = None
) -> _MicroBatchSites | None:
    """Return where the turns of each sample are in the left-padded batch, or None if there are no turns.

    Raises AlignmentError unless student and teacher rows predict the same tokens. They do not if the batch was
    shuffled, split or padded without its sites.
    """
    flat = [(sample, turn) for sample, turns in enumerate(sites) for turn in turns]
    if not flat:
        return None
    device = input_ids.device
    first = (prompt_mask.shape[1] - prompt_mask.sum(1)).tolist()  # where each row's prompt begins, after its padding
    sizes = [turn.end - turn.start for _, turn in flat]
    # - 1, because a row predicts the next token.
    begins = [first[sample] + turn.start - 1 for sample, turn in flat]
    sequence_N = torch.cat([torch.full((size,), sample) for (sample, _), size in zip(flat, sizes, strict=True)])
    position_N = torch.cat([torch.arange(begin, begin + size) for begin, size in zip(begins, sizes, strict=True)])
    _check_inside(position_N, input_ids.shape[1])
    targets_N = input_ids[sequence_N.to(device), position_N.to(device) + 1]
    if completion_mask is not None:
        mask_N = torch.cat([prompt_mask, completion_mask], 1)[sequence_N.to(device), position_N.to(device)]
        if not bool(mask_N.all()):
            got = f"{int((mask_N == 0).sum())} rows excluded by the attention mask"
            raise AlignmentError(explain("erring turns in the batch", got=got, expected="only unmasked rows"))
    contexts = _Contexts(flat, input_ids, begins)
    contexts.check_targets(targets_N)
    turn_position_N = torch.cat([torch.arange(size) for size in sizes])
    return _MicroBatchSites(
        sequence_N.to(device), position_N.to(device), targets_N, turn_position_N.to(device), *contexts.placed(device)
    )


class _Contexts:
    """The teachers' sequences in a micro-batch: each turn's hinted ids, then two more for each turn with a contrast."""

    def __init__(self, flat: list[tuple[int, TaughtTurn]], input_ids: Tensor, begins: list[int]) -> None:
        self._turns = [turn for _, turn in flat]
        self._contrasted = [number for number, turn in enumerate(self._turns) if turn.wrong_ids is not None]
        # On the CPU, where trees are built.
        rows = input_ids.cpu()
        self._sequences = [(turn.teacher_ids.cpu(), turn.teacher_start) for turn in self._turns]
        for number in self._contrasted:
            sample, turn = flat[number]
            begin = begins[number] + 1 - turn.start
            assert turn.wrong_ids is not None
            self._sequences.append((turn.wrong_ids.cpu(), turn.wrong_start))
            self._sequences.append((rows[sample, begin : begin + turn.end], turn.start))

    def check_targets(self, targets_N: Tensor) -> None:
        """Raise AlignmentError unless every sequence predicts the batch's tokens."""
        sizes = [turn.end - turn.start for turn in self._turns]
        # The hinted sequences are followed by two per contrasted turn: with the unrelated hint, and without a hint.
        expected_tokens = targets_N.cpu().split(sizes)
        numbers = list(range(len(self._turns))) + [number for number in self._contrasted for _ in range(2)]
        for (ids, start), number in zip(self._sequences, numbers, strict=True):
            if not torch.equal(ids[start : start + sizes[number]], expected_tokens[number]):
                got = f"turn {self._turns[number].turn_id} with other tokens than in the batch"
                fix = "Reorder the batch together with its sites."
                raise AlignmentError(explain("erring turns in the batch", got=got, expected="the same tokens", fix=fix))

    def placed(self, device: torch.device) -> tuple[TokenTree, Tensor, Tensor, Tensor, Tensor, int]:
        """Return the tree, the tree rows that predict the turns' tokens, and the number of turns without a contrast."""
        tree = build_tree([ids for ids, _ in self._sequences]).to(device)
        sizes = [turn.end - turn.start for turn in self._turns]
        numbers = [*range(len(self._turns)), *(number for number in self._contrasted for _ in range(2))]
        rows = [
            tree.rows[index][start - 1 : start - 1 + sizes[number]]
            for index, ((_, start), number) in enumerate(zip(self._sequences, numbers, strict=True))
        ]
        hinted, contrast_rows = rows[: len(self._turns)], rows[len(self._turns) :]
        empty = torch.empty(0, dtype=torch.int64, device=device)
        firsts = torch.tensor([0, *sizes]).cumsum(0).tolist()
        in_channel = [torch.arange(firsts[n], firsts[n] + sizes[n], device=device) for n in self._contrasted]
        numbers_M = torch.cat(in_channel or [empty])
        # They alternate: with the unrelated hint, without a hint.
        wrong, unhinted = torch.cat(contrast_rows[::2] or [empty]), torch.cat(contrast_rows[1::2] or [empty])
        return tree, torch.cat(hinted), numbers_M, wrong, unhinted, len(self._turns) - len(self._contrasted)


def _check_inside(position_N: Tensor, length: int) -> None:
    if int(position_N.max()) + 1 >= length or int(position_N.min()) < 0:
        got = f"rows {int(position_N.min())} to {int(position_N.max())} of {length}"
        raise AlignmentError(explain("erring turns in the batch", got=got, expected=f"rows 0 to {length - 2}"))


class RolloutChannel:
    """Channel 2 of one micro-batch: `run_teachers`, then the policy in `capture_student_rows`, then `result`."""

    def __init__(
        self,
        model: nn.Module,
        sites: _MicroBatchSites | None,
        options: ChannelOptions,
        importance: Importance | None = None,
    ) -> None:
        self._model, self._sites, self._options, self._importance = model, sites, options, importance
        self._teachers: list[TeacherRows] = []
        self._targets = HintTargets()
        self._shape: tuple[int, ...] | None = None
        self._channel: Channel | None = None
        self._is_busy = False
        self.hint_effects_nats: Tensor | None = None
        """(T, 2): how much the own and the unrelated hint lower each turn that has both, in nats/token."""

    def run_teachers(self, probe_ids: Tensor) -> bool:
        """Run the teachers if there are sites, on any process if the model is sharded. Return whether they ran."""
        has_sites = self._sites is not None
        (anywhere,) = agreed_most(models_of(self._model, self._options.teachers), [int(has_sites)])
        if not anywhere:
            return False
        sites = self._sites
        # A process without sites makes the same passes as the others, over a tree of two tokens.
        tree = sites.tree if sites else build_tree([[0, 0]]).to(probe_ids.device)
        rows = (
            (sites.teacher_rows_N, sites.wrong_rows_M, sites.unhinted_rows_M)
            if sites
            else (probe_ids.new_empty(0),) * 3
        )
        parts = [(tree, row_indices) for row_indices in rows]
        self._teachers, wrong, unhinted = rows_by_part(self._model, self._options.teachers, parts)
        if sites is not None:
            # The effects of both hints are always measured, but the loss uses them only if the contrast is on.
            both = Contrast(sites.contrast_numbers_M, wrong, unhinted)
            contrast = both if self._options.contrasts else None
            self._targets = HintTargets(sites.targets_N, sites.turn_position_N, contrast, sites.without_contrast)
            self.hint_effects_nats = hint_effects(self._teachers, both, sites.targets_N, sites.turn_position_N)
        return True

    @contextmanager
    def capture_student_rows(self) -> Iterator[None]:
        """Compute the channel from the policy's pass inside the block, during which the body must run exactly once."""
        body: nn.Module = decoder_of(causal_lm_of(self._model))
        handle = body.register_forward_hook(self._forward_hook)
        try:
            yield
        finally:
            handle.remove()

    def _forward_hook(self, _body: nn.Module, _inputs: object, output: object) -> None:
        if self._is_busy:  # the first call of `head_of` for a model runs its body too
            return
        if self._shape is not None:
            fix = "Run the policy on the whole micro-batch at once."
            raise InputError(explain("policy passes in one loss", got="two or more", expected="exactly one", fix=fix))
        hidden_BTH: Tensor = output.last_hidden_state  # pyright: ignore[reportAttributeAccessIssue]
        self._shape = tuple(hidden_BTH.shape)
        sites = self._sites
        if sites is None:
            return
        self._is_busy = True
        try:
            head = head_of(self._model, sites.tree.input_ids[None])
        finally:
            self._is_busy = False
        rows_NH = in_head_dtype(hidden_BTH[sites.sequence_N, sites.position_N], head)
        targets = self._targets
        if self._importance is not None:
            weights_N = self._importance.weights(head, rows_NH, sites, hidden_BTH.shape[1])
            targets = targets._replace(importance_N=weights_N)
        self._channel = hint_channel(head, rows_NH, self._teachers, self._options, targets)

    def result(self, batch_size: int, length: int) -> Channel | None:
        """Return the channel's loss, or None if this micro-batch has no sites.

        Raises AlignmentError if the captured pass was over a batch of another shape.
        """
        if self._shape is None or self._shape[:2] != (batch_size, length):
            got = "no pass" if self._shape is None else f"shape {self._shape[:2]}"
            raise AlignmentError(
                explain("hidden states of the policy", got=got, expected=f"shape {(batch_size, length)}")
            )
        return self._channel


@torch.no_grad()
def hint_effects(
    teachers: Sequence[TeacherRows], contrast: Contrast, targets_N: Tensor, turn_position_N: Tensor
) -> Tensor:
    """Return how much the own and the unrelated hint lower each turn that has an unrelated hint, in order (T, 2).

    The effect of a hint is the mean over a turn's tokens of log p without it minus log p with it. A row whose
    `turn_position_N` is 0 begins a turn.
    """
    numbers_M = contrast.numbers_M
    if not numbers_M.numel():
        return torch.zeros(0, 2, device=targets_N.device)
    # The index of the turn that contains each row.
    turn_M = (turn_position_N[numbers_M] == 0).cumsum(0) - 1
    tokens_M = targets_N[numbers_M]
    own_teachers = [teacher._replace(rows_NH=teacher.rows_NH[numbers_M]) for teacher in teachers]
    logprobs = [_logprobs(group, tokens_M).float() for group in (contrast.unhinted, own_teachers, contrast.wrong)]
    effects_M2 = torch.stack([logprobs[0] - logprobs[1], logprobs[0] - logprobs[2]], dim=1)
    num_turns = int(turn_M[-1]) + 1
    length_T = torch.bincount(turn_M, minlength=num_turns)
    return effects_M2.new_zeros(num_turns, 2).index_add_(0, turn_M, effects_M2) / length_T[:, None]


def _logprobs(teachers: Sequence[TeacherRows], tokens_M: Tensor) -> Tensor:
    """Return the log-prob of each token under the sum of the teachers' logits."""
    terms = [TeacherTerm(teacher.rows_NH, teacher.head, teacher.coefficient) for teacher in teachers]
    first = teachers[0]
    return linear_row_stats(first.rows_NH, first.head, terms, tokens_M).teacher_logprobs


def exchange_hints(finder: RolloutSites, rollout_sites: Sequence[FoundSites], seed: str) -> None:
    """Give each turn the hint for a turn with a different kind of error; drop turns for which there is no such hint."""
    turns = [turn for sites in rollout_sites for turn in sites.taught]
    chosen = iter(draw_unrelated_hints(turns, [turn.kind for turn in turns], seed=seed))
    for sites in rollout_sites:
        own_turns, sites.taught = sites.taught, []
        for turn in own_turns:
            other_turn = next(chosen)
            hinted = NO_HINT if other_turn is None else finder.hinted(sites.sequence, turn.turn_id, other_turn.hint)
            if other_turn is None or isinstance(hinted, str):
                sites.counts["dropped:no_hint_of_another_kind"] += 1
                continue
            ids = torch.tensor(hinted.ids)
            sites.taught.append(
                turn._replace(
                    teacher_ids=ids, teacher_start=hinted.teacher_start, hint=other_turn.hint, hint_kind=other_turn.kind
                )
            )


def add_wrong_hints(
    finder: RolloutSites, rollout_sites: Sequence[FoundSites], seed: str, earlier_hints: Mapping[str, str] | None = None
) -> None:
    """Add an unrelated hint to each turn; `earlier_hints` are hints from earlier batches, by kind.

    The kinds in a batch are paired at random, so that two kinds are compared in both directions. If hints were
    exchanged before, the unrelated hint matches neither the kind of the turn nor the kind of the hint that it received.
    A control whose received hint is contrasted with the right one would otherwise learn the error.
    """
    hints: dict[str, list[str]] = {kind: [hint] for kind, hint in (earlier_hints or {}).items()}
    in_batch: dict[str, list[str]] = {}
    for turn in (turn for sites in rollout_sites for turn in sites.taught):
        in_batch.setdefault(turn.about, []).append(turn.hint)
    hints |= in_batch
    rng = random.Random(seed)  # noqa: S311 (a choice, not a secret)
    partners = paired_kinds(sorted(in_batch), sorted(hints), rng)
    for sites in rollout_sites:
        for number, turn in enumerate(sites.taught):
            wrong = _unrelated_hint(turn, partners[turn.about], hints, rng)
            hinted = NO_HINT if wrong is None else finder.hinted(sites.sequence, turn.turn_id, wrong[1])
            if wrong is None or isinstance(hinted, str):
                sites.counts["without_contrast"] += 1
                continue
            ids = torch.tensor(hinted.ids)
            sites.taught[number] = turn._replace(wrong_ids=ids, wrong_start=hinted.teacher_start, wrong_kind=wrong[0])


def paired_kinds(kinds: list[str], all_kinds: Sequence[str], rng: random.Random) -> dict[str, str | None]:
    """Pair the kinds at random, and return the partner of each kind; if one is left over, it gets any other kind."""
    rng.shuffle(kinds)
    partners: dict[str, str | None] = {}
    for first, second in zip(kinds[::2], kinds[1::2], strict=False):
        partners |= {first: second, second: first}
    for kind in kinds[len(partners) :]:
        other_kinds = [candidate for candidate in all_kinds if candidate != kind]
        partners[kind] = rng.choice(other_kinds) if other_kinds else None
    return partners


def _unrelated_hint(
    turn: TaughtTurn, partner: str | None, hints: Mapping[str, Sequence[str]], rng: random.Random
) -> tuple[str, str] | None:
    """Return an unrelated hint with its kind: the partner's kind if possible, else any other kind; or None."""
    other_hints = {kind: [hint for hint in kind_hints if hint != turn.hint] for kind, kind_hints in hints.items()}
    kinds = sorted(
        kind for kind, kind_hints in other_hints.items() if kind_hints and kind not in (turn.kind, turn.about)
    )
    if not kinds:
        return None
    kind = partner if partner in kinds else rng.choice(kinds)
    return kind, rng.choice(other_hints[kind])
