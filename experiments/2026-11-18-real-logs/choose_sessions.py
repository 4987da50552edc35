"""The log files of sessions that hold an error with a hint, copied into a folder of their own.

    python choose_sessions.py RUN OUT      # RUN after `crf ingest` and `crf sites`

The others would only make the run larger: an arm learns from windows with an error or a pair, and is judged on sites.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from composer_replication.ingestion.cache.session_sources import read_accounts
from composer_replication.runs import RunDir
from composer_replication.runs.sites import read_sites


def chosen_files(run: RunDir) -> list[Path]:
    with_a_site = {site.conversation_id for site, hint in read_sites(run) if site.is_kept and hint is not None}
    return [Path(each.path) for each in read_accounts(run) if with_a_site.intersection(each.conversations)]


def main() -> None:
    out = Path(sys.argv[2])
    out.mkdir(parents=True)
    files = chosen_files(RunDir.open(Path(sys.argv[1])))
    for file in files:
        shutil.copy(file, out)
    print(f"{len(files)} files")


if __name__ == "__main__":
    main()
