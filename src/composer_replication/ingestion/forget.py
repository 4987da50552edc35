"""Sessions out of what an ingest wrote, and marks of them, so that no later ingest brings them back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import replace
from itertools import islice

from composer_replication.ingestion import states as tool_schemas
from composer_replication.ingestion.session_sources import (
    Row,
    SessionSource,
    add_totals,
    forgotten_marks,
    read_accounts,
    with_rows,
    with_suffix,
    write_accounts,
    write_forgotten,
)
from composer_replication.messages import ToolSchemas
from composer_replication.runs import RunDir
from composer_replication.runs import files as rows
from composer_replication.runs.files import read_tools


def mark(run: RunDir, gone: Set[str]) -> None:
    """Write down what must not come back. From here on no crash and no ingest brings these conversations back."""
    dead = [_bare(row) for row in _stored(run) if row["id"] in gone]
    alive = ({"session_id": row["session_id"]} for row in _stored(run) if row["id"] not in gone)
    write_forgotten(run, forgotten_marks(dead, alive))


def forget(run: RunDir, gone: Set[str]) -> None:
    """Write conversations, their sources and the tools inferred from them anew, without these conversations."""
    given_tools = read_tools(run, with_test=True).given
    meta, tools, sources = run.meta("conversations"), ToolSchemas(), list[SessionSource]()
    counts, drops = Counter[str](), Counter[str]()
    is_scrubbed = meta.settings.get("scrubbed") is True

    def kept_rows() -> Iterator[Row]:
        for account, family in _families(run):
            remaining_rows = [row for row in family if row["id"] not in gone]
            if len(remaining_rows) < len(family):
                if not remaining_rows:
                    continue  # nothing is left to say where it was
                bare = with_suffix(remaining_rows, suffix="", remove=account.id_suffix)
                account = replace(with_rows(account, bare), skipped={}, skips=())
            sources.append(account)
            for row in remaining_rows:
                tools.add_row(row)
                yield row
        add_totals(sources, counts, drops)

    run.write_jsonl(
        "conversations",
        kept_rows(),
        schema=rows.CONVERSATIONS_SCHEMA,
        version=rows.CONVERSATIONS_VERSION,
        counts=counts,
        drops=drops,
        settings=meta.settings,
    )
    write_accounts(run, sources, is_scrubbed=is_scrubbed)
    tool_schemas.write_tools(run, tools, given_tools, is_scrubbed=is_scrubbed)


def _bare(row: Row) -> Row:
    """The row with the id that its log gave it."""
    return {**row, "id": row["id"].partition("@")[0] if row["session_id"] is not None else row["id"]}


def _families(run: RunDir) -> Iterator[tuple[SessionSource, list[Row]]]:
    stored = _stored(run)
    for account in read_accounts(run):
        yield account, list(islice(stored, len(account.conversations)))


def _stored(run: RunDir) -> Iterator[Row]:
    return run.read_jsonl("conversations", schema=rows.CONVERSATIONS_SCHEMA, version=rows.CONVERSATIONS_VERSION)
