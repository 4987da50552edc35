"""A session and everything made from it out of a run, so that it does not come back with the next ingest."""

from __future__ import annotations

import difflib
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from composer_replication.errors import InputError, explain
from composer_replication.ingestion import schemas
from composer_replication.ingestion.cache.content_marks import forgotten_marks
from composer_replication.ingestion.cache.earlier import write_forgotten
from composer_replication.ingestion.cache.session_sources import (
    Row,
    SessionSource,
    add_totals,
    read_accounts,
    with_rows,
    with_suffix,
    write_accounts,
)
from composer_replication.ingestion.into_run import write_tools
from composer_replication.runs import ARTEFACTS, ArtefactMeta, RunDir
from composer_replication.runs import conversations as rows
from composer_replication.runs.answer_owners import AnswersOfRun, count_answers, keep_answers
from composer_replication.runs.asked_tools import forget_asked
from composer_replication.runs.source_paths import find_source
from composer_replication.runs.tools import read_tools

MIN_PREFIX = 6
_STORE = "teacher_cache"
# Made by the ingest itself, or before it.
_OURS = frozenset({"config", "conversations", "session_sources", "tools", "forgotten", "asked_tools"})


@dataclass(frozen=True, slots=True)
class Forgetting:
    """What forgetting some sessions takes away: conversations, rows of artefacts, and whole artefacts.

    `answers` are the paid ones of a replay; None without a store of them.
    """

    conversations: tuple[str, ...]
    filtered: tuple[str, ...]
    deleted: tuple[str, ...]
    answers: AnswersOfRun | None = None


def plan_forgetting(run: RunDir, sessions: Sequence[str]) -> Forgetting:
    """What `forget` would take away; nothing is changed. Each of `sessions` is an id, or the start of just one."""
    links = [(row["id"], row["session_id"], (row["parent"] or {}).get("conversation_id")) for row in _stored(run)]
    chosen = {each for name in sessions for each in _matching(name, links)}
    size = -1
    while size != len(chosen):  # sub-agents of sub-agents, part after part
        size = len(chosen)
        chosen |= {identity for identity, _, parent in links if parent in chosen}
    derived = [name for name in ARTEFACTS if name not in _OURS and run.path(name).exists()]
    filtered, answers = _filtered(run, derived), None
    if _STORE in derived:
        alive = {identity for identity, _, _ in links} - chosen
        answers = count_answers(run.path(_STORE), alive, chosen)
    return Forgetting(
        conversations=tuple(identity for identity, _, _ in links if identity in chosen),
        filtered=filtered,
        deleted=tuple(name for name in derived if name not in filtered and (name != _STORE or answers is None)),
        answers=answers,
    )


def forget(run: RunDir, sessions: Sequence[str], *, discard_answers: bool = False) -> Forgetting:
    """Take the sessions out of the run, with the rows and artefacts that were made from them.

    Stopped half way, it can be repeated: the conversations go last, so that they can still be named. Paid answers of
    which nobody knows whose they are go only with `discard_answers`.
    """
    with run.exclusive("forget", against=("replay", "training")):
        run.remove_leftovers(*ARTEFACTS)
        plan = plan_forgetting(run, sessions)
        if plan.answers is not None and plan.answers.num_unowned and not discard_answers:
            raise _unowned(run, plan.answers)
        given = read_tools(run).given  # what cannot be read is found out before anything is taken away
        gone = frozenset(plan.conversations)
        dead = [_bare(row) for row in _stored(run) if row["id"] in gone]
        alive = ({"session_id": row["session_id"]} for row in _stored(run) if row["id"] not in gone)
        write_forgotten(run, forgotten_marks(dead, alive))  # first: from here on, no crash brings them back
        if plan.answers is not None:
            keep_answers(run.path(_STORE), {row["id"] for row in _stored(run)} - gone)
        forget_asked(run, gone)
        for name in plan.deleted:
            _delete(run, name)
        metas = {name: run.meta(name) for name in plan.filtered}
        for name, meta in metas.items():
            _rewrite(run, name, gone, meta)
        _rewrite_conversations(run, gone, given)
        for name, meta in metas.items():  # once more: they are current only beside the new conversations
            _rewrite(run, name, gone, meta)
        return plan


def _unowned(run: RunDir, answers: AnswersOfRun) -> InputError:
    got = f"{answers.num_unowned:,} answers of which it does not say for whom they were asked"
    fix = (
        "`crf replay` as it was run before writes it down: what is answered is not asked or paid for again. "
        "`crf forget --discard-answers` throws those answers away"
    )
    return InputError(explain(run.path(_STORE).name, got=got, expected="answers with their sessions", fix=fix))


def _bare(row: Row) -> Row:
    """The row with the id that its log gave it."""
    return {**row, "id": row["id"].partition("@")[0] if row["session_id"] is not None else row["id"]}


def _matching(name: str, links: list[tuple[str, str | None, str | None]]) -> set[str]:
    exact = {identity for identity, session, _ in links if name in (identity, session)}
    if exact:
        return exact
    names = {each for identity, session, _ in links for each in (session or identity, identity)}
    started = {each for each in names if len(name) >= MIN_PREFIX and each.startswith(name)}
    sessions = {session or identity for identity, session, _ in links if {identity, session} & started}
    if len(sessions) == 1:
        return _matching(sessions.pop(), links)
    near = sorted(started) or difflib.get_close_matches(name, sorted(names), n=3)
    expected = f"the id of a session, or at least {MIN_PREFIX} characters that only one begins with"
    fix = f"Did you mean {' or '.join(near[:3])}?" if near else "The ids are in conversations.jsonl: session_id, or id"
    raise InputError(explain("session", got=repr(name), expected=expected, fix=fix))


def _filtered(run: RunDir, derived: Sequence[str]) -> tuple[str, ...]:
    """Those of which single rows can go; what was made of one that goes whole goes with it."""
    found = [name for name in derived if _can_be_filtered(run, name)]
    size = -1
    while size != len(found):
        size = len(found)
        whole = set(derived) - set(found)
        found = [name for name in found if not whole & {source.name for source in run.meta(name).sources}]
    return tuple(found)


def _can_be_filtered(run: RunDir, name: str) -> bool:
    """Whether single rows can go: they say which conversation they are from, and the artefact is not out of date."""
    if ARTEFACTS[name].kind != "records":
        return False
    return "conversation_id" in run.meta(name).keys and name not in run.lineage(name).stale


def _rewrite_conversations(run: RunDir, gone: frozenset[str], given: Mapping[str, Mapping[str, Any]]) -> None:
    meta, tools, settled = run.meta("conversations"), schemas.ToolSchemas(), list[SessionSource]()
    counts, drops = Counter[str](), Counter[str]()
    is_scrubbed = meta.settings.get("scrubbed") is True

    def kept_rows() -> Iterator[Row]:
        for account, family in _families(run):
            kept = [row for row in family if row["id"] not in gone]
            if len(kept) < len(family):
                if not kept:
                    continue  # nothing is left to say where it was
                bare = with_suffix(kept, suffix="", remove=account.id_suffix)
                account = replace(with_rows(account, bare), skipped={}, skips=())
            settled.append(account)
            for row in kept:
                tools.add_row(row)
                yield row
        add_totals(settled, counts, drops)

    run.write_jsonl(
        "conversations",
        kept_rows(),
        schema=rows.SCHEMA,
        version=rows.VERSION,
        counts=counts,
        drops=drops,
        settings=meta.settings,
    )
    write_accounts(run, settled, is_scrubbed=is_scrubbed)
    write_tools(run, tools, given, is_scrubbed=is_scrubbed)


def _families(run: RunDir) -> Iterator[tuple[SessionSource, list[Row]]]:
    stored = _stored(run)
    for account in read_accounts(run):
        yield account, list(islice(stored, len(account.conversations)))


def _stored(run: RunDir) -> Iterator[Row]:
    return run.read_jsonl("conversations", schema=rows.SCHEMA, version=rows.VERSION)


def _rows_of(run: RunDir, name: str) -> Iterator[Row]:
    meta = run.meta(name)
    return run.read_jsonl(name, schema=meta.schema, version=meta.version)


def _rewrite(run: RunDir, name: str, gone: frozenset[str], meta: ArtefactMeta) -> None:
    """Counts and drops are left out: they were made for rows that are gone, by a step that is not here to say."""
    kept = [row for row in _rows_of(run, name) if row["conversation_id"] not in gone]
    sources = [each.name if each.kind == "artefact" else find_source(each.name, run.root) for each in meta.sources]
    run.write_jsonl(
        name,
        kept,
        schema=meta.schema,
        version=meta.version,
        sources=[each for each in sources if isinstance(each, str) or each.is_file()],
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
