"""The facts of a session that a hint may state: only what the session had shown by the time of the erring turn.

What the failing result says is known too: a hint is written with hindsight about one turn, not about later ones.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping
from typing import Any

from composer_replication.actions.session_state import SessionState
from composer_replication.actions.tools import (
    EVERYWHERE,
    NEW_TEXT,
    OLD_TEXT,
    PATH,
    first_text,
    plain_name,
)
from composer_replication.hint_generator.along import Case, StateAlong, call_of, said_of
from composer_replication.hint_generator.context import HintContext
from composer_replication.hint_generator.edit_texts import ambiguous_facts, no_match_facts
from composer_replication.hint_generator.error_words import (
    choices_in,
    command_to_run,
    meant_name,
    near_option,
    nearest,
    options_in,
    unknown_option,
)
from composer_replication.hint_generator.file_templates import SEARCHERS
from composer_replication.hint_generator.files import missing_path_facts, names_in
from composer_replication.hint_generator.parameters import parameter_facts
from composer_replication.hint_generator.shell_facts import advised_facts, known, missing_in_shell, place_of_shell
from composer_replication.types import Conversation, ErrorSite, ToolCall

# In this order: in some shells' words the place comes where others put the name.
_PROGRAM = (
    re.compile(r"(?:command not found|未找到命令|找不到命令)[:：] ?([\w.+-]+)"),
    re.compile(r"['\"]([\w.+-]+)['\"] is not rec"),
    re.compile(r"(?:^|[:\s])([\w.+-]+): (?:\S+ )?(?:not found|nicht gefunden|introuvable|no encontrada|non trovato)"),
)
_INSTEAD = {"python": "python3", "pip": "python3 -m pip", "pytest": "python3 -m pytest"}
_MAX_NAMES, _MAX_VALUE = 8, 80
_NUM_LINES = re.compile(r"number of lines in the file: `?(\d{1,7})|lines of the file: \[1, (\d{1,7})\]")
_READERS = ("read", "read_file", "view_file", "open_file", "view")
_LISTERS = ("glob", "ls", "list_directory", "find_file", "list_dir", "list_files", "file_search", "search_files")
_NOT_A_FILE_OF_GIT = re.compile(r"pathspec|known to git|ambiguous argument|not in the working tree")
_RENAMES = re.compile(r"\bmv\b|\brename\b")


_Schemas = Mapping[str, Mapping[str, Any]]


def collect_facts(
    site: ErrorSite,
    conversation: Conversation,
    *,
    tool_schemas: Mapping[str, Mapping[str, Any]] | None = None,
    inferred_tools: Mapping[str, Mapping[str, Any]] | None = None,
    along: StateAlong | None = None,
) -> HintContext:
    """Facts about one site, for the template of its kind and for those that read the hint's record.

    `tool_schemas` are those that somebody wrote down: what calls merely happened to have says nothing about what a tool
    needs or refuses. `inferred_tools` are those that sessions of the same agent called.
    """
    call, walk = call_of(site, conversation), along or StateAlong(conversation)
    state = walk.before(site.turn_id)
    schemas = tool_schemas or {}
    facts: HintContext = {"error_kind": site.kind, "tool_name": site.tool}
    if site.evidence_text:
        facts["error_message"] = site.evidence_text
    facts |= _tool_facts(site, state, schemas, inferred_tools or {})
    if call is not None:
        case = Case(site, call, said_of(site, conversation), state, walk.edits_of)
        if case.path:
            facts["path"] = case.path
        if site.kind == "input_validation":
            facts |= parameter_facts(call, case.said, schemas.get(site.tool))
            facts |= _renamed_parameter(call, facts, inferred_tools or {})
        if site.kind in _BY_KIND:
            facts |= _BY_KIND[site.kind](case)
    return facts


def _tool_facts(site: ErrorSite, state: SessionState, schemas: _Schemas, inferred: _Schemas) -> HintContext:
    facts: HintContext = {}
    # What this session has called is not all there is: sessions of the same agent tell the rest.
    tools = sorted({*schemas, *state.tools, *inferred} - ({site.tool} if site.kind == "tool_not_found" else set()))
    if tools:
        facts["available_tools"] = tools
    if site.tool in schemas:
        facts["tool_schema"] = schemas[site.tool]
    elif state.tools.get(site.tool):
        facts["seen_parameters"] = sorted(state.tools[site.tool])
    if site.repeats:
        facts["num_repeats"] = site.repeats
    for key, names in (("reader_tool", _READERS), ("finder_tool", _LISTERS), ("search_tool", SEARCHERS)):
        tool_there = next((tool for tool in tools if plain_name(tool) in names), None)
        if tool_there is not None:
            facts[key] = tool_there
    return facts


# ---- one kind after the other


def _unknown_tool(case: Case) -> HintContext:
    choices = choices_in(case.said)
    meant = meant_name(case.said) or nearest(case.call.name, [*choices, *sorted(case.seen.tools)])
    return known(available_tools=choices, meant=meant)


def _renamed_parameter(call: ToolCall, facts: HintContext, inferred: _Schemas) -> HintContext:
    """What this tool calls a parameter that others call as it was called here."""
    has = {*facts.get("seen_parameters", ()), *(inferred.get(call.name, {}).get("properties") or ())}
    for wrong in facts.get("unexpected_parameters", ()):
        for names in (PATH, OLD_TEXT, NEW_TEXT):
            synonyms = [name for name in names if name in has and name not in call.arguments] if wrong in names else []
            if len(synonyms) == 1:
                return {"meant_parameter": synonyms[0]}
    return {}


def _wrong_value(case: Case) -> HintContext:
    """The values there are, where the error lists them, and the one that was surely meant."""
    choices = choices_in(case.said)
    values = [value for value in case.call.arguments.values() if isinstance(value, str) and 0 < len(value) < _MAX_VALUE]
    wrong = max((value for value in values if value in case.said), key=len, default=None)
    meant = meant_name(case.said) or (nearest(wrong, choices) if wrong and choices else None)
    lines = _NUM_LINES.search(case.said)
    advice = f"The file has {lines[1] or lines[2]} lines: ask for none after its last." if lines else None
    return advised_facts(case) | known(choices=choices, meant=meant, advice=advice)


def _missing_file(case: Case) -> HintContext:
    return missing_path_facts(case.path, case.said, case.seen) if case.path else {}


def _unread(case: Case) -> HintContext:
    if not case.path:
        return {}
    name = case.path.rpartition("/")[2]
    is_renamed = any(_RENAMES.search(command) and name in command for command in case.seen.commands)
    counts_no_more = case.seen.texts.starts_with_summary or case.seen.has_touched(case.path) or is_renamed
    return {"was_read": case.seen.was_in_a_command(case.path), "counts_no_more": counts_no_more}


def _no_match(case: Case) -> HintContext:
    old_text, facts = _old_text(case.call.arguments), advised_facts(case)
    if not case.path or not old_text or facts:
        return facts
    return no_match_facts(case.path, old_text, case.seen, case.edits(case.path))


def _ambiguous(case: Case) -> HintContext:
    # A parameter that the call has already is not named: its name alone makes the same call likelier.
    has = any(key in case.call.arguments for key in EVERYWHERE)
    everywhere = None if has else next((key for key in EVERYWHERE if key in case.said), None)
    facts = known(meant_parameter=everywhere, can_replace_all=has)
    if not case.path:
        return facts
    return facts | ambiguous_facts(case.path, _old_text(case.call.arguments), case.said, case.seen)


def _folder(case: Case) -> HintContext:
    return known(names_there=names_in(case.path, case.seen)[:_MAX_NAMES] if case.path else None)


def _unknown_program(case: Case) -> HintContext:
    match = next((hit for pattern in _PROGRAM if (hit := pattern.search(case.site.evidence_text))), None)
    program = match[1] if match else ""
    other_programs, instead = sorted(case.seen.programs - {program}), _INSTEAD.get(program, "")
    meant = (
        instead
        if instead.partition(" ")[0] in other_programs
        else nearest(program, other_programs)
        if program
        else None
    )
    return advised_facts(case) | known(meant=meant_name(case.said) or meant)


def _wrong_use(case: Case) -> HintContext:
    wrong, facts = unknown_option(case.said), advised_facts(case)
    if wrong is not None:
        meant = meant_name(case.said) or near_option(wrong, options_in(case.said))
        return facts | known(meant=meant, is_unknown_option=True)
    choices = choices_in(case.said)
    if choices or not facts:
        facts = known(choices=choices)
    return facts | known(meant=meant_name(case.said))


def _of_git(case: Case) -> HintContext:
    command = command_to_run(case.said) or ""
    if _NOT_A_FILE_OF_GIT.search(case.said) and case.path:
        shell_facts = place_of_shell(case)
        is_file = posixpath.splitext(case.path)[1] != ""
        if "path_from_shell" in shell_facts or ("shell_folder" in shell_facts and is_file):
            shell_facts.pop("advice", None)
            return shell_facts
    return advised_facts(case) | known(meant=command if command.startswith("git ") else None)


def _gate(case: Case) -> HintContext:
    return known(meant=command_to_run(case.said))


_BY_KIND: dict[str, Callable[[Case], HintContext]] = {
    "tool_not_found": _unknown_tool,
    "input_validation": _wrong_value,
    "file_not_found": _missing_file,
    "shell_path_missing": missing_in_shell,
    "wrong_folder": place_of_shell,
    "edit_not_read": _unread,
    "edit_no_match": _no_match,
    "edit_ambiguous": _ambiguous,
    "is_directory": _folder,
    "output_too_large": advised_facts,
    "cmd_not_found": _unknown_program,
    "usage_error": _wrong_use,
    "shell_syntax": advised_facts,
    "other": advised_facts,
    "api_misuse": advised_facts,
    "git_state": _of_git,
    "hook_blocked": _gate,
}


def _old_text(arguments: Mapping[str, Any]) -> str:
    text = first_text(arguments, OLD_TEXT)
    if text is not None:
        return text
    edits = arguments.get("edits")
    if isinstance(edits, list) and edits and isinstance(edits[0], dict):
        return _old_text(edits[0])
    return ""
