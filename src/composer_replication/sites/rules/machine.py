"""Failures of shell commands that are the machine's, the network's or the harness's, and no slip."""

from __future__ import annotations

from composer_replication.sites.rule import FailureRule, rule
from composer_replication.sites.rules.slips import NO_COMMAND, NO_COMMAND_WORDS, SAID_FIRST, is_slip

MACHINE: tuple[FailureRule, ...] = (
    rule(
        "timeout",
        r"timed out after|command timed out|timed out and has been killed|timeout: sending signal|\bTimeoutError\b"
        r"|\bTimeoutExpired\b|deadline exceeded|ETIMEDOUT|operation timed out|execution timed out|timeout (?:of"
        r"|after) \d"
        r"|exceeded (?:the )?(?:time ?out|time limit)|(?:exceeded|reached) .{0,30}timeout",
        *("timed out", "timeout", "deadline", "etimedout", "time limit"),
        channels="shell",
    ),
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
    rule(
        "git_state",
        r"tell me who you are|unable to auto-detect email|index\.lock|another git process|detected dubious ownership"
        r"|protected branch|GH0\d\d|pre-receive hook declined",
        *("who you are", "auto-detect", "index.lock", "another git", "dubious", "protected branch", "gh0"),
        "pre-receive",
        channels="shell",
        blame="env",
    ),
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
    rule(
        "git_state",
        r"not possible to fast-forward|divergent branches|! \[rejected\]|non-fast-forward|failed to push some refs",
        *("fast-forward", "divergent", "[rejected]", "failed to push"),
        channels="shell",
        blame="unknown",
        confidence=0.7,
    ),
    rule(
        "cmd_not_found",
        rf"^(?:.{{0,80}}: )?(?:line \d+: |\d+: )?([\w.+@/-]{{1,80}}): {NO_COMMAND}\W?$"
        rf"|(?:{SAID_FIRST}) ?[:：] ?([\w.+@/-]{{1,80}})$",
        *NO_COMMAND_WORDS,
        channels="shell",
        blame="env",
        confidence=0.7,
        accept=lambda match, command: not is_slip(match, command),
    ),
    rule(
        "cmd_not_found",
        r"/usr/bin/env: ['‘]?[\w.+-]{1,60}['’]?: No such file"
        r"|^g?make(?:\[\d+\])?: (?!Makefile)[\w.+-]{1,60}: No such file",
        *("/usr/bin/env", "make"),
        channels="shell",
        blame="env",
    ),
)

# The harness held the output back, whatever the command was.
WITHHELD: tuple[FailureRule, ...] = (
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
