"""Sites as rows of `sites.jsonl`, each with its hint, and back again: what inspect, replay, pairs and training read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from difflib import get_close_matches
from typing import Any, NamedTuple

from composer_replication.errors import ArtefactCorruptError, InputError, explain
from composer_replication.runs.conversations import read_conversations
from composer_replication.runs.directory import RunDir
from composer_replication.types import Conversation, ErrorSite, Hint

SCHEMA, VERSION = "error_site", 1
_MIN_PREFIX, _MAX_NEAR = 4, 3
_SITE = tuple(each.name for each in fields(ErrorSite))


class SiteOfRun(NamedTuple):
    """A site with its hint, and the conversation it is in."""

    site: ErrorSite
    hint: Hint | None
    conversation: Conversation


def read_sites(run: RunDir) -> Iterator[tuple[ErrorSite, Hint | None]]:
    """The sites of a run, in order, each with its hint."""
    return (from_row(row) for row in run.read_jsonl("sites", schema=SCHEMA, version=VERSION))


def find_site(run: RunDir, identity: str) -> tuple[ErrorSite, Hint | None]:
    """The site with this id, or whose id alone begins like this."""
    every = list(read_sites(run))
    found = [each for each in every if each[0].id.startswith(identity)]
    if len(found) == 1 and len(identity) >= _MIN_PREFIX:
        return found[0]
    got = f"{identity!r}, which {len(found)} sites begin with"
    expected = f"the id of a site, or at least {_MIN_PREFIX} characters that only one begins with"
    ids = list(dict.fromkeys(site.id for site, _ in every))
    begin = [each for each in ids if identity and each.startswith(identity)]
    near = begin[:_MAX_NEAR] or get_close_matches(identity, ids, n=_MAX_NEAR)
    fix = "`crf sites RUN` shows ids" + (f". Near it: {', '.join(near)}" if near else "")
    raise InputError(explain("site", got=got, expected=expected, fix=fix))


def read_site(run: RunDir, identity: str) -> SiteOfRun:
    """The site with this id, or whose id alone begins like this."""
    site, hint = find_site(run, identity)
    conversation = next((each for each in read_conversations(run) if each.id == site.conversation_id), None)
    if conversation is None:
        fix = "The conversations were written anew: run `crf sites RUN` again."
        what = f"conversation of site {site.id}"
        raise InputError(explain(what, got=repr(site.conversation_id), expected="one of this run", fix=fix))
    return SiteOfRun(site, hint, conversation)


def to_row(site: ErrorSite, hint: Hint | None) -> dict[str, object]:
    """One row of `sites.jsonl`."""
    return {**asdict(site), "hint": None if hint is None else asdict(hint)}


def from_row(row: Mapping[str, Any]) -> tuple[ErrorSite, Hint | None]:
    """The inverse of `to_row`."""
    try:
        site = ErrorSite(**{name: row[name] for name in _SITE if name != "evidence"}, evidence=tuple(row["evidence"]))
        return site, None if row["hint"] is None else Hint(**row["hint"])
    except (KeyError, TypeError) as error:
        expected = f"the fields of {SCHEMA} {VERSION}"
        raise ArtefactCorruptError(explain(f"site {row.get('id')!r}", got=error, expected=expected)) from error
