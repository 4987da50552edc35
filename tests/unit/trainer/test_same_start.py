"""Two processes of one training: a rank without weights gets rank 0's, and one that begins otherwise is refused."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
from offline_pieces import sessions_of, tiny, trainer_of

from composer_replication.errors import ConfigError
from composer_replication.trainer.objective.fingerprint import weights_digest
from composer_replication.trainer.offline_trainer import _check_arguments
from composer_replication.trainer.same_start import errors_of_ranks
from warm_crf import WarmCall


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    beside = [Path(__file__).parent]
    processes = [WarmCall("same_start_worker:main", rank, port, str(folder), beside=beside) for rank in (0, 1)]
    try:
        codes = [process.wait(120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("name", ["zeros", "meta", "frozen", "trust_region", "ema", "frozen, attached by hand"])
def test_a_rank_without_weights_gets_those_of_rank_0_before_they_are_copied(ranks, name):
    assert [rank[name] for rank in ranks] == [weights_digest(tiny())] * 2


def test_weights_in_half_precision_are_sent_bit_by_bit(ranks):
    assert [rank["zeros in bf16"] for rank in ranks] == [weights_digest(tiny().bfloat16())] * 2


@pytest.mark.parametrize("name", ["a fresh adapter", "the same adapter"])
def test_all_ranks_have_one_adapter(ranks, name):
    assert len(ranks[0][name]) == 64
    assert ranks[0][name] == ranks[1][name]


def test_reference_logprobs_are_those_of_one_process(ranks, tmp_path):
    alone = trainer_of(tmp_path, sessions_of(0, 1))
    expected = [value for batch in alone.train_dataset.batches() for value in batch.pairs.chosen_reference.tolist()]
    assert [rank["references"] for rank in ranks] == [pytest.approx(expected, abs=1e-6)] * 2


@pytest.mark.parametrize(
    "name", ["other weights", "other dtype", "another adapter", "an adapter on one rank", "other sessions"]
)
def test_a_rank_that_begins_otherwise_is_named_on_every_rank(ranks, name):
    for kind, text in (rank[name] for rank in ranks):
        assert kind == "InputError"
        assert re.search(r"\brank 1\b.*\brank 0\b", text, re.DOTALL)  # got, and expected


def test_rank_0_has_to_have_weights(ranks):
    assert [rank["no weights on rank 0"][0] for rank in ranks] == ["InputError"] * 2


def test_references_of_a_rank_without_weights_name_the_option(ranks):
    kind, text = ranks[1]["references by hand"]
    assert kind == "InputError"
    assert "cpu_ram_efficient_loading" in text
    assert ranks[0]["references by hand"] == "float32"


def test_a_process_that_would_train_alone_is_refused(monkeypatch, tmp_path):
    """Without an accelerator transformers makes no process group of what torchrun has started, and says nothing."""
    from transformers import TrainingArguments

    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    _check_arguments(args)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError):
        _check_arguments(args)


@pytest.mark.parametrize("missing", ["RANK", "MASTER_ADDR"])
def test_an_error_is_told_where_a_launcher_has_set_half_of_its_variables(monkeypatch, missing):
    launched = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    assert errors_of_ranks("no such run", is_own=True) == {}
