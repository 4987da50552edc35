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

CALLS: tuple[FailureRule, ...] = (
    rule(
        "tool_not_found",
        r"No such tool\b|(?:MCP error -32602: )?(?:The )?(?:tool"
        r"|function)(?: call)?[ :]+[\"'`]?[\w.:-]{1,100}[\"'`]? (?:was )?"
        r"(?:not found|does not exist|doesn't exist"
        r"|is not (?:available|registered|recognized|defined|a valid tool|supported))"
        r"|(?:unknown|unrecognized|invalid|unsupported|no) (?:tool|function)(?: name| call| named| called)?\b"
        r"|unsupported call\b|[\"'`]?[\w.:-]{1,100}[\"'`]? is not a (?:valid|known|registered) (?:tool|function)"
        r"|Could not find (?:a )?(?:tool|function)\b|.{0,80}Model tried to call unavailable tool",
        *("tool", "function", "unsupported call"),
        where="start",
        confidence=0.97,
    ),
    rule(
        "input_validation",
        r"InputValidationError|.{0,120}\bfailed to (?:parse|decode) (?:function|tool|the)? ?(?:call )?arguments"
        r"|Invalid (?:tool |function |input )?(?:parameters?|arguments?|params|input)\b|.{0,40}validating (?:args"
        r"|arguments|input)\b"
        r"|Invalid [`'\"]\w{1,60}[`'\"](?!.{0,300}(?:does not exist|must be different))"
        r"|.{0,160}(?:missing|requires?) (?:value for )?(?:a )?(?:required|mandatory) (?:parameter|argument|property"
        r"|field|key)"
        r"|.{0,120}required (?:parameter|argument|property|field|key)\b.{0,120}"
        r"(?:missing|not (?:provided|set|given)|undefined)"
        r"|.{0,60}params must (?:have|be|NOT)\b|.{0,120}must have required property"
        r"|.{0,80}Extra inputs are not permitted"
        r"|.{0,80}\d+ validation errors? for |.{0,120}got an unexpected keyword argument"
        r"|.{0,120}missing \d+ required (?:positional|keyword-only) argument"
        r"|.{0,120}(?:unexpected|unknown|unrecognized|additional) (?:parameter|argument|property|properties|field|key)"
        r"|(?:The )?(?:parameter|argument|field|property|type of)\b.{0,160}"
        r"(?:must be|should be|is required|expected|is not valid|invalid|is missing|cannot be)"
        r"|.{0,120}\bexpected (?:an? )?(?:string|number|integer|boolean|array|object)\b,? (?:but )?(?:received|got)"
        r"|(?:MCP error )?-32602|.{0,80}(?:arguments?|input|parameters?) (?:is|are|was|were) not valid JSON"
        r"|.{0,80}(?:invalid|malformed|unparsable|could not parse|cannot parse|failed to parse) (?:the )?"
        r"(?:tool |function )?(?:call )?(?:JSON|arguments?)|(?:JSONDecodeError|json\.decoder)"
        r"|.{0,40}(?:Unexpected (?:token|end of JSON)|Expecting (?:value|property name|',' delimiter))"
        r"|.{0,80}does not match (?:the )?(?:tool(?:'s)? )?(?:input )?schema"
        r"|.{0,20}regex parse error|.{0,20}(?:invalid|malformed) (?:regex|regular expression|glob|pattern)"
        r"|(?:File|Path|Value|Input) must be an? |\w+ type ['\"`].{1,80}['\"`] not found"
        r"|.{0,60}invalid patch\b",
        *("inputvalidation", "argument", "param", "propert", "field", "validation", "required", "json", "expected"),
        *("expecting", "-32602", "schema", "input", "invalid", "regex", "pattern", "must be", "type"),
        where="start",
        confidence=0.93,
    ),
)
