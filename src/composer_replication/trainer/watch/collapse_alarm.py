"""The collapse alarm: says in plain words that a run is falling apart, keeps the best checkpoint, and can end the run.

Watched, where they are logged: entropy, completion length, tool calls, the divergence from the start weights, the rate
of the errors that channel 2 is about, and the reward, of the rollouts and on the held-out set. See `watched_metric` for
when it goes off.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from composer_replication.config.train import AlarmConfig
from composer_replication.errors import InputError, explain
from composer_replication.trainer.watch.best_checkpoint import Best, keep_best, read_best
from composer_replication.trainer.watch.watched_metric import Alarm, Watch, WatchedMetric, finite

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
