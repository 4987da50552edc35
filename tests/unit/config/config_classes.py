"""A config with one option of every type, for the tests of this folder."""

from __future__ import annotations

from typing import Literal

from composer_replication.config import option, section, table


@table("outer.inner")
class Inner:
    ratio: float = option(0.5, "A number.", at_least=0, below=1)
    mode: Literal["fast", "none"] = option("fast", "A choice.")


@table("outer")
class Outer:
    flag: bool = option(False, "A switch.")
    count: int = option(3, "A count.")
    size: float = option(1.0, "A size.")
    name: str = option("x", "A name.")
    limit: float | None = option(None, "A limit.", above=0)
    label: str | None = option(None, "A label.")
    names: tuple[str, ...] = option(("a", "b"), "Names.")
    weights: dict[str, float] = option({"a": 1.0}, "Weights.", at_least=-10)
    inner: Inner = section(Inner, "More.")


@table("")
class Root:
    top: int = option(1, "At the top.")
    outer: Outer = section(Outer, "A section.")
