"""Hints about files: reading before changing, exact text, paths that exist."""

from __future__ import annotations

from composer_replication.hint_generator.context import HintContext, given, text_fact


def hint_edit_not_read(ctx: HintContext | None = None) -> str:
    """A change without a look."""
    path, reader = text_fact(ctx, "path"), text_fact(ctx, "reader_tool")
    rule = f"Read a file{f' with {reader}' if reader else ''} before changing it"
    if not path:
        return f"{rule}."
    seen = "has not been read with it" if given(ctx, "was_read") else "has not been read in this session"
    return f"{rule}. {path} {seen}."


def hint_edit_stale(ctx: HintContext | None = None) -> str:
    """A change on the ground of an old look."""
    path = text_fact(ctx, "path")
    return f"Read {path or 'a file'} again before changing it: it has changed since it was read."


def hint_edit_no_match(ctx: HintContext | None = None) -> str:
    """Text that is not in the file; the nearest line that the session shows helps to see why."""
    path, closest = text_fact(ctx, "path"), text_fact(ctx, "closest_line")
    rule = "The text to replace must be copied exactly from the file, with its whitespace and without line numbers."
    if closest and given(ctx, "only_whitespace"):
        return f"{rule} Here only the whitespace differs from the line {closest}."
    if closest:
        return f"{rule} The closest line{f' of {path}' if path else ''} is {closest}."
    return f"{rule} Read {path or 'the file'} again and copy from what it shows."


def hint_edit_ambiguous(ctx: HintContext | None = None) -> str:
    """Text that is in the file more than once."""
    path = text_fact(ctx, "path")
    rule = f"The text to replace must occur only once{f' in {path}' if path else ''}."
    return f"{rule} Add lines around it until it is unique, or replace all of them on purpose."


def hint_edit_noop(ctx: HintContext | None = None) -> str:
    """A replacement by the same text."""
    path = text_fact(ctx, "path")
    return f"The new text must differ from the old one: this edit changes nothing{f' in {path}' if path else ''}."


def hint_file_not_found(ctx: HintContext | None = None) -> str:
    """A path that was guessed."""
    path, similar, finder = (text_fact(ctx, key) for key in ("path", "similar_path", "finder_tool"))
    missing = f"{path} does not exist" if path else "The file does not exist"
    if similar:
        return f"{missing}; this session has shown {similar}. Use paths that were listed or read, not guessed ones."
    return (
        f"{missing}. Look for a file{f' with {finder}' if finder else ''} before opening a path that nothing has shown."
    )


def hint_is_directory(ctx: HintContext | None = None) -> str:
    """A folder where a file is needed."""
    path = text_fact(ctx, "path")
    return f"{path or 'The path'} is a folder, and a file is needed. List a folder to see which files it has."


def hint_output_too_large(ctx: HintContext | None = None) -> str:
    """More than a result can hold."""
    path = text_fact(ctx, "path")
    return f"{path or 'The result'} is too large to read at once. Search it, or read a part of it by offset and limit."
