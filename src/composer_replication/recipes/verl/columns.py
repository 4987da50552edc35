"""Write error sites with their hints, and pairs, as columns of verl's batches, and read them back. Each row's value is
JSON text.

verl moves columns between processes, slices them into mini- and micro-batches and writes them to queues. Text survives
all of that without pickle. A hinted context is mostly identical to its row, so only the part that the hint changed is
stored. Reading restores the context from the row; a checksum detects a wrong row.

    sdpo_sites    [{"start", "end", "teacher_start", "same", "changed", "row", "kind", "hint", "turn_id"}, ...]
    replay_pairs  [{"context", "chosen", "rejected", "reference": [chosen, rejected] or null}, ...]
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from composer_replication.batch.pair_tokens import PairIds
from composer_replication.errors import AlignmentError, InputError, explain
from composer_replication.trainer.rollouts.hint_distillation import SITES, ErringTurn

PAIRS = "replay_pairs"
EXTRA_FIELDS = "extra_fields"
"""The column in which verl's queue stores what an agent loop adds."""


class ReplayPair(NamedTuple):
    """A chosen and a rejected answer to one context, and their summed log-probs under the initial model (None with
    SimPO).
    """

    context: list[int]
    chosen: list[int]
    rejected: list[int]
    reference: tuple[float, float] | None


def write_sites(turns: Sequence[ErringTurn], row_ids: Sequence[int]) -> str:
    """Encode the erring turns of a row as JSON. `row_ids` are the token ids of the row's prompt and response,
    without padding.
    """
    return json.dumps([_site_record(turn, list(row_ids)) for turn in turns])


def _site_record(turn: ErringTurn, row_ids: list[int]) -> dict[str, Any]:
    size = turn.end - turn.start
    hinted = turn.teacher_ids.tolist()
    if hinted[turn.teacher_start : turn.teacher_start + size] != row_ids[turn.start : turn.end] or not size:
        got = f"different tokens in the row from {turn.start} to {turn.end}"
        raise AlignmentError(
            explain(f"turn {turn.turn_id} of a row", got=got, expected="the tokens of the hinted context")
        )
    # The common prefix of row and hinted context is not stored.
    num_same = 0
    while num_same < min(turn.teacher_start, turn.start) and hinted[num_same] == row_ids[num_same]:
        num_same += 1
    return {
        "start": turn.start,
        "end": turn.end,
        "teacher_start": turn.teacher_start,
        "same": num_same,
        "changed": hinted[num_same : turn.teacher_start],
        "row": _checksum(row_ids[: turn.end]),
        "kind": turn.kind,
        "hint": turn.hint,
        "turn_id": turn.turn_id,
    }


def read_sites(text: str | None, row_ids: Sequence[int]) -> list[ErringTurn]:
    """Decode erring turns encoded by `write_sites`. Raises AlignmentError if the row's token ids have changed since
    they were encoded.
    """
    return [_taught_turn(site, list(row_ids)) for site in _parse_column(text, SITES)]


def _taught_turn(site: Mapping[str, Any], row_ids: list[int]) -> ErringTurn:
    start, end, teacher_start = site["start"], site["end"], site["teacher_start"]
    # The checksum covers all tokens up to the end of the turn, because they are all part of the context.
    if end > len(row_ids) or site["row"] != _checksum(row_ids[:end]):
        got = f"different tokens before position {end}"
        fix = "The row was cut or reordered without its sites. Keep the columns of a row together."
        raise AlignmentError(
            explain(
                f"site {site['turn_id']} of a row",
                got=got,
                expected="the tokens for which the site was written",
                fix=fix,
            )
        )
    ids = torch.tensor([*row_ids[: site["same"]], *site["changed"], *row_ids[start:end]])
    return ErringTurn(start, end, ids, teacher_start, site["kind"], site["hint"], site["turn_id"])


def _checksum(ids: list[int]) -> int:
    # CRC-32 of 64-bit ids, which detects mistakes but not tampering.
    return zlib.crc32(array("q", ids).tobytes())


def write_pairs(pairs: Sequence[tuple[PairIds, tuple[float, float] | None]]) -> str:
    """Encode pairs as JSON, each with its reference log-probs (see `objective.reference`) if it has any."""
    return json.dumps(
        [
            {
                "context": list(pair.chosen.ids[: pair.chosen.start]),
                "chosen": list(pair.chosen.ids[pair.chosen.start :]),
                "rejected": list(pair.rejected.ids[pair.rejected.start :]),
                "reference": None if reference is None else list(reference),
            }
            for pair, reference in pairs
        ]
    )


def read_pairs(text: str | None) -> list[ReplayPair]:
    """Decode pairs encoded by `write_pairs`. Raises InputError if a context or an answer is empty."""
    pairs = [_replay_pair(entry) for entry in _parse_column(text, PAIRS)]
    for pair in pairs:
        if not (pair.context and pair.chosen and pair.rejected):
            raise InputError(explain(f"pair in {PAIRS}", got="an empty list", expected="a context and two answers"))
    return pairs


def _replay_pair(entry: Mapping[str, Any]) -> ReplayPair:
    reference = entry["reference"]
    return ReplayPair(
        entry["context"], entry["chosen"], entry["rejected"], None if reference is None else tuple(reference)
    )


def _parse_column(text: str | None, column: str) -> list[Mapping[str, Any]]:
    # Rows of other data sources have no value in these columns.
    if text is None or text == "":
        return []
    if not isinstance(text, str):
        fix = f"Write the column with `write_{'sites' if column == SITES else 'pairs'}`."
        raise InputError(explain(f"a value of {column}", got=type(text).__name__, expected="JSON text", fix=fix))
    return json.loads(text)


def read_column(data: Any, name: str) -> list[str | None]:
    """Read a column of a TensorDict. Returns one value per row, with None for padding rows and rows without a value.

    verl's queue stores the values that an agent loop adds in one mapping per row; verl's older trainer stores them as
    columns.
    """
    # verl is imported on use: this module also writes columns where verl is not installed.
    from verl.utils import tensordict_utils

    num_rows = len(data)
    # Look for a separate column first, then in the mapping of extra fields.
    values = _per_row(tensordict_utils.get(data, name), num_rows)
    if values is None:
        fields = _per_row(tensordict_utils.get(data, EXTRA_FIELDS), num_rows) or [None] * num_rows
        values = [(row_fields or {}).get(name) for row_fields in fields]
    return [
        value if is_rollout else None for value, is_rollout in zip(values, _rows_with_sampled_tokens(data), strict=True)
    ]


def _per_row(value: Any, num_rows: int) -> list[Any] | None:
    """Return a list with one value per row. In a batch of one row, verl may store the value itself instead of a
    list.
    """
    if value is None:
        return None
    return [value] * num_rows if isinstance(value, str | Mapping) else list(value)


def _rows_with_sampled_tokens(data: Any) -> list[bool]:
    """Return, as a list of booleans, which rows contain sampled tokens. The other rows are padding that verl copied
    from rollouts.
    """
    mask = data["loss_mask"]
    rows = mask.unbind() if mask.is_nested else list(mask)
    return [bool(row.any()) for row in rows]


def row_ids(data: Any) -> list[list[int]]:
    """Return the token ids of each row's prompt and response, without padding, from verl's nested layout."""
    ids = data["input_ids"]
    if not ids.is_nested:
        fix = "Convert it with verl.workers.utils.padding.left_right_2_no_padding first."
        raise InputError(explain("input_ids of a batch", got="padded", expected="nested rows", fix=fix))
    return [row.tolist() for row in ids.unbind()]
