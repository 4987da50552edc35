"""The last look before text leaves the machine: at requests to teachers and at exports, as they are about to go out.

`crf ingest` takes secrets out. What is sent may still hold one: the run was made by older rules, or elsewhere, a
variable was set since, a state was made by hand, a teacher wrote it. So what goes out is read back from its own bytes
and looked at again, with the rules of `privacy`. A find names the place, the kind and an id of the text, never the
value.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import orjson

from composer_replication.errors import InputError, RunError, explain
from composer_replication.ingestion.gate_view import View, bytes_of, flat_text, view_of
from composer_replication.privacy import Scrubber, secret_looking_environment
from composer_replication.runs import RunDir

_MAX_KNOWN = 1 << 17
_MAX_TOLD = 10
_ID_BYTES = 6


@dataclass(frozen=True)
class Find:
    """A text that looks as if it held a secret: where, and how many of which kind."""

    place: str
    kinds: Mapping[str, int]
    digest: bytes = field(repr=False)

    @property
    def id(self) -> str:
        """What `--allow` takes: of the whole text, and slow to make, for a text may be little more than a password."""
        return _slow_hash(self.digest)

    def __str__(self) -> str:
        return f"{self.place}: {_listed(self.kinds)} (id {self.id})"


class LastGate:
    """Looks at what goes out. Texts are known by their digest: one that stands in every state is looked at once.

    `environment` is where known values come from, as at ingest; `allowed` are ids of texts that somebody has looked at.
    """

    is_open = False

    def __init__(self, environment: Mapping[str, str], *, allowed: Iterable[str] = ()) -> None:
        values = secret_looking_environment(environment)
        self._texts, self._ids = Scrubber(env_values=values), Scrubber(env_values=values, entropy=False)
        self._allowed = frozenset(allowed)
        self._known: dict[bytes, Mapping[str, int]] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def in_request(self, body: bytes, place: str) -> list[Find]:
        """What is found in the bytes of a request to a chat-completions endpoint."""
        if self.is_open:
            return []
        data: Any = orjson.loads(body)
        parts = [("parameters", {key: value for key, value in data.items() if key not in ("messages", "tools")}, False)]
        parts += [("tools", data.get("tools"), True)]
        for number, message in enumerate(data["messages"], start=1):
            parts.append((f"message {number} ({message.get('role')})", message, True))
        return [
            find
            for name, part, is_text in parts
            if part and (find := self.look(part, f"{place}, {name}", is_text=is_text)) is not None
        ]

    def look(self, part: Any, place: str, *, is_text: bool = True) -> Find | None:
        """What is found in one part of something that goes out: plain JSON data.

        `is_text=False` is for what a person typed into a setting, where a random word is a name.
        """
        if self.is_open:
            return None
        digest = hashlib.sha256(bytes_of(part)).digest()
        kinds = self._known.get(digest)
        if kinds is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            kinds = self._known[digest] = self._kinds(part, is_text)
        if not kinds:
            return None
        find = Find(place, kinds, digest)
        return None if self._allowed and find.id in self._allowed else find

    def _kinds(self, part: Any, is_text: bool) -> Mapping[str, int]:
        try:
            view = view_of(part)
            kinds = self._found_in(view, is_text)
            if not kinds and view.joined:  # a secret may lie across the pieces; glued words are random, and no find
                names = self._ids.scope()
                for text in view.joined:
                    names.text(text)
                return names.report.counts
            return kinds
        except RecursionError:  # nested too deeply to be walked
            texts = (self._texts if is_text else self._ids).scope()
            texts.text(flat_text(part))
            return texts.report.counts

    def _found_in(self, view: View, is_text: bool) -> Mapping[str, int]:
        texts, names = self._texts.scope(), self._ids.scope()
        (texts if is_text else names).value(view.value)
        names.value(view.shown)
        for identity in view.ids:
            names.text(identity)
        return Counter(texts.report.counts) + Counter(names.report.counts)


class OpenGate(LastGate):
    """Lets everything through: somebody has said `--no-scrub` here."""

    is_open = True

    def __init__(self) -> None:
        super().__init__({})


def gate_of(
    run: RunDir,
    environment: Mapping[str, str],
    *,
    no_scrub: bool,
    allowed: Iterable[str] = (),
    given: LastGate | None = None,
) -> LastGate:
    """The gate for what is made from a run; one that was ingested with `--no-scrub` needs the flag once more.

    A gate that is `given` is the one, but lets nothing of such a run through unless it is the open one.
    """
    if no_scrub or (given is not None and given.is_open):
        return given or OpenGate()
    if run.meta("conversations").settings.get("scrubbed") is not True:
        fix = (
            "`crf ingest PATH... -o NEW_RUN` without --no-scrub takes the secrets out; or "
            "type --no-scrub here as well (in Python: the gate OpenGate()): "
            "everything goes out as the logs hold it"
        )
        raise RunError(explain(str(run.root), got="a run made with --no-scrub", expected="a scrubbed one", fix=fix))
    return given or LastGate(environment, allowed=allowed)


def refusal(what: str, finds: Sequence[Find]) -> InputError:
    """The error for something that does not go out: every kind, the first places, and what to do about them."""
    kinds: Counter[str] = Counter()
    for find in finds:
        kinds.update(find.kinds)
    more = len(finds) - _MAX_TOLD
    locations = [f"  {find}" for find in finds[:_MAX_TOLD]] + ([f"  and {more:,} more"] if more > 0 else [])
    steps = (
        "`crf ingest PATH... -o RUN --reread` takes out what the rules and this environment know by now",
        "`crf forget SESSION --run RUN` leaves a session out",
        "`--allow ID` lets a text through that holds no secret (may be repeated)",
        "`--no-scrub`, typed here, lets everything through",
    )
    number = (
        f"{len(finds):,} text{'s that look as if they' if len(finds) > 1 else ' that looks as if it'} held a secret"
    )
    got = f"{number} ({_listed(kinds)})"
    fix = "\n".join(["The places:", *locations, "What to do:", *(f"  {step}" for step in steps)])
    return InputError(explain(what, got=got, expected="none; nothing of it went out", fix=fix))


@lru_cache(maxsize=4096)
def _slow_hash(digest: bytes) -> str:
    return hashlib.scrypt(digest, salt=b"composer_replication find", n=2**14, r=8, p=1, dklen=_ID_BYTES).hex()


def _listed(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} x{number}" for kind, number in sorted(kinds.items()))
