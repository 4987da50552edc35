"""Write the sites and good calls of a run as token ids: all that a scorer needs, without the text of the sessions.

There is one line per call. The model reads `prefix`, one of `hints`, and `tail`. `spans` are positions in the tail: the
tokens up to the end of the tool's name, the arguments, and the first token in which the arguments differ from those of
another call. For an erring call this is the next successful call of the same tool, and for a good call the erring call.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from composer_replication.batch.hint_placement import (
    Placement,
    _has_tokens,
    draw_unrelated_hints,
    exclusion_reason,
    teacher_context,
)
from composer_replication.batch.model_folder import load_tokenizer
from composer_replication.batch.render.renderer import RenderedSequence, Renderer, TurnSpan, token_texts
from composer_replication.errors import InputError
from composer_replication.runs import RunDir
from composer_replication.runs.files import read_tools
from composer_replication.runs.split import read_split
from composer_replication.trainer.sessions.rendering import LoggedSession, good_turns, read_sessions
from composer_replication.types import ErrorSite, Turn

SCHEMA = "hint_items 2"
_MAX_ARGUMENTS = 512  # maximum number of scored tokens of a call's arguments
_MAX_ERROR = 400  # maximum characters of an error message
_MAX_PER_SESSION = 8
_NEAR = 8  # maximum number of assistant turns between an error and its correction


class _Chosen(NamedTuple):
    """A site with the hint texts that may be placed before its turn."""

    site: ErrorSite
    hints: dict[str, str]


class _Place(NamedTuple):
    """A call as tokens: its sequence, the span of its turn, and the end of the tool's name."""

    rendered: RenderedSequence
    span: TurnSpan
    call: tuple[int, int]
    name_end: int

    def ids(self) -> list[int]:
        return self.rendered.ids[self.call[0] : self.call[1]]


def prepare(
    run: str,
    tokenizer: str,
    out: Path,
    hints: Mapping[str, Path],
    *,
    max_sites: int,
    max_tokens: int,
    placement: Placement = "before_turn",
) -> None:
    """Write the items of a run, and print their number."""
    directory = RunDir.open(run)
    renderer = Renderer(load_tokenizer(tokenizer), tools=read_tools(directory).by_format)
    chosen = _choose(directory, {name: _read_hints(path) for name, path in hints.items()}, max_sites)
    num_sites = num_good = 0
    with out.open("w", encoding="utf-8") as file:
        names = ["none", "template", "raw_error", "other_kind", *hints]
        head = {"schema": SCHEMA, "hints": names, "max_tokens": max_tokens, "placement": placement}
        file.write(json.dumps(head) + "\n")
        sides = read_split(directory)
        for session in read_sessions(directory, with_sites=True, with_pairs=False):
            mine = chosen.get(session.conversation.id, [])
            is_held_out = None if sides is None else session.conversation.id in sides.test
            for item in _items(renderer, session, mine, max_tokens, placement, is_held_out=is_held_out):
                num_sites, num_good = num_sites + (item["role"] == "site"), num_good + (item["role"] == "good")
                file.write(json.dumps(item, separators=(",", ":")) + "\n")
    print(f"{out}: {num_sites} sites and {num_good} good calls, of {sum(map(len, chosen.values()))} sites chosen")


def _read_hints(path: Path) -> dict[str, str]:
    """Return hints by site id. A row has `site` or `id`, and a `hint` that is a text or an object with one."""
    found: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        hint = row.get("hint")
        text = hint.get("text") if isinstance(hint, dict) else hint
        if text:
            found[row.get("site") or row["id"]] = text
    return found


def _choose(run: RunDir, named: Mapping[str, Mapping[str, str]], max_sites: int) -> dict[str, list[_Chosen]]:
    """Return the chosen sites by conversation: round-robin over kinds, in an order independent of the log.

    Hints that quote a user are left out, because they are about refused calls and were not written as hints.
    """
    by_kind: dict[str, list[_Chosen]] = defaultdict(list)
    for session in read_sessions(run, with_sites=True, with_pairs=False):
        alone = {turn.id for turn in session.conversation.turns if len(turn.calls) == 1}
        written = [(site, hint) for site, hint in session.sites if hint and hint.source != "user"]
        mine = [(site, hint) for site, hint in written if site.is_kept and site.turn_id in alone]
        for site, hint in sorted(mine, key=lambda each: _order(each[0].id))[:_MAX_PER_SESSION]:
            hints = {"template": hint.text, "raw_error": _error_of(session, site)}
            hints |= {name: known[site.id] for name, known in named.items() if site.id in known}
            by_kind[site.kind].append(_Chosen(site, hints))
    for group in by_kind.values():
        group.sort(key=lambda each: _order(each.site.id))
    rounds = zip_longest(*(by_kind[kind] for kind in sorted(by_kind)))
    every = [each for one_of_each in rounds for each in one_of_each if each is not None][:max_sites]
    others = draw_unrelated_hints([each.hints["template"] for each in every], [each.site.kind for each in every])
    chosen: dict[str, list[_Chosen]] = defaultdict(list)
    for each, other in zip(every, others, strict=True):
        each.hints.update({} if other is None else {"other_kind": other})
        chosen[each.site.conversation_id].append(each)
    return chosen


def _error_of(session: LoggedSession, site: ErrorSite) -> str:
    results = (result for turn in session.conversation.turns for result in turn.results)
    text = next((result.text for result in results if result.call_id == site.call_id), "")
    return " ".join(text.split())[:_MAX_ERROR] or site.evidence_text or "error"


def _digest(session: str) -> str:
    """Return a digest as the name of a session, because scores are published and sessions are not."""
    return hashlib.sha256(session.encode()).hexdigest()[:16]


def _order(identity: str) -> str:
    return hashlib.sha256(f"hints:{identity}".encode()).hexdigest()


def _items(
    renderer: Renderer,
    session: LoggedSession,
    chosen: Sequence[_Chosen],
    max_tokens: int,
    placement: Placement,
    *,
    is_held_out: bool | None,
) -> Iterator[dict[str, Any]]:
    if not chosen:
        return
    try:
        sequences = renderer.render(session.conversation)
    except InputError as error:
        print(f"left out {len(chosen)} sites: {error}")
        return
    calls = _Calls(renderer, session, sequences)
    for site, hints in chosen:
        erring = calls.place(site.turn_id)
        if erring is None:
            continue
        corrected, good = calls.corrected(site), calls.good(site)
        session_id = _digest(session.conversation.session_id or session.conversation.id)
        about = {"id": site.id, "session": session_id, "kind": site.kind, "tool": site.tool, "is_held_out": is_held_out}
        for role, place, against in (("site", erring, corrected), ("good", good, erring)):
            item = place and _item(renderer, place, against, hints, max_tokens, placement)
            if item:
                yield {**about, "role": role, **item}


def _item(
    renderer: Renderer,
    place: _Place,
    against: _Place | None,
    hints: Mapping[str, str],
    max_tokens: int,
    placement: Placement,
) -> dict[str, Any] | None:
    """Return the item of a call with every hint, cut at the beginning of a turn.

    Return None if the turn alone is too long, or if its hints cannot be placed before it.
    """
    rendered, span, call, name_end = place
    end = min(call[1], name_end + _MAX_ARGUMENTS)
    usable = {name: text for name, text in hints.items() if _has_tokens(renderer, text)}
    longest = max((len(renderer.encoder.encode([text])[0]) for text in usable.values()), default=0) + 32
    least = max(0, end + longest - max_tokens)
    first = next((each.header_start for each in rendered.spans if each.header_start >= least), None) if least else 0
    if first is None or first > span.header_start:
        return None
    contexts = {
        name: teacher_context(renderer, rendered, span, text, placement=placement, first=first)
        for name, text in usable.items()
    }
    if any(context.placement != placement for context in contexts.values()):
        return None
    begin = min((context.hint_start for context in contexts.values()), default=span.header_start - first) + first
    if begin < 1 + first or any(context.hint_start + first != begin for context in contexts.values()):
        return None
    spans = {"name": [call[0] - begin, name_end - begin], "arguments": [name_end - begin, end - begin]}
    differing = _first_difference(place, against)
    if differing is not None and call[0] + differing < end:
        spans["first"] = [call[0] + differing - begin, call[0] + differing + 1 - begin]
    return {
        "prefix": rendered.ids[first:begin],
        "tail": rendered.ids[begin:end],
        "hints": {"none": [], **{name: each.ids[each.hint_start : each.hint_end] for name, each in contexts.items()}},
        "spans": spans,
    }


def _first_difference(place: _Place, other: _Place | None) -> int | None:
    """Return the first token in which the arguments of two calls of the same tool differ, or None."""
    if other is None:
        return None
    mine, theirs, name = place.ids(), other.ids(), place.name_end - place.call[0]
    if mine[:name] != theirs[:name]:
        return None
    pairs = enumerate(zip(mine, theirs, strict=False))
    return next((number for number, (a, b) in pairs if a != b), None)


class _Calls:
    """The calls of a rendered session that are the only call in their turn."""

    def __init__(self, renderer: Renderer, session: LoggedSession, sequences: Sequence[RenderedSequence]) -> None:
        self._renderer = renderer
        self._spans = {span.turn_id: (rendered, span) for rendered in sequences for span in rendered.spans}
        self._turns = [turn for turn in session.conversation.turns if turn.role == "assistant"]
        self._number = {turn.id: number for number, turn in enumerate(self._turns)}
        self._good = good_turns(session).good

    def place(self, turn_id: str) -> _Place | None:
        turn = self._turns[self._number[turn_id]]
        rendered, span = self._spans.get(turn_id, (None, None))
        if (
            rendered is None
            or span is None
            or span.call_start is None
            or span.call_end is None
            or exclusion_reason(span)
        ):
            return None
        texts = token_texts(self._renderer.tokenizer, rendered.ids[span.call_start : span.call_end])
        name_ends_at = "".join(texts).find(turn.calls[0].name) + len(turn.calls[0].name)
        length = 0
        for number, text in enumerate(texts):
            length += len(text)
            if length >= name_ends_at:
                end = span.call_start + number + 1
                return _Place(rendered, span, (span.call_start, span.call_end), end)
        return None

    def corrected(self, site: ErrorSite) -> _Place | None:
        """Return the next successful call of the same tool within a few turns, or None."""
        at = self._number[site.turn_id]
        later = (turn for turn in self._turns[at + 1 : at + 1 + _NEAR] if self._is_good(turn, site.tool))
        turn = next(later, None)
        return None if turn is None else self.place(turn.id)

    def good(self, site: ErrorSite) -> _Place | None:
        """Return the nearest good call before the site, or else after it, preferably of the same tool."""
        at = self._number[site.turn_id]
        before, after = self._turns[:at][::-1], self._turns[at + 1 + _NEAR :]
        for tool in (site.tool, None):
            for turn in (*before, *after):
                if self._is_good(turn, tool) and (place := self.place(turn.id)) is not None:
                    return place
        return None

    def _is_good(self, turn: Turn, tool: str | None) -> bool:
        is_same = len(turn.calls) == 1 and tool in (None, turn.calls[0].name)
        return is_same and turn.id in self._good
