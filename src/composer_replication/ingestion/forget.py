"""Remove sessions from an ingested run, and store marks that keep later ingests from restoring them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import replace
from itertools import islice

from composer_replication.ingestion.session_sources import (
    Row,
    SessionSource,
    add_totals,
    forgotten_marks,
    read_accounts,
    replace_id_suffix,
    replace_rows,
    write_accounts,
    write_forgotten,
)
from composer_replication.ingestion.states import write_tools
from composer_replication.messages import ToolSchemas
from composer_replication.runs import RunDir
from composer_replication.runs.files import CONVERSATIONS_SCHEMA, CONVERSATIONS_VERSION, read_tools


def mark_forgotten(run: RunDir, ids: Set[str]) -> None:
    """Store marks that identify the conversations to forget.

    After that, neither a crash nor a later ingest restores these conversations.
    """
    dead = [_with_original_id(row) for row in _stored_rows(run) if row["id"] in ids]
    # A generator, since all rows together may not fit into memory. Only their session ids are needed.
    alive = ({"session_id": row["session_id"]} for row in _stored_rows(run) if row["id"] not in ids)
    write_forgotten(run, forgotten_marks(dead, alive))


def forget(run: RunDir, ids: Set[str]) -> None:
    """Remove these conversations from the run, along with their sources and the tools inferred from them."""
    given_tools = read_tools(run, with_test=True).declared
    meta, tools, sources = run.meta("conversations"), ToolSchemas(), list[SessionSource]()
    counts, drops = Counter[str](), Counter[str]()
    is_scrubbed = meta.settings.get("scrubbed") is True

    def kept_rows() -> Iterator[Row]:
        for account, session in _sessions(run):
            remaining_rows = [row for row in session if row["id"] not in ids]
            if len(remaining_rows) < len(session):
                if not remaining_rows:
                    continue  # not even the name of the log is kept
                bare = replace_id_suffix(remaining_rows, suffix="", remove=account.id_suffix)
                # Skipped records are listed by file and line, which would reveal that the file had more content.
                account = replace(replace_rows(account, bare), skipped={}, skips=())
            sources.append(account)
            for row in remaining_rows:
                tools.add_row(row)
                yield row
        add_totals(sources, counts, drops)

    run.write_jsonl(
        "conversations",
        kept_rows(),
        schema=CONVERSATIONS_SCHEMA,
        version=CONVERSATIONS_VERSION,
        counts=counts,
        drops=drops,
        settings=meta.settings,
    )
    write_accounts(run, sources, is_scrubbed=is_scrubbed)
    write_tools(run, tools, given_tools, is_scrubbed=is_scrubbed)


def _with_original_id(row: Row) -> Row:
    """Return the row with its original id from the log."""
    return {**row, "id": row["id"].partition("@")[0] if row["session_id"] is not None else row["id"]}


def _sessions(run: RunDir) -> Iterator[tuple[SessionSource, list[Row]]]:
    stored = _stored_rows(run)
    for account in read_accounts(run):
        yield account, list(islice(stored, len(account.conversations)))


def _stored_rows(run: RunDir) -> Iterator[Row]:
    return run.read_jsonl("conversations", schema=CONVERSATIONS_SCHEMA, version=CONVERSATIONS_VERSION)
