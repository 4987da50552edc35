"""The log files of sessions that hold an error with a hint, copied into a folder of their own.

    python choose_sessions.py RUN LOGS OUT      # RUN: `crf ingest LOGS -o RUN`, then `crf sites RUN`

The others would only make the run larger: an arm learns from windows with an error or a pair, and is judged on sites.
A run keeps no path as it was (names of people in it are replaced), so files are found again by their own names, which
in the logs of agents are ids; a name that two files have is refused.
"""

from __future__ import annotations

import argparse
import shutil
from collections import Counter
from pathlib import Path

from composer_replication.ingestion.session_sources import read_accounts
from composer_replication.runs import RunDir
from composer_replication.runs.files import read_sites


def chosen_names(run: RunDir) -> set[str]:
    """The names of the files that a session with a kept site was read from, without their folders."""
    with_a_site = {site.conversation_id for site, hint in read_sites(run) if site.is_kept and hint is not None}
    accounts = (each for each in read_accounts(run) if with_a_site.intersection(each.conversations))
    return {Path(file).name for each in accounts for file in each.files}


def main() -> None:
    parser = argparse.ArgumentParser(description="Copy the log files of sessions that hold an error with a hint.")
    for name in ("run", "logs", "out"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args()
    names = chosen_names(RunDir.open(given.run))
    files = [path for path in sorted(given.logs.rglob("*")) if path.is_file() and path.name in names]
    twice = [name for name, number in Counter(path.name for path in files).items() if number > 1]
    if twice or len(files) < len(names):
        missing = sorted(names - {path.name for path in files})
        raise SystemExit(f"{given.logs}: got names that two files have {twice[:3]} or none {missing[:3]}, expected one")
    for path in files:
        target = given.out / path.relative_to(given.logs)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    print(f"{len(files)} files")


if __name__ == "__main__":
    main()
