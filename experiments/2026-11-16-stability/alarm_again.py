"""What the collapse alarm of today says of the recorded trainings: python alarm_again.py [results.json]

The file may be packed, as here. The curve of a job has the reward of each step's rollouts; alarms that were
raised while it ran are in it as `alarms`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from composer_replication.evaluation.ablation.job import read_stored
from composer_replication.trainer.watch.collapse_alarm import CollapseAlarm


def alarms_of(curve: list[dict[str, Any]]) -> list[str]:
    alarm = CollapseAlarm()
    for point in curve:
        alarm.observe({"reward": point["reward"]}, int(point["step"]) + 1)
    return [f"{each.step}: {each.baseline:.2f} -> {each.latest:.2f}" for each in alarm.alarms]


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("results.json")
    for job in read_stored(path)["results"]:
        then = max(point["alarms"] for point in job["curve"])
        print(f"{job['arm']} {job['seed']}: {then:.0f} while it ran; now {alarms_of(job['curve']) or 'none'}")


if __name__ == "__main__":
    main()
