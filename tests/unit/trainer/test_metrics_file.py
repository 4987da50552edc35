"""`metrics.jsonl`: one checked line a log call, and none of steps that a resumed run makes again."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch

from composer_replication.runs import RunDir
from composer_replication.runs.journal import read_journal
from composer_replication.trainer.metrics_file import MetricsFile


def state(step, *, is_main=True):
    return SimpleNamespace(global_step=step, is_world_process_zero=is_main)


def logged(path, *steps):
    file = MetricsFile(path)
    for step in steps:
        file.on_log(None, state(step), None, logs={"loss": step / 2})
    return file


def test_every_log_call_is_a_line(tmp_path):
    logged(tmp_path / "out" / "metrics.jsonl", 1, 2)
    rows = read_journal(tmp_path / "out" / "metrics.jsonl").rows
    assert rows == [{"loss": 0.5, "step": 1}, {"loss": 1.0, "step": 2}]


def test_a_run_directory_reads_it_as_its_journal(tmp_path):
    run = RunDir.create(tmp_path / "run")
    logged(run.path("metrics"), 7)
    assert run.read_journal("metrics").rows == [{"loss": 3.5, "step": 7}]


def test_a_resumed_run_drops_the_lines_of_steps_it_makes_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    logged(path, 1, 2, 3, 4)
    file = MetricsFile(path)
    file.on_train_begin(None, state(2), None)
    file.on_log(None, state(3), None, logs={"loss": 9.0})
    assert [(row["step"], row["loss"]) for row in read_journal(path).rows] == [(1, 0.5), (2, 1.0), (3, 9.0)]


def test_a_new_run_begins_a_new_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    logged(path, 0, 1).on_train_begin(None, state(0), None)
    assert read_journal(path).rows == []


def test_a_line_that_a_kill_tore_is_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    logged(path, 1, 2)
    path.write_bytes(path.read_bytes()[:-9])
    file = MetricsFile(path)
    file.on_train_begin(None, state(1), None)
    file.on_log(None, state(2), None, logs={"loss": 5.0})
    assert [row["loss"] for row in read_journal(path).rows] == [0.5, 5.0]


def test_numbers_that_are_not_finite_are_null_and_tensors_are_numbers(tmp_path):
    path = tmp_path / "metrics.jsonl"
    logs = {"a": math.nan, "b": -math.inf, "c": torch.tensor(2.5), "d": True, "e": "text", "f": None}
    MetricsFile(path).on_log(None, state(1), None, logs=logs)
    assert read_journal(path).rows == [{"a": None, "b": None, "c": 2.5, "d": True, "e": "text", "f": None, "step": 1}]


def test_only_the_main_process_writes(tmp_path):
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path).on_log(None, state(1, is_main=False), None, logs={"loss": 1.0})
    assert not path.exists()
