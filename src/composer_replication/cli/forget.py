"""`crf forget SESSION...`: remove sessions, and everything derived from them, from a run for good.

    plan_forgetting  return what would be removed
    forget           remove the sessions

If each row of an artifact names its conversation, only the rows of the sessions are removed; other artifacts are
deleted. Copies outside the run, such as exported weights, are only listed: the user has to delete them.
"""

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
from composer_replication.runs.conventions import ConventionsFile
from composer_replication.runs.directory import OutsideCopy, outside_copies
from composer_replication.runs.files import read_tools
from composer_replication.runs.lineage import source_path
from composer_replication.teacher_replay import forget as replayed
from composer_replication.teacher_replay.forget import AnswerCounts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sessions", nargs="+", metavar="SESSION", help="id of a session or conversation, or its first 6 characters"
    )
    parser.add_argument("--run", default=".", metavar="RUN", dest="run_dir", help="run directory; default: this folder")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    parser.add_argument(
        "--discard-answers", action="store_true", help="also delete paid answers that belong to no known session"
    )
    parser.add_argument("--json", action="store_true", help="print what was removed as JSON")


def run(args: argparse.Namespace) -> int:
    run_dir = RunDir.open(args.run_dir)
    plan = plan_forgetting(run_dir, args.sessions)
    if args.dry_run:
        _show(plan, run_dir, as_json=args.json, done=False)
        return 0
    if not args.yes:
        _show(plan, run_dir, as_json=False, done=False, to_stderr=True)
        if not is_terminal(sys.stdin):
            log("crf forget: nothing was removed. Add --yes to remove without being asked")
            return 1
        print("Remove all of this? [y/N] ", end="", file=sys.stderr, flush=True)
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
        lines.append(f"{verb} from conventions.md, rules that no other session states: {plan.num_conventions}")
    if plan.answers is not None:
        unowned = f" and {plan.answers.num_unowned:,} of unknown sessions" if plan.answers.num_unowned else ""
        lines.append(
            f"{verb} {plan.answers.num_removed:,} paid answers about them{unowned} from teacher_cache.sqlite; "
            f"{plan.answers.num_kept:,} answers about other sessions stay, and so does the amount spent"
        )
    for artefact in plan.elsewhere:
        is_trained = artefact.what in ("checkpoints", "trained weights", "exported weights")
        relation = "be trained on" if is_trained else "contain"
        not_removed = "Not removed" if done else "Would not remove"
        lines.append(f"{not_removed}: {plain(artefact.path)} ({artefact.what}) may {relation} them")
    print("\n".join(lines), file=sys.stderr if to_stderr else sys.stdout)


_MIN_PREFIX = 6
# Written by the ingest or before it, or a mere list of paths or ids.
_NOT_DERIVED = frozenset(
    {"config", "conversations", "session_sources", "tools", "forgotten", "elsewhere", "conventions", "struck_hints"}
)
# Rewritten without the sessions. If one of these files is a link, its target stays unchanged.
_REWRITTEN = ("conversations", "session_sources", "tools")
_Link = tuple[str, str | None, str | None]
"""The ids of a conversation, of its session, and of the conversation that it continues."""


@dataclass(frozen=True, slots=True)
class Forgetting:
    """The conversations, artifacts and answers that are removed with the sessions.

    The field names are those of `--json`.
    """

    conversations: tuple[str, ...]
    filtered: tuple[str, ...]  # artefacts that lose some of their rows
    deleted: tuple[str, ...]  # artefacts that are deleted
    answers: AnswerCounts | None = None  # paid answers of teachers; None without a teacher cache
    num_conventions: int = 0  # user rules that only these sessions state
    # Files outside of the run that may contain the sessions or be trained on them, and targets of links in the run.
    # They are not removed: the user has to decide.
    elsewhere: tuple[OutsideCopy, ...] = ()


def plan_forgetting(run: RunDir, sessions: Sequence[str]) -> Forgetting:
    """Return what `forget` would remove, without changing anything.

    `sessions` are session ids or unique prefixes of them.
    """
    links = list(_read_links(run))
    chosen = {conversation_id for name in sessions for conversation_id in _find_conversations(name, links)}
    # Add the conversations that continue them (after a compaction, or as subagents), until no more are found.
    size = -1
    while size != len(chosen):
        size = len(chosen)
        chosen |= {conversation_id for conversation_id, _, parent in links if parent in chosen}
    # Not Path.exists, which is False for a broken link; broken links are removed as well.
    existing = [name for name in ARTEFACTS if name not in _NOT_DERIVED and os.path.lexists(run.path(name))]
    remaining = {conversation_id for conversation_id, _, _ in links} - chosen
    answers = replayed.count_answers(run, remaining, chosen)
    # A teacher cache that cannot be read is deleted as a whole.
    derived = [
        name
        for name in existing
        if name not in replayed.CLEANED_ARTEFACTS or (name == replayed.STORE and answers is None)
    ]
    num_conventions = ConventionsFile(run).num_stated_only_in(chosen)
    linked = tuple(_link_targets(run, (*derived, *_REWRITTEN)))
    # A rule stated in a forgotten session may be the hint of sites in other sessions. Then sites.jsonl is deleted.
    filtered = tuple(name for name in _filterable(run, derived) if name != "sites" or not num_conventions)
    return Forgetting(
        conversations=tuple(conversation_id for conversation_id, _, _ in links if conversation_id in chosen),
        filtered=filtered,
        deleted=tuple(name for name in derived if name not in filtered),
        answers=answers,
        num_conventions=num_conventions,
        elsewhere=(*outside_copies(run), *linked),
    )


def forget(run: RunDir, sessions: Sequence[str], *, discard_answers: bool = False) -> Forgetting:
    """Remove the sessions from the run, with the rows and artifacts that were derived from them.

    An interrupted call can be repeated: the conversations are removed last, so their ids are still known. Paid answers
    about unknown sessions are deleted only with `discard_answers`; without it, they cause an InputError.
    """
    with run.exclusive("forget", against=("replay", "training")):
        run.remove_leftovers(*ARTEFACTS)
        plan = plan_forgetting(run, sessions)
        if plan.answers is not None and plan.answers.num_unowned and not discard_answers:
            raise _unowned_answers_error(run, plan.answers)
        read_tools(run, with_test=True)  # raises if the file cannot be read, before anything is removed
        removed_ids = frozenset(plan.conversations)
        remaining = {conversation_id for conversation_id, _, _ in _read_links(run)} - removed_ids
        # First, so that neither a crash nor a later ingest can restore the sessions.
        ingested_sessions.mark_forgotten(run, removed_ids)
        replayed.forget(run, removed_ids, remaining)
        ConventionsFile(run).forget(removed_ids)
        for name in plan.deleted:
            _delete_artefact(run, name)
        # An interrupted evaluation leaves texts of the sessions.
        for unfinished in run.root.glob("*.partial.jsonl"):
            remove(unfinished)
        metas = {name: run.meta(name) for name in plan.filtered}
        for name, meta in metas.items():
            _forget_rows(run, name, removed_ids, meta)
        ingested_sessions.forget(run, removed_ids)
        for name, meta in metas.items():  # again, because their sidecars must name the new conversations
            _forget_rows(run, name, removed_ids, meta)
        return plan


def _unowned_answers_error(run: RunDir, answers: AnswerCounts) -> InputError:
    got = f"{answers.num_unowned:,} paid answers about unknown sessions"
    fix = (
        "Repeat the earlier `crf replay`, which records the sessions; cached answers are not paid for again. "
        "Or delete these answers with `crf forget --discard-answers`"
    )
    return InputError(
        explain(run.path(replayed.STORE).name, got=got, expected="only answers about sessions of the run", fix=fix)
    )


def _read_links(run: RunDir) -> Iterator[_Link]:
    stored: Iterator[dict[str, Any]] = run.read_jsonl(
        "conversations", schema=rows.CONVERSATIONS_SCHEMA, version=rows.CONVERSATIONS_VERSION
    )
    return ((row["id"], row["session_id"], (row["parent"] or {}).get("conversation_id")) for row in stored)


def _find_conversations(name: str, links: Sequence[_Link]) -> set[str]:
    exact = {conversation_id for conversation_id, session, _ in links if name in (conversation_id, session)}
    if exact:
        return exact
    names = {
        candidate
        for conversation_id, session, _ in links
        for candidate in (session or conversation_id, conversation_id)
    }
    with_prefix = {candidate for candidate in names if len(name) >= _MIN_PREFIX and candidate.startswith(name)}
    sessions = {
        session or conversation_id for conversation_id, session, _ in links if {conversation_id, session} & with_prefix
    }
    if len(sessions) == 1:
        return _find_conversations(sessions.pop(), links)
    near = sorted(with_prefix) or difflib.get_close_matches(name, sorted(names), n=3)
    expected = f"the id of a session, or a unique prefix of at least {_MIN_PREFIX} characters"
    fix = f"Did you mean {' or '.join(near[:3])}?" if near else "The ids are in conversations.jsonl: session_id or id"
    raise InputError(explain("session", got=repr(name), expected=expected, fix=fix))


def _filterable(run: RunDir, derived: Sequence[str]) -> tuple[str, ...]:
    """Return the artifacts that lose only some of their rows.

    If an artifact is deleted as a whole, so is every artifact derived from it.
    """
    filtered = [name for name in derived if _can_be_filtered(run, name)]
    size = -1
    while size != len(filtered):
        size = len(filtered)
        whole = set(derived) - set(filtered)
        filtered = [name for name in filtered if not whole & {source.name for source in run.meta(name).sources}]
    return tuple(filtered)


def _forget_rows(run: RunDir, name: str, removed_ids: Set[str], meta: ArtefactMeta) -> None:
    """Rewrite an artifact without the rows of these conversations. `meta` is its sidecar from before the removal.

    The new sidecar has no counts and drops: the old numbers include removed rows, and only the pipeline step can
    recount.
    """
    rows = run.read_jsonl(name, schema=meta.schema, version=meta.version)
    remaining_rows = [row for row in rows if row["conversation_id"] not in removed_ids]
    sources = [
        source.name if source.kind == "artefact" else source_path(source.name, run.root) for source in meta.sources
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
    remove(run.path(name))
    (run.root / ARTEFACTS[name].sidecar_name).unlink(missing_ok=True)


def _can_be_filtered(run: RunDir, name: str) -> bool:
    """Return whether an artifact is up to date and each of its rows names its conversation.

    Links and unreadable artifacts are deleted as a whole: they may contain the session, and can be rebuilt.
    """
    if ARTEFACTS[name].kind != "records" or run.path(name).is_symlink():
        return False
    try:
        return "conversation_id" in run.meta(name).keys and name not in run.lineage(name).stale
    except RunError:
        return False


def _link_targets(run: RunDir, names: Sequence[str]) -> Iterator[OutsideCopy]:
    """Yield the targets of all links among these artifacts, including links inside folders."""
    for name in names:
        path = run.path(name)
        links = [path] if path.is_symlink() else [inner for inner in sorted(path.rglob("*")) if inner.is_symlink()]
        for link in links:
            yield OutsideCopy(f"where the link {link.relative_to(run.root)} led", os.path.realpath(link), "")
