"""The collapse alarm: goes off in runs that fall apart, not in noisy healthy ones, and keeps the best weights."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from alarm_checkpoints import best_of, checkpoint, names
from alarm_series import Line, healthy, rewards_of_few_rollouts, tool_use_collapse
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from composer_replication.config.train import AlarmConfig
from composer_replication.errors import InputError
from composer_replication.evaluation.ablation.job import read_stored
from composer_replication.trainer.watch.collapse_alarm import (
    CollapseAlarm,
    _Alarm,
    _Best,
    _default_watches,
    _keep_best,
    _read_best,
    _Watch,
    _WatchedMetric,
)
from refusals import refusal

NUM_RUNS = {"ci": 20, "full": 1000}[os.environ.get("CRF_TEST_PROFILE", "ci")]


def alarms_of(lines: Iterable[Line], watches: Iterable[_Watch] | None = None) -> list[_Alarm]:
    alarm = CollapseAlarm(None if watches is None else tuple(watches))
    return [each for step, logs in lines for each in alarm.observe(logs, step)]


def series(key: str, values: Iterable[float | None], every: int = 1) -> list[tuple[int, dict[str, Any]]]:
    return [(every * (number + 1), {key: value}) for number, value in enumerate(values)]


# --- when it goes off ----------------------------------------------------------------------------------------------


def test_healthy_noisy_runs_raise_no_alarm(note: Callable[[str], None]) -> None:
    false = sum(bool(alarms_of(healthy(seed))) for seed in range(NUM_RUNS))
    note(f"collapse alarm: {false} false alarms in {NUM_RUNS} healthy runs of 1,000 steps (make test-full: 1,000 runs)")
    assert false == 0


def test_the_users_collapse_is_told_within_60_steps_of_its_start(note: Callable[[str], None]) -> None:
    delays: list[int] = []
    for seed in range(NUM_RUNS):
        [alarm] = [each for each in alarms_of(tool_use_collapse(seed)) if each.key == "eval_reward"]
        delays.append(alarm.step - 400)
        assert 0.55 < alarm.baseline < 0.75
        assert alarm.latest < 0.5 * alarm.baseline
        assert alarm.baseline_step <= 400 + 30
    note(f"collapse alarm: told {min(delays)} to {max(delays)} steps after the fall begins, {NUM_RUNS} runs")
    assert 0 < min(delays) <= max(delays) <= 60


def test_a_fall_of_the_rollouts_reward_is_told_though_each_step_has_other_tasks(note: Callable[[str], None]) -> None:
    """Six of six collapses of 600 steps were of this shape, and one of them was told when no reward was watched."""
    delays: list[int] = []
    for seed in range(NUM_RUNS):
        found = alarms_of(rewards_of_few_rollouts(seed, falls_after=300))
        assert {each.key for each in found} == {"reward"}
        delays.append(found[0].step - 300)
    false = sum(bool(alarms_of(rewards_of_few_rollouts(seed))) for seed in range(NUM_RUNS))
    note(f"collapse alarm, three rollouts a step: told {min(delays)} to {max(delays)} steps after, {false} false")
    assert false == 0
    assert 0 < min(delays) <= max(delays) <= 100


def test_the_trainings_on_record_that_collapsed_are_told() -> None:
    """Nine trainings of 600 steps; `solved` of the last weights says which collapsed."""
    record = Path(__file__).parents[3] / "experiments" / "2026-11-16-stability" / "results.json"
    jobs: list[Any] = read_stored(record)["results"]
    collapsed = [job for job in jobs if sum(unit["metrics"]["solved"] for unit in job["units"]) < 10]
    assert (len(jobs), len(collapsed)) == (9, 6)
    for job in collapsed:
        lines = [(int(point["step"]) + 1, {"reward": point["reward"]}) for point in job["curve"]]
        assert alarms_of(lines), (job["arm"], job["seed"])


def test_tool_calls_that_fade_away_are_told_in_plain_words() -> None:
    draw = random.Random(0)
    calls = [max(0.0, (0.65 if step <= 400 else 0.02) + draw.gauss(0, 0.03)) for step in range(1, 431)]
    [alarm] = alarms_of(series("tools/call_frequency", calls))
    assert 405 < alarm.step <= 415
    assert alarm.baseline == pytest.approx(0.65, abs=0.05)
    assert alarm.moved == "fell"
    figures = (f"{alarm.baseline:.4g}", f"{alarm.latest:.4g}", "10", f"step {alarm.step}")
    assert all(fact in alarm.describe() for fact in (alarm.name, "tools/call_frequency", "fell", *figures))


def name_of(key: str) -> str:
    """What the watch of a metric is called, as states and alarms name it."""
    [name] = [watch.name for watch in _default_watches() if key in watch.keys]
    return name


@pytest.mark.parametrize(
    ("key", "before", "after", "moved"),
    [
        ("entropy", 1.0, 0.05, "fell"),
        ("completions/mean_length", 400.0, 20.0, "fell"),
        ("completions/mean_length", 400.0, 4000.0, "rose"),
        ("kl", 0.1, 3.0, "rose"),
        ("sites/per_100_turns", 8.0, 40.0, "rose"),
        ("eval_reward", 0.6, 0.1, "fell"),
        ("eval_reward", -0.2, -0.9, "fell"),
        ("reward", 0.8, 0.2, "fell"),
    ],
)
def test_each_metric_has_its_way_of_collapsing(key: str, before: float, after: float, moved: str) -> None:
    wobble = [1.02, 0.98, 1.0]
    values = [before * wobble[n % 3] for n in range(90)] + [after * wobble[n % 3] for n in range(60)]
    [alarm] = alarms_of(series(key, values))
    assert (alarm.name, alarm.moved, alarm.key) == (name_of(key), moved, key)
    assert alarm.baseline == pytest.approx(before, rel=0.02)


@pytest.mark.parametrize(
    ("key", "before", "after"),
    [
        ("entropy", 1.0, 0.4),
        ("completions/mean_length", 400.0, 1200.0),
        ("kl", 0.0, 0.5),
        ("sites/per_100_turns", 1.0, 4.0),  # four times as many, and still few
        ("eval_reward", 0.02, 0.0),  # nothing was ever learnt
        ("eval_reward", 0.3, 0.9),
        ("loss", 1.0, 1e9),
    ],
)
def test_a_change_that_is_no_collapse_is_none(key: str, before: float, after: float) -> None:
    assert alarms_of(series(key, [before, before * 1.01] * 15 + [after, after * 1.01] * 15)) == []


WATCH = _Watch(name="score", keys=("score",), fall_to=0.5, window=4, patience=3, certainty=0.0)


def test_the_alarm_comes_after_exactly_its_patience() -> None:
    """The mean of 4 is at half of the baseline when two of them are 0; then it has to stay there for 3 values."""
    values = [1.0] * 8 + [0.0] * 10
    [alarm] = alarms_of(series("score", values), [WATCH])
    assert alarm == _Alarm(12, "score", "score", "fell", 1.0, 4, 0.0, 4)
    two = alarms_of(series("score", values[:11]), [WATCH])
    assert two == []


def test_a_short_dip_is_no_alarm_and_a_second_collapse_is_a_second_one() -> None:
    assert alarms_of(series("score", [1.0] * 8 + [0.1] * 2 + [1.0] * 8), [WATCH]) == []
    twice = [1.0] * 8 + [0.0] * 8 + [1.0] * 12 + [0.0] * 8
    assert [alarm.step for alarm in alarms_of(series("score", twice), [WATCH])] == [12, 32]


def test_the_best_window_is_the_baseline_where_it_is_asked_for() -> None:
    best = _Watch(name="score", keys=("score",), baseline="best", fall_to=0.5, window=2, patience=1, certainty=0.0)
    rising = [0.2, 0.2, 0.4, 0.4, 0.8, 0.8, 0.8, 0.8, 0.3, 0.3]
    [alarm] = alarms_of(series("score", rising), [best])
    assert (alarm.baseline, alarm.step) == (0.8, 10)
    first = _Watch(name="score", keys=("score",), fall_to=0.5, window=2, patience=1, certainty=0.0)
    assert alarms_of(series("score", rising), [first]) == []


def test_noise_as_large_as_the_fall_is_no_alarm() -> None:
    noisy = [2.0, 0.0] * 10 + [0.5, -0.1] * 5
    certain = _Watch(name="score", keys=("score",), fall_to=0.5, window=4, patience=3, certainty=4.0)
    assert alarms_of(series("score", noisy), [certain]) == []
    assert len(alarms_of(series("score", noisy), [WATCH])) == 1


def test_values_that_are_no_numbers_are_no_values() -> None:
    holes: list[float | None] = []
    for value in [1.0] * 8 + [0.0] * 4:
        holes += [value, None, float("nan"), float("inf")]
    [alarm] = alarms_of(series("score", holes), [WATCH])
    assert alarm._replace(step=0, baseline_step=0) == _Alarm(0, "score", "score", "fell", 1.0, 0, 0.0, 4)


def test_a_watch_without_a_limit_or_a_key_is_refused() -> None:
    with refusal(InputError, what="x", expected="ceiling"):
        _Watch(name="x", keys=("x",))
    with refusal(InputError, what="x", got="keys ()"):
        _Watch(name="x", keys=(), fall_to=0.5)
    with pytest.raises(InputError) as refused:
        _Watch(name="x", keys=("x",), baseline="best", fall_to=0.5, rise_to=2.0)
    limits = ("fall_to", "rise_to", "ceiling")
    assert [name in refused.value.expected for name in limits] == [True, True, False]


def test_the_limits_are_those_of_the_config() -> None:
    watches = {watch.name: watch for watch in _default_watches(AlarmConfig(entropy_floor=0.5, eval_window=7, window=5))}
    entropy, held_out = watches[name_of("entropy")], watches[name_of("eval_reward")]
    assert (entropy.fall_to, entropy.window, held_out.window) == (0.5, 5, 7)


# --- state ---------------------------------------------------------------------------------------------------------


def test_a_run_that_is_resumed_anywhere_raises_the_alarms_of_one_that_was_not() -> None:
    lines = list(tool_use_collapse(5))
    whole = CollapseAlarm()
    for step, logs in lines:
        whole.observe(logs, step)
    assert whole.alarms
    for cut in (0, 1, 7, 399, 431, 448, 599):
        first, second = CollapseAlarm(), CollapseAlarm()
        for step, logs in lines[:cut]:
            first.observe(logs, step)
        second.load_state(json.loads(json.dumps(first.state())))
        for step, logs in lines[cut:]:
            first.observe(logs, step)  # the state is a copy: what goes on here changes nothing there
            second.observe(logs, step)
        assert second.alarms == whole.alarms
        assert second.state() == whole.state()


def test_a_state_of_a_version_that_watched_less_is_gone_on_with() -> None:
    lines = series("entropy", [1.0] * 30 + [0.05] * 20)
    first = CollapseAlarm()
    for step, logs in lines[:35]:
        first.observe(logs, step)
    state = first.state()
    del state["watches"][name_of("reward")]
    second = CollapseAlarm()
    second.load_state(state)
    assert [each for step, logs in lines[35:] for each in second.observe(logs, step)] == alarms_of(lines) != []


def test_a_state_of_other_watches_is_refused() -> None:
    with refusal(InputError, got="['score']", expected=name_of("entropy")):
        CollapseAlarm().load_state(CollapseAlarm((WATCH,)).state())
    with refusal(InputError, what="score", got="['values']"):
        _WatchedMetric(WATCH).load_state({"values": []})


# --- inside a trainer ----------------------------------------------------------------------------------------------


class Line1D(nn.Module):
    """The smallest model that a Trainer trains."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": ((self.weight * x - labels) ** 2).mean()}


class Scripted(Trainer):
    """Logs metrics of a script beside its own."""

    script: dict[str, list[float]]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        step = self.state.global_step
        logs |= {key: values[step - 1] for key, values in self.script.items() if step <= len(values)}
        super().log(logs, start_time)


def train(output: Path, alarm: CollapseAlarm, script: dict[str, list[float]], steps: int = 8) -> Trainer:
    rows = [{"x": torch.tensor([1.0]), "labels": torch.tensor([1.0])}] * 64
    arguments = TrainingArguments(
        output_dir=str(output),
        max_steps=steps,
        per_device_train_batch_size=1,
        logging_steps=1,
        save_steps=2,
        save_total_limit=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        learning_rate=0.1,
        lr_scheduler_type="constant",
    )
    trainer = Scripted(Line1D(), arguments, train_dataset=rows, callbacks=[alarm])  # pyright: ignore[reportArgumentType]
    trainer.script = script
    trainer.train()
    return trainer


def weight_in(folder: Path) -> float:
    return load_file(folder / "model.safetensors")["weight"].item()


def test_a_trainer_keeps_the_checkpoint_with_the_best_held_out_reward(tmp_path: Path) -> None:
    alarm = CollapseAlarm()
    train(tmp_path, alarm, {"eval_reward": [0.1, 0.2, 0.3, 0.7, 0.9, 0.6, 0.5, 0.4], "sites/per_100_turns": [9.0] * 8})
    # 0.9 was reached between two checkpoints; of those on the disk, the one of step 4 is best.
    assert alarm.best == _Best(step=4, metric="eval_reward", value=0.7, higher_is_better=True)
    assert names(tmp_path) == {"checkpoint-8", "best", "best-4", "best.json"}
    fresh = train(tmp_path / "again", CollapseAlarm(), {}, steps=4)
    assert weight_in(tmp_path / "best") == fresh.model.weight.item() != weight_in(tmp_path / "checkpoint-8")  # pyright: ignore


def test_without_a_held_out_reward_the_fewest_errors_are_best(tmp_path: Path) -> None:
    alarm = CollapseAlarm()
    train(tmp_path, alarm, {"sites/per_100_turns": [9, 9, 4, 6, 8, 1, 9, 9]})
    assert alarm.best == _Best(step=6, metric="sites/per_100_turns", value=4.5, higher_is_better=False)


def test_a_model_that_no_longer_acts_makes_no_errors_and_is_not_best(tmp_path: Path) -> None:
    alarm = CollapseAlarm()
    train(
        tmp_path, alarm, {"reward": [0.6, 0.6, 0.8, 0.7, 0.2, 0, 0, 0], "sites/per_100_turns": [9, 9, 5, 5, 2, 0, 0, 0]}
    )
    assert alarm.best == _Best(step=4, metric="reward", value=0.75, higher_is_better=True)


def test_a_checkpoint_behind_a_collapse_is_not_best_for_what_came_before_it() -> None:
    alarm = CollapseAlarm()
    for value in [0.6] * 20:
        alarm.observe({"reward": value}, 1)
    assert alarm._score() == ("reward", pytest.approx(0.6))
    for value in [0.9] * 90 + [0.0] * 10:
        alarm.observe({"reward": value}, 1)
    assert alarm._score() == ("reward", 0.0)


def test_the_first_held_out_reward_takes_over_from_the_rollouts(tmp_path: Path) -> None:
    alarm = CollapseAlarm()
    train(tmp_path, alarm, {"reward": [0.9] * 8, "eval_reward": [float("nan")] * 5 + [0.3, 0.3, 0.2]})
    assert alarm.best == _Best(step=6, metric="eval_reward", value=0.3, higher_is_better=True)


def test_a_checkpoint_that_nothing_was_measured_for_is_not_best(tmp_path: Path) -> None:
    alarm = CollapseAlarm()
    train(tmp_path, alarm, {"eval_reward": [0.5]}, steps=4)
    assert alarm.best is not None
    assert alarm.best.step == 2


def test_an_alarm_says_what_fell_and_stops_the_run_where_it_may(tmp_path: Path) -> None:
    watch = _Watch(name="held-out reward", keys=("eval_reward",), fall_to=0.5, window=2, patience=1, certainty=0.0)
    script = {"eval_reward": [0.6, 0.6, 0.6, 0.6, 0.0, 0.0, 0.0, 0.0]}
    told: list[str] = []
    alarm = CollapseAlarm((watch,), stop=True, say=told.append)
    trainer = train(tmp_path / "stop", alarm, script)
    assert trainer.state.global_step == 5
    assert alarm.alarms == [_Alarm(5, "held-out reward", "eval_reward", "fell", 0.6, 2, 0.3, 2)]
    assert len(told) == 1
    assert all(fact in told[0] for fact in (alarm.alarms[0].describe(), "step 5", "best-2", "eval_reward 0.6"))
    words = alarm.alarms[0].describe()
    assert all(fact in words for fact in ("held-out reward", "eval_reward", "fell", "0.6", "step 2", "0.3", "step 5"))
    trainer = train(tmp_path / "go", CollapseAlarm((watch,), say=told.append), script)
    assert trainer.state.global_step == 8
    assert len(told) == 2
    assert words in told[1]
    assert told[1] != told[0]  # as far as that it is not stopped


def callback_call(output: Path, step: int) -> tuple[TrainingArguments, TrainerState, TrainerControl]:
    arguments = TrainingArguments(output_dir=str(output), use_cpu=True, report_to="none")
    return arguments, TrainerState(global_step=step, is_world_process_zero=True), TrainerControl()


def test_a_resumed_run_measures_itself_against_the_best_on_the_disk(tmp_path: Path) -> None:
    checkpoint(tmp_path, 4)
    _keep_best(tmp_path, best_of(4, 0.7))
    checkpoint(tmp_path, 6)
    for start, kept in ((4, 4), (0, 6)):  # a new run in the same folder has nothing to do with the old best
        alarm = CollapseAlarm()
        alarm.on_train_begin(*callback_call(tmp_path, start))
        alarm.observe({"eval_reward": 0.6}, 6)
        alarm.on_save(*callback_call(tmp_path, 6))
        best = _read_best(tmp_path)
        assert best is not None
        assert best.step == kept


def test_a_run_that_died_between_its_checkpoint_and_its_best_is_judged_when_it_goes_on(tmp_path: Path) -> None:
    died = CollapseAlarm()
    died.observe({"eval_reward": 0.6}, 4)
    checkpoint(tmp_path, 4)
    alarm = CollapseAlarm()
    alarm.load_state(died.state())
    alarm.on_train_begin(*callback_call(tmp_path, 4))
    alarm.on_step_begin(*callback_call(tmp_path, 4))
    assert _read_best(tmp_path) == best_of(4, 0.6)
    alarm.on_step_begin(*callback_call(tmp_path, 5))
    assert _read_best(tmp_path) == best_of(4, 0.6)


def test_other_processes_decide_alike_and_write_nothing(tmp_path: Path) -> None:
    checkpoint(tmp_path, 4)
    alarm = CollapseAlarm()
    arguments, state, control = callback_call(tmp_path, 4)
    state.is_world_process_zero = False
    alarm.observe({"eval_reward": 0.6}, 4)
    alarm.on_save(arguments, state, control)
    assert alarm.best == best_of(4, 0.6)
    assert names(tmp_path) == {"checkpoint-4"}
