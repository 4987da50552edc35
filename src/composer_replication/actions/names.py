"""What tools call the same thing: the keys of their arguments, and the numbers they put before lines they show.

Every stage that reads a call reads it by these lists, so that a key which one stage knows is known to all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

PATH = (
    "file_path",
    "path",
    "filePath",
    "notebook_path",
    "absolute_path",
    "filepath",
    "filename",
    "file",
    "target_file",
)
OLD_TEXT = ("old_string", "old_str", "oldString", "oldText", "old_text", "search", "old")
NEW_TEXT = ("new_string", "new_str", "newString", "newText", "new_text", "replace", "new")
EVERYWHERE = ("replace_all", "replaceAll")

LINE_NUMBER = re.compile(r"^[^\S\n]*(\d+)(?:→|\t|\| ?| ?: )", re.MULTILINE)
"""As `cat -n`, Claude Code and others number the lines of a file."""


def first_text(arguments: Mapping[str, Any], keys: Iterable[str]) -> str | None:
    """The value of the first of the keys that holds text."""
    return next((arguments[key] for key in keys if isinstance(arguments.get(key), str)), None)
