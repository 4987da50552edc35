"""Sessions into a run directory: what is new is read, the rest taken over, and the bytes are those of a fresh run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_replication.actions.tool_schemas import ToolSchemas
from composer_replication.errors import InputError, RunError, explain
from composer_replication.ingestion import tool_schemas
from composer_replication.ingestion.cache.drop_copies import settle
from composer_replication.ingestion.cache.gather import GatheredFamily, gather
from composer_replication.ingestion.cache.last_ingest import Earlier, read_earlier
from composer_replication.ingestion.cache.planning import Plan, Planned, plan
from composer_replication.ingestion.cache.session_sources import FORGOTTEN, SessionSource, add_totals, write_accounts
from composer_replication.ingestion.cache.summary import IngestSummary
from composer_replication.ingestion.registry import no_session
from composer_replication.ingestion.scrubbing import ScrubSettings
from composer_replication.runs import RunDir
from composer_replication.runs import conversations as rows
from composer_replication.runs.records import Line

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


def ingest_into(
    run: RunDir,
    paths: Iterable[str | Path],
    *,
    scrub: ScrubSettings | None,
    exclude: Sequence[str] = (),
    num_workers: int | None = 1,
    tools: Mapping[str, Mapping[str, Any]] | None = None,
    reread: bool = False,
    follow_links: bool = False,
    progress: Progress | None = None,
) -> IngestSummary:
    """Write `conversations.jsonl`, `session_sources.jsonl` and `tools.jsonl` of all sessions below `paths`.

    Sessions of earlier calls stay, also those whose files are gone by now; what is excluded or forgotten does not.
    `scrub=None` leaves secrets in, and the sidecars say so. `num_workers=None` is as many processes as pay off.
    On an error the run is left as it was.
    """
    with run.exclusive("ingest"):
        run.remove_leftovers("conversations", "session_sources", "tools")
        earlier = read_earlier(run, scrub)
        try:
            planned = plan(
                run.root,
                _roots(paths),
                earlier,
                scrub=scrub,
                exclude=exclude,
                reread=reread,
                follow_links=follow_links,
            )
            _refuse_what_cannot_be_read_anew(run, planned, earlier)
            with gather(run.root, planned.families, earlier, scrub, num_workers, progress) as gathered:
                _refuse_empty(planned, gathered)
                return _write(run, planned, gathered, earlier, scrub, tools or {})
        finally:
            earlier.close()


def _write(
    run: RunDir,
    planned: Plan,
    gathered: Sequence[GatheredFamily],
    earlier: Earlier,
    scrub: ScrubSettings | None,
    tools: Mapping[str, Mapping[str, Any]],
) -> IngestSummary:
    sources, inferred = list[SessionSource](), ToolSchemas()
    counts, drops = Counter[str](), Counter(planned.outside.skipped)

    def all_lines() -> Iterator[Line]:
        for family in settle(gathered):
            sources.append(family.source)
            for line, facts in zip(family.lines, family.facts, strict=True):
                inferred.add(facts.tools)
                yield Line(line, rows.KEYS)
        add_totals(sources, counts, drops)

    settings = {"scrubbed": scrub is not None}
    salted = {f"settings_{name}": getattr(earlier.fingerprint, name) for name in ("salt", "digest")}
    run.write_jsonl(
        "conversations",
        all_lines(),
        schema=rows.SCHEMA,
        version=rows.VERSION,
        counts=counts,
        drops=drops,
        settings=settings | salted,
    )
    write_accounts(run, sources, is_scrubbed=scrub is not None)
    given_tools = tools if scrub is None else scrub.scrubber().scope().value(dict(tools))
    tool_schemas.write_tools(run, inferred, given_tools, is_scrubbed=scrub is not None)
    return IngestSummary.of(sources, planned, gathered, lost=earlier.lost, is_scrubbed=scrub is not None)


def _roots(paths: Iterable[str | Path]) -> list[Path]:
    """An empty string is an unset variable, not the folder one happens to be in."""
    paths = list(paths)
    if any(str(path) == "" for path in paths):
        raise InputError(explain("path", got="an empty string", expected="a file or a folder with session logs"))
    return [Path(path) for path in paths]


def _refuse_what_cannot_be_read_anew(run: RunDir, planned: Plan, earlier: Earlier) -> None:
    """Rows of an older version are read anew from their logs, all of which have to be among those named now."""
    if not earlier.is_old:
        return
    missing = [
        planned_family.source.path
        for planned_family in planned.families
        if planned_family.family is None or _has_lost_files(planned_family)
    ]
    if missing:
        got = (
            f"a run made before arguments kept their order, with {len(missing)} sessions whose logs are not among"
            " those that were named this time"
        )
        expected = f"the logs of all its sessions, to read them anew; the first that is missing: {missing[0]}"
        fix = "Name them too. If they are gone, ingest the others into a new run: `crf ingest PATH... -o NEW_RUN`"
        raise RunError(explain(str(run.root), got=got, expected=expected, fix=fix))


def _has_lost_files(planned: Planned) -> bool:
    return planned.old is not None and bool(planned.gone.intersection(planned.old.file_of))


def _refuse_empty(planned: Plan, gathered: Sequence[GatheredFamily]) -> None:
    """A path that holds no session at all is an error, also beside others that do."""
    held = {family.source.path: family for family in gathered}
    for root, paths in planned.of_root.items():
        below = [held[path] for path in paths]
        if root in planned.all_ignored or any(family.facts or FORGOTTEN in family.source.skipped for family in below):
            continue
        reasons = Counter[str](planned.outside.skipped)
        for family in below:
            reasons.update(family.source.skipped)
        raise no_session(root, reasons)
