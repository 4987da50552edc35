"""`crf ingest`: session logs of any known agent into a run directory, secrets out."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

from composer_replication.config import IngestConfig
from composer_replication.ingestion.cache.summary import IngestSummary
from composer_replication.ingestion.into_run import ingest_into
from composer_replication.ingestion.scrubbing import ScrubSettings
from composer_replication.ingestion.tool_schemas import load_tool_schemas
from composer_replication.privacy import secret_looking_environment
from composer_replication.runs import RunDir


def ingest(
    section: IngestConfig,
    run: RunDir,
    *,
    no_scrub: bool = False,
    reread: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> IngestSummary:
    """Read what is new below the section's paths. `reread` reads all of it, `no_scrub` leaves secrets in.

    `progress` is called with the bytes done and the bytes in all.
    """
    return ingest_into(
        run,
        [str(Path(path).expanduser()) for path in section.paths],
        scrub=None if no_scrub else scrub_settings(section, os.environ),
        exclude=section.exclude,
        num_workers=section.workers,
        tools=None if section.tools is None else load_tool_schemas(Path(section.tools)),
        reread=reread,
        follow_links=section.follow_links,
        progress=progress,
    )


@contextlib.contextmanager
def run_directory(path: Path) -> Generator[RunDir, None, None]:
    """The run at `path`, made if need be; one that nothing was written into does not stay."""
    has_files = path.is_dir() and any(path.iterdir())
    run = RunDir.open(path) if has_files else RunDir.create(path)
    try:
        yield run
    finally:
        if not has_files and not run.path("conversations").exists():
            for file in run.root.iterdir():
                file.unlink()
            run.root.rmdir()


def scrub_settings(section: IngestConfig, environment: Mapping[str, str]) -> ScrubSettings:
    """What this process knows and logs must not tell: secret-looking variables, the home directory, the user's name."""
    homes = {environment.get(name, "") for name in ("HOME", "USERPROFILE")}
    names = {environment.get(name, "") for name in ("USER", "USERNAME", "LOGNAME")}
    return ScrubSettings(
        env_values=secret_looking_environment(environment),
        home_dirs=tuple(sorted(home for home in homes if len(home) > 1)),
        user_names=tuple(sorted(name for name in names if name and name != "root")),
        kingfisher=section.kingfisher,
        people=section.people,
    )
