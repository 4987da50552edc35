"""Rules for messages from the harness: calls that it refused, and calls that it could not run.

A refusal is the whole result, so it is searched only at the start. A program may print the same words about something
else, but rarely at the start of its output.

Whether a message proves that the call itself was wrong (no such tool, wrong arguments) depends on the tool. Sentences
that only a harness writes count for every tool. File tools may also complain about their parameters. A tool on an MCP
server also reports failures of the server, so its message has to be about the arguments. For a shell, only sentences
from a harness count, since programs print arbitrary text.
"""

from __future__ import annotations

import re

from composer_replication.sites.actions.shell_command import Command
from composer_replication.sites.rule import FailureRule, rule

REFUSALS: tuple[FailureRule, ...] = (
    # "The user doesn't want to proceed with this tool use."; "Tool call rejected by user"; not "users rejected: 0"
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
    # "[Request interrupted by user]"; "The user aborted the run"
    rule(
        "user_interrupt",
        r"\[Request interrupted by user|(?:\S+ ){0,3}(?:interrupted|aborted|cancelled|canceled) by (?:the )?user\b"
        r"|<turn_aborted>|\[(?:Operation|Request) (?:Cancelled|Aborted|Interrupted)\]|Conversation interrupted"
        r"|(?:The )?user (?:interrupted|aborted|cancelled|canceled|stopped)",
        *("interrupted", "aborted", "cancelled", "canceled", "stopped"),
        where="start",
        confidence=0.98,
    ),
    # An interruption after partial output: "12 passed\n[Request interrupted by user for tool use]"
    rule(
        "user_interrupt",
        r"^\[Request interrupted by user(?: for tool use)?\]\s*\Z|^(?:aborted"
        r"|interrupted) by (?:the )?user\b.{0,40}\Z",
        *("interrupted by", "aborted by"),
        where="end",
        confidence=0.95,
    ),
    # "Claude requested permissions to write to a.py, but you haven't granted it yet."; "This command requires approval"
    rule(
        "permission_denied",
        r".{0,40}requested permissions? to .{0,200} haven't granted"
        r"|Permission (?:to|for) .{0,200}(?:has been |was )?denied"
        r"|.{0,200}(?:requires|needs|is waiting for) (?:\w+ )?approval|.{0,300} was blocked\. For security"
        r"|.{0,200}(?:denied|blocked|disallowed|not allowed|not permitted|rejected|forbidden) by (?:the |your |an? )?"
        r"(?:\w+ ){0,3}(?:polic|permission|approval|sandbox|settings|allow ?list|rules)"
        r"|.{0,200}denied by your permission settings"
        r"|.{0,120}(?:outside|within one of) (?:of )?(?:the )?(?:allowed |workspace )"
        r"|.{0,300}approval required by|.{0,80}has specified a rule which prevents"
        r"|.{0,160}not (?:in|on) the (?:list of allowed|allow ?list|allowed)"
        r"|.{0,80}approval (?:policy|mode) .{0,80}(?:never|reject|deny|prevents)|.{0,80}in (?:plan|read-only) mode",
        *("permission", "approval", "blocked", "polic", "allow", "prevents", "sandbox", "workspace"),
        *("plan mode", "read-only mode"),
        where="start",
        confidence=0.95,
    ),
    # "PreToolUse:Bash hook error: no force pushes"; "Blocked: use the make target"; not "the hook ran"
    rule(
        "hook_blocked",
        r"(?:Hook )?(?:PreToolUse|PostToolUse|UserPromptSubmit|PreCompact|Stop|SubagentStop)\b"
        r"|.{0,80}\bhook (?:error|blocked|denied|failed|returned)"
        r"|.{0,80}(?:blocked|denied|stopped) by (?:an? )?(?:\S+ ){0,2}hook"
        r"|.{0,60}\bhook ['\"]?[\w-]{1,60}['\"]? (?:denied|blocked|rejected)"
        r"|Pre-commit validation failed|(?:Operation|Tool|Execution) (?:blocked|stopped) by|Blocked: ",
        *("hook", "tooluse", "pre-commit", "blocked by", "stop", "blocked: "),
        where="start",
        confidence=0.97,
    ),
    # "Sibling tool call errored"; "Skipped because another tool call failed"
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

_QUOTE = r"[\"'`‘’]?"
_TOOL = rf"{_QUOTE}(?P<thing>[\w.:-]{{1,100}}){_QUOTE}"


def _names_called_tool(match: re.Match[str], command: Command) -> bool:
    tool = (match["thing"] or match["other"] or match["third"] or "").rstrip(".:-")
    # The message may contain the full name of an MCP tool: "mcp__github__search" for "search".
    return re.split(r"__|::|/", tool)[-1].lower() in command.words or tool in command.words


TOOL_NAME: tuple[FailureRule, ...] = (
    # "No such tool available: Raed" -> "Raed"; "Tool search_web is not available" -> "search_web"
    rule(
        "tool_not_found",
        rf"(?:MCP error -3260[12]: )?(?:No such tool(?: available)?: ?|(?:unknown|unrecognized|unsupported"
        rf"|invalid) tool"
        rf"(?: name)?:? |unsupported call:? |.{{0,80}}Model tried to call unavailable tool |no tool (?:named|called) "
        rf"|could not find (?:a )?tool (?:named )?){_TOOL}|(?:MCP error -3260[12]: )?(?:The )?(?:tool"
        rf"|function)(?: call)?[ :]+"
        rf"{_TOOL.replace('thing', 'other')} (?:was )?(?:not found|does not exist|doesn't exist|is not (?:available"
        rf"|registered"
        rf"|recognized|defined|a valid tool|supported))|{_TOOL.replace('thing', 'third')} is not a (?:valid|known"
        rf"|registered)"
        r" (?:tool|function)",
        *("tool", "function", "unsupported call"),
        where="start",
        confidence=0.97,
        accept=_names_called_tool,
    ),
)

# Sentences about arguments that only a harness writes, whatever the tool.
HARNESS_SENTENCES: tuple[FailureRule, ...] = (
    # "InputValidationError: Edit failed"; "failed to parse function arguments: missing field `command`"
    rule(
        "input_validation",
        r"InputValidationError|failed to (?:parse|decode) function(?: call)? arguments|Invalid tool parameters"
        r"|.{0,60}params must have required property ['\"]?(?:command|cmd|description)"
        r"|The (?:tool )?arguments provided (?:to|for) the tool are invalid|Missing value for required parameter"
        r"|Output does not match required schema: /",
        *("inputvalidation", "arguments", "parameter", "params must", "required schema"),
        where="start",
        confidence=0.95,
    ),
)


def _is_about_arguments(match: re.Match[str], _: Command) -> bool:
    """Return whether the message is about the arguments of the call, rather than a failure on the server."""
    text = match.string[:400]
    return _SERVER_SIDE.search(text) is None and _ENVIRONMENT_VARIABLE.search(text) is None


def _is_about_parameter(match: re.Match[str], command: Command) -> bool:
    name = match["thing"]
    return _is_about_arguments(match, command) and (name is None or not name.isupper())


def _is_this_function(match: re.Match[str], command: Command) -> bool:
    """Return whether the function in the message is the tool itself, rather than a function that the tool calls."""
    return match["thing"] is None or (match["thing"] in command.words and _is_about_arguments(match, command))


# Words which show that a message is not about the arguments.
# "structured content does not match"; "API_KEY is not set"; not "missing required parameter 'query'"
_SERVER_SIDE = re.compile(
    r"structured content|output schema|Response\b|environment|__init__|config|DOCTYPE|\benv\b|API[_ ]KEY|/etc/"
    r"|status code",
    re.IGNORECASE,
)
# "SERVICE_TOKEN_FILE is missing"; not "TOKEN is missing"
_ENVIRONMENT_VARIABLE = re.compile(r"\b[A-Z]{3,}_[A-Z0-9_]{2,}\b")
SERVER_ARGUMENTS: tuple[FailureRule, ...] = (
    # "MCP error -32602: Invalid arguments for tool search"; "Input validation error: 'limit' is not a number"
    rule(
        "input_validation",
        r"(?:MCP error )?-32602:? ?(?:invalid (?:arguments?|params|parameters)|input validation)"
        r"|.{0,40}Input validation error"
        r"|.{0,40}Invalid arguments? for (?:tool|function)|\d+ validation errors? for (?:call\[|\w{0,60}(?:Arguments"
        r"|Args|Input|Params)\b)"
        r"|.{0,60}arguments? (?:is|are|was|were) not valid JSON|.{0,40}(?:failed|could not"
        r"|cannot) (?:to )?parse (?:the )?"
        r"(?:tool |function |call )?arguments|Invalid (?:tool |function )?(?:arguments?|parameters?)\b",
        *("-32602", "validation", "argument", "parameter"),
        channels="other",
        where="start",
        confidence=0.9,
        accept=_is_about_arguments,
    ),
    # `Missing required parameter "query"` -> "query"; "the field 'limit' is required"
    rule(
        "input_validation",
        r".{0,80}(?:missing|requires?|unexpected|unknown|invalid) (?:a )?(?:required |keyword )?(?:parameter|argument"
        r"|property|field)s?"
        r"(?: named)?:? [\"'`](?P<thing>\w{1,60})[\"'`]|.{0,60}(?:parameter|argument|property"
        r"|field) [\"'`](?P<name>\w{1,60})[\"'`]"
        r" (?:is (?:required|missing|not|invalid)|must|should|cannot)",
        *("parameter", "argument", "property", "field"),
        channels="other",
        where="start",
        confidence=0.85,
        accept=_is_about_parameter,
    ),
    # "search() got an unexpected keyword argument 'q'" -> "search"; "expected string, received number"
    rule(
        "input_validation",
        r".{0,60}?(?P<thing>[\w.]{1,80})\(\) (?:got an unexpected keyword argument|missing \d+ required (?:positional"
        r"|keyword-only) argument)"
        r"|.{0,120}expected (?:an? )?(?:string|number|integer|boolean|array|object),? (?:but )?(?:received|got)",
        *("argument", "expected"),
        channels="other",
        where="start",
        confidence=0.8,
        accept=_is_this_function,
    ),
)

FILE_ARGUMENTS: tuple[FailureRule, ...] = (
    # "The required parameter `file_path` is missing"; "limit: expected number, received string"
    rule(
        "input_validation",
        r"Invalid [`'\"]\w{1,60}[`'\"](?!.{0,300}(?:does not exist|must be different))"
        r"|.{0,100}(?:missing|requires?) (?:value for )?(?:a )?(?:required|mandatory) (?:parameter|argument|property"
        r"|field)"
        r"|.{0,100}required (?:parameter|argument|property|field)\b.{0,120}(?:missing|not (?:provided|set|given)"
        r"|undefined)"
        r"|.{0,60}params must (?:have|be|NOT)\b|.{0,100}must have required property|.{0,40}validating (?:args"
        r"|arguments|input)\b"
        r"|\d+ validation errors? for |.{0,100}(?:unexpected|unknown|additional) (?:parameter|argument|property"
        r"|field) [`'\"]"
        r"|(?:The )?(?:parameter|argument|field|property|type of)\b.{0,160}(?:must be|should be|is required|expected"
        r"|is not valid"
        r"|invalid|is missing|cannot be)|.{0,100}\bexpected (?:an? )?(?:string|number|integer|boolean|array"
        r"|object)\b,? (?:but )?"
        r"(?:received|got)|(?:MCP error )?-32602|.{0,60}arguments? (?:is|are|was|were) not valid JSON"
        r"|.{0,20}regex parse error"
        r"|.{0,20}(?:invalid|malformed|error parsing) (?:regex|regular expression|glob)|File must be an?\b"
        r"|.{0,60}invalid patch\b|Invalid \w{1,30} parameter|Page range .{1,40} exceeds|File path must"
        r"|Path is not a dir"
        r"|.{0,60}Invalid arguments? for (?:tool|function)|Invalid (?:tool )?(?:arguments?|parameters?"
        r"|params|input)\b",
        *("argument", "param", "propert", "field", "validation", "required", "expected", "-32602", "invalid"),
        *("regex", "must be", "validating", "error parsing", "page range", "not a dir"),
        channels="file",
        where="start",
        confidence=0.93,
    ),
    # "agent type 'reviewer' not found"; not "type error"
    rule(
        "input_validation",
        r"\w+ type ['\"`].{1,80}['\"`] not found",
        "type",
        channels="other",
        where="start",
        confidence=0.9,
    ),
)

# A value that the tool does not accept.
MISUSES: tuple[FailureRule, ...] = (
    # "Unknown skill: deploy"; "Task abc123 is not running"; not "the skill works"
    rule(
        "input_validation",
        r"(?:Unknown|Invalid|No such) (?:skill|agent|command|mode|type|URL)\b|Skill \S{1,80} (?:not found"
        r"|is not|cannot be used|does not)"
        r"|Agent type .{1,80} not found|You are not in plan mode|.{0,40}(?:No (?:task|shell|agent|session)"
        r"|Task|Shell) (?:found with|with) ID"
        r"|(?:Task|Shell|Agent) \S{1,80} (?:is not running|not found|does not exist)"
        r"|.{0,60}is not a valid (?:URL|value|option|choice)|(?:Error: )?Cannot specify both",
        *("specify both", "skill", "agent", "command", "mode", "type", "url", "task", "shell", "valid", "session"),
        channels="other",
        where="start",
        confidence=0.8,
    ),
    # "This tool cannot read binary files."; "File is a Jupyter Notebook. Use the notebook tool."
    rule(
        "input_validation",
        r".{0,60}unrecognized file type|.{0,80}cannot read binary files|File is a Jupyter Notebook"
        r"|Cannot create new file"
        r"|.{0,40}ripgrep (?:error|failed).{0,80}(?:regex|unrecognized|glob)|.{0,200}is not a (?:notebook|valid)",
        *("file type", "binary files", "jupyter", "cannot create", "ripgrep", "is not a "),
        channels="file",
        where="start",
        confidence=0.8,
    ),
)
