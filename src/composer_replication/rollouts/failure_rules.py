"""How failures look in a rollout whose tools are Python functions, besides the rules that logs have.

A tool's exception reaches the model as its text alone, without its type, so what the words do not say is asked of the
call and of the tool's schema.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from composer_replication.hint_generator.parameters import parameter_facts
from composer_replication.sites.rule import FailureRule, rule
from composer_replication.types import Conversation, ErrorSite, ToolCall

MALFORMED = "The tool call is not valid JSON"
"""What the parser's refusal of a call begins with."""

ROLLOUT_RULES: tuple[FailureRule, ...] = (
    rule("tool_not_found", r"^Tool \S.* not found\.?$", "not found", where="start", confidence=0.98),
    rule("tool_not_found", r"^Unsupported tool call type", "unsupported tool call", where="start", confidence=0.95),
    rule(
        "input_validation",
        r"^.*\bgot (?:an unexpected keyword argument|multiple values for argument)|^.*\bmissing \d+ required "
        r"(?:positional|keyword-only) arguments?:",
        "unexpected keyword",
        "multiple values",
        "missing",
        where="start",
        confidence=0.98,
    ),
    # A tool that says it in words instead of raising; its name tells nobody that it reads files.
    rule(
        "file_not_found",
        r"^(?:\w*error:\s*)?(?:the )?(?:file|path|folder|directory)\b[^\n]{0,200}?\b(?:not found|does not exist)"
        r"|^(?:\w*error:\s*)?no such file or directory",
        "not found",
        "does not exist",
        "no such file",
        channels="other",
        where="start",
        confidence=0.85,
    ),
    rule("input_validation", rf"^{MALFORMED}", MALFORMED.lower(), where="start", confidence=0.98),
    rule(
        "input_validation",
        r"^.*argument after \*\* must be a mapping",
        "must be a mapping",
        where="start",
        confidence=0.95,
    ),
)


def judged_by_schema(
    sites: Sequence[ErrorSite], conversation: Conversation, tools: Mapping[str, Mapping[str, Any]]
) -> list[ErrorSite]:
    """Exceptions that no rule knows, where the call itself explains them; others stay nobody's, and are not taught.

    Arguments that do not fit the tool's schema are the model's doing whatever the tool then stumbled over, and so is an
    argument that the message names.
    """
    calls = {call.id: call for turn in conversation.turns for call in turn.calls}
    return [_judged(site, calls.get(site.call_id), tools.get(site.tool)) for site in sites]


def _judged(site: ErrorSite, call: ToolCall | None, schema: Mapping[str, Any] | None) -> ErrorSite:
    if site.kind != "other" or site.blame != "unknown" or site.is_soft or call is None:
        return site
    does_not_fit = bool(parameter_facts(call, site.evidence_text, schema))
    names = [name for name in call.arguments if re.search(rf"\b{re.escape(name)}\b", site.evidence_text)]
    if not (does_not_fit or names):
        return site
    why = "its arguments do not fit the schema" if does_not_fit else f"the message names its argument {names[0]}"
    return replace(
        site, kind="input_validation", blame="model", confidence=0.8, is_kept=True, reason=f"a tool raised: {why}"
    )
