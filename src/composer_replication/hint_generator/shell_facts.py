"""Collect the facts about failed shell commands: the shell's working folder, and advice that matches the message.

A path often fails because an earlier `cd` has moved the shell. `shell_folder_facts` then returns the path relative to
the current folder. `_advice_for` chooses advice by the wording of the message.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from composer_replication.hint_generator.context import HintContext, missing_path_facts, short_path
from composer_replication.sites.actions.tools import tool_channel

if TYPE_CHECKING:
    from composer_replication.hint_generator.context import FailingCall


# "cd src && make" -> "src"; "cd 'src'; make" -> "src"; not "make && cd src"
_LEADING_CD = re.compile(r"\s*cd\s+(['\"]?)([^\s'\";&|]+)\1\s*(?:&&|;|\n)")


def nonempty_facts(**facts: Any) -> HintContext:
    """Return the facts whose values are not empty."""
    return cast("HintContext", {name: value for name, value in facts.items() if value})


def advice_facts(case: FailingCall) -> HintContext:
    """Return the advice that matches the message of a failing call, if any."""
    return nonempty_facts(advice=_advice_for(case.site.kind, case.error_text, case.command))


def missing_shell_path_facts(case: FailingCall) -> HintContext:
    """Return the missing path relative to the shell's folder, or else the path that was probably meant."""
    facts = shell_folder_facts(case)
    if re.search(r"\bgit\b", case.command):
        facts |= nonempty_facts(advice=_advice_for("git_state", case.error_text, case.command))
    if "path_from_shell" not in facts and "meant" not in facts and case.path:
        folder = _resolution_folder(case)
        path = case.path if folder is None else posixpath.join(folder, case.path)
        facts |= missing_path_facts(path, case.error_text, case.state)
    return facts


def shell_folder_facts(case: FailingCall) -> HintContext:
    """Return the shell's folder, unless it is the project's, and the typed path relative to that folder."""
    paths, facts, typed = case.state.paths, advice_facts(case), case.path or ""
    current_folder, root, own_cd = _resolution_folder(case), paths.root, _leading_cd(case)
    cd_role = own_cd and ("to" if own_cd == typed else "before")
    facts |= nonempty_facts(own_cd=cd_role, is_absolute=typed.startswith("/"))
    if current_folder is None or root is None:
        return facts
    if current_folder != root:
        facts |= {"shell_folder": short_path(current_folder, root), "project_folder": root}
    # A relative path may have been meant relative to a parent of the current folder.
    for base in _with_parents(current_folder, root) if typed and not typed.startswith(("/", "~")) else ():
        meant = posixpath.normpath(posixpath.join(base, typed))
        if meant == current_folder or (base != current_folder and (meant in paths.files or meant in paths.folders)):
            facts["path_from_shell"] = posixpath.relpath(meant, current_folder)
            return facts
    if typed and (current_folder == root or typed.startswith("/")):
        facts |= missing_path_facts(posixpath.join(root, typed), case.error_text, case.state)
    return facts


def _leading_cd(case: FailingCall) -> str | None:
    """Return the target of a `cd` at the start of the command, or None."""
    match = _LEADING_CD.match(case.command) if tool_channel(case.call.name) == "shell" else None
    return match[2] if match else None


def _resolution_folder(case: FailingCall) -> str | None:
    """Return the folder relative to which the failing path was resolved, or None if it is unknown."""
    current_folder, own_cd = case.state.paths.shell.path, _leading_cd(case)
    if own_cd is None or own_cd == case.path:
        return current_folder
    if own_cd.startswith(("~", "$", "-")) or (current_folder is None and not own_cd.startswith("/")):
        return None
    return posixpath.normpath(posixpath.join(current_folder or "/", own_cd))


def _with_parents(folder: str, root: str) -> Iterator[str]:
    """Yield the folder and its parents, up to the project's folder."""
    while folder.startswith(root):
        yield folder
        if folder == root:
            return
        folder = posixpath.dirname(folder)


# ---- Advice by the wording of the message ----------------------------------------------------------------------------


class _Row(NamedTuple):
    """A message pattern and the advice for messages that match it. The first matching row is used."""

    kind: str
    message: str
    """A pattern that must match the message."""
    advice: str
    command: str | None = None
    """A pattern that must also match the command."""


_MAX_ERROR = 6000
_BSD = "On macOS and BSD `{}` has its own options: {}."
# Above each group: an example of a message and the beginning of its advice. The advice is part of hints, so it is data.
_ADVICE = (
    # jq: "jq: error: syntax error, unexpected INVALID_CHARACTER" -> "Put a jq filter into single quotes"
    _Row("shell_syntax", r"top-level program not given|^jq - commandline JSON processor",
         "Give jq its program: its text came out empty, as happens with a variable that is not set or quotes that close"
         " too early. Put it in single quotes right behind the options."),
    _Row("shell_syntax", r"^jq: .*unexpected ['\"]?(?:\||//|[-+*/%<>=]=?|and|or)['\"]?,? (?:expecting|\()"
         r"|^jq: .*parenthes",
         "In jq put an object's value in parentheses as soon as it is more than a path or a literal, also where it only"
         " has an alternative with `//`. Try a filter on one record before the whole list."),
    _Row("shell_syntax", r"^jq: .*(?:syntax error|compile error)", "Put a jq filter into single quotes, or into a file"
         " for `-f`, where the shell changes no sign of it. Try it on one record before the whole list."),
    # Quoting in shells: "zsh: event not found: /usr" -> "Put text with an exclamation mark in single quotes"
    _Row("shell_syntax", r"no matches found|bad pattern",
         "Put single quotes around every word with `?`, `*`, `[`, `^` or `#` that is not meant to match file names:"
         " zsh refuses to run a command whose pattern matches no file."),
    _Row("shell_syntax", r"event not found", "Put text with an exclamation mark in single quotes: in double quotes the"
         " shell looks it up in its history."),
    _Row("shell_syntax", r"bad substitution", "Use only expansions that this shell has, and single quotes where a"
         " dollar sign is meant as text."),
    _Row("shell_syntax", r"unexpected EOF|unmatched|unterminated|unexpected end of file|looking for matching",
         "Text with quotes or several lines belongs into a here-document whose end word is quoted (`<<'EOF'`), or into"
         " a file: then the shell reads nothing in it."),
    # Programs on the command line: "IndentationError: unexpected indent" -> "Write an inline program"
    _Row("shell_syntax", r"File \"<string>\"[\s\S]*File \"<string>\"[\s\S]*SyntaxError",
         "Look at what a program prints before an inline script reads it, and read it with the parser of its format,"
         " such as `json.load`.", command=r"\beval\("),
    _Row("shell_syntax", r"SyntaxError|IndentationError|NameError",
         "Write an inline program of more than one statement as a here-document with a quoted end word (`<<'EOF'`) or"
         " a file: on one line in quotes blocks, quotes and backslashes go wrong."),
    _Row("shell_syntax", r"near unexpected token|parse error near|syntax error near",
         "Put single quotes around parentheses, brackets, semicolons and ampersands that are text, and close every"
         " `if`, `for` and `while` on the same command line."),
    # GitHub and other services: "gh: Not Found (HTTP 404)" -> "List what there is first"
    _Row("api_misuse", r"parent comment not found", "A reply needs the id of the first review comment of a thread:"
         " take it from the list of the pull request's review comments, where `in_reply_to_id` is empty."),
    _Row("api_misuse", r"HTTP 404", "A single review comment is read at `repos/OWNER/REPO/pulls/comments/ID`, without"
         " the number of the pull request; the list of a pull request has that number.",
         command=r"pulls/\d+/comments/\d+(?!/replies)"),
    _Row("api_misuse", r"HTTP 404|not found", "List what there is first, and take path and identifier from that list:"
         " the service knows nothing at an address that was put together from memory."),
    _Row("api_misuse", r"HTTP 422|validation failed|unprocessable", "Send only fields and values that the service's"
         " documentation names for this endpoint; its message says which one it refused."),
    _Row("api_misuse", r"doesn't exist on type|undefined field|parse error on|expected type",
         "Ask for fields that the schema has: query it first (`__type(name: …) {fields {name}}`)."),
    # Tool arguments: "Path must be absolute" -> "Give this tool absolute paths"
    _Row("input_validation", r"unknown skill|skill .{0,80}not found", "This tool knows the names alone that the"
         " session lists for it: take one of those, whole. Where none is for the work, do it with the other tools."),
    _Row("input_validation", r"not a prompt-based skill|cannot be used with Skill|disable-model-invocation",
         "What only the user can start cannot be called: do the work with the other tools, or ask the user."),
    _Row("input_validation", r"path must be absolute|must be an absolute path", "Give this tool absolute paths, which"
         " begin with the project's folder."),
    _Row("input_validation", r"begin patch", "A patch begins with the line `*** Begin Patch`, names each file with"
         " `*** Update File:`, and ends with `*** End Patch`."),
    _Row("input_validation", r"regex parse error|invalid regular expression|unclosed (?:group|character class)",
         "Put a backslash before brackets, braces and other signs of a pattern that are meant as text."),
    _Row("input_validation", r"must be a jupyter notebook", "This tool changes notebooks alone: use the one for text"
         " files."),
    _Row("edit_no_match", r"cell with id|cell not found", "Read the notebook again, and name one of the cells' ids that"
         " it shows."),
    _Row("output_too_large", r"^(?!.*\bfile (?:content|size)).*(?:response|output|results?|matches)",
         "Ask for less at a time: filter, count or page, or write the output to a file and search that."),
    # Wrong folder, wrong shell, broken tool: "go: cannot find main module" -> "Go commands run inside a module"
    _Row("wrong_folder", r"cannot find main module|go\.mod file not found", "Go commands run inside a module, below the"
         " folder that has go.mod: change there first."),
    _Row("cmd_not_found", r"cmdlet", "This shell is PowerShell: use its own commands, such as `Select-String` and"
         " `Get-ChildItem`."),
    _Row("other", r"posix_spawn|\bspawn\b.{0,200}ENOENT", "The tool itself cannot start in this session: do the same"
         " with a shell command, such as `grep` or `find`, or with another tool."),
    # Programs called with wrong arguments: "make: *** No rule to make target" -> "Read the Makefile"
    _Row("usage_error", r"could not open a new TTY|not a (?:tty|terminal)|inappropriate ioctl", "There is no terminal"
         " here: run the program in a mode that only prints, such as JSON or plain text."),
    _Row("usage_error", r"must be provided .{0,40}stdin", "An option that takes several values swallows what follows"
         " it: give the text through stdin, or before the options."),
    _Row("usage_error", r"build constraints exclude all Go files", "Give the tag that the files ask for in their"
         " `//go:build` line with `-tags`: without it none of them belongs to the package."),
    _Row("usage_error", r"undefined: |\[build failed\]", "`go vet` with the tag that the files ask for sees all of"
         " them, also those that are for testing alone.", command=r"\bgo"),
    _Row("usage_error", r"cannot write multiple packages", "One output file takes one package: name the folder of the"
         " main package alone."),
    _Row("usage_error", r"no task \S+ found|no tasks? .{0,80}found", "`mise tasks` lists the tasks that this project"
         " has: pick one of those.", command=r"\bmise\b"),
    _Row("usage_error", r"no rule to make target", "Read the Makefile for the targets there are before calling one."),
    _Row("usage_error", r"missing script", "`npm run` without a name lists the scripts of package.json: call one of"
         " those."),
    _Row("usage_error", r"\.\.\.: no such file|lstat .*\.\.\.", "Give a formatter the folder alone, which it walks by"
         " itself: three dots behind a folder are for commands that take packages.", command=r"\bgofmt\b"),
    # Go packages: "named files must be .go files: ./cmd" -> "Name packages by their folders"
    _Row("usage_error", r"named files must be", "Name packages by their folders, and nothing else beside them: a"
         " package is checked as a whole."),
    _Row("usage_error", r"named files must all be in one directory|directory prefix|outside main module",
         "Give go commands packages by folder (`./some/folder/...`) from inside the module, not single files of"
         " several folders."),
    # GNU options that BSD tools lack: "usage: stat [-FLnq]" -> "This system's tools are BSD's"
    _Row("usage_error", r"usage: grep|grep: invalid option|grep: illegal option",
         _BSD.format("grep", "use `-E` for extended patterns, or `perl -ne`"), command=r"\bgrep\b"),
    _Row("usage_error", r"usage: sed|sed: .*(?:invalid command code|illegal option|extra characters|expected)",
         _BSD.format("sed", "`-i` needs an argument of its own (`-i ''`), and inserted text a new line"),
         command=r"\bsed\b"),
    _Row("usage_error", r"usage: (?:stat|date|xargs|find|head|tail|sort|ls|cp|readlink|du|ps|base64|mktemp)\b"
         r"|illegal (?:option|line count|time format)", "This system's tools are BSD's, not GNU's: use options that"
         " both have, or look at `man` first."),
    _Row("usage_error", r"unknown json field", "Ask only for fields that the program lists: `--json` without a name"
         " prints them.", command=r"\bgh\b"),
    _Row("usage_error", r"accepts? (?:at most |between )?\d+ arg|too many arguments|requires? (?:at least )?\d+ arg"
         r"|missing (?:required )?(?:argument|operand)|not enough arguments",
         "Look at the usage line for how many arguments the command takes, and put quotes around one that has spaces."),
    # Git: "fatal: not a git repository" -> "Git commands work only inside a repository"
    _Row("git_state", r"is not a git command", "Use only commands that git has: `git help -a` lists them."),
    _Row("git_state", r"no upstream", "The first push of a branch names where it goes:"
         " `git push --set-upstream origin` and the branch."),
    _Row("git_state", r"not a git repo|kein git-repository|dépôt git|git 仓库|git ?リポジトリ",
         "Git commands work only inside a repository: change to it first, or name it with `git -C`."),
    _Row("git_state", r"ignored by", "Ignored files are not added: leave them out, name the others one by one."),
    _Row("git_state", r"nothing to commit|nothing added|no changes added", "Look at `git status` first: there must be"
         " staged changes before a commit, and they are staged with `git add`."),
    _Row("git_state", r"untracked working tree", "Move, commit or remove the untracked files that stand where the"
         " branch has its own."),
    _Row("git_state", r"would be overwritten|unstaged changes|uncommitted changes|commit your changes or stash"
         r"|local modifications|changes staged", "Commit or stash local changes before switching, merging, rebasing or"
         " pulling, and look at `git status` to see that none are left."),
    _Row("git_state", r"already (?:used by|checked out)", "A branch can be checked out in one worktree alone:"
         " `git worktree list` shows where it is; work there, or make a new branch."),
    _Row("git_state", r"(?:rebase|merge|cherry-pick).{0,40}in progress|already a rebase", "Finish or abort what is in"
         " progress first: `git status` says which command does it."),
    _Row("git_state", r"not possible to fast-forward|diverg|non-fast-forward|fetch first|rejected", "Fetch, and rebase"
         " or merge onto the remote branch before pushing."),
    # Paths and revisions. Commands that take files come first, since the message for revisions is the same.
    # "error: pathspec 'mian' did not match any file(s) known to git" -> "Check that a branch, revision or file"
    _Row("git_state", r"pathspec|known to git", "Git takes the paths of files from the folder that the shell stands in:"
         " `git status` and `git ls-files` show them as they are called from there.",
         command=r"\bgit (?:-\S+ (?:\S+ )?)?(?:add|rm|mv|commit|diff|restore|stash|log|show|reset|ls-files)\b"),
    _Row("git_state", r"ambiguous argument|unknown revision|bad revision|invalid (?:reference|object|upstream)"
         r"|not a valid (?:object|ref)|is not a commit|not something we can merge|couldn't find remote ref|pathspec",
         "Check that a branch, revision or file is known to git before naming it: `git branch -a`, `git log --oneline`"
         " and `git ls-files` show what there is."),
    _Row("git_state", r"refspec", "Push only branches that exist here: `git branch` lists them; a commit has to be on"
         " one."),
    _Row("git_state", r"(?:branch|tag|remote).{0,120}already exists", "Look at the names that are taken before making"
         " a new one: `git branch -a`, `git tag`, `git remote -v`."),
    _Row("git_state", r"no such remote|does not appear to be a git repository", "Check with `git remote -v` which"
         " remotes there are before using one."),
    _Row("git_state", r"(?:does not exist in|exists on disk, but not in)", "Name a file of a revision from the"
         " repository's root, and check with `git ls-tree -r --name-only` that the revision has it."),
    _Row("git_state", r"not fully merged|cannot delete branch", "Leave a branch before deleting it, and merge it first"
         " if its commits are still needed."),
    # Programs that are not installed on every system: "bash: rg: command not found" -> "`grep -rn` searches files"
    _Row("cmd_not_found", r"\btimeout\b", "Give the time limit to the tool that runs the command: this system has no"
         " program for it."),
    _Row("cmd_not_found", r"\btree\b", "`find . -maxdepth 2` and `ls -R` show a folder with what is in it, on every"
         " system."),
    _Row("cmd_not_found", r"\b(?:rg|ag|ack)\b", "`grep -rn` searches files on every system."),
    _Row("cmd_not_found", r"\b(?:fd|fdfind)\b", "`find . -name` looks for files on every system."),
)  # fmt: skip


def _advice_for(kind: str, error_text: str, command: str) -> str | None:
    """Return general advice for an error message, or None if no row of the table matches."""
    rows = (row for row in _ADVICE if row.kind == kind and _matches(row.message, error_text[:_MAX_ERROR]))
    return next((row.advice for row in rows if row.command is None or _matches(row.command, command)), None)


def _matches(pattern: str, text: str) -> bool:
    return re.search(pattern, text, re.IGNORECASE | re.MULTILINE) is not None
