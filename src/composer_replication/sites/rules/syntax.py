"""What could not be read as it was typed: by the shell, or by a program that was handed a script with the command."""

from __future__ import annotations

from composer_replication.sites.rule import FailureRule, rule
from composer_replication.sites.rules.typed import (
    is_familiar,
    is_here,
    is_replaced_pattern,
    is_unescaped,
    is_unquoted,
    is_written_inline,
)

_SHELL_SAYS = (
    r"^(?:(?:/\S{0,40}/)?(?:bash|sh|zsh|dash|ksh|fish)(?:: eval)?|-?bash|\(eval\)|eval)(?:: -c)?(?::[\w\[]{1,20})?"
    r"(?:: line \d+|[: ]+\d+)?: "
)

SYNTAX: tuple[FailureRule, ...] = (
    rule(  # bash, zsh, dash, fish
        "shell_syntax",
        _SHELL_SAYS + r".{0,80}(?:syntax error|unexpected EOF|unexpected end of file|parse error|unmatched|unterminated"
        r"|bad substitution|bad pattern|event not found|bad math expression|not a valid identifier"
        r"|unknown file attribute"
        r"|bad option|conditional|read-only variable|missing end|unknown condition|not valid in this context"
        r"|number expected"
        r"|expected (?:a |an )?(?:command|string|variable)|=+ not found|bad set of key|Unsupported use of"
        r"|here-document"
        r"|ambiguous redirect|unary operator expected|binary operator expected|integer expression expected"
        r"|bad array subscript|bad floating point|value too great for base|division by 0|failed glob|bad range"
        r"|is not the exit status|no coprocess|-[\w-]: invalid option|bad assignment|command not found: #$"
        r"|Variables cannot be bracketed|Command substitutions not allowed|Expected "
        r"|can only .{0,12}(?:be used in|from) a fun"
        r"|cd: too many arguments|invalid (?:number|directive)$|\$\(\.\.\.\) is not supported"
        r"|(?:\[\[|source|shopt|mapfile|readarray|declare|local|pushd|setopt|function): (?:command )?not found$"
        r"|command not found: (?:mapfile|readarray|shopt|compgen|complete)$)"
        r"|^(?:bash|sh|zsh|\(eval\))(?::\d+| line \d+|: line \d+)?: \[+: .{1,80}|^sh: \d+: Syntax error",
        *("syntax error", "unexpected", "parse error", "unmatched", "unterminated", "bad "),
        *("event not found", "identifier", "attribute", "conditional", "read-only variable", "missing "),
        *("unknown condition", "not valid", "expected", " not found", "unsupported use", "here-document"),
        *("ambiguous", "too great", "division by", "failed glob", "[: ", "exit status", "bracketed"),
        *("not allowed", "coprocess", "invalid ", "can only ", "too many", "not supported"),
        channels="shell",
        confidence=0.85,
        accept=is_here,
    ),
    rule(  # PowerShell and cmd
        "shell_syntax",
        r"is not a valid statement separator|^The string is missing the terminator"
        r"|^Unexpected token '.{1,40}' in expression"
        r"|^\s*\+ .{0,40}FullyQualifiedErrorId : (?:UnexpectedToken|MissingEnd|TerminatorExpected|InvalidVariable"
        r"|Missing|Ampersand)"
        r"|^Missing (?:closing '[)}]' in|argument in parameter list|expression after)"
        r"|^The '<' operator is reserved for future use"
        r"|^The ampersand \(&\) character is not allowed|^The syntax of the command is incorrect"
        r"|^\S{1,40} was unexpected at this time"
        r"|^You must provide a value expression following",
        *("separator", "missing ", "unexpected", "errorid", "reserved for", "ampersand"),
        *("command is incorrect", "value expression"),
        channels="shell",
        confidence=0.85,
        accept=is_here,
    ),
    rule(
        "shell_syntax",
        rf"{_SHELL_SAYS}no matches found: (\S.{{0,300}}?)\s*$|^fish: No matches for wildcard '(.{{1,300}}?)'",
        "no matches",
        channels="shell",
        confidence=0.8,
        accept=is_unquoted,
    ),
    rule(  # words in backticks, or in a variable, that the shell took for a command
        "shell_syntax",
        rf"{_SHELL_SAYS}(?:(?:command not found|no such file or directory|permission denied"
        rf"|is a directory): (.{{1,200}}?)"
        r"|(.{1,200}?): (?:command not found|No such file or directory|Permission denied|Is a directory))$",
        *("not found", "no such file", "permission denied", "is a directory"),
        channels="shell",
        confidence=0.8,
        accept=is_unescaped,
    ),
    rule(  # a pattern that the shell replaced by names
        "shell_syntax",
        r"^find: (\S{1,200}): unknown primary|^find: paths must precede expression",
        *("unknown primary", "precede"),
        channels="shell",
        confidence=0.8,
        accept=is_replaced_pattern,
    ),
    rule(  # programs that are handed a script of their own
        "shell_syntax",
        r"^jq: error: (?:syntax error|\S{1,60}/\d+ is not defined)|^jq: \d+ compile errors?"
        r"|failed to parse jq expression"
        r"|^sed: (?:first RE|RE error: (?!illegal byte)|-e expression #\d+, char \d+|\d+: \").{0,300}"
        r"|^g?awk: (?:cmd\. line:\d+: .{0,200}"
        r"|.{0,40})(?:syntax error"
        r"|unterminated|non-terminated|calling undefined function|illegal statement|bailing out)"
        r"|^g?awk: .{0,80} source line \d+|^(?:e|f|z"
        r"|g)?grep: (?:unmatched"
        r"|invalid (?:repetition|character|regular|preceding|back|range)|parentheses not balanced|brackets"
        r"|repetition-operator"
        r"|trailing backslash|empty \(sub\)expression|exceeded)|^rg: (?:regex parse error|error parsing"
        r"|the literal)|^regex parse error:"
        r"|^perl: syntax error|syntax error at -e line \d|^Substitution (?:replacement|pattern) not terminated at -e"
        r"|^yq: .{0,40}(?:bad expression|lexer error)|^Error: bad expression",
        *("jq", "sed: ", "awk: ", "grep: ", "regex parse", "rg: ", "at -e", "perl", "bad expression"),
        "lexer error",
        channels="shell",
        confidence=0.85,
    ),
    rule(  # interpreters
        "shell_syntax",
        r'^\s*File "<(?:string|stdin)>", line \d+\s*$'
        r"|^-e:\d+: syntax error|^\[(?:eval|stdin)\]:\d+$|Parse error: .{0,120} in Command line code"
        r"|^syntax error at - line \d|^file:///\S{0,80}\[eval\d\]:\d+",
        *('file "<st', "-e:", "[eval", "[stdin]", "command line code", "at - line"),
        channels="shell",
        confidence=0.75,
        accept=is_written_inline,
    ),
    rule(  # a cell
        "shell_syntax",
        r"\s*(?:Cell In ?\[\d{1,6}\], line \d{1,6}|File \"<ipython-input\S{1,80}, line \d{1,6})\n(?:.{0,300}\n){1,4}?"
        r"\s*(?:SyntaxError|IndentationError|TabError): ",
        *("syntaxerror", "indentationerror", "taberror"),
        channels="shell",
        where="start",
        confidence=0.75,
    ),
    rule(  # statements of SQL
        "shell_syntax",
        r"^(?:psql:<stdin>:\d+: )?ERROR: +syntax error at or near"
        r"|^(?:Parse error: |Error: )?(?:in prepare, )?near .{1,60}: syntax error"
        r"|^ERROR 1064 \(42000\)",
        *("syntax error", "error 1064"),
        channels="shell",
        confidence=0.8,
        accept=lambda _, command: (
            is_familiar(command) and "<" not in command.text.replace("<<", "") and " -f" not in command.text
        ),
    ),
)
