"""What the judge says of one call: that it works, fails, may well fail, or that it cannot say; and by which rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Says = Literal["ok", "fails", "risky", "unknown"]


@dataclass(frozen=True, slots=True)
class Judgement:
    """`kind` is the kind of failure (`sites.KINDS`) that is expected, or that would be one; `why` is for people.

    Almost every shell command is `unknown`.
    """

    says: Says
    rule: str
    kind: str = ""
    why: str = ""
