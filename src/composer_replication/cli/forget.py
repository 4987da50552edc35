"""`crf forget SESSION…`: a session and everything made from it out of a run, for good."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from composer_replication.atomic import remove
from composer_replication.cli.console import is_terminal, log, plain, print_json
from composer_replication.errors import InputError, RunError, explain
from composer_replication.ingestion import forget as ingested_sessions
from composer_replication.runs import ARTEFACTS, RunDir
from composer_replication.runs import files as rows
from composer_replication.runs.artefacts import ArtefactMeta
from composer_replication.runs.conventions import forget_conventions, num_forgotten
from composer_replication.runs.directory import MadeElsewhere, made_elsewhere
from composer_replication.runs.files import read_tools
from composer_replication.runs.lineage import find_source
from composer_replication.teacher_replay import forget as replayed
from composer_replication.teacher_replay.forget import AnswersOfRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sessions", nargs="+", metavar="SESSION", help="id of a session or conversation, or its first 6 characters"
    )
    parser.add_argument("--run", default=".", metavar="RUN", dest="run_dir", help="run directory; default: this folder")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--dry-run", action="store_true", help="only say what would go")
    parser.add_argument(
        "--discard-answers", action="store_true", help="also throw away paid answers that no session is known to own"
    )
    parser.add_argument("--json", action="store_true", help="print what went as JSON")


def run(args: argparse.Namespace) -> int:
    run_dir = RunDir.open(args.run_dir)
    plan = plan_forgetting(run_dir, args.sessions)
    if args.dry_run:
        _show(plan, run_dir, as_json=args.json, done=False)
        return 0
    if not args.yes:
        _show(plan, run_dir, as_json=False, done=False, to_stderr=True)
        if not is_terminal(sys.stdin):
            log("crf forget: nothing was removed. Say --yes to remove it")
            return 1
        print("Remove all this? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            log("Nothing was removed")
            return 1
    forgotten = forget(run_dir, args.sessions, discard_answers=args.discard_answers)
    _show(forgotten, run_dir, as_json=args.json, done=True)
    return 0


def _show(plan: Forgetting, run_dir: RunDir, *, as_json: bool, done: bool, to_stderr: bool = False) -> None:
    from dataclasses import asdict

    if as_json:
        print_json({"run": str(run_dir.root), "done": done, **asdict(plan)})
        return
    verb = "Removed" if done else "Would remove"
    lines = [
        f"{verb} from the run, conversations: {len(plan.conversations)}",
        *(f"  {plain(conversation)}" for conversation in plan.conversations),
    ]
    lines += [f"{verb} their rows from {run_dir.path(name).name}" for name in plan.filtered]
    lines += [f"{verb} {run_dir.path(name).name}, made from them" for name in plan.deleted]
    if plan.num_conventions:
        lines.append(f"{verb} from conventions.md, rules that were said nowhere else: {plan.num_conventions}")
    if plan.answers is not None:
        of_nobody = f" and {plan.answers.num_unowned:,} of nobody known" if plan.answers.num_unowned else ""
        lines.append(
            f"{verb} {plan.answers.num_gone:,} paid answers of theirs{of_nobody} from teacher_cache.sqlite; "
            f"{plan.answers.num_kept:,} of other sessions stay, and what was spent stays counted"
        )
    for artefact in plan.elsewhere:
        may = "have learnt from" if artefact.what in ("checkpoints", "trained weights", "exported weights") else "hold"
        not_removed = "Not removed" if done else "Would not remove"
        lines.append(f"{not_removed}: {plain(artefact.path)} ({artefact.what}) may {may} them")
    print("\n".join(lines), file=sys.stderr if to_stderr else sys.stdout)


# `crf forget`: a session and everything made from it out of a run. Each stage forgets its own.

MIN_PREFIX = 6
# Made by the ingest itself, before it, or only a list of places or ids.
_NOT_DERIVED = frozenset(
    {"config", "conversations", "session_sources", "tools", "forgotten", "elsewhere", "conventions", "struck_hints"}
)
# Written again without the sessions: where one was a link, the file that it led to stays as it was.
_REWRITTEN = ("conversations", "session_sources", "tools")
_Link = tuple[str, str | None, str | None]
"""The id of a conversation, of its session, and of the conversation it goes on from."""


@dataclass(frozen=True, slots=True)
class Forgetting:
    """What forgetting some sessions takes away: conversations, rows of artefacts, and whole artefacts.

    `answers` are the paid ones of a replay; None without a store of them. `num_conventions` are rules that were said
    nowhere else. `elsewhere` was made from the run outside of it, may hold the sessions or have learnt from them, and
    stays: whoever forgets has to delete it. So does what a symbolic link in the run led to: only the link goes.
    """

    conversations: tuple[str, ...]
    filtered: tuple[str, ...]
    deleted: tuple[str, ...]
    answers: AnswersOfRun | None = None
    num_conventions: int = 0
    elsewhere: tuple[MadeElsewhere, ...] = ()


def plan_forgetting(run: RunDir, sessions: Sequence[str]) -> Forgetting:
    """What `forget` would take away; nothing is changed. Each of `sessions` is an id, or the start of just one."""
    links = list(_links(run))
    chosen = {identity for name in sessions for identity in _matching(name, links)}
    size = -1
    while size != len(chosen):  # sub-agents of sub-agents, part after part
        size = len(chosen)
        chosen |= {identity for identity, _, parent in links if parent in chosen}
    # Not Path.exists: a link that leads nowhere is there, and goes too.
    there = [name for name in ARTEFACTS if name not in _NOT_DERIVED and os.path.lexists(run.path(name))]
    alive = {identity for identity, _, _ in links} - chosen
    answers = replayed.count_answers(run, alive, chosen)
    # A file that is no store of answers goes whole.
    derived = [name for name in there if name not in replayed.OWN or (name == replayed.STORE and answers is None)]
    num_conventions = num_forgotten(run, chosen)
    linked = tuple(_link_targets(run, (*derived, *_REWRITTEN)))
    # Words of a forgotten user may be the hints of other sessions' sites: those are found anew.
    filtered = tuple(name for name in _filtered_of(run, derived) if name != "sites" or not num_conventions)
    return Forgetting(
        conversations=tuple(identity for identity, _, _ in links if identity in chosen),
        filtered=filtered,
        deleted=tuple(name for name in derived if name not in filtered),
        answers=answers,
        num_conventions=num_conventions,
        elsewhere=(*made_elsewhere(run), *linked),
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
        read_tools(run, with_test=True)  # what cannot be read is found out before anything is taken away
        removed_ids = frozenset(plan.conversations)
        alive = {identity for identity, _, _ in _links(run)} - removed_ids
        # First: from here on, no crash brings them back.
        ingested_sessions.mark_forgotten(run, removed_ids)
        replayed.forget(run, removed_ids, alive)
        forget_conventions(run, removed_ids)
        for name in plan.deleted:
            _delete_artefact(run, name)
        for unfinished in run.root.glob("*.partial.jsonl"):  # an evaluation's has texts that were drawn in the sessions
            remove(unfinished)
        metas = {name: run.meta(name) for name in plan.filtered}
        for name, meta in metas.items():
            _forget_rows(run, name, removed_ids, meta)
        ingested_sessions.forget(run, removed_ids)
        for name, meta in metas.items():  # once more: they are current only beside the new conversations
            _forget_rows(run, name, removed_ids, meta)
        return plan


def _unowned(run: RunDir, answers: AnswersOfRun) -> InputError:
    got = f"{answers.num_unowned:,} answers of which it does not say for whom they were asked"
    fix = (
        "`crf replay` as it was run before writes it down: what is answered is not asked or paid for again. "
        "`crf forget --discard-answers` throws those answers away"
    )
    return InputError(explain(run.path(replayed.STORE).name, got=got, expected="answers with their sessions", fix=fix))


def _links(run: RunDir) -> Iterator[_Link]:
    stored: Iterator[dict[str, Any]] = run.read_jsonl(
        "conversations", schema=rows.CONVERSATIONS_SCHEMA, version=rows.CONVERSATIONS_VERSION
    )
    return ((row["id"], row["session_id"], (row["parent"] or {}).get("conversation_id")) for row in stored)


def _matching(name: str, links: Sequence[_Link]) -> set[str]:
    exact = {identity for identity, session, _ in links if name in (identity, session)}
    if exact:
        return exact
    names = {candidate for identity, session, _ in links for candidate in (session or identity, identity)}
    started = {candidate for candidate in names if len(name) >= MIN_PREFIX and candidate.startswith(name)}
    sessions = {session or identity for identity, session, _ in links if {identity, session} & started}
    if len(sessions) == 1:
        return _matching(sessions.pop(), links)
    near = sorted(started) or difflib.get_close_matches(name, sorted(names), n=3)
    expected = f"the id of a session, or at least {MIN_PREFIX} characters that only one begins with"
    fix = f"Did you mean {' or '.join(near[:3])}?" if near else "The ids are in conversations.jsonl: session_id, or id"
    raise InputError(explain("session", got=repr(name), expected=expected, fix=fix))


def _filtered_of(run: RunDir, derived: Sequence[str]) -> tuple[str, ...]:
    """Of these artefacts those of which single rows can go; what was made of one that goes whole goes with it."""
    filtered = [name for name in derived if _can_be_filtered(run, name)]
    size = -1
    while size != len(filtered):
        size = len(filtered)
        whole = set(derived) - set(filtered)
        filtered = [name for name in filtered if not whole & {source.name for source in run.meta(name).sources}]
    return tuple(filtered)


def _forget_rows(run: RunDir, name: str, gone: Set[str], meta: ArtefactMeta) -> None:
    """Write an artefact anew without the rows of these conversations; `meta` is its sidecar as it was before.

    Counts and drops are left out: they were made for rows that are gone, by a step that is not here to say.
    """
    rows = run.read_jsonl(name, schema=meta.schema, version=meta.version)
    remaining_rows = [row for row in rows if row["conversation_id"] not in gone]
    sources = [
        source.name if source.kind == "artefact" else find_source(source.name, run.root) for source in meta.sources
    ]
    run.write_jsonl(
        name,
        remaining_rows,
        schema=meta.schema,
        version=meta.version,
        sources=[source for source in sources if isinstance(source, str) or source.is_file()],
        config_hash=meta.config_hash,
        settings={**meta.settings, "rows_forgotten": meta.rows - len(remaining_rows)},
    )


def _delete_artefact(run: RunDir, name: str) -> None:
    """The artefact and its sidecar."""
    remove(run.path(name))
    (run.root / ARTEFACTS[name].sidecar_name).unlink(missing_ok=True)


def _can_be_filtered(run: RunDir, name: str) -> bool:
    """Whether single rows can go: they say which conversation they are from, and the artefact is not out of date.

    What cannot be read goes whole, like a link: it may hold the session, and can be made again.
    """
    if ARTEFACTS[name].kind != "records" or run.path(name).is_symlink():
        return False
    try:
        return "conversation_id" in run.meta(name).keys and name not in run.lineage(name).stale
    except RunError:
        return False


def _link_targets(run: RunDir, names: Sequence[str]) -> Iterator[MadeElsewhere]:
    """Yield what the links among these artefacts, and below those that are folders, lead to."""
    for name in names:
        path = run.path(name)
        links = [path] if path.is_symlink() else [inner for inner in sorted(path.rglob("*")) if inner.is_symlink()]
        for link in links:
            yield MadeElsewhere(f"where the link {link.relative_to(run.root)} led", os.path.realpath(link), "")
