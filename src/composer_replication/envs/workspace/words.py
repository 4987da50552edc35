"""What real harnesses say when a call fails, and the kind of each failure in sites/taxonomy.py."""

from __future__ import annotations

from dataclasses import dataclass

from composer_replication.envs.workspace.files import Refusal

MAX_TEXT, MAX_PATH = 30_000, 300
EMPTY = "<system-reminder>Warning: the file exists but the contents are empty.</system-reminder>"
SHORTER = (
    "<system-reminder>Warning: the file exists but is shorter than the provided offset ({offset}). "
    "The file has {lines} lines.</system-reminder>"
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came back. `kind` is the failure's name in the taxonomy, where the failure is the model's doing."""

    text: str
    failed: bool = False
    kind: str | None = None


def thrown(kind: str | None, text: str) -> Outcome:
    """What the tool or the system under it said; the harness passes it on."""
    return Outcome(text=text[:MAX_TEXT], failed=True, kind=kind)


def refused(kind: str, text: str) -> Outcome:
    """What the harness itself says before it runs a call: in tags, as the model sees it and as logs have it."""
    return Outcome(text=f"<tool_use_error>{text[:MAX_TEXT]}</tool_use_error>", failed=True, kind=kind)


def unknown_tool(name: str) -> Outcome:
    return refused("tool_not_found", f"Error: No such tool available: {name}")


def invalid_arguments(tool: str, issues: list[str]) -> Outcome:
    noun = "issue" if len(issues) == 1 else "issues"
    return refused(
        "input_validation", "\n".join([f"InputValidationError: {tool} failed due to the following {noun}:", *issues])
    )


def not_an_object(tool: str) -> Outcome:
    return refused(
        "input_validation", f"InputValidationError: {tool} failed to parse: the arguments are not valid JSON"
    )


def file_not_found(suggestion: str | None) -> Outcome:
    text = "File does not exist." + (f" Did you mean {suggestion}?" if suggestion else "")
    return refused("file_not_found", text)


def folder_not_found(path: str) -> Outcome:
    return refused("file_not_found", f"Directory does not exist: {path[:MAX_PATH]}")


def path_not_found(path: str) -> Outcome:
    return refused("file_not_found", f"Path does not exist: {path[:MAX_PATH]}")


def is_directory(doing: str, path: str = "") -> Outcome:
    return refused(
        "is_directory", f"EISDIR: illegal operation on a directory, {doing}" + (f" '{path}'" if path else "")
    )


def too_large(tokens: int) -> Outcome:
    return thrown(
        "output_too_large",
        f"File content ({tokens} tokens) exceeds maximum allowed tokens (25000). Please use offset and limit "
        "parameters to read specific portions of the file, or use the GrepTool to search for specific content.",
    )


def outside(path: str) -> Outcome:
    return thrown(None, f"Claude requested permissions to write to {path[:MAX_PATH]}, but you haven't granted it yet.")


def invalid_glob(pattern: str) -> Outcome:
    return refused("input_validation", f"Invalid glob pattern: {pattern[:200]}")


def invalid_regex(reason: str) -> Outcome:
    return refused("input_validation", reason)


def search_timed_out() -> Outcome:
    return thrown(
        None,
        "Ripgrep search timed out after 20 seconds. The search may have matched files but did not complete in time. "
        "Try searching a more specific path or pattern.",
    )


def cannot_write(refusal: Refusal, path: str) -> Outcome:
    """What the operating system says, through the harness."""
    if refusal == "null":
        shown_path = path.replace("\0", "\\x00")
        return thrown(
            "input_validation",
            f"The argument 'path' must be a string, Uint8Array, or URL without null bytes. Received '{shown_path}'",
        )
    messages = {
        "too long": "ENAMETOOLONG: name too long, open",
        "not a folder": "ENOTDIR: not a directory, open",
        "no space": "ENOSPC: no space left on device, write",
    }
    return thrown(None, f"{messages[refusal]} '{path}'")


def edit_noop() -> Outcome:
    return refused("edit_noop", "No changes to make: old_string and new_string are exactly the same.")


def edit_not_read() -> Outcome:
    return refused("edit_not_read", "File has not been read yet. Read it first before writing to it.")


def edit_stale() -> Outcome:
    return refused(
        "edit_stale",
        "File has been modified since read, either by the user or by a linter. "
        "Read it again before attempting to write it.",
    )


def edit_no_match(old: str) -> Outcome:
    return refused("edit_no_match", f"String to replace not found in file.\nString: {old}")


def edit_ambiguous(count: int, old: str) -> Outcome:
    return refused(
        "edit_ambiguous",
        f"Found {count} matches of the string to replace, but replace_all is false. To replace all occurrences, set "
        "replace_all to true. To replace only one occurrence, please provide more context to uniquely identify the "
        f"instance.\nString: {old}",
    )


def exists_already() -> Outcome:
    return refused("input_validation", "Cannot create new file - file already exists.")
