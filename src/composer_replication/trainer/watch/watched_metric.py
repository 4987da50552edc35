"""One metric held against its own past.

The latest `window` values are never part of what they are held against: a value enters the baseline when it leaves the
window. The metric is beyond its limit when the mean of the window is (i) past a multiple of the baseline or an absolute
ceiling, (ii) by at least `least_change`, and (iii) by more than the noise explains:

    |mean - baseline| > certainty * s * sqrt(2 / window),    s^2 = mean of (x[t+1] - x[t])^2 / 2 over the older values

Differences of neighbours measure noise without a trend. `patience` values in a row beyond the limit are an alarm. A
metric that comes back for as long may alarm again.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from composer_replication.errors import InputError, explain


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
