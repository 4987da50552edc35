"""What a store says: what was spent, and why a request is not to be sent."""

from __future__ import annotations

from typing import NamedTuple


class Meter(NamedTuple):
    """Nano-dollars: settled, held by requests in flight, and of requests that may or may not have been billed."""

    spent: int
    reserved: int
    unknown: int
    num_unknown: int
    halted: str | None

    @property
    def committed(self) -> int:
        """What counts against a cap."""
        return self.spent + self.reserved + self.unknown


class Refused(NamedTuple):
    """Why a request may not be sent."""

    reason: str


class Elsewhere(NamedTuple):
    """Not sent, because another process is asking this very thing (who), or just has (None: its reply is here).

    `lock_file` is what keeps its claim alive, beside the store.
    """

    holder: str | None
    lock_file: str = ""
