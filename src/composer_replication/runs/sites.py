"""Sites as rows of `sites.jsonl`, each with its hint, and back again; and which of them somebody struck out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields, replace
from difflib import get_close_matches
from typing import Any, NamedTuple

from composer_replication.errors import ArtefactCorruptError, InputError, explain
from composer_replication.runs.conversations import read_conversations
from composer_replication.runs.directory import RunDir
from composer_replication.types import Conversation, ErrorSite, Hint

SCHEMA, VERSION = "error_site", 1
_MIN_PREFIX, _MAX_NEAR = 4, 3
_STRUCK = "struck_hints"
_SITE = tuple(field.name for field in fields(ErrorSite))


class SiteOfRun(NamedTuple):
    """A site with its hint, and the conversation it is in."""

    site: ErrorSite
    hint: Hint | None
    conversation: Conversation


def read_sites(run: RunDir) -> Iterator[tuple[ErrorSite, Hint | None]]:
    """The sites of a run, in order, each with its hint."""
    return (from_row(row) for row in run.read_jsonl("sites", schema=SCHEMA, version=VERSION))


def find_site(run: RunDir, identity: str, *, what: str = "site") -> tuple[ErrorSite, Hint | None]:
    """The site with this id, or whose id alone begins like this."""
    every = list(read_sites(run))
    matches = [row for row in every if row[0].id.startswith(identity)]
    if len(matches) == 1 and len(identity) >= _MIN_PREFIX:
        return matches[0]
    number = f"{len(matches)} sites begin with" if matches else "no site has, or begins with"
    got = f"{identity!r}, which {number}"
    expected = f"the id of a site, or its first {_MIN_PREFIX} characters or more"
    ids = list(dict.fromkeys(site.id for site, _ in every))
    begin = [site_id for site_id in ids if identity and site_id.startswith(identity)]
    near = begin[:_MAX_NEAR] or get_close_matches(identity, ids, n=_MAX_NEAR)
    fix = f"`crf sites {run.root} --list` shows them" + (f". Near it: {', '.join(near)}" if near else ".")
    raise InputError(explain(what, got=got, expected=expected, fix=fix))


def read_site(run: RunDir, identity: str) -> SiteOfRun:
    """The site with this id, or whose id alone begins like this."""
    site, hint = find_site(run, identity)
    conversation = next(
        (candidate for candidate in read_conversations(run) if candidate.id == site.conversation_id), None
    )
    if conversation is None:
        fix = "The conversations were written anew: run `crf sites RUN` again."
        what = f"conversation of site {site.id}"
        raise InputError(explain(what, got=repr(site.conversation_id), expected="one of this run", fix=fix))
    return SiteOfRun(site, hint, conversation)


def struck_sites(run: RunDir) -> frozenset[str]:
    """Ids of the sites whose hints somebody struck out; they hold over every later `crf sites`."""
    if not run.path(_STRUCK).exists():
        return frozenset()
    last = {str(row["site"]): row["is_struck"] for row in run.read_journal(_STRUCK).rows}
    return frozenset(identity for identity, is_struck in last.items() if is_struck)


def struck_out(site: ErrorSite) -> ErrorSite:
    """The site as one that teaches nothing."""
    return replace(site, is_kept=False, reason="struck out: `crf hints RUN --keep ID` takes it back")


def strike_sites(
    run: RunDir, identities: Iterable[str], *, is_struck: bool = True, what: str = "site"
) -> list[ErrorSite]:
    """Strike out the hints of these sites, or take that back; ids may be cut short. `what` is where they were named.

    What was struck out is out of `sites.jsonl` at once. What was taken back is written by the next `crf sites`.
    """
    with run.exclusive("hints", against=("training",)):
        chosen = [find_site(run, identity, what=what)[0] for identity in identities]
        with run.append_jsonl(_STRUCK) as journal:
            for site in chosen:
                journal.append({"site": site.id, "is_struck": is_struck})
        if is_struck:
            _rewrite(run, frozenset(site.id for site in chosen))
    return chosen


def _rewrite(run: RunDir, struck: frozenset[str]) -> None:
    meta, rows = run.meta("sites"), list(read_sites(run))
    struck_hints = Counter(f"hint: {hint.source}" for site, hint in rows if site.id in struck and hint is not None)
    run.write_jsonl(
        "sites",
        [to_row(struck_out(site), None) if site.id in struck else to_row(site, hint) for site, hint in rows],
        schema=SCHEMA,
        version=VERSION,
        sources=meta.sources,
        counts=dict(Counter(meta.counts) - struck_hints),
        drops=meta.drops,
        settings={**meta.settings, "struck": sorted(struck_sites(run))},
    )


def to_row(site: ErrorSite, hint: Hint | None) -> dict[str, object]:
    """One row of `sites.jsonl`."""
    return {**{name: getattr(site, name) for name in _SITE}, "hint": None if hint is None else asdict(hint)}


def from_row(row: Mapping[str, Any]) -> tuple[ErrorSite, Hint | None]:
    """The inverse of `to_row`."""
    try:
        site = ErrorSite(**{name: row[name] for name in _SITE if name != "evidence"}, evidence=tuple(row["evidence"]))
        return site, None if row["hint"] is None else Hint(**row["hint"])
    except (KeyError, TypeError) as error:
        expected = f"the fields of {SCHEMA} {VERSION}"
        raise ArtefactCorruptError(explain(f"site {row.get('id')!r}", got=error, expected=expected)) from error
