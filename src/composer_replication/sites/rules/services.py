"""What was asked of somebody else's service, of a database or of data, and is not there: endpoints, tables, fields."""

from __future__ import annotations

from composer_replication.sites.rule import FailureRule, rule
from composer_replication.sites.rules.typed import (
    asks_a_service,
    asks_elsewhere,
    is_familiar,
    is_said_by_known,
    is_wrong_use,
)

SERVICES: tuple[FailureRule, ...] = (
    rule(
        "usage_error",
        r"must first push the current branch|a pull request for branch .{1,200} already exists"
        r"|build constraints exclude all Go"
        r"|none of the git remotes configured|no git remotes found",
        *("first push", "already exists", "build constraints", "git remotes"),
        channels="shell",
        confidence=0.75,
        accept=is_said_by_known,
    ),
    rule(
        "api_misuse",
        r"no such (?:table|column|function): ([\w.]{1,80})|ERROR: +(?:column|relation|table"
        r"|function) \"?([\w.]{1,80})\b.{0,80} does not exist"
        r"|ERROR 1(?:054|146|064) \(\w{5}\).{0,40}? '?([\w.]{2,80})'",
        *("no such table", "no such column", "no such function", "does not exist", "error 1"),
        channels="shell",
        confidence=0.75,
        accept=is_wrong_use,
    ),
    rule(
        "api_misuse",
        r"^gh: .{0,200}\(HTTP (?:404|422|400)\)|\bHTTP (?:404|422|400): .{0,200}\(https?://"
        r"|^glab: .{0,80}\b(?:404|422|400)\b"
        r"|^gh: (?:Field|Variable|Argument|Expected|Parse error|Unknown|Type mismatch|Problems parsing)\b.{0,200}"
        r"|Field '\w{1,60}' (?:doesn't exist on type|is missing required arguments)"
        r"|Could not resolve to an? \w{1,40} with the"
        r"|^(?:expected an object but got: |cannot (?:iterate|index)\b)",
        *("http 4", "glab", "field", "variable", "argument", "parse error", "mismatch"),
        *("could not resolve to", "parsing", "but got: ", "cannot iterate", "cannot index"),
        channels="shell",
        confidence=0.75,
        accept=asks_a_service,
    ),
    rule(
        "api_misuse",
        r"^curl: \(22\) .{0,80}\b(?:404|400|405|422)\b|ERROR (?:404|400|405|422): ",
        *("curl: (22)", "error 4"),
        channels="shell",
        confidence=0.7,
        accept=asks_elsewhere,
    ),
    rule(  # a filter that does not fit what it is given
        "usage_error",
        r"^jq: error \(at .{1,40}\): (?:Cannot (?:index|iterate)|.{0,200}(?:cannot be|has no keys"
        r"|and .{1,80} cannot))",
        "jq: error (at",
        channels="shell",
        confidence=0.7,
        accept=lambda _, command: is_familiar(command),
    ),
)
