"""The collapse alarm: says in plain words that a run is falling apart, keeps the best checkpoint, and can end the run.

Watched, where they are logged: entropy, completion length, tool calls, the divergence from the start weights, the rate
of the errors that channel 2 is about, and the reward, of the rollouts and on the held-out set. See `watched_metric` for
when it goes off.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import logging
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from composer_replication.atomic import atomic_write_json
from composer_replication.config.train import AlarmConfig
from composer_replication.errors import ArtefactNotFoundError, InputError, explain

ENTROPY = ("entropy",)
LENGTH = ("completions/mean_length",)
TOOL_CALLS = ("tools/call_frequency",)
KL_TO_START = ("kl_to_start", "kl")
ERROR_RATE = ("sites/per_100_turns",)
REWARD = ("reward",)
HELD_OUT_REWARD = ("eval_reward",)
# ruff: noqa: ARG002  (what a callback is called with is not its choice)
_JUDGES: dict[str, bool] = {key: key not in ERROR_RATE for key in (*HELD_OUT_REWARD, *REWARD, *ERROR_RATE)}
"""What a checkpoint is judged by, the first that is logged, and whether more of it is better. Errors come last: a model
that no longer calls a tool makes none."""
_LATEST = 10  # rewards of which a checkpoint has to be good, too: those before it may be of a model that is gone
_OF_BEST = 6.0  # the best of many means lies some way off by chance alone
_logger = logging.getLogger(__name__)


def default_watches(config: AlarmConfig | None = None) -> tuple[Watch, ...]:
    """The seven metrics with the limits of [train.alarm]."""
    limits = AlarmConfig() if config is None else config
    often: dict[str, Any] = {"window": limits.window, "patience": limits.patience}
    seldom: dict[str, Any] = {"window": limits.eval_window, "patience": limits.eval_patience}
    falls: dict[str, Any] = {"baseline": "best", "fall_to": limits.reward_floor, "least_change": 0.05}
    floor, ceiling = limits.length_floor, limits.length_ceiling
    return (
        Watch(name="entropy", keys=ENTROPY, fall_to=limits.entropy_floor, least_change=0.02, **often),
        Watch(name="completion length", keys=LENGTH, fall_to=floor, rise_to=ceiling, least_change=2.0, **often),
        Watch(name="tool calls a rollout", keys=TOOL_CALLS, fall_to=limits.tool_floor, least_change=0.1, **often),
        Watch(name="divergence from the start", keys=KL_TO_START, ceiling=limits.kl_ceiling, **often),
        Watch(
            name="target errors per 100 turns",
            keys=ERROR_RATE,
            baseline="best",
            rise_to=limits.error_ceiling,
            least_change=5.0,
            certainty=_OF_BEST,
            **often,
        ),
        Watch(
            name="reward of the rollouts",
            keys=REWARD,
            certainty=_OF_BEST,
            window=limits.reward_window,
            patience=limits.patience,
            **falls,
        ),
        Watch(name="held-out reward", keys=HELD_OUT_REWARD, certainty=_OF_BEST, **falls, **seldom),
    )


class CollapseAlarm(TrainerCallback):
    """Watches what a trainer logs. Every process sees the same metrics and so decides alike; one of them writes.

    The best checkpoint is the one with the highest held-out reward or, where none is logged, the highest mean reward of
    the rollouts or, without one, the lowest mean rate of target errors, measured since the checkpoint before it.
    """

    def __init__(
        self,
        watches: Sequence[Watch] | None = None,
        *,
        stop: bool = False,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._metrics = [WatchedMetric(watch) for watch in (default_watches() if watches is None else watches)]
        self._stop = stop
        self._say = _logger.warning if say is None else say
        self._since_save: dict[str, list[float]] = {}
        self._is_restored = False
        self.alarms: list[Alarm] = []
        self.best: Best | None = None

    @classmethod
    def from_config(cls, config: AlarmConfig, *, say: Callable[[str], None] | None = None) -> CollapseAlarm:
        """As [train.alarm] says."""
        return cls(default_watches(config), stop=config.stop, say=say)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A resumed run goes on from the best one on the disk; a new run's folder may hold another run's."""
        self.best = read_best(Path(args.output_dir or ".")) if state.global_step else None

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
                self._say(self._in_words(alarm))
            if self._stop:
                control.should_training_stop = True

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A checkpoint is written before on_save; a run that died in between is judged when it goes on."""
        if self._is_restored:
            self._is_restored = False
            self._judge(Path(args.output_dir or "."), state)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._judge(Path(args.output_dir or "."), state)

    def observe(self, logs: Mapping[str, Any], step: int) -> list[Alarm]:
        """The alarms that one line of metrics raises; the same lines always raise the same."""
        for key in _JUDGES:
            value = finite(logs.get(key))
            if value is not None:
                self._since_save.setdefault(key, []).append(value)
        alarms = [metric.observe(logs, step) for metric in self._metrics]
        raised = [alarm for alarm in alarms if alarm is not None]
        self.alarms += raised
        return raised

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as plain values. The best checkpoint speaks for itself on the disk."""
        return {
            "watches": {metric.watch.name: metric.state() for metric in self._metrics},
            "alarms": [list(alarm) for alarm in self.alarms],
            "since_save": {key: list(values) for key, values in self._since_save.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on as the run that gave this state would have. What an earlier version did not watch begins anew."""
        names = {metric.watch.name for metric in self._metrics}
        if not names.issuperset(state["watches"]):
            got = f"watches {sorted(state['watches'])}"
            raise InputError(explain("state of the collapse alarm", got=got, expected=f"some of {sorted(names)}"))
        for metric in self._metrics:
            if metric.watch.name in state["watches"]:
                metric.load_state(state["watches"][metric.watch.name])
        self.alarms = [Alarm(*entry) for entry in state["alarms"]]
        self._since_save = {key: list(values) for key, values in state["since_save"].items()}
        self._is_restored = True

    def _judge(self, output: Path, state: TrainerState) -> None:
        """Keep the checkpoint of this step if it is better than the best, or the first that was measured."""
        score, step = self._score(), state.global_step
        self._since_save = {}
        if score is None or not (output / f"checkpoint-{step}").is_dir():
            return
        metric, value = score
        if self.best is not None and not self._beats(metric, value):
            return
        best = Best(step=step, metric=metric, value=value, higher_is_better=_JUDGES[metric])
        if state.is_world_process_zero:
            keep_best(output, best)
        self.best = best

    def _score(self) -> tuple[str, float] | None:
        """What judges the checkpoint just saved, and its value.

        Of a held-out set the latest, else the mean; of rollouts' rewards that of the latest where it is lower.
        """
        for key in _JUDGES:
            values = self._since_save.get(key)
            if values:
                if key in HELD_OUT_REWARD:
                    return key, values[-1]
                means = [sum(part) / len(part) for part in (values, values[-_LATEST:])]
                return key, min(means) if key in REWARD else means[0]
        return None

    def _beats(self, metric: str, value: float) -> bool:
        """The first value of a judge that counts for more takes over."""
        assert self.best is not None
        order = list(_JUDGES)
        counts_for_more = self.best.metric in order and order.index(metric) < order.index(self.best.metric)
        return counts_for_more or self.best.is_beaten_by(metric, value)

    def _in_words(self, alarm: Alarm) -> str:
        best_sentence = "No checkpoint was judged yet, so none is kept as best."
        if self.best is not None:
            best_sentence = f"The best checkpoint is {self.best.folder} ({self.best.metric} {self.best.value:.4g})."
        end = "The run stops here." if self._stop else "The run goes on."
        return f"Collapse alarm at step {alarm.step}: {alarm.in_words()}. {best_sentence} {end}"


# The best checkpoint, kept whatever the rotation of the others does.
#
# Its files are hard links (copies where there are none) in a folder of their own, `best-<step>`, which is complete
# before it has that name. `best` is a symbolic link to it that is exchanged in one rename, and `best.json` says how
# good it is. An earlier best is removed last, so there is a whole one at every moment.

LINK, RECORD = "best", "best.json"
_FOLDER = re.compile(r"best-\d+")
# What file systems without links answer.
_CANNOT_LINK = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EMLINK, errno.EXDEV}


@dataclass(frozen=True, kw_only=True)
class Best:
    """Which checkpoint is best so far, by which metric, and where it is kept."""

    step: int
    metric: str
    value: float
    higher_is_better: bool

    @property
    def folder(self) -> str:
        return f"best-{self.step}"

    def is_beaten_by(self, metric: str, value: float) -> bool:
        """By a better value of the same metric; a value of another metric cannot be compared, and does not count."""
        if metric != self.metric:
            return False
        return value > self.value if self.higher_is_better else value < self.value


def keep_best(output: Path, best: Best) -> None:
    """Keep the checkpoint of that step in the folder as the best one, and let an earlier best go."""
    checkpoint = output / f"checkpoint-{best.step}"
    if not checkpoint.is_dir():
        raise ArtefactNotFoundError(
            explain("checkpoint to keep", got=f"no {checkpoint}", expected="the folder that was just saved")
        )
    _copy_folder(checkpoint, output / best.folder)
    _point(output, best.folder)
    atomic_write_json(output / RECORD, asdict(best))
    for folder in output.iterdir():
        if _FOLDER.fullmatch(folder.name) and folder.name != best.folder:
            shutil.rmtree(folder)


def read_best(output: Path) -> Best | None:
    """What an earlier part of this run kept; None where there is nothing whole."""
    try:
        record: dict[str, Any] = json.loads((output / RECORD).read_bytes())
        best = Best(**record)
    except (OSError, ValueError, TypeError):  # no record, or not one of ours: as good as none
        return None
    return best if (output / best.folder).is_dir() else None


def _copy_folder(source: Path, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        shutil.copytree(source, temporary, copy_function=_link_or_copy)
        if target.exists():  # the same step again, after a resume
            shutil.rmtree(target)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        shutil.copy2(source, target)


def _point(output: Path, folder: str) -> None:
    """Exchange the link in one rename; where there are no links, best.json alone says which folder it is."""
    temporary = output / f".{LINK}.{secrets.token_hex(4)}.tmp"
    try:
        temporary.symlink_to(folder, target_is_directory=True)
        temporary.replace(output / LINK)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


# One metric held against its own past.
#
# The latest `window` values are never part of what they are held against: a value enters the baseline when it leaves
# the window. The metric is beyond its limit when the mean of the window is (i) past a multiple of the baseline or an
# absolute ceiling, (ii) by at least `least_change`, and (iii) by more than the noise explains:
#
#     |mean - baseline| > certainty * s * sqrt(2 / window),    s^2 = mean of (x[t+1] - x[t])^2 / 2 over the older values
#
# Differences of neighbours measure noise without a trend. `patience` values in a row beyond the limit are an alarm. A
# metric that comes back for as long may alarm again.


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What is watched, by the first of `keys` that is logged, and what counts as a collapse.

    `baseline="first"` is the mean of the first `window` values; "best" is the best mean of any `window` values so far,
    highest where `fall_to` is set and lowest where `rise_to` is.
    """

    name: str
    keys: tuple[str, ...]
    baseline: Literal["first", "best"] = "first"
    fall_to: float | None = None
    """Share of the baseline that is too low."""
    rise_to: float | None = None
    """Multiple of the baseline that is too high."""
    ceiling: float | None = None
    """Value that is too high, whatever the baseline."""
    least_change: float = 0.0
    certainty: float = 4.0
    window: int = 10
    patience: int = 5

    def __post_init__(self) -> None:
        if not self.keys or self.window < 2 or self.patience < 1:
            got = f"keys {self.keys}, window {self.window}, patience {self.patience}"
            raise InputError(explain(f"watch {self.name}", got=got, expected="a key, a window >= 2, a patience >= 1"))
        if self.fall_to is None and self.rise_to is None and self.ceiling is None:
            raise InputError(explain(f"watch {self.name}", got="no limit", expected="fall_to, rise_to or ceiling"))
        if self.baseline == "best" and (self.fall_to is None) == (self.rise_to is None):
            raise InputError(explain(f"watch {self.name}", got="no one best", expected="either fall_to or rise_to"))

    def limit_passed(self, baseline: float, latest: float) -> Literal["fell", "rose"] | None:
        """Where the latest mean is past a limit, noise aside."""
        change = latest - baseline
        scale = abs(baseline)  # rewards may be negative: a fall is counted by the size of what it falls from
        if self.fall_to is not None and change <= -max((1.0 - self.fall_to) * scale, self.least_change):
            return "fell"
        if self.rise_to is not None and change >= max((self.rise_to - 1.0) * scale, self.least_change):
            return "rose"
        if self.ceiling is not None and latest > self.ceiling and change >= self.least_change:
            return "rose"
        return None


class Alarm(NamedTuple):
    """A metric beyond its limit for as long as patience allows, at a step."""

    step: int
    name: str
    key: str
    moved: str
    baseline: float
    baseline_step: int
    latest: float
    values: int

    def in_words(self) -> str:
        """What moved, from what to what."""
        return (
            f"{self.name} ({self.key}) {self.moved} from {self.baseline:.4g} (mean of {self.values} values up to step "
            f"{self.baseline_step}) to {self.latest:.4g} (mean of the last {self.values}, step {self.step})"
        )


@dataclass
class _Seen:
    """Everything about a metric's past that the next decision needs: plain values, as many as two windows."""

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


class WatchedMetric:
    """A watch and what it has seen."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._seen = _Seen()

    def observe(self, logs: Mapping[str, Any], step: int) -> Alarm | None:
        """Take the value of a line of metrics, if it has a finite one; the alarm that it raises, if any."""
        key = next((key for key in self.watch.keys if finite(logs.get(key)) is not None), None)
        value = None if key is None else finite(logs[key])
        if key is None or value is None:
            return None
        self._take(value, step)
        state = self._seen
        if state.baseline is None or len(state.window) < self.watch.window:
            return None
        latest = math.fsum(state.window) / len(state.window)
        moved = self.watch.limit_passed(state.baseline, latest)
        if moved is not None and not self._is_beyond_noise(latest - state.baseline):
            moved = None
        if not self._is_time_to_raise(moved is not None):
            return None
        return Alarm(
            step, self.watch.name, key, moved or "", state.baseline, state.baseline_step, latest, self.watch.window
        )

    def state(self) -> dict[str, Any]:
        """Plain values; a list is the caller's own."""
        return asdict(self._seen)

    def load_state(self, state: Mapping[str, Any]) -> None:
        field_names = _Seen.__dataclass_fields__.keys()
        if state.keys() != field_names:
            got = f"the keys {sorted(state)}"
            raise InputError(explain(f"state of watch {self.watch.name}", got=got, expected=f"{sorted(field_names)}"))
        values: dict[str, Any] = copy.deepcopy(dict(state))
        self._seen = _Seen(**values)

    def _take(self, value: float, step: int) -> None:
        state, size = self._seen, self.watch.window
        state.window.append(value)
        state.window_steps.append(step)
        if len(state.window) <= size:
            return
        oldest, oldest_step = state.window.pop(0), state.window_steps.pop(0)
        if state.older:
            state.squares += (oldest - state.older[-1]) ** 2
            state.differences += 1
        state.older = [*state.older, oldest][-size:]
        if len(state.older) == size and self._is_better(math.fsum(state.older) / size):
            state.baseline, state.baseline_step = math.fsum(state.older) / size, oldest_step

    def _is_better(self, mean: float) -> bool:
        if self._seen.baseline is None:
            return True
        if self.watch.baseline == "first":
            return False
        return mean > self._seen.baseline if self.watch.fall_to is not None else mean < self._seen.baseline

    def _is_beyond_noise(self, change: float) -> bool:
        noise = math.sqrt(self._seen.squares / max(2 * self._seen.differences, 1))
        return abs(change) > self.watch.certainty * noise * math.sqrt(2.0 / self.watch.window)

    def _is_time_to_raise(self, is_beyond: bool) -> bool:
        state = self._seen
        state.beyond, state.within = (state.beyond + 1, 0) if is_beyond else (0, state.within + 1)
        if state.is_raised:
            state.is_raised = state.within < self.watch.patience
            return False
        state.is_raised = state.beyond >= self.watch.patience
        return state.is_raised


def finite(value: object) -> float | None:
    """A logged value as a float; None where it is missing, not a number, NaN or infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None
