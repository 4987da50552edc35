"""Where a sequence begins that is too long: as far left as fits, at the start of a message if one starts there."""

from __future__ import annotations

from collections.abc import Sequence

from composer_replication.batch.render.dialect import assistant, user
from composer_replication.batch.render.renderer import Renderer
from composer_replication.errors import InputError

_WORD = "Zqword"


class LeftCut:
    """The tokens a template opens messages with, which no text can forge; found by asking it once."""

    def __init__(self, renderer: Renderer) -> None:
        self._openings = frozenset(_opening_ids(renderer))
        self._stops = frozenset(renderer.protected.ids[stop] for stop in renderer.dialect.stops)
        self.header_tokens = max(map(len, renderer.encoder.encode(renderer.dialect.headers)))

    def first(self, ids: Sequence[int], *, end: int, limit: int, latest: int) -> int | None:
        """The first token of at most `limit` that stop before `end`; None where that would be later than `latest`.

        A sequence that fits is not cut. Where no message starts in time, the cut is inside one.
        """
        lowest = max(0, end - limit)
        if lowest > latest:
            return None
        if lowest == 0:
            return 0
        return next((at for at in range(lowest, latest + 1) if self._starts_message(ids, at)), lowest)

    def _starts_message(self, ids: Sequence[int], at: int) -> bool:
        return ids[at] in self._openings if self._openings else ids[at - 1] in self._stops


def _opening_ids(renderer: Renderer) -> list[int]:
    """The first token only a template can write, of the generation prompt and of a user's message."""
    openings = [renderer.dialect.header]
    try:
        answered = renderer.template.render([user("u"), assistant("a")])
        asked = renderer.template.render([user("u"), assistant("a"), user(_WORD)])
    except InputError:  # a template for one question: its header is all there is to go by
        pass
    else:
        openings.append(asked[len(answered) :].partition(_WORD)[0] if asked.startswith(answered) else "")
    found = (
        next((index for index in ids if index in renderer.encoder.protected_ids), None)
        for ids in renderer.encoder.encode(openings)
    )
    return [index for index in found if index is not None]
