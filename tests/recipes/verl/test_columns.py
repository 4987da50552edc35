"""Sites and pairs as columns: what was written comes back, wherever verl has carried it, or an error says why not."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl import DataProto
from verl.utils import tensordict_utils

from composer_replication.batch.pair_tokens import PairIds, ResponseIds
from composer_replication.errors import AlignmentError, ConfigError, InputError
from composer_replication.recipes.verl.channel_loss import EngineChannels, read_settings
from composer_replication.recipes.verl.columns import (
    PAIRS,
    ReplayPair,
    read_column,
    read_pairs,
    read_sites,
    row_ids,
    write_pairs,
    write_sites,
)
from composer_replication.trainer.rollouts.hint_distillation import SITES, ErringTurn
from recipes.recorded_steps import recorded_batches
from recipes.verl.cpu_engine import data_proto, step_data
from refusals import refusal

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]


def found_in(data: Any) -> list[tuple[int, ...]]:
    """Every site of a batch: its tokens in its own row's ids, and its hinted ids."""
    return sorted(
        (turn.start, turn.end, turn.teacher_start, *ids[turn.start : turn.end], *turn.teacher_ids.tolist())
        for text, ids in zip(read_column(data, SITES), row_ids(data), strict=True)
        for turn in read_sites(text, ids)
    )


def wanted_of(batch: Any) -> list[tuple[int, ...]]:
    return sorted(
        (
            site.start,
            site.end,
            site.teacher_start,
            *batch.row_ids(site.row)[site.start : site.end],
            *site.teacher_ids.tolist(),
        )
        for site in batch.sites
    )


@pytest.mark.parametrize("number", range(10))
def test_recorded_sites_come_back_from_every_place_verl_carries_them_to(number: int) -> None:
    batch = recorded_batches()[number]
    wanted = wanted_of(batch)
    proto = data_proto(batch)
    assert found_in(step_data(proto)) == wanted
    proto.reorder(torch.tensor([5, 2, 7, 0, 1, 6, 3, 4]))
    assert found_in(step_data(proto)) == wanted
    joined = DataProto.concat(proto.chunk(4))
    assert found_in(step_data(joined)) == wanted
    data = step_data(joined)
    parts = tensordict_utils.chunk_tensordict(data, 4)
    assert sorted(each for part in parts for each in found_in(part)) == wanted
    ones = [tensordict_utils.index_select_tensor_dict(data, [row]) for row in range(8)]
    assert sorted(each for part in ones for each in found_in(part)) == wanted


def test_what_verls_queue_keeps_in_one_mapping_is_found_too() -> None:
    batch = recorded_batches()[0]
    data = step_data(data_proto(batch))
    texts = read_column(data, SITES)
    del data[SITES]
    assert found_in(data) == []
    fields = [{SITES: text, "turn_scores": []} for text in texts]
    tensordict_utils.assign_non_tensor_stack(data, "extra_fields", fields)
    assert found_in(data) == wanted_of(batch)


def test_a_hinted_context_is_written_as_what_the_hint_changed() -> None:
    batch = recorded_batches()[0]
    site = max(batch.sites, key=lambda each: each.teacher_start)
    turn = ErringTurn(site.start, site.end, site.teacher_ids, site.teacher_start, site.kind, site.hint, "assistant-1")
    (written,) = json.loads(write_sites([turn], batch.row_ids(site.row)))
    assert written["same"] > site.start - 8
    assert written["same"] + len(written["changed"]) == site.teacher_start


@pytest.mark.parametrize("change", ["cut", "token", "moved"])
def test_a_row_that_is_not_the_sites_own_is_an_error(change: str) -> None:
    batch = recorded_batches()[0]
    site = batch.sites[0]
    ids = batch.row_ids(site.row)
    turn = ErringTurn(site.start, site.end, site.teacher_ids, site.teacher_start, site.kind, site.hint, "assistant-0")
    text = write_sites([turn], ids)
    changed = {"cut": ids[: site.end - 1], "token": [ids[0] + 1, *ids[1:]], "moved": ids[1:]}[change]
    with refusal(AlignmentError, what="site assistant-0", got=str(site.end)):
        read_sites(text, changed)
    if change != "token":
        with refusal(AlignmentError, what="turn assistant-0", got=str(site.start)):
            write_sites([turn], changed)


def test_pairs_come_back() -> None:
    pair = PairIds(ResponseIds([1, 2, 3, 4], 2), ResponseIds([1, 2, 9], 2))
    text = write_pairs([(pair, (-1.5, -2.25)), (pair, None)])
    assert read_pairs(text) == [
        ReplayPair([1, 2], [3, 4], [9], (-1.5, -2.25)),
        ReplayPair([1, 2], [3, 4], [9], None),
    ]
    assert read_pairs("") == read_pairs(None) == []


def test_half_a_pair_and_other_values_are_refused() -> None:
    empty = PairIds(ResponseIds([1, 2], 2), ResponseIds([1, 2, 9], 2))
    with refusal(InputError, what=PAIRS, expected="context"):
        read_pairs(write_pairs([(empty, None)]))
    with refusal(InputError, what=PAIRS, got="list"):
        read_pairs([1, 2])  # type: ignore[arg-type]


def test_a_padded_batch_has_no_rows_to_read() -> None:
    with pytest.raises(InputError, match="left_right_2_no_padding"):
        row_ids(TensorDict({"input_ids": torch.zeros(2, 3)}, batch_size=2))


def test_rows_without_the_column_have_no_sites() -> None:
    proto = data_proto(recorded_batches()[0], with_sites=False)
    assert read_column(step_data(proto), SITES) == [None] * 8
    proto.non_tensor_batch[SITES] = np.array([None] * 8, dtype=object)
    assert found_in(step_data(proto)) == []


def test_settings_are_strict() -> None:
    assert read_settings({"composer": {"alpha_sdpo": 0.2}}) == EngineChannels(alpha_sdpo=0.2)
    with refusal(ConfigError, what="composer", got="['alpha']", expected="alpha_sdpo"):
        read_settings({"composer": {"alpha": 0.2}})
    with refusal(ConfigError, what="composer", got="None"):
        read_settings({})
    for wrong in ({"live_share": 1.5}, {"teacher_top_k": 0}, {"sdpo_wrapper": "taid"}, {"anneal": "cosine"}):
        with pytest.raises(InputError):
            EngineChannels(**wrong)  # type: ignore[arg-type]


def test_the_weight_falls_over_the_schedule() -> None:
    settings = EngineChannels(alpha_sdpo=0.1, anneal="linear", anneal_end=0.5)
    assert [settings.alpha_at(step, 5) for step in (0, 2, 4, 9)] == pytest.approx([0.1, 0.075, 0.05, 0.05])
    with refusal(InputError, what="total_training_steps", got="-1"):
        settings.alpha_at(0, -1)
