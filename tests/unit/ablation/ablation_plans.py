"""A small arms.toml, and results that no job had to make."""

from __future__ import annotations

from pathlib import Path

ARMS = """
[ablate]
question = "Does it help?"
world = "logs"
seeds = [1, 2]
baseline = "plain"
primary = "forced_gap"
primary_direction = "up"
budget = { steps = 2 }

[base]
train.preset = "none"
train.model = "m"
train.optimiser = { steps = 2, lr = 1e-3 }

[arms.plain]
about = "Channel 1 alone."
predict = "Nothing moves."

[arms.hints]
about = "With hints."
predict = "The gap widens."
expect = "better"
set.loss.alpha_sdpo = 0.5

[arms.shuffled]
about = "With hints of other kinds."
predict = "As plain."
expect = "same"
control_of = "hints"
set = { loss.alpha_sdpo = 0.5, train.control = "shuffled" }
"""

TOY = """
[ablate]
question = "Does the toy help?"
world = "toy_world"
seeds = [1, 2]
baseline = "plain"
primary = "failing"
primary_direction = "down"
budget = { steps = 3, rollouts = 30 }
reach = { success = 0.5 }

[base.train]
preset = "none"

[arms.plain]
about = "Nothing."
predict = "Fails as it did."

[arms.helped]
about = "Half of the failing calls are avoided."
predict = "Fails half as often."
expect = "better"
world.effect = 0.5

[arms.placebo]
about = "Nothing, and it is called something."
predict = "As plain."
expect = "same"
control_of = "helped"
"""


def write_arms(folder: Path, *changes: tuple[str, str], text: str = ARMS) -> Path:
    """The file with some of its text changed; each change has to find its text."""
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = folder / "arms.toml"
    path.write_text(text, encoding="utf-8")
    return path
