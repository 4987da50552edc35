"""Track what a session has shown up to a turn: tools and programs that worked, files, paths, failed attempts.

The caller adds messages and calls in the order of the session, and queries the state in between:

    state = SessionState("/repo")
    state.add_message("Fix the bug in a.py, please.")
    state.add(call, result.text, failed=False)
    state.has_shown("src/a.py")

The state is used to decide whether a failure is the model's, to limit hints to what the model could know, and to
compute the result of an edit when actions are compared. Each kind of query has its own tracker. Trackers are lazy: they
process new events only when queried, since most sessions never query some of them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from composer_replication.sites.actions.edits import apply_changes, compute_changes, edit_operations
from composer_replication.sites.actions.file_contents import FileTexts
from composer_replication.sites.actions.known_paths import (
    CHANGED_NOTE,
    KnownPaths,
    ShellFolder,
    file_printed_by_cat,
    file_shown_by_tool,
)
from composer_replication.sites.actions.shell_command import Command, is_read_only_command, leaves_sources_unchanged
from composer_replication.sites.actions.shell_equality import folder_after
from composer_replication.sites.actions.shell_lexer import UnsupportedShellSyntax
from composer_replication.sites.actions.shell_parser import nested_script, parse_script
from composer_replication.sites.actions.tools import (
    command_parameter,
    command_text,
    is_descriptive_parameter,
    is_edit,
    is_read_only_tool_call,
    normal_path,
    path_argument,
    plain_name,
    tool_channel,
    word_set,
)
from composer_replication.types import ToolCall

# Long enough for any file or listing in a session. The rest of a longer text, such as a full disk listing, is ignored.
_MAX_TEXT = 400_000
_SEARCH_TOOLS = ("glob", "ls", "list_directory", "find_file", "list_dir", "list_files", "grep")
_BUILD_PROGRAMS = word_set(
    "make cmake gmake ninja gcc g++ clang cargo go javac tsc webpack vite mvn gradle gradlew dotnet bazel npm yarn pnpm"
)
_FOLDER_CHANGERS = frozenset({"cd", "pushd", "popd"})
_NO_MATCHES = ("No files found", "No matches found")
# "cat a.py 2>/dev/null", "cat a.py || true" and "cat a.py | head" succeed even if the file does not exist
_HIDES_ERRORS = re.compile(r"2>\s*/dev/null|\|\||[;|]")
# The text that separates a path from what precedes it: "(see src/" -> "(", " "
_PATH_DELIMITER = re.compile(r"[\s'\"`()<>:,;=]")
_MAX_PREFIX = 200
_REMOVE_COMMANDS = frozenset({("rm", ""), ("mv", ""), ("rmdir", ""), ("unlink", ""), ("git", "rm"), ("git", "mv")})


class _Event(NamedTuple):
    """A call with its result, or a message that was not written by the model (`call` is None)."""

    call: ToolCall | None
    text: str
    failed: bool
    kind: str = ""


class SessionState:
    """What a session has shown so far.

    `tools` maps the tools that have succeeded to the parameters of their calls. `read` maps the path in a call to the
    file as the tool showed it. `files` maps the normalized path to the whole file.
    """

    def __init__(self, cwd: str | None = None) -> None:
        self.tools: dict[str, set[str]] = {}
        self.read: dict[str, str] = {}
        self.reader: str | None = None
        self.commands: list[str] = []  # successful commands only
        self._events: list[_Event] = []
        self._cwd = cwd
        self._touched: set[str] = set()  # files that were read, written or edited, by normalized path
        self._failed_paths: set[str] = set()  # files on which a call failed, by normalized path
        self._shell, self._files = _ShellHistory(cwd), _WholeFiles(cwd)
        self._texts, self._known_paths = FileTexts(cwd, ShellFolder(cwd)), KnownPaths(cwd, ShellFolder(cwd))
        self._attempts = _Attempts()
        self._num_processed: dict[str, int] = {}  # tracker -> how many events it has processed

    def add_message(self, text: str) -> None:
        """Add a message from anyone except the model."""
        self._events.append(_Event(None, text, failed=False))

    def add(self, call: ToolCall, text: str, *, failed: bool, kind: str = "") -> None:
        """Add a call and its result. `kind` is the kind of failure, if it has been classified."""
        self._events.append(_Event(call, text, failed, kind))
        channel, path = tool_channel(call.name), path_argument(call.arguments)
        if failed:
            self._failed_paths |= {normal_path(path, self._cwd)} if path and channel == "file" else set()
            return
        self.tools.setdefault(call.name, set()).update(call.arguments)
        if channel == "shell":
            self.commands.append(command_text(call.name, call.arguments))
        elif channel == "file" and plain_name(call.name) not in _SEARCH_TOOLS:
            self._touched |= {normal_path(path, self._cwd)} if path else set()
            if path and is_edit(call.name) and call.arguments.get("command") != "view":
                self.read.pop(path, None)  # its current content was not shown
            elif path:
                self.reader = self.reader or call.name
                self.read[path] = text[:_MAX_TEXT]

    @property
    def programs(self) -> set[str]:
        """The programs that were run by successful commands."""
        return self._updated_shell().programs

    @property
    def build_failed(self) -> bool:
        """Whether the last build failed."""
        return self._updated_shell().build_failed

    def has_shown(self, path: str) -> bool:
        """Return whether a text has shown this path, or a longer path ending in it, since the path was last removed."""
        return self._updated_shell().has_shown(path)

    def has_shown_text(self, path: str, text: str) -> bool:
        """Return whether the file contains this text, as far as the session has shown or written the file."""
        file_text = self.texts.get(path)
        return file_text is not None and file_text.count(text) > 0

    @property
    def texts(self) -> FileTexts:
        """The content of files as far as it was shown, and the files that the agent counts as read."""
        for call, text, failed, _ in self._unprocessed_events("texts"):
            if call is None:
                self._texts.add_message(text)
            elif failed:
                self._texts.add_failed_call(call, text)
            else:
                self._texts.add_call(call, text)
        return self._texts

    @property
    def paths(self) -> KnownPaths:
        """Paths that exist, paths that do not, and the shell's folder."""
        for call, text, failed, _ in self._unprocessed_events("paths"):
            if call is None:
                self._known_paths.add_message(text)
            else:
                self._known_paths.add_call(call, text, failed=failed)
        return self._known_paths

    @property
    def attempts(self) -> _Attempts:
        """The calls that have failed, and whether anything has changed since."""
        for call, text, failed, kind in self._unprocessed_events("attempts"):
            if call is None:
                self._attempts.add_message(text)
            else:
                self._attempts.add_call(call, text, kind, failed=failed)
        return self._attempts

    def has_touched(self, path: str) -> bool:
        """Return whether a tool has read, written or edited this file, however its path was spelled."""
        return normal_path(path, self._cwd) in self._touched

    def has_failed_on(self, path: str) -> bool:
        """Return whether a call to a file tool has failed on this path."""
        return normal_path(path, self._cwd) in self._failed_paths

    def was_shown_from_other_folder(self, path: str) -> bool:
        """Return whether a relative path was shown, but never relative to the shell's current folder."""
        return self._updated_shell().was_shown_from_other_folder(path)

    @property
    def files(self) -> dict[str, str]:
        """The files that were shown in full, updated by later edits."""
        return self._updated_files().files

    @property
    def may_have_left_cwd(self) -> bool:
        """Whether the shell may be in a folder other than the session's."""
        files = self._updated_files()
        return files.folder != files.cwd

    def appeared_in_command(self, path: str) -> bool:
        """Return whether a shell command contains the path or its name, which does not count as reading the file."""
        return any(path in command or path.rpartition("/")[2] in command for command in self.commands)

    def _unprocessed_events(self, name: str) -> list[_Event]:
        """Return the events that the named tracker has not processed yet, and mark them as processed."""
        start, self._num_processed[name] = self._num_processed.get(name, 0), len(self._events)
        return self._events[start:]

    def _updated_shell(self) -> _ShellHistory:
        for event in self._unprocessed_events("shell"):
            self._shell.add(event)
        return self._shell

    def _updated_files(self) -> _WholeFiles:
        for call, text, failed, _ in self._unprocessed_events("files"):
            if call is None:
                self._files.add_message(text)
            elif not failed:
                self._files.add_call(call, text)
        return self._files


class _ShellHistory:
    """The effects of commands: programs, builds, removed paths. Texts are stored, and searched for a path on demand."""

    def __init__(self, cwd: str | None) -> None:
        self.programs: set[str] = set()
        self.build_failed = False
        self._shell_folder = ShellFolder(cwd)
        self._cwd = self._shell_folder.path
        self._texts: list[str] = []
        self._folders: list[str | None] = []  # the shell's folder for each text
        self._messages: list[str] = []  # the texts that are not call results
        self._removed: dict[str, int] = {}  # removed path -> the number of texts when it was removed

    def add(self, event: _Event) -> None:
        """Add a message, or a call with its result."""
        call, text, failed, _ = event
        if call is None:
            self._add_text(text, self._cwd)  # people give paths relative to the session's folder
            self._messages.append(text)
            return
        command = Command.of(command_text(call.name, call.arguments))
        programs = command.programs
        if any(name in _BUILD_PROGRAMS for name, _ in programs):
            self.build_failed = failed
        if failed:  # a failed command leaves the shell in its folder
            return
        folder_before = self.folder
        if any(name in _FOLDER_CHANGERS for name, _ in programs):
            self._shell_folder.update(command.text, text, failed=False)
        path = path_argument(call.arguments)
        if tool_channel(call.name) == "file" and path and not text.startswith(_NO_MATCHES):
            self._add_text(path, self.folder)
        self.programs.update(name for name, _ in programs)
        if any(pair in _REMOVE_COMMANDS or (pair[0], "") in _REMOVE_COMMANDS for pair in programs):
            # Every word in the command counts as removed: `rm -r src docs`.
            self._removed |= dict.fromkeys(command.words, len(self._texts))
        elif command.is_display_only and not _HIDES_ERRORS.search(command.text):
            self._add_text(command.text, folder_before)
        self._add_text(text, self.folder)

    @property
    def folder(self) -> str | None:
        """The shell's folder, or None if it cannot be determined."""
        return self._shell_folder.path

    def _add_text(self, text: str, folder: str | None) -> None:
        self._texts.append(text)
        self._folders.append(folder)

    def was_shown_from_other_folder(self, path: str) -> bool:
        """Return whether a relative path was shown only in other folders, or only at the end of longer paths."""
        if self.folder is None or not self.has_shown(path):
            return False
        texts = zip(self._texts, self._folders, strict=True)
        from_here = f"{self.folder}/{path}"
        return not any(
            _is_mentioned_in(from_here, text)
            or (folder in (None, self.folder) and _is_mentioned_in(path, text, alone=True))
            for text, folder in texts
        )

    def has_shown(self, path: str) -> bool:
        """Return whether a text has shown this path since the path was last removed."""
        name = path.removeprefix("./").rstrip("/")
        # Texts shown before the path, or its name, was removed do not count.
        since = max(self._removed.get(path, 0), self._removed.get(name.rpartition("/")[2], 0))
        if any(_is_mentioned_in(name, text[:_MAX_TEXT]) for text in self._texts[since:]):
            return True
        path_in_cwd = name.removeprefix(f"{self._cwd}/")  # the same path, relative to the session's folder
        if self._cwd is None or path_in_cwd == name or since:
            return False
        # A bare file name in output may belong to any folder. If a person writes it, it means the file in this folder.
        texts = self._texts if "/" in path_in_cwd else self._messages
        return any(_is_mentioned_in(path_in_cwd, text[:_MAX_TEXT], cwd=self._cwd) for text in texts)


def _is_mentioned_in(path: str, text: str, *, alone: bool = False, cwd: str | None = None) -> bool:
    """Return whether the text contains this path, or a path inside it, which proves that the folder exists.

    Args:
        alone: Whether to reject any match at the end of a longer path.
        cwd: The session's folder. If it is given, a match at the end of a longer path is rejected if that path leads
            to a different folder in the project.
    """
    position = text.find(path) if path else -1
    while position >= 0:
        end = position + len(path)
        # "a.py" is not in "data.py" or "a.pyc". A period after the name ends the sentence.
        before, after = text[position - 1 : position], text[end : end + 1]
        is_part_of_longer_name = (
            after.isalnum() or after in ("_", "-") or (after == "." and text[end + 1 : end + 2].isalnum())
        )
        if not (before.isalnum() or before in ("_", "-") or is_part_of_longer_name):
            prefix = _PATH_DELIMITER.split(text[max(0, position - _MAX_PREFIX) : position])[-1] if before == "/" else ""
            if prefix in ("", "./") or not (alone or (cwd and _is_path_to_other_folder(prefix, cwd))):
                return True
        position = text.find(path, position + 1)
    return False


def _is_path_to_other_folder(prefix: str, cwd: str) -> bool:
    """Return whether the text before a path leads to a different folder in the project.

    For absolute paths, parent folders and the `a/` and `b/` of a diff, the answer is False.
    """
    prefix = prefix.removeprefix(f"{cwd}/").removeprefix("./")
    if not prefix or prefix in ("a/", "b/") or f"/{cwd}/".endswith(f"/{prefix}"):
        return False  # "a/" and "b/" in a diff, or a parent folder
    return not prefix.startswith("/") and "." not in prefix.partition("/")[0]


# "zsh: command not found: rg" -> "rg", "bash: rg: command not found" -> "rg"
_COMMAND_NOT_FOUND = re.compile(r"command not found: ([\w.+-]+)|(?:^|[\s:])([\w.+-]+): command not found(?!:)")
# "Agent type 'fixer' not found" and "Unknown skill: deploy"
_UNKNOWN_NAME = re.compile(r"Agent type '[^']{1,200}' not found|Unknown skill|is not a prompt-based skill")
# "Available agents: Bash, reviewer" -> "Bash, reviewer"
_AVAILABLE_AGENTS = re.compile(r"Available agents: ([^\n<]{1,4000})")
_NAME_PARAMETERS = {"task": "subagent_type", "agent": "subagent_type", "skill": "skill"}
_MAX_HEAD, _MAX_ERROR_TEXT = 2000, 10_000


def requested_agent_or_skill(call: ToolCall) -> tuple[str, str] | None:
    """Return the tool and the name of the agent or skill that a call asks for, or None for other calls."""
    value = call.arguments.get(_NAME_PARAMETERS.get(plain_name(call.name), ""))
    return (call.name, value) if isinstance(value, str) else None


class _LastFailure(NamedTuple):
    """The last failure of a call: its kind, if classified, and whether nothing has changed since."""

    kind: str
    is_unchanged: bool


class _Attempts:
    """The failed calls in a session so far.

    Calls that differ only in labels (`tools.is_descriptive_parameter`) count as the same.
    """

    def __init__(self) -> None:
        self._failed: dict[str, tuple[str, int]] = {}
        self._num_changes = 0
        self.missing_programs: set[str] = set()
        self.names: dict[tuple[str, str], bool] = {}  # (tool, name of an agent or skill) -> whether it exists
        self.agents: frozenset[str] | None = None  # all agents, if an error message listed them

    def add_message(self, text: str) -> None:
        # The user may have made a change that lets a failed call succeed.
        self._num_changes += bool(text.strip())

    def add_call(self, call: ToolCall, text: str, kind: str, *, failed: bool) -> None:
        """Add a call and its result. `kind` is the kind of failure."""
        command = command_text(call.name, call.arguments)
        is_shell = tool_channel(call.name) == "shell"
        # A failed call to a non-shell tool has changed nothing; a failed command may have.
        is_read_only = (
            is_read_only_command(command) if is_shell else is_read_only_tool_call(call.name, call.arguments) or failed
        )
        self._num_changes += not is_read_only
        name = requested_agent_or_skill(call)
        # If the call failed for another reason, the agent or skill may or may not exist.
        if name is not None and (not failed or _UNKNOWN_NAME.search(text[:_MAX_HEAD])):
            self.names[name] = not failed
            agent_list = _AVAILABLE_AGENTS.search(text[:_MAX_ERROR_TEXT]) if failed else None
            self.agents = frozenset(agent.strip() for agent in agent_list[1].split(",")) if agent_list else self.agents
        if failed:
            self._failed[_call_key(call)] = (kind, self._num_changes)
            if is_shell:
                self.missing_programs.update(
                    name_after or name_before
                    for name_after, name_before in _COMMAND_NOT_FOUND.findall(text[:_MAX_HEAD])
                )
        elif self._failed:
            self._failed.pop(_call_key(call), None)

    def last_failure(self, call: ToolCall) -> _LastFailure | None:
        """Return the last failure of this call, or None if it has not failed."""
        if not self._failed or (failure := self._failed.get(_call_key(call))) is None:
            return None
        return _LastFailure(failure[0], failure[1] == self._num_changes)


def _call_key(call: ToolCall) -> str:
    arguments = {name: value for name, value in call.arguments.items() if not is_descriptive_parameter(call.name, name)}
    return json.dumps([call.name, arguments, call.raw_arguments], sort_keys=True, default=str)


@dataclass
class _WholeFiles:
    """The files that were shown in full, by normalized path. A file is dropped if it may have changed since.

    `folder` is the shell's folder, or None if it cannot be determined.
    """

    cwd: str | None
    files: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        self.folder = self.cwd

    def add_message(self, text: str) -> None:
        """Add a message. Agents use messages to report that a file was changed by someone else."""
        for path in CHANGED_NOTE.findall(text):
            self.files.pop(normal_path(path, self.cwd), None)

    def add_call(self, call: ToolCall, text: str) -> None:
        """Add a successful call and its result."""
        if call.raw_arguments is not None:
            return
        operations = edit_operations(call, self.cwd)
        key = command_parameter(call.name, call.arguments)
        if operations is not None:
            changes = compute_changes(operations, self.files)
            if changes is None:
                for operation in operations:
                    self.files.pop(operation.path, None)  # its current content was not shown
            else:
                apply_changes(self.files, changes)
        elif key is not None:
            self._add_command(call.arguments[key], text)
        elif is_read_only_tool_call(call.name, call.arguments):
            shown_file = file_shown_by_tool(call, text)
            if shown_file is not None:
                self.files[normal_path(shown_file.path, self.cwd)] = shown_file.text
        elif tool_channel(call.name) == "file" or plain_name(call.name) in ("task", "agent"):
            self.files.clear()  # the call may have changed any file

    def _add_command(self, command: object, output: str) -> None:
        words = [str(word) for word in cast("list[object]", command)] if isinstance(command, list) else None
        text = str(command) if words is None else nested_script(words) or " ".join(words)
        shown_file = file_printed_by_cat(text, output)
        # A plain `cat file` shows a file and changes nothing.
        if shown_file is not None:
            if self.folder is not None or shown_file.path.startswith("/"):
                self.files[normal_path(shown_file.path, self.folder)] = shown_file.text
            return
        if not leaves_sources_unchanged(text):
            self.files.clear()
        if words is None:
            self._update_folder(text)

    def _update_folder(self, command: str) -> None:
        """Update the folder after a command. Once it is unknown, only an absolute `cd` makes it known again."""
        try:
            self.folder = folder_after(parse_script(command), self.folder)
        except UnsupportedShellSyntax:
            self.folder = self.folder if " cd " not in f" {command}" else None
