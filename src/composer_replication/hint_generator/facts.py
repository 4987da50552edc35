"""The facts of a session that a hint may state: only what the session had shown by the time of the erring turn.

What the failing result says is known too: a hint is written with hindsight about one turn, not about later ones.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast

from composer_replication.actions.session_state import SessionState
from composer_replication.actions.tools import (
    EVERYWHERE,
    NEW_TEXT,
    OLD_TEXT,
    PATH,
    channel_of,
    command_text,
    first_text,
    path_argument,
    plain_name,
)
from composer_replication.hint_generator.advice import advice_for
from composer_replication.hint_generator.along import StateAlong, call_of, said_of
from composer_replication.hint_generator.context import HintContext
from composer_replication.hint_generator.error_words import (
    choices_in,
    command_to_run,
    meant_name,
    nearest,
    options_in,
)
from composer_replication.hint_generator.files import (
    ambiguous_facts,
    missing_path_facts,
    names_in,
    no_match_facts,
    short_path,
    typed_path,
)
from composer_replication.hint_generator.parameters import parameter_facts
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
_SEARCHERS = ("grep", "search_file_content", "grep_search")


_Schemas = Mapping[str, Mapping[str, Any]]


class _Case(NamedTuple):
    """A failing call, what came back, and what the session had shown before it."""

    site: ErrorSite
    call: ToolCall
    said: str
    seen: SessionState
    edits: Callable[[str], list[tuple[str, str]]]

    @property
    def command(self) -> str:
        return command_text(self.call.name, self.call.arguments)

    @property
    def path(self) -> str | None:
        if channel_of(self.call.name) != "shell":
            return path_argument(self.call.arguments)
        return typed_path(self.site.evidence_text, self.command)


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
    seen = walk.before(site.turn_id)
    schemas = tool_schemas or {}
    facts: HintContext = {"error_kind": site.kind, "tool_name": site.tool}
    if site.evidence_text:
        facts["error_message"] = site.evidence_text
    facts |= _tool_facts(site, seen, schemas, inferred_tools or {})
    if call is not None:
        case = _Case(site, call, said_of(site, conversation), seen, walk.edits_of)
        if case.path:
            facts["path"] = case.path
        if site.kind == "input_validation":
            facts |= parameter_facts(call, case.said, schemas.get(site.tool))
            facts |= _renamed_parameter(call, facts, inferred_tools or {})
        if site.kind in _BY_KIND:
            facts |= _BY_KIND[site.kind](case)
    return facts


def _tool_facts(site: ErrorSite, seen: SessionState, schemas: _Schemas, inferred: _Schemas) -> HintContext:
    facts: HintContext = {}
    tools = sorted({*schemas, *seen.tools} - ({site.tool} if site.kind == "tool_not_found" else set()))
    if tools:
        facts["available_tools"] = tools
    if site.tool in schemas:
        facts["tool_schema"] = schemas[site.tool]
    elif seen.tools.get(site.tool):
        facts["seen_parameters"] = sorted(seen.tools[site.tool])
    if site.repeats:
        facts["num_repeats"] = site.repeats
    for key, names in (("reader_tool", _READERS), ("finder_tool", _LISTERS), ("search_tool", _SEARCHERS)):
        known = next((tool for tool in (*tools, *sorted(inferred)) if plain_name(tool) in names), None)
        if known is not None:
            facts[key] = known
    return facts


# ---- one kind after the other


def _unknown_tool(case: _Case) -> HintContext:
    choices = choices_in(case.said)
    meant = meant_name(case.said) or nearest(case.call.name, [*choices, *sorted(case.seen.tools)])
    return _known(available_tools=choices, meant=meant)


def _renamed_parameter(call: ToolCall, facts: HintContext, inferred: _Schemas) -> HintContext:
    """What this tool calls a parameter that others call as it was called here."""
    known = {*facts.get("seen_parameters", ()), *(inferred.get(call.name, {}).get("properties") or ())}
    for wrong in facts.get("unexpected_parameters", ()):
        for names in (PATH, OLD_TEXT, NEW_TEXT):
            others = [name for name in names if name in known and name not in call.arguments] if wrong in names else []
            if len(others) == 1:
                return {"meant_parameter": others[0]}
    return {}


def _wrong_value(case: _Case) -> HintContext:
    """The values there are, where the error lists them, and the one that was surely meant."""
    choices = choices_in(case.said)
    values = [each for each in case.call.arguments.values() if isinstance(each, str) and 0 < len(each) < _MAX_VALUE]
    wrong = max((each for each in values if each in case.said), key=len, default=None)
    meant = meant_name(case.said) or (nearest(wrong, choices) if wrong and choices else None)
    lines = _NUM_LINES.search(case.said)
    advice = f"The file has {lines[1] or lines[2]} lines: ask for none after its last." if lines else None
    return _advised(case) | _known(choices=choices, meant=meant, advice=advice)


def _missing_file(case: _Case) -> HintContext:
    return missing_path_facts(case.path, case.said, case.seen) if case.path else {}


def _missing_in_shell(case: _Case) -> HintContext:
    facts = _place_of_shell(case)
    if re.search(r"\bgit\b", case.command):
        facts |= _known(advice=advice_for("git_state", case.said, case.command))
    if "path_from_shell" not in facts and "meant" not in facts and case.path:
        folder = case.seen.paths.shell.path
        path = case.path if folder is None else posixpath.join(folder, case.path)
        facts |= missing_path_facts(path, case.said, case.seen)
    return facts


def _place_of_shell(case: _Case) -> HintContext:
    """Where the shell stands, if not where the session began, and what a typed path is called from there."""
    paths, facts = case.seen.paths, _advised(case)
    here, root = paths.shell.path, paths.root
    if here is None or root is None:
        return facts
    if here != root:
        facts |= {"shell_folder": short_path(here, root), "project_folder": root}
    typed = case.path or ""
    for base in _with_parents(here, root) if typed and not typed.startswith(("/", "~")) else ():
        meant = posixpath.normpath(posixpath.join(base, typed))
        if meant == here or (base != here and (meant in paths.files or meant in paths.folders)):
            facts["path_from_shell"] = posixpath.relpath(meant, here)
            return facts
    if typed and here == root:
        facts |= missing_path_facts(posixpath.join(root, typed), case.said, case.seen)
    return facts


def _with_parents(folder: str, root: str) -> Iterator[str]:
    """The folder and those above it, up to the project's."""
    while folder.startswith(root):
        yield folder
        if folder == root:
            return
        folder = posixpath.dirname(folder)


def _unread(case: _Case) -> HintContext:
    return {"was_read": case.seen.was_in_a_command(case.path)} if case.path else {}


def _no_match(case: _Case) -> HintContext:
    wanted, facts = _old_text(case.call.arguments), _advised(case)
    if not case.path or not wanted or facts:
        return facts
    return no_match_facts(case.path, wanted, case.seen, case.edits(case.path))


def _ambiguous(case: _Case) -> HintContext:
    everywhere = next((key for key in EVERYWHERE if key in case.call.arguments or key in case.said), None)
    if not case.path:
        return _known(meant_parameter=everywhere)
    facts = ambiguous_facts(case.path, _old_text(case.call.arguments), case.said, case.seen)
    return facts | _known(meant_parameter=everywhere)


def _folder(case: _Case) -> HintContext:
    return _known(names_there=names_in(case.path, case.seen)[:_MAX_NAMES] if case.path else None)


def _unknown_program(case: _Case) -> HintContext:
    match = next((found for each in _PROGRAM if (found := each.search(case.site.evidence_text))), None)
    program = match[1] if match else ""
    known, instead = sorted(case.seen.programs - {program}), _INSTEAD.get(program, "")
    meant = instead if instead.partition(" ")[0] in known else nearest(program, known) if program else None
    return _advised(case) | _known(meant=meant_name(case.said) or meant)


def _wrong_use(case: _Case) -> HintContext:
    choices, facts = choices_in(case.said), _advised(case)
    if choices or not facts:
        facts = _known(choices=choices or options_in(case.said))
    return facts | _known(meant=meant_name(case.said))


def _advised(case: _Case) -> HintContext:
    return _known(advice=advice_for(case.site.kind, case.said, case.command))


def _of_git(case: _Case) -> HintContext:
    asked = command_to_run(case.said) or ""
    return _advised(case) | _known(meant=asked if asked.startswith("git ") else None)


def _gate(case: _Case) -> HintContext:
    return _known(meant=command_to_run(case.said))


def _known(**facts: Any) -> HintContext:
    """Those of the facts that there are."""
    return cast("HintContext", {name: value for name, value in facts.items() if value})


_BY_KIND: dict[str, Callable[[_Case], HintContext]] = {
    "tool_not_found": _unknown_tool,
    "input_validation": _wrong_value,
    "file_not_found": _missing_file,
    "shell_path_missing": _missing_in_shell,
    "wrong_folder": _place_of_shell,
    "edit_not_read": _unread,
    "edit_no_match": _no_match,
    "edit_ambiguous": _ambiguous,
    "is_directory": _folder,
    "output_too_large": _advised,
    "cmd_not_found": _unknown_program,
    "usage_error": _wrong_use,
    "shell_syntax": _advised,
    "other": _advised,
    "api_misuse": _advised,
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
