"""The order of the site's parts and pages: what a newcomer needs first comes first. A hook of mkdocs.yml."""

from __future__ import annotations

from typing import Any

PARTS = ("Guides", "Concepts", "Reference", "Decisions")
PAGES = (
    "ingest",
    "hints",
    "inspect",
    "replay",
    "train",
    "batches",
    "pipeline",
    "channels",
    "losses",
    "glossary",
    "cli",
    "config",
)


def on_nav(nav: Any, **_: Any) -> Any:
    """Pages of the top level, then the folders in our order; what is in no list keeps its place behind the others."""
    nav.items.sort(key=lambda item: (item.is_section, _place(item.title, PARTS)))
    for part in nav.items:
        if part.is_section:
            part.children.sort(key=lambda item: _place(item.file.name if item.is_page else "", PAGES, "index"))
    return nav


def _place(name: str | None, order: tuple[str, ...], first: str = "") -> int:
    if name == first:
        return -1
    return order.index(name) if name in order else len(order)
