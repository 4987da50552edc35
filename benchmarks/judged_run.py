"""Judge the training targets of a run: all that `crf train` batches by default for one tokenizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from composer_replication.action_text import text_of
from composer_replication.config.presets import load_with_preset
from composer_replication.runs import RunDir
from composer_replication.runs import files as pair_rows
from composer_replication.runs.files import read_conversations, read_sites
from composer_replication.trainer.from_config.inputs import read_inputs, tools_of
from composer_replication.trainer.from_config.offline import offline_data
from composer_replication.trainer.sessions.dataset import StoredWindow
from composer_replication.types import Turn
from target_check import Judged, SessionJudge, Tally
from template_oracle import Student, is_own


class Pair(NamedTuple):
    """Another answer in place of an assistant turn; turns are numbered from 0."""

    conversation_id: str
    turn_number: int
    answer: Turn

    @property
    def state_id(self) -> str:
        return f"{self.conversation_id}::{self.turn_number:04d}"


def write_pairs(run: RunDir, pairs: Sequence[Pair]) -> None:
    """Write made-up pairs to `pairs.jsonl` in the format of `crf pairs`."""
    rows = [
        {
            "state_id": pair.state_id,
            "chosen": text_of(pair.answer.action),
            "rejected": "",
            "n_teachers_agreeing": 2,
            "conversation_id": pair.conversation_id,
            "turn_number": pair.turn_number,
            "chosen_by": "log",
            "teachers": [],
            "classes": [],
            "student_kind": "call",
            "chosen_kind": "call",
            "metadata": {},
        }
        for pair in pairs
    ]
    run.write_jsonl(
        "pairs",
        rows,
        schema=pair_rows.PAIRS_SCHEMA,
        version=pair_rows.PAIRS_VERSION,
        sources=["conversations"],
        counts={},
    )


def judge_run(
    run: RunDir,
    model: Path,
    *,
    pairs: Iterable[Pair] = (),
    overrides: Sequence[str] = (),
    student_names: Sequence[str] = (),
    whole: bool = False,
    sample: int | None = None,
    students: dict[str, Student] | None = None,
) -> Tally:
    """Judge everything that `crf train` would batch from a run for the tokenizer in the folder `model`.

    `students` caches what is derived from tokenizers, for the next run.
    """
    config = load_with_preset(None, [f'train.model="{model}"', f'train.run="{run.root}"', *overrides])
    inputs = read_inputs(config)
    sessions = offline_data(inputs).train
    tally = Tally()
    tally.notes.update({f"dropped by the package, {name}": count for name, count in sessions.drops.items()})
    student = _student(inputs.tokenizer, {} if students is None else students, str(model))
    tools = tools_of(run) or {}
    windows = defaultdict[str, list[StoredWindow]](list)
    for window in sessions.windows:
        windows[window.conversation_id].append(window)
    hints, turn_of = _hints(run)
    answers = defaultdict[str, dict[str, tuple[int, Turn]]](dict)
    for pair in pairs:
        answers[pair.conversation_id][pair.state_id] = (pair.turn_number, pair.answer)
    for conversation in read_conversations(run):
        own_windows = windows.pop(conversation.id, [])
        judged = Judged(
            conversation=conversation,
            hints=hints.get(conversation.id, {}),
            answers=answers.get(conversation.id, {}),
            trained_states=frozenset(state for window in own_windows for state in window.state_ids),
            is_own=lambda turn: is_own(turn, student_names),
            whole=whole,
            sample=sample,
        )
        student.tools = tools.get(conversation.format, tools.get(None, []))
        judge = SessionJudge(student, judged, tally)
        for window in own_windows:
            judge.judge(window.batch(), [turn_of[site_id] for site_id in window.site_ids], window.state_ids)
    if windows:
        tally.blame("good turn", "window_of_no_conversation", next(iter(windows)))
    return tally


def _student(tokenizer: object, known: dict[str, Student], name: str) -> Student:
    if name not in known:
        known[name] = Student(tokenizer)
    return known[name]


def _hints(run: RunDir) -> tuple[Mapping[str, Mapping[str, list[str]]], Mapping[str, str]]:
    """Return the hints of kept sites by conversation and turn, and the turn of each site."""
    hints = defaultdict[str, dict[str, list[str]]](dict)
    turn_of: dict[str, str] = {}
    for site, hint in read_sites(run):
        turn_of[site.id] = site.turn_id
        if site.is_kept:
            said = hints[site.conversation_id].setdefault(site.turn_id, [])
            said += [hint.text] if hint is not None else []
    return hints, turn_of
