"""What real harnesses say when a call fails, and the kind of each failure in sites/taxonomy.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came back. `kind` is the failure's name in the taxonomy, where the failure is the model's doing."""

    text: str
    failed: bool = False
    kind: str | None = None


def failure(kind: str | None, text: str) -> Outcome:
    return Outcome(text=text, failed=True, kind=kind)


def unknown_tool(name: str) -> Outcome:
    return failure("tool_not_found", f"Error: No such tool available: {name}")


def invalid_arguments(tool: str, issues: list[str]) -> Outcome:
    noun = "issue" if len(issues) == 1 else "issues"
    return failure(
        "input_validation", "\n".join([f"InputValidationError: {tool} failed due to the following {noun}:", *issues])
    )


def not_an_object(tool: str) -> Outcome:
    return failure(
        "input_validation", f"InputValidationError: {tool} failed to parse: the arguments are not valid JSON"
    )


def file_not_found(suggestion: str | None) -> Outcome:
    text = "File does not exist." + (f" Did you mean {suggestion}?" if suggestion else "")
    return failure("file_not_found", text)


def folder_not_found(path: str) -> Outcome:
    return failure("file_not_found", f"Directory does not exist: {path}")


def path_not_found(path: str) -> Outcome:
    return failure("file_not_found", f"Path does not exist: {path}")


def is_directory() -> Outcome:
    return failure("is_directory", "EISDIR: illegal operation on a directory, read")


def outside(path: str) -> Outcome:
    return failure(None, f"Permission to write to {path} has been denied.")


def edit_noop() -> Outcome:
    return failure("edit_noop", "No changes to make: old_string and new_string are exactly the same.")


def edit_not_read() -> Outcome:
    return failure("edit_not_read", "File has not been read yet. Read it first before writing to it.")


def edit_stale() -> Outcome:
    return failure(
        "edit_stale",
        "File has been modified since read, either by the user or by a linter. "
        "Read it again before attempting to write it.",
    )


def edit_no_match(old: str) -> Outcome:
    return failure("edit_no_match", f"String to replace not found in file.\nString: {old}")


def edit_ambiguous(count: int, old: str) -> Outcome:
    return failure(
        "edit_ambiguous",
        f"Found {count} matches of the string to replace, but replace_all is false. To replace all occurrences, set "
        "replace_all to true. To replace only one occurrence, please provide more context to uniquely identify the "
        f"instance.\nString: {old}",
    )


def exists_already() -> Outcome:
    return failure("input_validation", "Cannot create new file - file already exists.")
