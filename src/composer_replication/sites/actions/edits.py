"""Parse edits into operations on files, and compute the resulting files.

`edit_operations` parses an editing call from any agent: a replacement, a whole file, an insertion or a patch.
`compute_changes` applies operations to known files. Two edits with the same result count as the same action, whichever
tool was used.

A patch may be a unified diff or in Codex's `*** Begin Patch` format. A patch that does not match the text exactly is
not applied, since tools handle such patches differently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from composer_replication.sites.actions.shell_parser import single_command
from composer_replication.sites.actions.tools import (
    NEW_TEXT_KEYS,
    OLD_TEXT_KEYS,
    PATH_KEYS,
    REPLACE_ALL_KEYS,
    command_parameter,
    is_descriptive_parameter,
    normal_path,
    plain_name,
    word_set,
)
from composer_replication.types import ToolCall

FileChanges = dict[str, str | None]
"""Path -> full text of the file, or None for a removed file."""


@dataclass(frozen=True, slots=True)
class Replace:
    """An edit that replaces a text, which must occur exactly once unless `everywhere` is set."""

    path: str
    old: str
    new: str
    everywhere: bool = False

    def apply(self, files: Mapping[str, str]) -> FileChanges | None:
        """Return the changed file, or None if the file is unknown or a tool would reject the edit."""
        text = files.get(self.path)
        if text is None or not self.old or self.old == self.new:
            return None
        count = text.count(self.old)
        if count == 0 or (count > 1 and not self.everywhere):
            return None
        return {self.path: text.replace(self.old, self.new)}


@dataclass(frozen=True, slots=True)
class Put:
    """An edit that writes a whole file. If `is_new` is set, the file must not exist yet."""

    path: str
    text: str
    is_new: bool = False

    def apply(self, files: Mapping[str, str]) -> FileChanges | None:
        """Return the written file, or None if it was supposed to be new but exists."""
        return None if self.is_new and self.path in files else {self.path: self.text}


# The class names are part of action keys (see `equality`), so they must not change.
@dataclass(frozen=True, slots=True)
class Insert:
    """An edit that inserts lines after line number `line`, where 0 means the beginning of the file."""

    path: str
    line: int
    text: str

    def apply(self, files: Mapping[str, str]) -> FileChanges | None:
        """Return the changed file, or None if the file is unknown or has too few lines."""
        text = files.get(self.path)
        lines = text.split("\n") if text is not None else []
        if text is None or not 0 <= self.line <= len(lines):
            return None
        return {
            self.path: "\n".join([*lines[: self.line], *self.text.removesuffix("\n").split("\n"), *lines[self.line :]])
        }


@dataclass
class _Hunk:
    """One hunk of a patch, which replaces the lines `old` with the lines `new`.

    `at` is the line number in a unified diff, and `header` is the text after `@@` in Codex's format.
    """

    old: list[str] = field(default_factory=list[str])
    new: list[str] = field(default_factory=list[str])
    header: str = ""  # a line above the hunk
    at: int | None = None
    ends_file: bool = False  # the end of the file is tried first

    def add(self, line: str) -> bool:
        """Add a line of the patch. Return False if the line does not belong to a hunk."""
        mark, text = line[:1], line[1:]
        # An empty line is an empty context line whose leading blank an editor has removed.
        if mark not in ("", " ", "-", "+"):
            return False
        if mark in ("", " ", "-"):
            self.old.append(text)
        if mark in ("", " ", "+"):
            self.new.append(text)
        return True


@dataclass
class FilePatch:
    """The changes to one file in a patch. `kind` is update, add or delete; for a move, `target` differs from `path`."""

    kind: str
    path: str
    target: str
    hunks: list[_Hunk] = field(default_factory=list[_Hunk])

    def apply(self, files: Mapping[str, str]) -> dict[str, str | None] | None:
        """Return the changed files by path, with None for a removed file.

        Return None instead of a dictionary if the patch does not apply to the known files.
        """
        if self.kind == "add":
            if self.path in files:
                return None
            return {self.path: "".join(f"{line}\n" for hunk in self.hunks for line in hunk.new)}
        text = files.get(self.path)
        if text is None:
            return {self.path: None} if self.kind == "delete" else None
        if self.kind == "delete":
            return {self.path: None}
        changed = _apply_hunks(text, self.hunks)
        if changed is None or (self.target != self.path and self.target in files):
            return None
        removed_file: dict[str, str | None] = {self.path: None} if self.target != self.path else {}
        return removed_file | {self.target: changed}


Operation = Replace | Put | Insert | FilePatch
_CONTENT_KEYS = ("content", "contents", "file_text", "text")
_PATCH_KEYS = ("input", "patch", "patchText", "diff")
_EDITORS = word_set("edit replace str_replace replace_string_in_file search_replace edit_file string_replace")
_WRITERS = word_set("write write_file create_file write_to_file create")
_COMMAND_EDITORS = word_set("str_replace_editor str_replace_based_edit_tool edit_anthropic")
_PATCH_CALL_OPTIONS = ("workdir", "timeout", "timeout_ms", "login")
_PATCH_TOOLS = word_set("apply_patch applypatch patch")


def edit_operations(call: ToolCall, cwd: str | None) -> list[Operation] | None:
    """Return the operations of an edit, or None for any other call and for an edit that is only partly understood."""
    if call.raw_arguments is not None:
        return None
    arguments = {name: value for name, value in call.arguments.items() if value is not None}
    arguments = {name: value for name, value in arguments.items() if not is_descriptive_parameter(call.name, name)}
    base = normal_path(arguments["workdir"], cwd) if isinstance(arguments.get("workdir"), str) else cwd
    operations = _operations(plain_name(call.name), call, arguments)
    return None if operations is None else [_normalize_paths(operation, base) for operation in operations]


def compute_changes(operations: list[Operation], files: Mapping[str, str]) -> FileChanges | None:
    """Return the changed files after all operations, or None if one of the operations cannot be applied."""
    if len(operations) == 1:  # no need to copy the files
        return operations[0].apply(files)
    current_files, changes = dict(files), FileChanges()
    for operation in operations:
        operation_changes = operation.apply(current_files)
        if operation_changes is None:
            return None
        changes |= operation_changes
        apply_changes(current_files, operation_changes)
    return changes


def apply_changes(files: dict[str, str], changes: FileChanges) -> None:
    """Apply the changes to `files` in place."""
    for path, text in changes.items():
        if text is None:
            files.pop(path, None)
        else:
            files[path] = text


def _operations(tool: str, call: ToolCall, arguments: dict[str, Any]) -> list[Operation] | None:
    # The checks on the number of arguments reject calls with parameters whose effect is unknown.
    if tool in _COMMAND_EDITORS:
        return _command_edits(arguments)
    if tool in _EDITORS:
        return _list_edits(arguments) if "edits" in arguments else _replace_edit(arguments)
    if tool == "multiedit":
        return _list_edits(arguments)
    if tool in _WRITERS:
        path, text = _only_text(arguments, PATH_KEYS), _only_text(arguments, _CONTENT_KEYS)
        is_new = tool.startswith("create")
        return [Put(path, text, is_new)] if path and text is not None and len(arguments) == 2 else None
    if tool in _PATCH_TOOLS:
        patch = _only_text(arguments, _PATCH_KEYS)
        return _patch_operations(patch) if patch is not None and len(arguments) == 1 else None
    return _shell_patch(call, arguments)


def _command_edits(arguments: dict[str, Any]) -> list[Operation] | None:
    """Return the operations of the editor tool in Claude's API, whose `command` parameter selects the operation."""
    command, path = arguments.get("command"), _only_text(arguments, PATH_KEYS)
    if path is None:
        return None
    if command == "create" and isinstance(arguments.get("file_text"), str) and len(arguments) == 3:
        return [Put(path, arguments["file_text"], is_new=True)]
    if command == "str_replace":
        rest = {name: value for name, value in arguments.items() if name != "command"}
        return _replace_edit({"new_str": "", **rest})  # without new_str, the text is deleted
    line, text = arguments.get("insert_line"), _only_text(arguments, ("new_str", "insert_text"))
    if command == "insert" and type(line) is int and text is not None and len(arguments) == 4:
        return [Insert(path, line, text)]
    return None


def _replace_edit(arguments: dict[str, Any]) -> list[Operation] | None:
    """Return a replacement, or None if a parameter is missing or unknown."""
    path, old, new = (
        _only_text(arguments, PATH_KEYS),
        _only_text(arguments, OLD_TEXT_KEYS),
        _only_text(arguments, NEW_TEXT_KEYS),
    )
    unexpected = arguments.keys() - {*PATH_KEYS, *OLD_TEXT_KEYS, *NEW_TEXT_KEYS, *REPLACE_ALL_KEYS}
    everywhere = next((arguments[name] for name in REPLACE_ALL_KEYS if name in arguments), False)
    if path is None or old is None or new is None or unexpected or not isinstance(everywhere, bool):
        return None
    return [Replace(path, old, new, everywhere)]


def _list_edits(arguments: dict[str, Any]) -> list[Operation] | None:
    """Return the operations of a call such as `MultiEdit`, with a list of replacements in one file."""
    path, edits = _only_text(arguments, PATH_KEYS), arguments.get("edits")
    if path is None or not isinstance(edits, list) or arguments.keys() - {*PATH_KEYS, "edits"}:
        return None
    operations: list[Operation] = []
    for edit in cast("list[object]", edits):
        replacement = _replace_edit({**cast("dict[str, Any]", edit), "path": path}) if isinstance(edit, dict) else None
        if replacement is None:
            return None
        operations += replacement
    return operations or None


def _shell_patch(call: ToolCall, arguments: dict[str, Any]) -> list[Operation] | None:
    """Return the operations of a shell call to `apply_patch`, with the patch as an argument or on standard input."""
    key = command_parameter(call.name, arguments)
    command = arguments.get(key) if key is not None and not arguments.keys() - {key, *_PATCH_CALL_OPTIONS} else None
    if isinstance(command, list):
        words = cast("list[object]", command)
        is_patch = len(words) == 2 and words[0] in ("apply_patch", "applypatch") and isinstance(words[1], str)
        return _patch_operations(cast("str", words[1])) if is_patch else None
    # "apply_patch <<'EOF'" and " applypatch '…'"; not "git apply x.patch"
    if not isinstance(command, str) or not re.match(r"\s*apply_?patch\b", command):
        return None
    simple = single_command(command)
    if simple is None:
        return None
    texts = [word.literal for word in simple.words[1:]]
    texts += [redirect.target.literal if redirect.op == "<<" else None for redirect in simple.redirects]
    return _patch_operations(texts[0]) if len(texts) == 1 and texts[0] is not None else None


def _patch_operations(text: str) -> list[Operation] | None:
    patches = _read_patch(text)
    return None if patches is None else [*patches]


def _only_text(arguments: dict[str, Any], names: tuple[str, ...]) -> str | None:
    """Return the argument with one of these names, or None unless exactly one is present and it is a string."""
    present = [arguments[name] for name in names if name in arguments]
    return present[0] if len(present) == 1 and isinstance(present[0], str) else None


def _normalize_paths(operation: Operation, cwd: str | None) -> Operation:
    """Return the operation with its paths normalized."""
    path = normal_path(operation.path, cwd)
    if isinstance(operation, FilePatch):
        return replace(operation, path=path, target=normal_path(operation.target, cwd))
    return replace(operation, path=path)


_BEGIN, _END = "*** Begin Patch", "*** End Patch"
_END_OF_FILE = "*** End of File"
# "*** Update File: src/a.py" -> ("Update", "src/a.py")
_CODEX_SECTION = re.compile(r"\*\*\* (Update|Add|Delete) File: (.+)")
_MOVE = "*** Move to: "
# "@@ -12,3 +12,4 @@ def f():" -> ("12", "3", "12", "4"), "@@ -1 +1 @@" -> ("1", None, "1", None)
_UNIFIED_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_MAX_COMPARED_LINES = 20_000_000  # a patch of 1,000 lines against a file of 20,000 lines
_NO_NEWLINE = "\\ No newline at end of file"


def _read_patch(text: str) -> list[FilePatch] | None:
    """Return the changes in a patch of either format, or None for any other text."""
    stripped = text.strip("\n")
    if stripped.lstrip().startswith(_BEGIN):
        return _read_codex(stripped.strip().split("\n"))
    return _read_unified(stripped.split("\n"))


def _read_codex(lines: list[str]) -> list[FilePatch] | None:
    """Parse a patch in Codex's format. Return None if a line does not belong there."""
    if lines[0].strip() != _BEGIN or lines[-1].strip() != _END:
        return None
    patches: list[FilePatch] = []
    for line in lines[1:-1]:
        section = _CODEX_SECTION.fullmatch(line.rstrip())
        if section:
            path = section[2].strip()
            patches.append(FilePatch(section[1].lower(), path, path))
        elif not patches or not _add_patch_line(patches[-1], line):
            return None
    return patches or None


def _add_patch_line(patch: FilePatch, line: str) -> bool:
    """Add a line from a file's section to its patch. Return False if the line does not belong there."""
    if patch.kind == "delete":
        return False
    if patch.kind == "add":
        patch.hunks = patch.hunks or [_Hunk()]
        patch.hunks[0].new.append(line[1:])
        return line.startswith("+")
    if line.startswith(_MOVE) and not patch.hunks:
        patch.target = line[len(_MOVE) :].strip()
        return True
    if line.startswith("@@"):
        if patch.hunks and not (patch.hunks[-1].old or patch.hunks[-1].new):
            return False  # several headers in a row (class, then method) are not supported
        patch.hunks.append(_Hunk(header=line[2:].strip()))
        return True
    if line.strip() == _END_OF_FILE and patch.hunks:
        patch.hunks[-1].ends_file = True
        return True
    if line.startswith("*** "):
        return False
    patch.hunks = patch.hunks or [_Hunk()]
    return patch.hunks[-1].add(line)


def _read_unified(lines: list[str]) -> list[FilePatch] | None:
    """Parse a unified diff. Return None if it contains lines other than headers and hunks."""
    patches: list[FilePatch] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith("--- ") and at + 1 < len(lines) and lines[at + 1].startswith("+++ "):
            patch = _unified_file(line[4:], lines[at + 1][4:])
            if patch is None:
                return None
            patches.append(patch)
            at += 2
        elif (head := _UNIFIED_HUNK.match(line)) and patches:
            end = _read_hunk(lines, at + 1, head, patches[-1])
            if end is None:
                return None
            at = end
        elif line.startswith(("diff --git ", "index ", "new file mode ", "deleted file mode ")) or not line.strip():
            at += 1
        else:
            return None
    return patches if patches and all(patch.hunks for patch in patches) else None


def _unified_file(old: str, new: str) -> FilePatch | None:
    """Return the patch for one file, given the names after `---` and `+++`, or None for a rename."""
    old, new = (name.split("\t")[0].strip() for name in (old, new))
    # git writes "a/src/x.py" and "b/src/x.py"; other tools write the plain path.
    if old.startswith("a/") and new.startswith("b/"):
        old, new = old[2:], new[2:]
    elif old == "/dev/null":
        new = new.removeprefix("b/")
        return FilePatch("add", new, new)
    elif new == "/dev/null":
        old = old.removeprefix("a/")
        return FilePatch("delete", old, old)
    return FilePatch("update", old, new) if old == new else None


def _read_hunk(lines: list[str], at: int, head: re.Match[str], patch: FilePatch) -> int | None:
    """Read a hunk whose header states how many lines it has.

    Return the position after it, or None if the counts are wrong.
    """
    num_old, num_new = int(head[2] or 1), int(head[4] or 1)
    hunk = _Hunk(at=int(head[1]))
    while len(hunk.old) < num_old or len(hunk.new) < num_new:
        if at >= len(lines) or not hunk.add(lines[at]):
            return None
        at += 1
    # A file without a final newline is not supported: `_apply_hunks` always ends the text with one.
    if len(hunk.old) != num_old or len(hunk.new) != num_new or (at < len(lines) and lines[at] == _NO_NEWLINE):
        return None
    patch.hunks.append(hunk)
    return at


def _apply_hunks(text: str, hunks: list[_Hunk]) -> str | None:
    """Return the text after applying all hunks in order, or None if a hunk does not apply."""
    lines = text.removesuffix("\n").split("\n")
    result: list[str] = []
    cursor = 0
    for hunk in hunks:
        start = _hunk_start(hunk, lines, cursor)
        if start is None:
            return None
        result += [*lines[cursor:start], *hunk.new]
        cursor = start + len(hunk.old)  # hunks are in file order
    return "\n".join([*result, *lines[cursor:]]) + "\n"


def _hunk_start(hunk: _Hunk, lines: list[str], cursor: int) -> int | None:
    """Return the index of the line where a hunk applies, or None if there is no such line or it is ambiguous.

    A unified diff applies at its line number, or else at the only place that matches. A Codex hunk applies at the first
    match after its header.
    """
    if hunk.at is not None:
        # The line number (1-based) is that of the first old line, or of the line before if the hunk only adds lines.
        start = hunk.at - 1 if hunk.old else hunk.at
        if start >= cursor and lines[start : start + len(hunk.old)] == hunk.old and start <= len(lines):
            return start
        starts = _match_starts(hunk.old, lines, cursor) if hunk.old else []
        return starts[0] if len(starts) == 1 else None
    if hunk.header:
        header_index = next((index for index in range(cursor, len(lines)) if lines[index].strip() == hunk.header), None)
        if header_index is None:
            return None
        cursor = header_index + 1
    if not hunk.old:
        return len(lines) if not hunk.header else None
    last = len(lines) - len(hunk.old)
    if hunk.ends_file and last >= cursor and lines[last:] == hunk.old:
        return last
    starts = _match_starts(hunk.old, lines, cursor)
    return starts[0] if starts else None


def _match_starts(old_lines: list[str], lines: list[str], cursor: int) -> list[int]:
    """Return the indices, at or after `cursor`, at which `old_lines` occur in `lines`.

    The search stops after two matches, which already make the hunk ambiguous, and is skipped for very long texts.
    """
    starts: list[int] = []
    if len(old_lines) * len(lines) > _MAX_COMPARED_LINES:
        return starts
    for start in range(cursor, len(lines) - len(old_lines) + 1):
        if lines[start] == old_lines[0] and lines[start : start + len(old_lines)] == old_lines:
            starts.append(start)
            if len(starts) > 1:
                break
    return starts
