"""Messages of the harness itself. They are the whole result, so they are looked for only where it starts.

A shell can print any of these words about something else; it cannot make a result start like this without meaning it.
"""

from __future__ import annotations

from composer_replication.sites.rule import FailureRule, rule

REFUSALS: tuple[FailureRule, ...] = (
    rule(
        "user_rejected",
        r"The user doesn't want to (?:proceed|take this action)|(?:The )?tool (?:use|call) was rejected"
        r"|(?:\S+ ){0,3}rejected by (?:the )?user|(?:The )?user (?:has )?(?:rejected|declined|denied|refused"
        r"|did not approve)"
        r"|\[?(?:Operation|Tool call|Request) cancelled\]?[.:]? *Reason: User (?:did not allow|cancelled|rejected)"
        r"|User did not allow",
        *("user", "rejected"),
        where="start",
        confidence=0.98,
    ),
    rule(
        "user_interrupt",
        r"\[Request interrupted by user|(?:\S+ ){0,3}(?:interrupted|aborted|cancelled|canceled) by (?:the )?user\b"
        r"|<turn_aborted>|\[(?:Operation|Request) (?:Cancelled|Aborted|Interrupted)\]|Conversation interrupted"
        r"|(?:The )?user (?:interrupted|aborted|cancelled|canceled|stopped)",
        *("interrupted", "aborted", "cancelled", "canceled", "stopped"),
        where="start",
        confidence=0.98,
    ),
    rule(  # with what had been printed until then
        "user_interrupt",
        r"^\[Request interrupted by user(?: for tool use)?\]\s*\Z|^(?:aborted|interrupted) by (?:the )?user\b.{0,40}\Z",
        *("interrupted by", "aborted by"),
        where="end",
        confidence=0.95,
    ),
    rule(
        "permission_denied",
        r".{0,40}requested permissions? to .{0,200} haven't granted|Permission to .{0,200}(?:has been |was )?denied"
        r"|.{0,200}(?:requires|needs|is waiting for) (?:\w+ )?approval|.{0,300} was blocked\. For security"
        r"|.{0,200}(?:denied|blocked|disallowed|not allowed|not permitted|rejected|forbidden) by (?:the |your |an? )?"
        r"(?:\w+ ){0,3}(?:polic|permission|approval|sandbox|settings|allow ?list|rules)"
        r"|.{0,200}denied by your permission settings"
        r"|.{0,120}(?:outside|within one of) (?:of )?(?:the )?(?:allowed |workspace )"
        r"|.{0,300}approval required by|.{0,80}has specified a rule which prevents"
        r"|.{0,160}not (?:in|on) the (?:list of allowed|allow ?list|allowed)"
        r"|.{0,80}approval (?:policy|mode) .{0,80}(?:never|reject|deny|prevents)|.{0,80}in (?:plan|read-only) mode",
        *(
            "permission",
            "approval",
            "blocked",
            "polic",
            "allow",
            "prevents",
            "sandbox",
            "workspace",
            "plan mode",
            "read-only mode",
        ),
        where="start",
        confidence=0.95,
    ),
    rule(
        "hook_blocked",
        r"(?:Hook )?(?:PreToolUse|PostToolUse|UserPromptSubmit|PreCompact|Stop|SubagentStop)\b"
        r"|.{0,80}\bhook (?:error|blocked|denied|failed|returned)"
        r"|.{0,80}(?:blocked|denied|stopped) by (?:an? )?(?:\S+ ){0,2}hook"
        r"|.{0,60}\bhook ['\"]?[\w-]{1,60}['\"]? (?:denied|blocked|rejected)"
        r"|Pre-commit validation failed|(?:Operation|Tool|Execution) (?:blocked|stopped) by",
        *("hook", "tooluse", "pre-commit", "blocked by", "stop"),
        where="start",
        confidence=0.97,
    ),
    rule(
        "sibling_cancelled",
        r".{0,60}Sibling tool call errored|.{0,20}cancelled: parallel tool call"
        r"|.{0,80}(?:parallel|sibling|another) tool call .{0,60}(?:errored|failed|cancelled|canceled|rejected)"
        r"|.{0,60}(?:skipped|cancelled|canceled|not (?:run|executed)) (?:because|since|as|due to) .{0,60}"
        r"(?:parallel|sibling|another|other|previous|earlier) (?:tool )?call",
        *("sibling", "parallel", "tool call", "call"),
        where="start",
        confidence=0.98,
    ),
)
