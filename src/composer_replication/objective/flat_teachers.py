"""The teachers' rows of a flat batch: a pass over the hinted contexts, and with wrong hints two more."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from composer_replication.objective.alignment import RowIndex, Sequences
from composer_replication.objective.channels import Options
from composer_replication.objective.contract import ContrastContexts, HintChannel
from composer_replication.objective.model_head import hidden_states
from composer_replication.objective.noise import is_noisy
from composer_replication.objective.row_weighting import Contrast, split_rows
from composer_replication.objective.teachers import Teacher, is_live, teacher_rows


class TaughtRows(NamedTuple):
    """The teachers with the right hint, and what a contrast needs beside them."""

    teachers: list[Teacher]
    contrast: Contrast | None


class FlatTeachers(NamedTuple):
    """Who teaches, the contexts without a hint, and whether any process has wrong hints: then all make their passes."""

    model: nn.Module
    options: Options
    student: Sequences
    contrast_anywhere: bool

    def rows(self, hint: HintChannel, student_NH: Tensor) -> TaughtRows:
        """Every teacher's rows, without gradient and without dropout; row n belongs to row n of the student."""
        if not self.contrast_anywhere:
            return TaughtRows(self._hinted(hint, None), None)
        contrast = hint.contrast or ContrastContexts(_one_token(self.student), *_no_rows(student_NH))
        both = self._hinted(hint, contrast)
        unhinted = self._unhinted(hint, contrast.numbers_M, student_NH)
        if hint.contrast is None:
            return TaughtRows(both, None)
        right, wrong = split_rows(both, [len(hint.student_rows), len(contrast.rows)])
        return TaughtRows(right, Contrast(contrast.numbers_M, wrong, unhinted))

    def passes_of_others(self, like_BTH: Tensor) -> None:
        """As little as these passes can be: another process has hints, and a shared pass takes all of them."""
        no_rows, _ = _no_rows(like_BTH)
        self.rows(HintChannel(_one_token(self.student), no_rows, no_rows), like_BTH[:0, 0])

    def _hinted(self, hint: HintChannel, contrast: ContrastContexts | None) -> list[Teacher]:
        """Rows with the right hint, and behind them those with a wrong one."""

        def rows_of(teacher: nn.Module) -> Tensor:
            right_NH = _rows(teacher, hint.teacher, hint.teacher_rows)
            if contrast is None:
                return right_NH
            return torch.cat([right_NH, _rows(teacher, contrast.sequences, contrast.rows)])

        return teacher_rows(self.model, self.options.teachers, hint.teacher.input_ids, rows_of)

    def _unhinted(self, hint: HintChannel, numbers_M: Tensor, student_NH: Tensor) -> list[Teacher]:
        """Rows of the student's own contexts that have a contrast; none where they are the student's own rows.

        A live teacher's are, unless dropout made them noisy: no teacher has any.
        """
        noisy = is_noisy(self.model)
        if not noisy and all(is_live(each, self.model) for each in self.options.teachers):
            return []
        sequences = self.student if hint.contrast is not None else _one_token(self.student)
        rows = RowIndex(hint.student_rows.sequence_N[numbers_M], hint.student_rows.position_N[numbers_M])
        live_rows = None if noisy else student_NH[numbers_M].detach()

        def rows_of(teacher: nn.Module) -> Tensor:
            return _rows(teacher, sequences, rows)

        return teacher_rows(self.model, self.options.teachers, sequences.input_ids, rows_of, live_rows)


def _one_token(sequences: Sequences) -> Sequences:
    return Sequences(sequences.input_ids[:1, :1], None)


def _no_rows(like: Tensor) -> tuple[RowIndex, Tensor]:
    nothing = torch.empty(0, dtype=torch.int64, device=like.device)
    return RowIndex(nothing, nothing), nothing


def _rows(teacher: nn.Module, sequences: Sequences, rows: RowIndex) -> Tensor:
    hidden_BTH = hidden_states(teacher, sequences.input_ids, sequences.attention_mask)
    return hidden_BTH[rows.sequence_N, rows.position_N]
