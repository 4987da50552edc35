"""A session and everything made from it out of a run, so that it does not come back with the next ingest."""

from __future__ import annotations

import difflib
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from composer_replication.errors import InputError, explain
from composer_replication.ingestion import schemas
from composer_replication.ingestion.session_sources import (
    Row,
    SessionSource,
    add_totals,
    read_accounts,
    recounted,
    tombstones,
    write_accounts,
)
from composer_replication.runs import ARTEFACTS, ArtefactMeta, RunDir
from composer_replication.runs import conversations as rows
from composer_replication.runs.source_paths import find_source

_MIN_PREFIX = 6
# Made by the ingest itself, or before it.
_OURS = frozenset({"config", "conversations", "session_sources", "tools"})


@dataclass(frozen=True, slots=True)
class Forgetting:
    """What forgetting some sessions takes away: conversations, rows of artefacts, and whole artefacts."""

    conversations: tuple[str, ...]
    filtered: tuple[str, ...]
    deleted: tuple[str, ...]


def plan_forgetting(run: RunDir, sessions: Sequence[str]) -> Forgetting:
    """What `forget` would take away; nothing is changed. Each of `sessions` is an id, or the start of just one."""
    links = [(row["id"], row["session_id"], (row["parent"] or {}).get("conversation_id")) for row in _stored(run)]
    chosen = {each for name in sessions for each in _matching(name, links)}
    size = -1
    while size != len(chosen):  # sub-agents of sub-agents, part after part
        size = len(chosen)
        chosen |= {identity for identity, _, parent in links if parent in chosen}
    derived = [name for name in ARTEFACTS if name not in _OURS and run.path(name).exists()]
    filtered = tuple(name for name in derived if _can_be_filtered(run, name))
    return Forgetting(
        conversations=tuple(identity for identity, _, _ in links if identity in chosen),
        filtered=filtered,
        deleted=tuple(name for name in derived if name not in filtered),
    )


def forget(run: RunDir, sessions: Sequence[str]) -> Forgetting:
    """Take the sessions out of the run, with the rows and artefacts that were made from them."""
    plan = plan_forgetting(run, sessions)
    gone = frozenset(plan.conversations)
    accounts = [_with_tombstones(account, family, gone) for account, family in _families(run)]
    write_accounts(run, accounts)  # first: from here on, no crash brings them back
    for name in plan.deleted:
        _delete(run, name)
    kept_meta = {name: run.meta(name) for name in plan.filtered}
    kept_rows = {name: [row for row in _rows_of(run, name) if row["conversation_id"] not in gone] for name in kept_meta}
    _rewrite_conversations(run, accounts, gone)
    for name, meta in kept_meta.items():
        _rewrite(run, name, kept_rows[name], meta)
    return plan


def _matching(name: str, links: list[tuple[str, str | None, str | None]]) -> set[str]:
    exact = {identity for identity, session, _ in links if name in (identity, session)}
    if exact:
        return exact
    names = {session or identity for identity, session, _ in links}
    started = {each for each in names if len(name) >= _MIN_PREFIX and each.startswith(name)}
    if len(started) == 1:
        return _matching(started.pop(), links)
    near = sorted(started) or difflib.get_close_matches(name, sorted(names), n=3)
    expected = f"the id of a session, or at least {_MIN_PREFIX} characters that only one begins with"
    fix = f"Did you mean {' or '.join(near)}?" if near else "`jq -r .session_id conversations.jsonl` lists them"
    raise InputError(explain("session", got=repr(name), expected=expected, fix=fix))


def _can_be_filtered(run: RunDir, name: str) -> bool:
    """Whether single rows can go: they say which conversation they are from, and the artefact is not out of date."""
    if ARTEFACTS[name].kind != "records":
        return False
    meta = run.meta(name)
    return "conversation_id" in meta.keys and name not in run.lineage(name).stale


def _with_tombstones(account: SessionSource, family: list[Row], gone: frozenset[str]) -> SessionSource:
    dead = [row for row in family if row["id"] in gone]
    if not dead:
        return account
    marks = tombstones(account, dead, whole=len(dead) == len(family))
    return replace(account, forgotten=sorted({*account.forgotten, *marks}))


def _rewrite_conversations(run: RunDir, accounts: list[SessionSource], gone: frozenset[str]) -> None:
    meta, tools, settled = run.meta("conversations"), schemas.ToolSchemas(), list[SessionSource]()

    def kept_rows() -> Iterator[Row]:
        for account, (_, family) in zip(accounts, _families(run), strict=True):
            kept = [row for row in family if row["id"] not in gone]
            lost = len(family) - len(kept)
            settled.append(recounted(account, kept, num_forgotten=lost) if lost else account)
            for row in kept:
                tools.add_row(row)
                yield row
        add_totals(settled, counts, drops)

    counts, drops = Counter[str](), Counter[str]()
    given = {row["name"]: row["parameters"] for row in _rows_of(run, "tools") if row["source"] == "file"}
    run.write_jsonl(
        "conversations",
        kept_rows(),
        schema=rows.SCHEMA,
        version=rows.VERSION,
        counts=counts,
        drops=drops,
        settings=meta.settings,
    )
    write_accounts(run, settled)
    found = schemas.tool_rows(tools, given)
    run.write_jsonl("tools", found, schema=schemas.SCHEMA, version=schemas.VERSION, sources=["conversations"])


def _families(run: RunDir) -> Iterator[tuple[SessionSource, list[Row]]]:
    stored = _stored(run)
    for account in read_accounts(run):
        yield account, list(islice(stored, len(account.conversations)))


def _stored(run: RunDir) -> Iterator[Row]:
    return run.read_jsonl("conversations", schema=rows.SCHEMA, version=rows.VERSION)


def _rows_of(run: RunDir, name: str) -> Iterator[Row]:
    meta = run.meta(name)
    return run.read_jsonl(name, schema=meta.schema, version=meta.version)


def _rewrite(run: RunDir, name: str, kept: list[Row], meta: ArtefactMeta) -> None:
    """Counts and drops are left out: they were made for rows that are gone, by a step that is not here to say."""
    sources = [each.name if each.kind == "artefact" else find_source(each.name, run.root) for each in meta.sources]
    there = [each for each in sources if isinstance(each, str) or each.is_file()]
    run.write_jsonl(
        name,
        kept,
        schema=meta.schema,
        version=meta.version,
        sources=there,
        config_hash=meta.config_hash,
        settings={**meta.settings, "rows_forgotten": meta.rows - len(kept)},
    )


def _delete(run: RunDir, name: str) -> None:
    path, sidecar = run.path(name), run.root / ARTEFACTS[name].sidecar_name
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    sidecar.unlink(missing_ok=True)
