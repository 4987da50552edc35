"""Messages of tools that read, find and change files, and of tools that do something else altogether.

They are looked for at the start of the result: what a file holds further down is not a message.
"""

from __future__ import annotations

from composer_replication.actions.shell.command import AGENT_COMMANDS
from composer_replication.sites.rule import FailureRule, rule

EDITS: tuple[FailureRule, ...] = (
    rule(
        "edit_not_read",
        r".{0,200}(?:has not been read|hasn't been read|must (?:first )?(?:be )?read (?:the file )?(?:first|before)"
        r"|must (?:first )?read .{0,200}(?:before|first)"
        r"|must use (?:the )?\w{0,20} ?(?:tool )?(?:to read )?.{0,40}(?:first|before (?:edit|writ|overwrit)))",
        *("read", "must use"),
        channels="file",
        where="start",
        confidence=0.98,
    ),
    rule(
        "edit_stale",
        r".{0,200}(?:(?:modified|changed|updated|edited)(?: on disk| externally)? since (?:it was |you |the |last "
        r"|being )?"
        r"(?:last )?(?:read|view|open)|(?:unexpectedly|externally) modified|has changed (?:on disk )?since"
        r"|stale (?:read|content|version))",
        *("since", "modified", "stale"),
        channels="file",
        where="start",
        confidence=0.95,
    ),
    rule(
        "edit_ambiguous",
        r".{0,200}(?:found (?:[2-9]|\d\d+) (?:matches|occurrences)|multiple (?:occurrences|matches)|(?:is"
        r"|are) not unique"
        r"|must be unique|expected (?:1|one|exactly one) (?:occurrence|match|replacement)s?,? but found (?:[2-9]|\d\d+)"
        r"|(?:appears|occurs|found|matched|matches) (?:[2-9]|\d\d+|multiple|several|more than one) (?:times|places"
        r"|locations|spots)"
        r"|appears (?:more than once|multiple times)|matches more than one)",
        *("found", "multiple", "unique", "appears", "occurs", "match", "times"),
        channels="file",
        where="start",
        confidence=0.97,
    ),
    rule(
        "edit_noop",
        r".{0,200}(?:no changes? (?:to make|to apply|were made|would be made|needed|detected|made)"
        r"|old_?str(?:ing)? (?:and|is) .{0,40}(?:the same|identical|equal)|(?:exactly|are) (?:the same|identical)"
        r"|must be different|identical to (?:the )?(?:old|existing|current|new)|(?:is|are) (?:identical|the same as)"
        r"|(?:would|did) not change (?:the file|anything)|new content is (?:the same|identical))",
        *("no change", "same", "identical", "must be different", "not change", "equal"),
        channels="file",
        where="start",
        confidence=0.96,
    ),
    rule(
        "file_not_found",
        r".{0,80}Failed to read (?:the )?file to update",
        "failed to read",
        channels="file shell",
        where="start",
        confidence=0.95,
    ),
    rule(
        "edit_no_match",
        r"(?:Text|Cell)\b.{0,100} not found|Text not found|.{0,200}(?:string to replace not found"
        r"|old_?str(?:ing)?\b.{0,80}(?:not found|does not (?:exist|appear|match))"
        r"|did not appear verbatim|failed to find (?:expected lines|context|the)|(?:could not|cannot|can't|couldn't"
        r"|unable to|failed"
        r" to) (?:find|locate|match) (?:the |a |any )?(?:exact |matching )?(?:string|text|match|context|lines?|search"
        r"|old|block|hunk|snippet|target)"
        r"|no (?:\w+ ){0,3}match(?:es)? (?:was |were )?found|0 occurrences|search (?:block|text|string|pattern)"
        r" (?:was )?not found|no replacement (?:was )?(?:performed|made)|invalid context|hunk #?\d+ (?:FAILED|failed"
        r"|does not apply)"
        r"|apply_patch verification failed|patch (?:does not|did not|failed to|cannot be) appl"
        r"|failed to apply (?:the )?"
        r"(?:patch|edit|diff|hunk)|not found in (?:the )?(?:file|content))",
        *("not found", "verbatim", "find", "locate", "match", "0 occurrences", "replacement", "context"),
        *("hunk", "appl"),
        channels="file",
        where="start",
        confidence=0.96,
    ),
)

# What broke behind the tool.
FAULTS: tuple[FailureRule, ...] = (
    rule(
        "other",
        r".{0,200}(?:\bspawn\b|posix_spawn|uv_cwd|kernel|index(?:ed|ing)?\b|apply model|pdftoppm)",
        *("spawn", "uv_cwd", "kernel", "index", "apply model", "pdftoppm"),
        channels="file",
        where="start",
        blame="harness",
        confidence=0.7,
    ),
    rule(
        "network",
        r".{0,200}\b(?:ECONNREFUSED|ECONNRESET|ETIMEDOUT|ENOTFOUND|EHOSTUNREACH)\b",
        *("econn", "etimedout", "enotfound", "ehostunreach"),
        channels="file",
        where="start",
    ),
)

# Patches that were applied through a shell.
PATCHES: tuple[FailureRule, ...] = (
    rule(
        "edit_no_match",
        r"^.{0,80}(?:apply_patch verification failed|Failed to find (?:expected lines|context)|Invalid Context"
        r"|error: patch failed: |error: .{1,200}: patch does not apply|Hunk #\d+ FAILED at)",
        *("apply_patch", "failed to find", "invalid context", "patch failed", "does not apply", "hunk"),
        channels="shell",
        confidence=0.85,
        accept=lambda _, command: any(
            word in command.text for word in ("apply_patch", "git apply", "patch ", "git am")
        ),
    ),
    rule(  # functions for files, called in a cell of Python
        "file_not_found",
        r"^(?:\[?ERROR: )?File (\S{1,300}?) (?:not found|does not exist)",
        "file",
        channels="shell",
        confidence=0.85,
        accept=lambda match, command: (
            match[1] in command.text and ("ERROR" in match[0] or any(map(command.calls, AGENT_COMMANDS)))
        ),
    ),
    rule(
        "edit_no_match",
        r"^\[?ERROR: .{0,80}(?:No match found|to_replace|did not appear)",
        "error: ",
        channels="shell",
        confidence=0.85,
        accept=lambda _, command: "edit_file" in command.text or "replace" in command.text,
    ),
)

READS: tuple[FailureRule, ...] = (
    rule(
        "os_permission",
        r".{0,300}(?:EACCES|EPERM|EROFS|permission denied|operation not permitted|access is denied"
        r"|read-only file system)",
        *("eacces", "eperm", "erofs", "denied", "not permitted", "read-only"),
        channels="file",
        where="start",
    ),
    rule(
        "timeout",
        r".{0,200}(?:\btimed out\b|\btimeout (?:of|after|exceeded|\d)|\bTimeoutError\b|ETIMEDOUT)",
        *("timed out", "timeout", "time out", "etimedout"),
        channels="file other",
        where="start",
    ),
    rule(
        "other",
        r".{0,200}(?:ENOSPC|no space left|EMFILE|ENOMEM|too many open files|EBUSY|EIO\b|out of memory)",
        *("enospc", "no space", "emfile", "enomem", "too many open", "ebusy", "eio", "out of memory"),
        channels="file",
        where="start",
        blame="env",
    ),
    rule(
        "output_too_large",
        r"(?!.{0,80}(?:took|prompt|rate|usage|quota|name) ).{0,120}\b(?:output|results?|response|content|file|lines?"
        r"|image|PDF)\b"
        r".{0,120}(?:exceeds? (?:the )?(?:\S{1,12} )?(?:maximum|max|limit|token|size|allowed)|too (?:large|long|big)"
        r"|larger than (?:the )?(?:maximum|allowed|limit))|.{0,60}too many (?:results|files|matches)",
        *("exceed", "too large", "too long", "too big", "too many", "larger than"),
        channels="file other",
        where="start",
        confidence=0.95,
    ),
    rule(
        "is_directory",
        r".{0,300}(?:EISDIR|is a directory|is a folder|not a (?:regular )?file\b|path is a directory"
        r"|cannot read a directory)",
        *("eisdir", "directory", "folder", "not a file", "regular file"),
        channels="file",
        where="start",
        confidence=0.95,
    ),
    rule(
        "file_not_found",
        r".{0,300}(?:(?:file|path|directory|folder|notebook)\b.{0,200}(?:does not exist|doesn't exist|not found"
        r"|could not be found"
        r"|cannot be found|is missing)|ENOENT|no such file|(?:file|path|directory) not found"
        r"|cannot find (?:the )?(?:file|path)"
        r"|invalid .?path.? parameter|not found: /)",
        *("not exist", "n't exist", "not found", "enoent", "no such file", "be found", "cannot find", "path"),
        channels="file",
        where="start",
        confidence=0.94,
    ),
)

# Tools that are neither shell nor files: only what cannot be the model's.
ELSEWHERE: tuple[FailureRule, ...] = (
    rule(
        "other",
        r".{0,120}(?:server .{0,60}(?:not connected|disconnected|not running|failed to start)|not enabled for"
        r"|is not authenticated)",
        *("not connected", "disconnected", "not running", "failed to start", "not enabled", "authenticated"),
        channels="other",
        where="start",
        blame="harness",
    ),
    rule(
        "lint_or_typecheck",
        r".{0,200}\"(?:diagnostics|severity)\"\s*:",
        *('"diagnostics"', '"severity"'),
        channels="other",
        where="start",
        confidence=0.7,
    ),
    rule(
        "network",
        r".{0,300}(?:ECONNREFUSED|ECONNRESET|ENOTFOUND|EAI_AGAIN|ETIMEDOUT|fetch failed|network error"
        r"|connection (?:refused|reset"
        r"|closed|error|failed|lost|timed out)|could not (?:connect|resolve)|unable to (?:connect|reach)"
        r"|failed to connect"
        r"|socket hang up|rate limit|too many requests|quota|service unavailable|bad gateway|gateway timeout|overloaded"
        r"|(?:status(?: code)?:? ?|HTTP(?:/[\d.]+)? ?|error:? )(?:40[138]|429|5\d\d)\b|unauthorized|forbidden)",
        *("econn", "enotfound", "eai_again", "etimedout", "fetch failed", "network", "connect", "resolve"),
        *("socket", "limit", "requests", "quota", "unavailable", "gateway", "overloaded", "status", "http"),
        *("error", "unauthorized", "forbidden"),
        channels="other",
        where="start",
    ),
)
