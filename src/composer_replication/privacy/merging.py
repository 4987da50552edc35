"""Spans that overlap, and values that stand in a text more than once."""

from __future__ import annotations

from composer_replication.privacy.rules import PLACEHOLDER, Span, is_strong


def without(text: str, found: list[Span]) -> str:
    """The text with blanks for what is already found."""
    for span in found if len(found) <= 64 else ():
        text = text[: span.start] + " " * (span.end - span.start) + text[span.end :]
    return text


def moved(span: Span, by: int) -> Span:
    return Span(span.start + by, span.end + by, span.kind)


def merge(text: str, found: list[Span]) -> list[Span]:
    """Overlaps become one span that covers all of them; the kind is that of the earliest layer. Placeholders stay."""
    order = {id(span): index for index, span in enumerate(found)}
    merged: list[Span] = []
    ranks: list[int] = []
    for span in sorted(found, key=lambda span: (span.start, -span.end)):
        rank = order[id(span)]
        if merged and span.start < merged[-1].end:
            last = merged[-1]
            same = (last.start, last.end) == (span.start, span.end)
            kind = span.kind if same and rank < ranks[-1] else last.kind
            merged[-1] = Span(last.start, max(last.end, span.end), kind)
            ranks[-1] = min(rank, ranks[-1]) if same else ranks[-1]
        else:
            merged.append(span)
            ranks.append(rank)
    return [span for span in merged if not PLACEHOLDER.fullmatch(text[span.start : span.end])]


def spread(text: str, spans: list[Span]) -> list[Span]:
    """The same value elsewhere in the same text is the same secret, whatever stands beside it."""
    if len(spans) > 64:  # a dump: every line has its own name, and the search would cost lines times length
        return spans
    extra: list[Span] = []
    for value, kind in {text[span.start : span.end]: span.kind for span in spans}.items():
        if len(value) >= 8 and is_strong(value):
            at = text.find(value)
            while at >= 0:
                extra.append(Span(at, at + len(value), kind))
                at = text.find(value, at + len(value))
    return merge(text, spans + extra) if len(extra) > len(spans) else spans
