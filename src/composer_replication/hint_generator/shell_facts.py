"""Where the shell stood for the path that an error is about, and what the path is called from there."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from composer_replication.actions.tools import channel_of
from composer_replication.hint_generator.advice import advice_for
from composer_replication.hint_generator.context import HintContext
from composer_replication.hint_generator.files import missing_path_facts, short_path

if TYPE_CHECKING:
    from composer_replication.hint_generator.along import Case

_OWN_CD = re.compile(r"\s*cd\s+(['\"]?)([^\s'\";&|]+)\1\s*(?:&&|;|\n)")


def known(**facts: Any) -> HintContext:
    """Those of the facts that there are."""
    return cast("HintContext", {name: value for name, value in facts.items() if value})


def advised_facts(case: Case) -> HintContext:
    return known(advice=advice_for(case.site.kind, case.said, case.command))


def missing_in_shell(case: Case) -> HintContext:
    facts = place_of_shell(case)
    if re.search(r"\bgit\b", case.command):
        facts |= known(advice=advice_for("git_state", case.said, case.command))
    if "path_from_shell" not in facts and "meant" not in facts and case.path:
        folder = _standing(case)
        path = case.path if folder is None else posixpath.join(folder, case.path)
        facts |= missing_path_facts(path, case.said, case.seen)
    return facts


def place_of_shell(case: Case) -> HintContext:
    """Where the shell stands, if not where the session began, and what a typed path is called from there."""
    paths, facts, typed = case.seen.paths, advised_facts(case), case.path or ""
    here, root, own_cd = _standing(case), paths.root, _own_cd(case)
    facts |= known(own_cd=own_cd and ("to" if own_cd == typed else "before"), is_absolute=typed.startswith("/"))
    if here is None or root is None:
        return facts
    if here != root:
        facts |= {"shell_folder": short_path(here, root), "project_folder": root}
    for base in _with_parents(here, root) if typed and not typed.startswith(("/", "~")) else ():
        meant = posixpath.normpath(posixpath.join(base, typed))
        if meant == here or (base != here and (meant in paths.files or meant in paths.folders)):
            facts["path_from_shell"] = posixpath.relpath(meant, here)
            return facts
    if typed and (here == root or typed.startswith("/")):
        facts |= missing_path_facts(posixpath.join(root, typed), case.said, case.seen)
    return facts


def _own_cd(case: Case) -> str | None:
    """The folder that the command itself goes to before anything else."""
    match = _OWN_CD.match(case.command) if channel_of(case.call.name) == "shell" else None
    return match[2] if match else None


def _standing(case: Case) -> str | None:
    """Where the shell stands for the path that the error is about; None where that cannot be said."""
    here, own_cd = case.seen.paths.shell.path, _own_cd(case)
    if own_cd is None or own_cd == case.path:
        return here
    if own_cd.startswith(("~", "$", "-")) or (here is None and not own_cd.startswith("/")):
        return None
    return posixpath.normpath(posixpath.join(here or "/", own_cd))


def _with_parents(folder: str, root: str) -> Iterator[str]:
    """The folder and those above it, up to the project's."""
    while folder.startswith(root):
        yield folder
        if folder == root:
            return
        folder = posixpath.dirname(folder)
