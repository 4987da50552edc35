"""What each channel of a training did: read from its lines of metrics once, and put into words once.

A channel was *taught* in the steps in which it had items and a weight. A loss without such a step is *measured, not
taught*: its weight was 0, or a gate let it rest. Only a channel that has a weight and no figure at all never ran.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

History = Sequence[Mapping[str, Any]]
ChannelState = Literal["taught", "measured", "off", "never_ran"]
_WEIGHTS = {"sdpo_kl": "alpha_sdpo", "sdpo_kl_logged": "alpha_sdpo", "trace_replay_dpo": "beta_replay"}
_GATED, _GATE = "sdpo_kl", "hints/gate"


@dataclass(frozen=True, kw_only=True)
class ChannelResult:
    """One channel over a run: the steps that taught it, and its losses on the first and the last line that has one.

    `reason` says why a channel that was measured was not taught.
    """

    name: str
    weight: float
    steps: int
    first_loss: float | None
    last_loss: float | None
    reason: str = ""

    @property
    def state(self) -> ChannelState:
        return state_of(vars(self))

    @property
    def never_ran(self) -> bool:
        return self.state == "never_ran"

    def in_words(self, total_steps: int | None) -> str:
        return channel_in_words(vars(self), total_steps)


def channel_results(names: Sequence[str], history: History, weights: Mapping[str, float]) -> tuple[ChannelResult, ...]:
    """Return the record of each channel, from lines of metrics that each speak for the steps since the line before.

    `ran/NAME` is the share of those steps that taught the channel; without it a loss speaks for all of them.
    """
    results: list[ChannelResult] = []
    for name in names:
        lines = [(at, line) for at, line in enumerate(history) if line.get(f"loss/{name}") is not None]
        losses = [line[f"loss/{name}"] for _, line in lines]
        weight = weights.get(_WEIGHTS.get(name, name), 1.0)
        steps = sum(_taught_steps(line.get(f"ran/{name}"), _steps_of(history, at)) for at, line in lines)
        reason = "" if steps or not has_figure(history, name) else _why_not_taught(history, name, weight, bool(losses))
        first, last = (losses[0], losses[-1]) if losses else (None, None)
        results.append(
            ChannelResult(name=name, weight=weight, steps=steps, first_loss=first, last_loss=last, reason=reason)
        )
    return tuple(results)


def has_figure(history: History, name: str) -> bool:
    """Whether a line of metrics has a loss of the channel, of a step or of held-out data."""
    return any(line.get(key) is not None for line in history for key in (f"loss/{name}", f"eval_{name}"))


def state_of(channel: Mapping[str, Any]) -> ChannelState:
    """Return what became of a channel, from its entry in `training.json`; those of earlier versions have no reason."""
    if channel.get("steps"):
        return "taught"
    if channel.get("first_loss") is not None or channel.get("reason"):
        return "measured"
    return "never_ran" if channel.get("weight") else "off"


def channel_in_words(channel: Mapping[str, Any], total_steps: int | None) -> str:
    """Return the same words wherever a channel is reported: `11 of 12`, `measured, not taught: gate closed`, ..."""
    state = state_of(channel)
    if state == "taught":
        return f"{channel['steps']:,}" + ("" if total_steps is None else f" of {total_steps:,}")
    if state == "measured":
        return ": ".join(["measured, not taught", *filter(None, [channel.get("reason")])])
    return "never ran: weight 0" if state == "off" else "never ran: no data in any step"


def _taught_steps(share: float | None, steps: int) -> int:
    """Any share above 0 is at least one step."""
    if share is None:
        return steps
    return max(round(share * steps), 1) if share > 0 else 0


def _why_not_taught(history: History, name: str, weight: float, has_loss: bool) -> str:
    if not weight:
        return "weight 0"
    if not has_loss:
        return "only on held-out data"
    gates = [line[_GATE] for line in history if line.get(_GATE) is not None]
    return "gate closed" if name == _GATED and gates else "weight 0 at these steps"


def _steps_of(history: History, at: int) -> int:
    before = [line["step"] for line in history[:at] if "loss" in line and "step" in line]
    return int(history[at].get("step", 0)) - int(before[-1] if before else 0)
