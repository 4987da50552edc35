"""Warn when a run collapses, keep its best checkpoint, and optionally stop it.

The alarm watches entropy, completion length, tool calls, the divergence from the initial model, the rate of errors that
channel 2 trains on, and the rewards on rollouts and on held-out tasks, if they are logged. `_WatchedMetric` defines
when a metric raises an alarm.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from composer_replication.atomic import CANNOT_LINK, atomic_write_json, link_or_copy, staged_path
from composer_replication.config.train import AlarmConfig
from composer_replication.errors import ArtefactNotFoundError, InputError, explain

ENTROPY = ("entropy",)
LENGTH = ("completions/mean_length",)
TOOL_CALLS = ("tools/call_frequency",)
KL_TO_START = ("kl_to_start", "kl")
ERROR_RATE = ("sites/per_100_turns",)
REWARD = ("reward",)
HELD_OUT_REWARD = ("eval_reward",)
# ruff: noqa: ARG002  (transformers decides which arguments a callback gets)
_RANKING_METRICS: dict[str, bool] = {key: key not in ERROR_RATE for key in (*HELD_OUT_REWARD, *REWARD, *ERROR_RATE)}
"""The metrics by which checkpoints are ranked, and whether higher is better. The first metric that is logged is used.
The error rate comes last, since a model that no longer calls tools makes no errors."""
# A checkpoint is also scored by this many latest rewards, since earlier rewards may predate a collapse.
_NUM_LATEST_REWARDS = 10
# A "best" baseline needs 6 instead of 4: the best of many means is far from the others by chance alone.
_CERTAINTY_OF_BEST = 6.0
_logger = logging.getLogger(__name__)


def _default_watches(config: AlarmConfig | None = None) -> tuple[_Watch, ...]:
    """Return the default watches, for seven metrics, with the limits configured in [train.alarm]."""
    limits = AlarmConfig() if config is None else config
    # Rollouts are logged far more often than evaluations, so evaluations have a separate window and patience.
    often: dict[str, Any] = {"window": limits.window, "patience": limits.patience}
    seldom: dict[str, Any] = {"window": limits.eval_window, "patience": limits.eval_patience}
    falls: dict[str, Any] = {"baseline": "best", "fall_to": limits.reward_floor, "least_change": 0.05}
    floor, ceiling = limits.length_floor, limits.length_ceiling
    return (
        _Watch(name="entropy", keys=ENTROPY, fall_to=limits.entropy_floor, least_change=0.02, **often),
        _Watch(name="completion length", keys=LENGTH, fall_to=floor, rise_to=ceiling, least_change=2.0, **often),
        _Watch(name="tool calls a rollout", keys=TOOL_CALLS, fall_to=limits.tool_floor, least_change=0.1, **often),
        _Watch(name="divergence from the start", keys=KL_TO_START, ceiling=limits.kl_ceiling, **often),
        _Watch(
            name="target errors per 100 turns",
            keys=ERROR_RATE,
            baseline="best",
            rise_to=limits.error_ceiling,
            least_change=5.0,
            certainty=_CERTAINTY_OF_BEST,
            **often,
        ),
        _Watch(
            name="reward of the rollouts",
            keys=REWARD,
            certainty=_CERTAINTY_OF_BEST,
            window=limits.reward_window,
            patience=limits.patience,
            **falls,
        ),
        _Watch(name="held-out reward", keys=HELD_OUT_REWARD, certainty=_CERTAINTY_OF_BEST, **falls, **seldom),
    )


class CollapseAlarm(TrainerCallback):
    """A callback that watches the metrics that a trainer logs, and raises an alarm if the run collapses.

    Every process sees the same metrics and so makes the same decisions; only the main process writes files.

    The best checkpoint is the one with the highest held-out reward. Without held-out rewards it is the one with the
    highest mean reward on rollouts, and without any rewards the one with the lowest mean error rate, over the steps
    since the previous checkpoint.
    """

    def __init__(
        self,
        watches: Sequence[_Watch] | None = None,
        *,
        stop: bool = False,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._metrics = [_WatchedMetric(watch) for watch in (_default_watches() if watches is None else watches)]
        self._stop = stop
        self._say = _logger.warning if say is None else say
        self._since_save: dict[str, list[float]] = {}
        self._is_resumed = False
        self.alarms: list[_Alarm] = []
        self.best: _Best | None = None

    @classmethod
    def from_config(cls, config: AlarmConfig, *, say: Callable[[str], None] | None = None) -> CollapseAlarm:
        """Return an alarm with the settings in [train.alarm]."""
        return cls(_default_watches(config), stop=config.stop, say=say)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Load the record of the best checkpoint if the run is resumed. In a new run, such a record would be another
        run's.
        """
        # A new run ignores the record.
        self.best = _read_best(Path(args.output_dir or ".")) if state.global_step else None

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        for alarm in self.observe(logs or {}, state.global_step):
            if state.is_world_process_zero:
                self._say(self._message(alarm))
            if self._stop:
                control.should_training_stop = True

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Rank a checkpoint that `on_save` did not rank, because the run was killed just after saving the
        checkpoint.
        """
        if self._is_resumed:
            self._is_resumed = False
            self._rank_checkpoint(Path(args.output_dir or "."), state)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._rank_checkpoint(Path(args.output_dir or "."), state)

    def observe(self, logs: Mapping[str, Any], step: int) -> list[_Alarm]:
        """Add one line of metrics, and return the alarms that it raises."""
        for key in _RANKING_METRICS:
            value = _finite(logs.get(key))
            if value is not None:
                self._since_save.setdefault(key, []).append(value)
        alarms = [metric.observe(logs, step) for metric in self._metrics]
        raised = [alarm for alarm in alarms if alarm is not None]
        self.alarms += raised
        return raised

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint as plain values. The best checkpoint is recorded in separate files."""
        return {
            "watches": {metric.watch.name: metric.state() for metric in self._metrics},
            "alarms": [list(alarm) for alarm in self.alarms],
            "since_save": {key: list(values) for key, values in self._since_save.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state. Metrics missing from the state of an earlier version start without a history."""
        names = {metric.watch.name for metric in self._metrics}
        if not names.issuperset(state["watches"]):
            got = f"watches {sorted(state['watches'])}"
            raise InputError(explain("state for the collapse alarm", got=got, expected=f"a subset of {sorted(names)}"))
        for metric in self._metrics:
            if metric.watch.name in state["watches"]:
                metric.load_state(state["watches"][metric.watch.name])
        self.alarms = [_Alarm(*entry) for entry in state["alarms"]]
        self._since_save = {key: list(values) for key, values in state["since_save"].items()}
        self._is_resumed = True

    def _rank_checkpoint(self, output: Path, state: TrainerState) -> None:
        """Keep this step's checkpoint if it is the first with a score, or better than the best one so far."""
        score, step = self._score(), state.global_step
        self._since_save = {}
        if score is None or not (output / f"checkpoint-{step}").is_dir():
            return
        metric, value = score
        if self.best is not None and not self._beats(metric, value):
            return
        best = _Best(step=step, metric=metric, value=value, higher_is_better=_RANKING_METRICS[metric])
        if state.is_world_process_zero:
            _keep_best(output, best)
        self.best = best

    def _score(self) -> tuple[str, float] | None:
        """Return the metric that ranks the latest checkpoint, and its value.

        The metric is the latest held-out reward; or else the mean reward on rollouts, or the mean of the last ten
        rewards if that is lower; or else the mean error rate.
        """
        for key in _RANKING_METRICS:
            values = self._since_save.get(key)
            if values:
                if key in HELD_OUT_REWARD:
                    return key, values[-1]
                means = [sum(part) / len(part) for part in (values, values[-_NUM_LATEST_REWARDS:])]
                return key, min(means) if key in REWARD else means[0]
        return None

    def _beats(self, metric: str, value: float) -> bool:
        """Return whether a score beats the best one so far, or is of a metric that takes precedence over the best
        one's metric.
        """
        assert self.best is not None
        order = list(_RANKING_METRICS)
        counts_for_more = self.best.metric in order and order.index(metric) < order.index(self.best.metric)
        return counts_for_more or self.best.is_beaten_by(metric, value)

    def _message(self, alarm: _Alarm) -> str:
        best_sentence = "No checkpoint has a score yet, so there is no best checkpoint."
        if self.best is not None:
            best_sentence = f"The best checkpoint is {self.best.folder} ({self.best.metric} {self.best.value:.4g})."
        end = "Training stops." if self._stop else "Training continues."
        return f"Collapse alarm at step {alarm.step}: {alarm.describe()}. {best_sentence} {end}"


LINK, RECORD = "best", "best.json"
# "best-120"; not "best" (the link) or "best-120.tmp"
_FOLDER = re.compile(r"best-\d+")


@dataclass(frozen=True, kw_only=True)
class _Best:
    """The best checkpoint so far: its step, and the metric and value that rank it."""

    step: int
    metric: str
    value: float
    higher_is_better: bool

    @property
    def folder(self) -> str:
        return f"best-{self.step}"

    def is_beaten_by(self, metric: str, value: float) -> bool:
        """Return whether the given value is better; False if the metric differs, since values are not comparable."""
        if metric != self.metric:
            return False
        return value > self.value if self.higher_is_better else value < self.value


def _keep_best(output: Path, best: _Best) -> None:
    """Keep the checkpoint of step `best.step` as the best one, and delete the earlier best checkpoint.

    The folder `best-<step>` contains hard links to the files, or copies on file systems without links, and gets its
    name once it is complete. The symbolic link `best` is switched to it atomically, and `best.json` has the score. The
    earlier best folder is deleted last, so a complete one always exists.
    """
    checkpoint = output / f"checkpoint-{best.step}"
    if not checkpoint.is_dir():
        raise ArtefactNotFoundError(
            explain("checkpoint to keep", got=f"no {checkpoint}", expected="the checkpoint that was just saved")
        )
    # Copy first, then switch the link, then write the record: each step leaves the earlier best checkpoint usable.
    with staged_path(output / best.folder) as unfinished:
        shutil.copytree(checkpoint, unfinished, copy_function=link_or_copy)
        # The run saved the same step before it was resumed.
        if (output / best.folder).exists():
            shutil.rmtree(output / best.folder)
    _replace_link(output, best.folder)
    atomic_write_json(output / RECORD, asdict(best))
    # Last, so that a kill at any moment leaves a complete best checkpoint.
    for folder in output.iterdir():
        if _FOLDER.fullmatch(folder.name) and folder.name != best.folder:
            shutil.rmtree(folder)


def _read_best(output: Path) -> _Best | None:
    """Read the record of the best checkpoint so far; None if there is no complete best checkpoint."""
    try:
        record: dict[str, Any] = json.loads((output / RECORD).read_bytes())
        best = _Best(**record)
    except (OSError, ValueError, TypeError):  # no record, or a record in an unknown format
        return None
    return best if (output / best.folder).is_dir() else None


def _replace_link(output: Path, folder: str) -> None:
    """Atomically point the symbolic link `best` to the folder. Where links are impossible, only best.json names the
    folder.
    """
    try:
        # A rename replaces the old link atomically; `symlink_to` alone would fail on an existing name.
        with staged_path(output / LINK) as link:
            link.symlink_to(folder, target_is_directory=True)
    except OSError as error:
        if error.errno not in CANNOT_LINK:
            raise


@dataclass(frozen=True, kw_only=True)
class _Watch:
    """A metric to watch (the first of `keys` that is logged), and the limits beyond which it counts as collapsed.

    With `baseline="first"` the baseline is the mean of the first `window` values. With "best" it is the best mean of
    any `window` consecutive values so far: the highest if `fall_to` is set, the lowest if `rise_to` is set.
    """

    name: str
    keys: tuple[str, ...]
    baseline: Literal["first", "best"] = "first"
    fall_to: float | None = None
    """Fraction of the baseline below which the metric is too low."""
    rise_to: float | None = None
    """Multiple of the baseline above which the metric is too high."""
    ceiling: float | None = None
    """Value above which the metric is too high, regardless of the baseline."""
    least_change: float = 0.0
    certainty: float = 4.0
    window: int = 10
    patience: int = 5

    def __post_init__(self) -> None:
        if not self.keys or self.window < 2 or self.patience < 1:
            got = f"keys {self.keys}, window {self.window}, patience {self.patience}"
            raise InputError(explain(f"watch {self.name}", got=got, expected="a key, window >= 2 and patience >= 1"))
        if self.fall_to is None and self.rise_to is None and self.ceiling is None:
            raise InputError(explain(f"watch {self.name}", got="no limit", expected="fall_to, rise_to or ceiling"))
        if self.baseline == "best" and (self.fall_to is None) == (self.rise_to is None):
            raise InputError(
                explain(
                    f"watch {self.name}",
                    got='baseline "best" without a direction',
                    expected="either fall_to or rise_to",
                )
            )

    def limit_passed(self, baseline: float, latest: float) -> Literal["fell", "rose"] | None:
        """Return the direction in which the latest mean is past a limit, ignoring noise, or None if it is within the
        limits.
        """
        change = latest - baseline
        # Rewards may be negative, so a fall is measured relative to the absolute value of the baseline.
        scale = abs(baseline)
        if self.fall_to is not None and change <= -max((1.0 - self.fall_to) * scale, self.least_change):
            return "fell"
        if self.rise_to is not None and change >= max((self.rise_to - 1.0) * scale, self.least_change):
            return "rose"
        if self.ceiling is not None and latest > self.ceiling and change >= self.least_change:
            return "rose"
        return None


class _Alarm(NamedTuple):
    """An alarm raised because a metric was past its limit for `patience` values in a row."""

    step: int
    name: str
    key: str
    moved: str
    baseline: float
    baseline_step: int
    latest: float
    values: int

    def describe(self) -> str:
        """Return a text that says which metric moved, with its earlier and its current value."""
        return (
            f"{self.name} ({self.key}) {self.moved} from {self.baseline:.4g} (mean of {self.values} values up to step "
            f"{self.baseline_step}) to {self.latest:.4g} (mean of the last {self.values}, step {self.step})"
        )


@dataclass
class _MetricHistory:
    """The part of a metric's history that is needed later: plain values, at most two windows long."""

    window: list[float] = field(default_factory=list[float])
    window_steps: list[int] = field(default_factory=list[int])
    older: list[float] = field(default_factory=list[float])
    squares: float = 0.0
    differences: int = 0
    baseline: float | None = None
    baseline_step: int = 0
    beyond: int = 0
    within: int = 0
    is_raised: bool = False


class _WatchedMetric:
    """A watched metric with its limits and its history.

    The latest `window` values are never part of the baseline: a value enters the baseline when it leaves the window.
    The metric is past its limit if the window's mean (i) is past a multiple of the baseline or an absolute ceiling,
    (ii) differs from the baseline by at least `least_change`, and (iii) differs by more than noise explains:

        |mean - baseline| > certainty * s * sqrt(2 / window),    s^2 = mean of (x[t+1] - x[t])^2 / 2 over the older
            values

    s measures noise without a trend, because it uses the differences of neighboring values. `patience` values in a row
    past the limit raise an alarm; after as many values within the limit, the metric may raise another alarm.
    """

    def __init__(self, watch: _Watch) -> None:
        self.watch = watch
        self._history = _MetricHistory()

    def observe(self, logs: Mapping[str, Any], step: int) -> _Alarm | None:
        """Add the metric's value from a line of metrics, if it is finite, and return an alarm or None."""
        key = next((key for key in self.watch.keys if _finite(logs.get(key)) is not None), None)
        value = None if key is None else _finite(logs[key])
        if key is None or value is None:
            return None
        self._take(value, step)
        state = self._history
        if state.baseline is None or len(state.window) < self.watch.window:
            return None
        latest = math.fsum(state.window) / len(state.window)
        moved = self.watch.limit_passed(state.baseline, latest)
        if moved is not None and not self._is_beyond_noise(latest - state.baseline):
            moved = None
        if not self._is_time_to_raise(moved is not None):
            return None
        return _Alarm(
            step, self.watch.name, key, moved or "", state.baseline, state.baseline_step, latest, self.watch.window
        )

    def state(self) -> dict[str, Any]:
        """Return the history as plain values that the caller may change."""
        return asdict(self._history)

    def load_state(self, state: Mapping[str, Any]) -> None:
        field_names = _MetricHistory.__dataclass_fields__.keys()
        if state.keys() != field_names:
            got = f"the keys {sorted(state)}"
            raise InputError(explain(f"state for watch {self.watch.name}", got=got, expected=f"{sorted(field_names)}"))
        values: dict[str, Any] = copy.deepcopy(dict(state))
        self._history = _MetricHistory(**values)

    def _take(self, value: float, step: int) -> None:
        state, size = self._history, self.watch.window
        state.window.append(value)
        state.window_steps.append(step)
        if len(state.window) <= size:
            return
        oldest, oldest_step = state.window.pop(0), state.window_steps.pop(0)
        if state.older:
            # Half the mean squared difference between neighbors estimates the variance of the noise.
            state.squares += (oldest - state.older[-1]) ** 2
            state.differences += 1
        # Store only the last `size` values, so that the state in a checkpoint does not grow with the run.
        state.older = [*state.older, oldest][-size:]
        if len(state.older) == size and self._is_better_baseline(math.fsum(state.older) / size):
            state.baseline, state.baseline_step = math.fsum(state.older) / size, oldest_step

    def _is_better_baseline(self, mean: float) -> bool:
        if self._history.baseline is None:
            return True
        if self.watch.baseline == "first":
            return False
        return mean > self._history.baseline if self.watch.fall_to is not None else mean < self._history.baseline

    def _is_beyond_noise(self, change: float) -> bool:
        noise = math.sqrt(self._history.squares / max(2 * self._history.differences, 1))
        return abs(change) > self.watch.certainty * noise * math.sqrt(2.0 / self.watch.window)

    def _is_time_to_raise(self, is_beyond: bool) -> bool:
        state = self._history
        state.beyond, state.within = (state.beyond + 1, 0) if is_beyond else (0, state.within + 1)
        # After an alarm, the metric must be within its limit for `patience` values before it can raise another alarm.
        if state.is_raised:
            state.is_raised = state.within < self.watch.patience
            return False
        state.is_raised = state.beyond >= self.watch.patience
        return state.is_raised


def _finite(value: object) -> float | None:
    """Return a logged value as a float, or None if it is missing, not a number, NaN or infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None
