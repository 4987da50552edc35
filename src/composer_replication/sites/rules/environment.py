"""Rules for shell commands that failed because of the machine or the network, and for slips by the model.

A slip names something that does not exist: a program, a path, a branch. It counts as the model's error only if the
message concerns something in the command itself. If a script cannot find its files, the command was not mistyped.
"""

from __future__ import annotations

import difflib
import re

from composer_replication.sites.actions.shell_command import (
    SETUP_PROGRAMS,
    UTILITY_PROGRAMS,
    WELL_KNOWN_PROGRAMS,
    Command,
)
from composer_replication.sites.actions.tools import word_set
from composer_replication.sites.rule import FailureRule, rule

# Shells print messages in the user's language: English, German, French, Spanish, Portuguese, Italian, Russian, Chinese,
# Japanese or Korean.
_NO_COMMAND = (
    r"(?:command not found|not found|Befehl nicht gefunden|Kommando nicht gefunden|commande introuvable"
    r"|orden no encontrada|comando não encontrado|comando non trovato|команда не найдена|未找到命令|找不到命令"
    r"|コマンドが見つかりません|명령어를 찾을 수 없음)"
)
# Without "not found", which before a name may also be a message about files.
_NO_COMMAND_IN_FRONT = _NO_COMMAND.replace("|not found", "")
_NO_COMMAND_WORDS = (
    *("not found", "nicht gefunden", "introuvable", "no encontrada", "não encontrado", "non trovato", "не найдена"),
    *("未找到", "找不到", "見つかりません", "찾을 수"),
)


MACHINE: tuple[FailureRule, ...] = (
    # "Command timed out after 120s"; "context deadline exceeded"; not "timeout=30"
    rule(
        "timeout",
        r"timed out after|command timed out|timed out and has been killed|timeout: sending signal|\bTimeoutError\b"
        r"|\bTimeoutExpired\b|deadline exceeded|ETIMEDOUT|operation timed out|execution timed out|timeout (?:of"
        r"|after) \d"
        r"|exceeded (?:the )?(?:time ?out|time limit)|(?:exceeded|reached) .{0,30}timeout",
        *("timed out", "timeout", "deadline", "etimedout", "time limit"),
        channels="shell",
    ),
    # "mkdir: /opt/x: Permission denied"; "sudo: a password is required"
    rule(
        "os_permission",
        r"permission denied|\b(?:EACCES|EPERM)\b|operation not permitted|sudo: a (?:password|terminal) is required"
        r"|are you root|must be (?:run as )?root|read-only file system|access is denied|not in the sudoers"
        r"|requires? (?:root|superuser|administrator)|Keine Berechtigung|Permission non accordée|Permiso denegado"
        r"|权限不够|許可がありません|Отказано в доступе",
        *("denied", "eacces", "eperm", "not permitted", "sudo", "root", "read-only", "requires", "require "),
        *("berechtigung", "accordée", "denegado", "权限", "許可", "отказано"),
        channels="shell",
    ),
    # "curl: (6) Could not resolve host: example.invalid"; "Connection refused"; "HTTP 503"; not "503 lines"
    rule(
        "network",
        r"\b(?:ECONNREFUSED|ECONNRESET|ENOTFOUND|EAI_AGAIN)\b|could ?n[o']t resolve (?:host|proxy|hostname)"
        r"|name resolution"
        r"|name or service not known|connection (?:refused|reset|timed out|aborted|error)|\bConnectionError\b"
        r"|failed to connect|network is unreachable|unable to access 'https?://|unable to connect|no route to host"
        r"|getaddrinfo|TLS handshake|SSL(?:_|: | error| certificate)|CERTIFICATE_VERIFY|429 too many"
        r"|too many requests"
        r"|rate limit|(?:HTTP|error|status|code)[^\n]{0,20}\b(?:429|50[0234])\b|service unavailable|bad gateway"
        r"|max retries exceeded|could not read from remote repository|authentication failed|could not read username"
        r"|remote end hung up|proxy error|temporary failure|dial tcp|is the server running"
        r"|connection to server .{0,80}failed",
        *("econn", "enotfound", "eai_again", "resol", "service not known", "connect", "network"),
        *("unable to access", "no route", "getaddrinfo", "handshake", "ssl", "certificate", "429"),
        *("requests", "rate limit", "50", "unavailable", "gateway", "retries", "remote", "authentication"),
        *("username", "proxy", "temporary failure", "dial tcp", "server running"),
        channels="shell",
    ),
    # "fatal: gpg failed to sign the data"; "No space left on device"; "listen EADDRINUSE: address already in use"
    rule(
        "nonzero_exit",
        r"bad interpreter|error while loading shared libraries|gpg failed to sign|(?:smudge"
        r"|external) filter .{0,80}failed"
        r"|shell snapshot|no space left on device|ENOSPC|disk quota exceeded|out of memory|cannot allocate memory"
        r"|\bKilled(?:\s|$)"
        r"|OOMKilled|address already in use|EADDRINUSE|port \d+ is (?:already )?(?:in use|allocated)"
        r"|cannot connect to the docker daemon|is the docker daemon running|too many open files|EMFILE"
        r"|resource temporarily unavailable|no CUDA|device or resource busy|bus error",
        *("bad interpreter", "shared librar", "gpg failed", "filter", "snapshot", "no space", "enospc"),
        *("quota", "memory", "killed", "already in use", "eaddrinuse", "port ", "docker", "open files"),
        *("emfile", "resource", "cuda", "bus error"),
        channels="shell",
        blame="env",
    ),
    # "*** Please tell me who you are."; "fatal: Unable to create '.git/index.lock': File exists."
    rule(
        "git_state",
        r"tell me who you are|unable to auto-detect email|index\.lock|another git process|detected dubious ownership"
        r"|protected branch|GH0\d\d|pre-receive hook declined",
        *("who you are", "auto-detect", "index.lock", "another git", "dubious", "protected branch", "gh0"),
        "pre-receive",
        channels="shell",
        blame="env",
    ),
    # "CONFLICT (content): Merge conflict in a.py"; "error: could not apply 1a2b3c4... Add a"
    rule(
        "git_state",
        r"CONFLICT \(|merge conflict|automatic merge failed|needs merge|fix conflicts|unmerged (?:files|paths)"
        r"|could not apply [0-9a-f]{7}|KONFLIKT|CONFLIT|冲突|競合",
        *("conflict", "automatic merge", "needs merge", "unmerged", "could not apply", "konflikt", "conflit"),
        *("冲突", "競合"),
        channels="shell",
        blame="task",
        confidence=0.7,
    ),
    # "! [rejected] main -> main (fetch first)"; "fatal: Not possible to fast-forward, aborting."
    rule(
        "git_state",
        r"not possible to fast-forward|divergent branches|! \[rejected\]|non-fast-forward|failed to push some refs",
        *("fast-forward", "divergent", "[rejected]", "failed to push"),
        channels="shell",
        blame="unknown",
        confidence=0.7,
    ),
    # "bash: line 1: foo: command not found" -> "foo"; "zsh: command not found: foo" -> "foo"
    rule(
        "cmd_not_found",
        rf"^(?:.{{0,80}}: )?(?:line \d+: |\d+: )?([\w.+@/-]{{1,80}}): {_NO_COMMAND}\W?$"
        rf"|(?:{_NO_COMMAND_IN_FRONT}) ?[:：] ?([\w.+@/-]{{1,80}})$",
        *_NO_COMMAND_WORDS,
        channels="shell",
        blame="env",
        confidence=0.7,
        accept=lambda match, command: not _is_misspelled_command(match, command),
    ),
    # A script or a Makefile that calls a missing program: "/usr/bin/env: ‘node’: No such file or directory";
    # "make: tsc: No such file or directory"
    rule(
        "cmd_not_found",
        r"/usr/bin/env: ['‘]?[\w.+-]{1,60}['’]?: No such file"
        r"|^g?make(?:\[\d+\])?: (?!Makefile)[\w.+-]{1,60}: No such file",
        *("/usr/bin/env", "make"),
        channels="shell",
        blame="env",
    ),
)
# The harness withheld the output, regardless of the command.
WITHHELD: tuple[FailureRule, ...] = (
    # mini-swe-agent: "<returncode>0</returncode>\n<warning>\nThe output of your last command was too long."
    rule(
        "output_too_large",
        r"(?:<returncode>-?\d{1,3}</returncode>\s*)?<warning>\s*The output of your last command was too (?:long"
        r"|large)",
        *("too long", "too large"),
        channels="shell",
        where="start",
        confidence=0.7,
    ),
)


_NO_FILE = (
    r"(?:No such file or directory|Datei oder Verzeichnis nicht gefunden|Aucun fichier ou dossier de ce (?:type|nom)"
    r"|No existe el (?:archivo|fichero) o el directorio|Arquivo ou diretório inexistente"
    r"|File o directory non esistente"
    r"|Нет такого файла или каталога|没有那个文件或目录|沒有此一檔案或目錄|そのようなファイルやディレクトリはありません"
    r"|그런 파일이나 디렉터리가 없습니다)"
)
_NO_FILE_WORDS = (
    *("no such file", "nicht gefunden", "aucun fichier", "no existe", "inexistente", "non esistente", "нет такого"),
    *("没有那个", "沒有此一", "そのような", "그런 파일"),
)


_IS_DIRECTORY = r"(?:Is a directory|Ist ein Verzeichnis|est un dossier|Es un directorio|是一个目录|ディレクトリです)"
# Quotation marks in all languages: "rm: 'build/a': No such file or directory" -> "build/a"
_QUOTED = re.compile(r"['\"`‘’“”«»「」]([^'\"`‘’“”«»「」]{1,300})['\"`‘’“”«»「」]")
# mv on macOS: "mv: rename a.txt to b/a.txt: No such file or directory" -> "a.txt"
_RENAME_SOURCE = re.compile(r"\brename (\S{1,300}) to ")
# Commands that query git, or exchange data with another machine: "git rev-parse HEAD~9"; not "git checkout main"
_GIT_QUERY = re.compile(r"\b(?:rev-parse|merge-base|show-ref|ls-remote|submodule|clone|fetch|pull|push|remote)\b")
# At the start of a line: "bash: line 1: foo: command not found"; "/bin/sh: 1: foo: not found";
# not "build: line 12: foo: not found"
_TYPED_SHELL = re.compile(r"(?:/\S{0,40}/)?(?:bash|sh|zsh|dash|fish|ksh)\b")
# "nothing to commit, working tree clean"
_SUMMARY = re.compile(r"nothing (?:added )?to commit|no changes added")
# "cannot access 'a.txt'"; not "access denied"
_FAILED_ACTION = re.compile(r"^(?:cannot|can't) (?:access|read|open|stat) ")
_UNIX_ONLY = word_set("ls cp mv rm cat touch export source which head tail grep sed awk chmod ln sudo pwd uname man")
# "./build.sh: line 12: foo: command not found"; not "bash: foo: command not found"
_SCRIPT_LINE = re.compile(r"\S+: (?:line )?\d+: ")
# "FileNotFoundError: a.txt"; "bad interpreter: /bin/zsh"; not "error: pathspec 'a' did not match"
_NOT_ABOUT_A_PATH = re.compile(
    r"(?:Error|Exception)\b|\berror:(?! pathspec)|socket|bad interpreter|loading shared librar|not a valid"
)


def _command_name(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group).rpartition("/")[2]


def _is_misspelled_command(match: re.Match[str], command: Command) -> bool:
    """Return whether a missing program is the model's error.

    It is if the program is a standard utility or its name is misspelled. Any other program may be one that the project
    or the machine should have provided.
    """
    name = _command_name(match)
    if not command.calls(name) or command.is_remote or _comes_from_script(match.string):
        return False
    if "is not recognized" in match[0] and name in _UNIX_ONLY:
        return True
    return name in UTILITY_PROGRAMS or (name not in SETUP_PROGRAMS and bool(_similar_commands(name)))


def _similar_commands(name: str) -> list[str]:
    """Return the most similar well-known command as a list, which is empty if the name is not a misspelling."""
    return difflib.get_close_matches(name, WELL_KNOWN_PROGRAMS, n=1, cutoff=0.8) if len(name) > 2 else []


def _comes_from_script(line: str) -> bool:
    """Return whether a script failed (`build.sh: line 12: foo: …`), not the typed command (`bash: line 1: foo: …`)."""
    return _SCRIPT_LINE.match(line) is not None and _TYPED_SHELL.match(line) is None


def _has_path_in_command(match: re.Match[str], command: Command) -> bool:
    """Return whether the message concerns a path in the command.

    It must come from the shell or from a program in the command.
    """
    line = match.string
    if (
        _comes_from_script(line)
        or command.is_remote
        or _NOT_ABOUT_A_PATH.search(line)
        or not command.is_own_message(line)
    ):
        return False
    pieces = [*_QUOTED.findall(line), *_RENAME_SOURCE.findall(line), *re.split(r"\s?[:：]\s", line)[1:]]
    return any(command.names(_FAILED_ACTION.sub("", piece).strip()) for piece in pieces if piece)


def _is_about_git_command(match: re.Match[str], command: Command) -> bool:
    """Return whether a git message is about the command itself.

    A script, a build or a hook may run other git commands.
    """
    is_summary = _SUMMARY.search(match[0]) is not None
    if not command.runs_git_only or (match["said"] is None and not match.string[:1].isupper() and not is_summary):
        return False
    # "nothing to commit" is the normal output of `git status`.
    return not (is_summary and "git status" in command.text)


SLIPS: tuple[FailureRule, ...] = (
    # As in MACHINE, plus PowerShell: "The term 'grep' is not recognized as a name of a cmdlet" -> "grep"
    rule(
        "cmd_not_found",
        rf"^(?:.{{0,80}}: )?(?:line \d+: |\d+: )?([\w.+@/-]{{1,80}}): {_NO_COMMAND}\W?$"
        rf"|(?:{_NO_COMMAND_IN_FRONT}|Unknown command) ?[:：] ?([\w.+@/-]{{1,80}})$"
        r"|(?:The term )?['‘\"]([\w.+@/\\-]{1,80})['’\"] is not recognized as",
        *_NO_COMMAND_WORDS,
        *("unknown command", "is not recognized as"),
        channels="shell",
        accept=_is_misspelled_command,
    ),
    # "cat: src: Is a directory"; not "src is a directory"
    rule(
        "is_directory",
        rf"^[\w./+-]{{1,60}}: .{{1,300}}: {_IS_DIRECTORY}\W?$",
        *(
            "is a directory",
            "ist ein verzeichnis",
            "est un dossier",
            "es un directorio",
            "是一个目录",
            "ディレクトリです",
        ),
        channels="shell",
        accept=_has_path_in_command,
    ),
    # "cat: src/a.py: No such file or directory"; not "No such file or directory"
    rule(
        "shell_path_missing",
        rf"^.{{1,400}}[:：] ?{_NO_FILE}",
        *_NO_FILE_WORDS,
        channels="shell",
        confidence=0.85,
        accept=_has_path_in_command,
    ),
    # "ls: cannot access 'a.py': No such file or directory"; "error: pathspec 'a.py' did not match any file(s)";
    # "cd: not a directory: a.py"
    rule(
        "shell_path_missing",
        r"^.{0,60}(?:cannot access|can't (?:open file|cd to|read)|Cannot find path) .{1,300}"
        r"|pathspec .{1,300} did not match"
        r"|file or directory not found: .{1,300}|\bcd(?::\d+)?: (?:not a directory|string not in pwd): .{1,300}"
        r"|^cd: The directory .{1,300} does not exist",
        *("cannot access", "not a directory", "not in pwd", "cd: the directory", "can't open file"),
        *("can't cd to", "can't read", "pathspec", "cannot find path", "file or directory not found"),
        channels="shell",
        confidence=0.85,
        accept=_has_path_in_command,
    ),
    # "fatal: not a git repository (or any of the parent directories): .git"; "nothing to commit, working tree clean"
    rule(
        "git_state",
        r"^(?P<said>(?:fatal|error|hint|warning|致命错误|Schwerwiegend|erreur)\s?[:：])?.{0,100}(?:not a git repository"
        r"|Kein Git-Repository|n'est un dépôt git|不是 ?(?:一个 ?)?git 仓库"
        r"|Git ?リポジトリではありません|has no upstream branch|ambiguous argument|argument .{1,100} ambigu"
        r"|unknown revision|bad revision|would be overwritten|commit your changes or stash|you have unstaged changes"
        r"|your index contains uncommitted|nothing to commit|nothing added to commit|no changes added to commit"
        r"|paths are ignored by|a branch named .{1,100} already exists|already exists and is not"
        r"|src refspec .{1,100} does not match|unrelated histories|not currently on a branch"
        r"|not something we can merge"
        r"|is not a commit|already checked out|already used by worktree|no such (?:ref|remote|branch)"
        r"|does not appear to be a git repository|remote .{1,60} already exists|no merge to abort"
        r"|no rebase in progress|no stash entries"
        r"|no cherry-pick|branch .{1,100} not found|not fully merged|does not have any commits|is not a git command"
        r"|tag .{1,80} already exists|cannot rebase|cannot pull|no tracking information|invalid (?:reference"
        r"|object name|upstream)"
        r"|not a valid (?:object|ref)|path .{1,200} (?:does not exist in|exists on disk, but not in)"
        r"|couldn't find remote ref"
        r"|cannot delete branch|is already used by|already a rebase|partial commit during|must be run in a work tree"
        r"|has (?:changes staged|local modifications)|without -r|no such path|unknown (?:option|switch)"
        r"|not a valid \w{1,20} name)",
        *("git", "dépôt", "upstream", "ambigu", "revision", "overwritten", "stash", "unstaged"),
        *("uncommitted", "nothing ", "no changes added", "ignored by", "already", "refspec", "unrelated"),
        *("not currently", "merge", "not a commit", "no such", "rebase", "stash entries", "cherry-pick", "not found"),
        *("any commits", "cannot pull", "tracking", "invalid ", "not a valid", "exist in", "on disk"),
        *("remote ref", "cannot delete", "partial commit", "work tree", "staged", "local modifications"),
        *("without -r", "unknown "),
        channels="shell",
        confidence=0.8,
        accept=_is_about_git_command,
    ),
    # Any other refusal by git, from a single command that is not a query.
    # "fatal: cannot do that now"; not "fatal: unable to access 'https://example.invalid/'"
    rule(
        "git_state",
        r"^fatal: (?!.{0,80}(?:Needed a single revision|remote|unable to|could not|cannot lock|early EOF|protocol))",
        "fatal: ",
        channels="shell",
        confidence=0.7,
        accept=lambda _, command: command.runs_git_only and not _GIT_QUERY.search(command.text),
    ),
)
