"""What a session had shown so far: tools and programs that worked, files as they were read, paths, whole files.

Whoever reads a session tells it what was said and what each call brought, in order; sites ask it whether a failure was
the model's doing, hints what may be stated, votes what an edit would leave. Every call is looked at once for each kind
of question, and only when the first such question comes.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from composer_replication.sites.actions.edits import apply_changes, changes_of, edit_operations
from composer_replication.sites.actions.shell_command import Command, keeps_sources, only_reads
from composer_replication.sites.actions.shell_keys import folder_after
from composer_replication.sites.actions.shell_tree import parse_script, shell_script
from composer_replication.sites.actions.shell_words import NotUnderstood
from composer_replication.sites.actions.shown_paths import (
    CHANGED_NOTE,
    KnownPaths,
    ShellFolder,
    file_in_output,
    file_in_view,
)
from composer_replication.sites.actions.shown_texts import FileTexts
from composer_replication.sites.actions.tools import (
    channel_of,
    command_parameter,
    command_text,
    is_edit,
    is_label,
    normal_path,
    only_looks,
    path_argument,
    plain_name,
    word_set,
)
from composer_replication.types import ToolCall

# Enough for any session; a listing of a whole disk is not searched.
_MAX_TEXT = 400_000
_SEARCH_TOOLS = ("glob", "ls", "list_directory", "find_file", "list_dir", "list_files", "grep")
_BUILD_PROGRAMS = word_set(
    "make cmake gmake ninja gcc g++ clang cargo go javac tsc webpack vite mvn gradle gradlew dotnet bazel npm yarn pnpm"
)
_FOLDER_CHANGERS = frozenset({"cd", "pushd", "popd"})
_NO_MATCHES = ("No files found", "No matches found")
_HIDES_ERRORS = re.compile(r"2>\s*/dev/null|\|\||[;|]")  # what it names need not be there
_PATH_DELIMITER = re.compile(r"[\s'\"`()<>:,;=]")
_MAX_PREFIX = 200
_REMOVE_COMMANDS = frozenset({("rm", ""), ("mv", ""), ("rmdir", ""), ("unlink", ""), ("git", "rm"), ("git", "mv")})


class _Event(NamedTuple):
    """What came back for a call, or words of somebody but the model."""

    call: ToolCall | None
    text: str
    failed: bool
    kind: str = ""


class SessionState:
    """Grows in the order of the session. `tools` are those that answered, with the parameters their calls had.

    `read` holds files by the path they were asked for, as the tool showed them; `files` whole ones by normal path.
    """

    def __init__(self, cwd: str | None = None) -> None:
        self.tools: dict[str, set[str]] = {}
        self.read: dict[str, str] = {}
        self.reader: str | None = None
        self.commands: list[str] = []  # those that worked
        self._events: list[_Event] = []
        self._cwd = cwd
        self._touched: set[str] = set()  # files that were read, written or edited, by normal path
        self._refused: set[str] = set()  # and those of which a call failed
        self._shell, self._files = _Shell(cwd), _ShownFiles(cwd)
        self._texts, self._known_paths = FileTexts(cwd, ShellFolder(cwd)), KnownPaths(cwd, ShellFolder(cwd))
        self._attempts = Attempts()
        self._num_processed: dict[str, int] = {}  # how many events each of them has taken

    def add_message(self, text: str) -> None:
        """Words of the user, or of anybody but the model."""
        self._events.append(_Event(None, text, failed=False))

    def add(self, call: ToolCall, text: str, *, failed: bool, kind: str = "") -> None:
        """A call and what came back for it; `kind` is that of its failure, where somebody has named it."""
        self._events.append(_Event(call, text, failed, kind))
        channel, path = channel_of(call.name), path_argument(call.arguments)
        if failed:
            self._refused |= {normal_path(path, self._cwd)} if path and channel == "file" else set()
            return
        self.tools.setdefault(call.name, set()).update(call.arguments)
        if channel == "shell":
            self.commands.append(command_text(call.name, call.arguments))
        elif channel == "file" and plain_name(call.name) not in _SEARCH_TOOLS:
            self._touched |= {normal_path(path, self._cwd)} if path else set()
            if path and is_edit(call.name) and call.arguments.get("command") != "view":
                self.read.pop(path, None)  # what it holds now was not shown
            elif path:
                self.reader = self.reader or call.name
                self.read[path] = text[:_MAX_TEXT]

    @property
    def programs(self) -> set[str]:
        """Programs that commands ran and that worked."""
        return self._shell_so_far().programs

    @property
    def build_failed(self) -> bool:
        """Whether the last thing that was built could not be."""
        return self._shell_so_far().build_failed

    def has_shown(self, path: str) -> bool:
        """Whether a text has shown this path, as it is or as the end of a longer one, since it was last removed."""
        return self._shell_so_far().has_shown(path)

    def has_shown_text(self, path: str, text: str) -> bool:
        """Whether this text stood in the file, as far as the session has shown it or written it itself."""
        file_text = self.texts.get(path)
        return file_text is not None and file_text.count(text) > 0

    @property
    def texts(self) -> FileTexts:
        """Files as far as they were shown, line by line, and which of them the agent counts as read."""
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
        """Which paths are there, which are not, and where the shell stands."""
        for call, text, failed, _ in self._unprocessed_events("paths"):
            if call is None:
                self._known_paths.add_message(text)
            else:
                self._known_paths.add_call(call, text, failed=failed)
        return self._known_paths

    @property
    def attempts(self) -> Attempts:
        """Which calls failed, and whether anything has changed since."""
        for call, text, failed, kind in self._unprocessed_events("attempts"):
            if call is None:
                self._attempts.add_message(text)
            else:
                self._attempts.add_call(call, text, kind, failed=failed)
        return self._attempts

    def has_touched(self, path: str) -> bool:
        """Whether a tool had read, written or edited this file, however the path was spelled."""
        return normal_path(path, self._cwd) in self._touched

    def had_failed(self, path: str) -> bool:
        """Whether a file tool had been refused this path."""
        return normal_path(path, self._cwd) in self._refused

    def is_from_elsewhere(self, path: str) -> bool:
        """Whether a relative path was shown, but never from where the shell stands now."""
        return self._shell_so_far().is_from_elsewhere(path)

    @property
    def files(self) -> dict[str, str]:
        """Whole files that were shown, as they are after the edits since."""
        return self._files_so_far().files

    @property
    def shell_moved(self) -> bool:
        """Whether the shell may stand elsewhere than where the session began."""
        files = self._files_so_far()
        return files.folder != files.cwd

    def was_in_a_command(self, path: str) -> bool:
        """Whether a shell command named the file, which does not count as reading it."""
        return any(path in command or path.rpartition("/")[2] in command for command in self.commands)

    def _unprocessed_events(self, name: str) -> list[_Event]:
        """What has come since this was asked for under that name."""
        start, self._num_processed[name] = self._num_processed.get(name, 0), len(self._events)
        return self._events[start:]

    def _shell_so_far(self) -> _Shell:
        for event in self._unprocessed_events("shell"):
            self._shell.add(event)
        return self._shell

    def _files_so_far(self) -> _ShownFiles:
        for call, text, failed, _ in self._unprocessed_events("files"):
            if call is None:
                self._files.add_message(text)
            elif not failed:
                self._files.add_call(call, text)
        return self._files


class _Shell:
    """What commands did: programs, builds, paths that went. Texts are kept, and searched only for a missing path."""

    def __init__(self, cwd: str | None) -> None:
        self.programs: set[str] = set()
        self.build_failed = False
        self._shell_folder = ShellFolder(cwd)
        self._cwd = self._shell_folder.path
        self._texts: list[str] = []
        self._folders: list[str | None] = []  # where the shell stood for each of them, if that matters
        self._messages: list[str] = []  # those of somebody but tools
        self._removed: dict[str, int] = {}  # a path -> how many texts had been shown when it went

    def add(self, event: _Event) -> None:
        call, text, failed, _ = event
        if call is None:
            self._add_text(text, self._cwd)  # who speaks of a path means it from where the session began
            self._messages.append(text)
            return
        command = Command.of(command_text(call.name, call.arguments))
        programs = command.programs
        if any(name in _BUILD_PROGRAMS for name, _ in programs):
            self.build_failed = failed
        if failed:  # nor does the shell stay where such a command went
            return
        folder_before = self.folder
        if any(name in _FOLDER_CHANGERS for name, _ in programs):
            self._shell_folder.follow(command.text, text, failed=False)
        path = path_argument(call.arguments)
        if channel_of(call.name) == "file" and path and not text.startswith(_NO_MATCHES):
            self._add_text(path, self.folder)
        self.programs.update(name for name, _ in programs)
        if any(pair in _REMOVE_COMMANDS or (pair[0], "") in _REMOVE_COMMANDS for pair in programs):
            self._removed |= dict.fromkeys(command.words, len(self._texts))
        elif command.only_shows and not _HIDES_ERRORS.search(command.text):
            self._add_text(command.text, folder_before)
        self._add_text(text, self.folder)

    @property
    def folder(self) -> str | None:
        """Where the shell stands; None where that cannot be said."""
        return self._shell_folder.path

    def _add_text(self, text: str, folder: str | None) -> None:
        self._texts.append(text)
        self._folders.append(folder)

    def is_from_elsewhere(self, path: str) -> bool:
        """Whether a relative path was shown only from other folders, or at the end of longer paths."""
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
        name = path.removeprefix("./").rstrip("/")
        since = max(self._removed.get(path, 0), self._removed.get(name.rpartition("/")[2], 0))
        if any(_is_mentioned_in(name, text[:_MAX_TEXT]) for text in self._texts[since:]):
            return True
        path_in_cwd = name.removeprefix(f"{self._cwd}/")  # as it is called by those who stand in the working folder
        if self._cwd is None or path_in_cwd == name or since:
            return False
        # A bare name in some output may be of any folder's file; somebody who says it means the one here.
        texts = self._texts if "/" in path_in_cwd else self._messages
        return any(_is_mentioned_in(path_in_cwd, text[:_MAX_TEXT], cwd=self._cwd) for text in texts)


def _is_mentioned_in(path: str, text: str, *, alone: bool = False, cwd: str | None = None) -> bool:
    """Whether the text says this path, or one inside it: a folder whose files were shown is there.

    With `alone`, not as the end of a longer one; with `cwd`, not of a longer one that lies in this folder.
    """
    position = text.find(path) if path else -1
    while position >= 0:
        end = position + len(path)
        before, after = text[position - 1 : position], text[end : end + 1]
        is_part_of_longer_name = (
            after.isalnum() or after in ("_", "-") or (after == "." and text[end + 1 : end + 2].isalnum())
        )
        if not (before.isalnum() or before in ("_", "-") or is_part_of_longer_name):
            prefix = _PATH_DELIMITER.split(text[max(0, position - _MAX_PREFIX) : position])[-1] if before == "/" else ""
            if prefix in ("", "./") or not (alone or (cwd and _leads_to_another_folder(prefix, cwd))):
                return True
        position = text.find(path, position + 1)
    return False


def _leads_to_another_folder(prefix: str, cwd: str) -> bool:
    """Whether what stands in front of a path leads to another folder of this project, not to a copy of it elsewhere."""
    prefix = prefix.removeprefix(f"{cwd}/").removeprefix("./")
    if not prefix or prefix in ("a/", "b/") or f"/{cwd}/".endswith(f"/{prefix}"):  # as diffs and folders above call it
        return False
    return not prefix.startswith("/") and "." not in prefix.partition("/")[0]


# Which calls failed, how, and whether anything that could help has happened since.

_COMMAND_NOT_FOUND = re.compile(r"command not found: ([\w.+-]+)|(?:^|[\s:])([\w.+-]+): command not found(?!:)")
_UNKNOWN_NAME = re.compile(r"Agent type '[^']{1,200}' not found|Unknown skill|is not a prompt-based skill")
_AVAILABLE_AGENTS = re.compile(r"Available agents: ([^\n<]{1,4000})")
_NAME_PARAMETERS = {"task": "subagent_type", "agent": "subagent_type", "skill": "skill"}
_MAX_HEAD, _MAX_ERROR_TEXT = 2000, 10_000


def requested_name(call: ToolCall) -> tuple[str, str] | None:
    """The agent or skill that a call asks for by its name."""
    value = call.arguments.get(_NAME_PARAMETERS.get(plain_name(call.name), ""))
    return (call.name, value) if isinstance(value, str) else None


class _LastFailure(NamedTuple):
    """The last failure of a call: its kind, where somebody named it, and whether something has changed since."""

    kind: str
    is_unchanged: bool


class Attempts:
    """Grows with the session; a call is the same whatever it says about itself."""

    def __init__(self) -> None:
        self._failed: dict[str, tuple[str, int]] = {}
        self._num_changes = 0
        self.missing_programs: set[str] = set()
        self.names: dict[tuple[str, str], bool] = {}  # agents and skills by the tool that takes them: are they there
        self.agents: frozenset[str] | None = None  # all of them, where somebody has listed them

    def add_message(self, text: str) -> None:
        self._num_changes += bool(text.strip())

    def add_call(self, call: ToolCall, text: str, kind: str, *, failed: bool) -> None:
        """A call that was made, and what came back; `kind` is that of its failure."""
        command = command_text(call.name, call.arguments)
        is_shell = channel_of(call.name) == "shell"
        is_read_only = only_reads(command) if is_shell else only_looks(call.name, call.arguments) or failed
        self._num_changes += not is_read_only
        name = requested_name(call)
        if name is not None and (not failed or _UNKNOWN_NAME.search(text[:_MAX_HEAD])):
            self.names[name] = not failed
            agent_list = _AVAILABLE_AGENTS.search(text[:_MAX_ERROR_TEXT]) if failed else None
            self.agents = frozenset(agent.strip() for agent in agent_list[1].split(",")) if agent_list else self.agents
        if failed:
            self._failed[_key(call)] = (kind, self._num_changes)
            if is_shell:
                self.missing_programs.update(
                    name_after or name_before
                    for name_after, name_before in _COMMAND_NOT_FOUND.findall(text[:_MAX_HEAD])
                )
        elif self._failed:
            self._failed.pop(_key(call), None)

    def last(self, call: ToolCall) -> _LastFailure | None:
        """How this very call failed when it was last made; None where it did not."""
        if not self._failed or (failure := self._failed.get(_key(call))) is None:
            return None
        return _LastFailure(failure[0], failure[1] == self._num_changes)


def _key(call: ToolCall) -> str:
    arguments = {name: value for name, value in call.arguments.items() if not is_label(call.name, name)}
    return json.dumps([call.name, arguments, call.raw_arguments], sort_keys=True, default=str)


# Whole files as a session has shown and changed them; what may have changed unseen is not among them.


@dataclass
class _ShownFiles:
    """Files by normal path, call by call. `folder` is where the shell stands, None where that cannot be said."""

    cwd: str | None
    files: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        self.folder = self.cwd

    def add_message(self, text: str) -> None:
        """Words of the user, among which agents put a note where a file was changed by somebody else."""
        for path in CHANGED_NOTE.findall(text):
            self.files.pop(normal_path(path, self.cwd), None)

    def add_call(self, call: ToolCall, text: str) -> None:
        """A call that worked, and what it showed."""
        if call.raw_arguments is not None:
            return
        operations = edit_operations(call, self.cwd)
        key = command_parameter(call.name, call.arguments)
        if operations is not None:
            changes = changes_of(operations, self.files)
            if changes is None:
                for operation in operations:
                    self.files.pop(operation.path, None)  # what it holds now was not shown
            else:
                apply_changes(self.files, changes)
        elif key is not None:
            self._add_command(call.arguments[key], text)
        elif only_looks(call.name, call.arguments):
            shown_file = file_in_view(call, text)
            if shown_file is not None:
                self.files[normal_path(shown_file.path, self.cwd)] = shown_file.text
        elif channel_of(call.name) == "file" or plain_name(call.name) in ("task", "agent"):
            self.files.clear()  # it may have changed any of them

    def _add_command(self, command: object, output: str) -> None:
        words = [str(word) for word in cast("list[object]", command)] if isinstance(command, list) else None
        text = str(command) if words is None else shell_script(words) or " ".join(words)
        shown_file = file_in_output(text, output)
        if shown_file is not None:
            if self.folder is not None or shown_file.path.startswith("/"):
                self.files[normal_path(shown_file.path, self.folder)] = shown_file.text
            return
        if not keeps_sources(text):
            self.files.clear()
        if words is None:
            self._update_folder(text)

    def _update_folder(self, command: str) -> None:
        """Where the shell stands now: some tools keep it between calls, so only a way back makes it sure again."""
        try:
            self.folder = folder_after(parse_script(command), self.folder)
        except NotUnderstood:
            self.folder = self.folder if " cd " not in f" {command}" else None
