"""The input of `compose_loss`: which rows predict which tokens, in a token tree or in padded sequences.

`SessionTargets` builds the tree of a session from flat sequences with targets. `pack_batches` puts several trees into
one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from composer_replication.batch.alignment import Sequences
from composer_replication.batch.tree import TokenTree, build_tree, pack_trees
from composer_replication.errors import AlignmentError, BatchKeyError, InputError, explain

T = TypeVar("T")
# Names of channels 1, 2 and 3 in metrics and denominators.
CHANNELS = ("lm_ce", "sdpo_jsd", "trace_replay_dpo")


class TargetRows(NamedTuple):
    """Rows, and the token that each row predicts."""

    rows: Tensor
    targets: Tensor


@dataclass(frozen=True, eq=False)
class PairRows:
    """The rows of channel 3 (preference pairs) that predict response tokens, with those tokens and the index of each
    row's response.

    Responses are indexed from 0: first the chosen ones, then the rejected ones.
    """

    rows: Tensor
    targets: Tensor
    response: Tensor
    num_pairs: int
    chosen_reference: Tensor | None
    rejected_reference: Tensor | None

    def references(self) -> tuple[Tensor, Tensor]:
        """Return the reference log-probs of the chosen and the rejected responses. Raises BatchKeyError if they are
        missing.
        """
        if self.chosen_reference is None or self.rejected_reference is None:
            raise BatchKeyError(explain("reference log-probs of the pairs", got=None, expected="two numbers per pair"))
        return self.chosen_reference, self.rejected_reference


class ContrastRows(NamedTuple):
    """Rows in contexts with an unrelated hint. `numbers` are the indices of the hint distillation rows that predict
    the same tokens.
    """

    numbers: Tensor
    rows: Tensor


Tokens = TokenTree | Sequences
"""The input of one forward pass. A row is an index in the tree's layout, or sequence * T + position if padded."""


class _Passes(NamedTuple):
    """The inputs of the four forward passes: student, hinted contexts, contexts with unrelated hints, and pairs."""

    student: Tokens
    hinted: Tokens
    contrast: Tokens
    pairs: Tokens


@dataclass(frozen=True, eq=False)
class _ChannelRows:
    """The rows of each channel. Row n of the student and row n of the teacher predict the same token.

    `target_tokens` is that token and `site_position` its position within its site. Some row weightings need them; all
    batches that this package builds have them.
    """

    response: TargetRows
    student_rows: Tensor
    teacher_rows: Tensor
    pairs: PairRows | None
    target_tokens: Tensor | None = None
    site_position: Tensor | None = None
    contrast: ContrastRows | None = None
    sites_without_contrast: int = 0

    def counts(self, *, hints: bool = True, pairs: bool = True) -> dict[str, int]:
        """Count the rows of channels 1 (GRPO) and 2 (hint distillation) and the pairs of channel 3; a channel that
        is switched off counts 0.
        """
        num_pairs = self.pairs.num_pairs if pairs and self.pairs is not None else 0
        numbers = (self.response.rows.numel(), self.student_rows.numel() if hints else 0, num_pairs)
        return dict(zip(CHANNELS, numbers, strict=True))


@dataclass(frozen=True, eq=False, kw_only=True)
class TreeBatch(_ChannelRows):
    """A batch whose rows are all in one tree, so that one forward pass covers them."""

    tree: TokenTree

    @property
    def passes(self) -> _Passes:
        """The tree, which is the input of every pass."""
        return _Passes(self.tree, self.tree, self.tree, self.tree)

    def check(self, num_embeddings: int) -> None:
        """Raise InputError if an id has no embedding."""
        check_ids(self.tree.input_ids, num_embeddings)


@dataclass(frozen=True, eq=False, kw_only=True)
class FlatBatch(_ChannelRows):
    """A batch of padded sequences, with separate forward passes for hinted contexts and pairs (see `flat_batch`).

    Because the passes are separate, the hinted contexts need no memory for a backward pass, and the values of channel 1
    (GRPO) are bit-identical with channel 2 (hint distillation) on or off.
    """

    sequences: Sequences
    contexts: Sequences | None = None
    contrast_contexts: Sequences | None = None
    pair_sequences: Sequences | None = None

    @property
    def passes(self) -> _Passes:
        """The sequences of each forward pass; a pass that has none gets a single placeholder token, so that all
        ranks run the same passes.
        """
        # With sharded weights all ranks must run the same passes, and another rank may have sequences for this one.
        optional_sequences = (self.contexts, self.contrast_contexts, self.pair_sequences)
        return _Passes(
            self.sequences,
            *(sequences or Sequences(self.sequences.input_ids[:1, :1]) for sequences in optional_sequences),
        )


class _Range(NamedTuple):
    """Tokens [start, end) of the sequence with index `sequence`."""

    sequence: int
    start: int
    end: int


class _Site(NamedTuple):
    """The ranges of an erring turn's tokens in the student's sequence, in the hinted context, and in the context
    with an unrelated hint.
    """

    student: _Range
    teacher: _Range
    contrast: _Range | None


@dataclass
class SessionTargets:
    """Collects the sequences of a session with their targets; `build` merges them into a tree.

    A target is a range of *tokens* [start, end) of its sequence; the rows that predict them are one position earlier.
    """

    _sequences: list[Sequence[int]] = field(default_factory=list[Sequence[int]])
    _responses: list[_Range] = field(default_factory=list[_Range])
    _sites: list[_Site] = field(default_factory=list[_Site])
    _chosen: list[_Range] = field(default_factory=list[_Range])
    _rejected: list[_Range] = field(default_factory=list[_Range])
    _references: list[tuple[float, float] | None] = field(default_factory=list[tuple[float, float] | None])
    _sequence_indices: dict[int, int] = field(default_factory=dict[int, int])

    def add_response(self, ids: Sequence[int], start: int, end: int) -> None:
        """Add tokens [start, end) of a sequence as a target of channel 1 (GRPO)."""
        self._responses.append(self._add(ids, start, end))

    def add_site(
        self,
        ids: Sequence[int],
        start: int,
        end: int,
        teacher_ids: Sequence[int],
        teacher_start: int,
        *,
        contrast_ids: Sequence[int] | None = None,
        contrast_start: int | None = None,
    ) -> None:
        """Add an erring turn as a target of channel 2 (hint distillation): its tokens in the student's sequence and in
        the hinted context.

        `contrast_ids` is the context with an unrelated hint; only `RowWeighting.contrast` needs it.
        """
        if (contrast_ids is None) != (contrast_start is None):
            got = "contrast_ids or contrast_start alone"
            raise InputError(explain("contrast of a site", got=got, expected="both, or neither"))
        _check_same_tokens(ids[start:end], teacher_ids, teacher_start)
        student = self._add(ids, start, end)
        teacher = self._add(teacher_ids, teacher_start, teacher_start + end - start)
        contrast = None
        if contrast_ids is not None and contrast_start is not None:
            _check_same_tokens(ids[start:end], contrast_ids, contrast_start)
            contrast = self._add(contrast_ids, contrast_start, contrast_start + end - start)
        self._sites.append(_Site(student, teacher, contrast))

    def add_pair(
        self,
        chosen_ids: Sequence[int],
        chosen_start: int,
        rejected_ids: Sequence[int],
        rejected_start: int,
        *,
        references: tuple[float, float] | None = None,
    ) -> None:
        """Add a preference pair to channel 3; each response consists of all tokens of its sequence from its start to
        the end.

        `references` are the log-probs of the chosen and the rejected response under the reference model.
        """
        self._chosen.append(self._add(chosen_ids, chosen_start, len(chosen_ids)))
        self._rejected.append(self._add(rejected_ids, rejected_start, len(rejected_ids)))
        self._references.append(references)

    def build(self, device: str | torch.device = "cpu") -> TreeBatch:
        """Merge all added sequences into a tree, with the rows of their targets."""
        if not self._sequences:
            raise InputError(explain("session", got="no sequence", expected="at least one"))
        tree = build_tree(self._sequences).to(device)
        student = _rows(tree, [site.student for site in self._sites])
        # Sites are concatenated: `firsts` has, for every row, the index of its site's first row.
        sizes = torch.tensor([site.student.end - site.student.start for site in self._sites], dtype=torch.int64)
        first_row = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        row_index = torch.arange(first_row.numel())
        has_contrast = torch.tensor([site.contrast is not None for site in self._sites], dtype=torch.bool)
        contrast = None
        if bool(has_contrast.any()):
            rows = _rows(tree, [site.contrast for site in self._sites if site.contrast is not None]).rows
            contrast = ContrastRows(row_index[has_contrast.repeat_interleave(sizes)].to(device), rows)
        return TreeBatch(
            _rows(tree, self._responses),
            student.rows,
            _rows(tree, [site.teacher for site in self._sites]).rows,
            self._pairs(tree),
            tree=tree,
            target_tokens=student.targets,
            site_position=(row_index - first_row).to(device),
            contrast=contrast,
            sites_without_contrast=int((~has_contrast).sum()),
        )

    def _pairs(self, tree: TokenTree) -> PairRows | None:
        if not self._chosen:
            return None
        ranges = [*self._chosen, *self._rejected]
        side_rows = _rows(tree, ranges)
        lengths = torch.tensor([end - start for _, start, end in ranges], device=side_rows.rows.device)
        response = torch.arange(len(ranges), device=side_rows.rows.device).repeat_interleave(lengths)
        references = [reference for reference in self._references if reference is not None]
        if len(references) not in (0, len(self._chosen)):
            got = f"{len(references)} of {len(self._chosen)} pairs"
            raise InputError(explain("reference log-probs", got=got, expected="all pairs, or none"))
        reference_pairs = (
            torch.tensor(references, dtype=torch.float64, device=side_rows.rows.device) if references else None
        )
        chosen, rejected = (None, None) if reference_pairs is None else reference_pairs.unbind(1)
        return PairRows(side_rows.rows, side_rows.targets, response, len(self._chosen), chosen, rejected)

    def _add(self, ids: Sequence[int], start: int, end: int) -> _Range:
        if not 0 < start < end <= len(ids):
            expected = f"0 < start < end <= {len(ids)} (no row predicts the first token)"
            raise InputError(explain("target range", got=(start, end), expected=expected))
        # Callers pass the same list object many times. The ids are compared too, because an address may be reused.
        index = self._sequence_indices.get(id(ids))
        if index is None or self._sequences[index] != ids:
            index = self._sequence_indices[id(ids)] = len(self._sequences)
            self._sequences.append(list(ids))
        return _Range(index, start, end)


def _check_same_tokens(targets: Sequence[int], teacher_ids: Sequence[int], teacher_start: int) -> None:
    teacher_targets = list(teacher_ids[teacher_start : teacher_start + len(targets)])
    if list(targets) != teacher_targets:
        fix = "Both starts are positions of the first target token itself, which comes later in the hinted context."
        got = f"{list(targets)[:5]}… and {teacher_targets[:5]}…"
        raise AlignmentError(
            explain("target tokens of student and teacher", got=got, expected="the same tokens", fix=fix)
        )


def check_ids(ids: Tensor, num_embeddings: int) -> None:
    """Raise InputError if an id has no embedding."""
    # On CUDA an index out of range triggers a device-side assert, after which the process can no longer use the GPU.
    smallest, largest = int(ids.min()), int(ids.max())
    if largest >= num_embeddings or smallest < 0:
        expected = f"ids from 0 to {num_embeddings - 1}"
        raise InputError(explain("token ids of the tree", got=f"{smallest} to {largest}", expected=expected))


def _rows(tree: TokenTree, ranges: Sequence[_Range]) -> TargetRows:
    """Return the rows that predict the tokens in the ranges, in order."""
    if not ranges:
        no_rows = torch.empty(0, dtype=torch.int64, device=tree.input_ids.device)
        return TargetRows(no_rows, no_rows)
    rows = torch.cat([tree.rows[sequence][start - 1 : end - 1] for sequence, start, end in ranges])
    tokens = torch.cat([tree.rows[sequence][start:end] for sequence, start, end in ranges])
    return TargetRows(rows, tree.input_ids[tokens])


def denominators_of(batches: Sequence[TreeBatch]) -> dict[str, int]:
    """Return the `denominators` to pass to `compose_loss` for each batch, so that the losses of all batches add up
    to their joint loss.
    """
    counts = [batch.counts() for batch in batches]
    return {name: sum(batch_counts[name] for batch_counts in counts) for name in CHANNELS}


def pack_batches(batches: Sequence[TreeBatch]) -> TreeBatch:
    """Concatenate the batches' trees, which cannot attend to each other. Pad after packing, not before."""
    if len(batches) == 1:
        return batches[0]
    tree = pack_trees([batch.tree for batch in batches])
    offsets = list(accumulate((len(batch.tree) for batch in batches[:-1]), initial=0))

    def concatenate_rows(rows: list[Tensor]) -> Tensor:
        return torch.cat([batch_rows + offset for batch_rows, offset in zip(rows, offsets, strict=True)])

    targets = torch.cat([batch.response.targets for batch in batches])
    response = TargetRows(concatenate_rows([batch.response.rows for batch in batches]), targets)
    student, teacher = (
        concatenate_rows([batch.student_rows for batch in batches]),
        concatenate_rows([batch.teacher_rows for batch in batches]),
    )
    pairs = [(batch.pairs, offset) for batch, offset in zip(batches, offsets, strict=True) if batch.pairs is not None]
    return TreeBatch(
        response,
        student,
        teacher,
        _concatenate_pairs(pairs) if pairs else None,
        tree=tree,
        target_tokens=_concatenate_if_all([batch.target_tokens for batch in batches]),
        site_position=_concatenate_if_all([batch.site_position for batch in batches]),
        contrast=_concatenate_contrast(batches, offsets),
        sites_without_contrast=sum(batch.sites_without_contrast for batch in batches),
    )


def map_tensors(value: T, change: Callable[[Tensor], Tensor]) -> T:
    """Return a copy of nested dataclasses and tuples with `change` applied to every tensor."""
    if isinstance(value, Tensor):
        return change(value)  # pyright: ignore[reportReturnType]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{field.name: map_tensors(getattr(value, field.name), change) for field in fields(value)}
        )
    if isinstance(value, tuple) and any(isinstance(member, Tensor) for member in value):
        members: Any = [map_tensors(member, change) for member in value]
        # The constructor of a NamedTuple takes its fields as separate arguments.
        return type(value)(*members) if hasattr(value, "_fields") else type(value)(members)
    return value


def _concatenate_if_all(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Concatenate the tensors; return None if any of them is None."""
    tensors = [part for part in parts if part is not None]
    return torch.cat(tensors) if len(tensors) == len(parts) else None


def _concatenate_contrast(batches: Sequence[TreeBatch], offsets: Sequence[int]) -> ContrastRows | None:
    numbers: list[Tensor] = []
    rows: list[Tensor] = []
    before = 0
    for batch, offset in zip(batches, offsets, strict=True):
        if batch.contrast is not None:
            numbers.append(batch.contrast.numbers + before)
            rows.append(batch.contrast.rows + offset)
        before += batch.student_rows.numel()
    return ContrastRows(torch.cat(numbers), torch.cat(rows)) if numbers else None


def _concatenate_pairs(pairs: Sequence[tuple[PairRows, int]]) -> PairRows:
    """Concatenate the pairs of all batches: all chosen responses in order, then all rejected ones."""
    total = sum(pair_rows.num_pairs for pair_rows, _ in pairs)
    numbers: list[Tensor] = []
    before = 0
    for pair_rows, _ in pairs:
        # Chosen response k of a batch becomes before + k, rejected response k becomes total + before + k.
        is_rejected = pair_rows.response >= pair_rows.num_pairs
        numbers.append(pair_rows.response + before + is_rejected * (total - pair_rows.num_pairs))
        before += pair_rows.num_pairs
    # Stable, so that the rows of a response stay in order.
    response, order = torch.cat(numbers).sort(stable=True)
    rows = torch.cat([pair_rows.rows + offset for pair_rows, offset in pairs])[order]
    targets = torch.cat([pair_rows.targets for pair_rows, _ in pairs])[order]
    if len({pair_rows.chosen_reference is None for pair_rows, _ in pairs}) > 1:
        raise InputError(explain("reference log-probs", got="some pairs only", expected="all pairs, or none"))
    if pairs[0][0].chosen_reference is None:
        return PairRows(rows, targets, response, total, None, None)
    chosen, rejected = zip(*(pair_rows.references() for pair_rows, _ in pairs), strict=True)
    return PairRows(rows, targets, response, total, torch.cat(chosen), torch.cat(rejected))
