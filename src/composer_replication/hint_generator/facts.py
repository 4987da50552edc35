"""Collect the facts that a hint may state: what the session showed before the erring turn, and the failing result.

Later turns are not used: the failing result is the only hindsight that a hint may have. `collect_facts` looks up the
function for the kind of failure (`_FACTS_BY_KIND`). The second half compares the old text of a failed edit with the
file as it was last shown.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from composer_replication.hint_generator.context import (
    FailingCall,
    HintContext,
    StateCursor,
    failing_result_text,
    find_call,
    folder_entries,
    listed_choices,
    missing_path_facts,
    nearest_name,
    short_path,
    suggested_name,
)
from composer_replication.hint_generator.shell_facts import (
    advice_facts,
    missing_shell_path_facts,
    nonempty_facts,
    shell_folder_facts,
)
from composer_replication.hint_generator.templates import TEXT_SEARCH_TOOLS
from composer_replication.sites.actions.session_state import SessionState
from composer_replication.sites.actions.tools import (
    NEW_TEXT_KEYS,
    OLD_TEXT_KEYS,
    PATH_KEYS,
    REPLACE_ALL_KEYS,
    first_string_argument,
    plain_name,
    word_set,
)
from composer_replication.types import Conversation, ErrorSite, ToolCall

# The order matters: some shells print a line number where others print the name.
_PROGRAM = (
    # "zsh: command not found: foo" -> "foo"
    re.compile(r"(?:command not found|未找到命令|找不到命令)[:：] ?([\w.+-]+)"),
    # "'foo' is not recognized as an internal or external command" -> "foo"
    re.compile(r"['\"]([\w.+-]+)['\"] is not rec"),
    # "bash: foo: command not found" -> "foo"; "bash: foo: commande introuvable" -> "foo"
    re.compile(r"(?:^|[:\s])([\w.+-]+): (?:\S+ )?(?:not found|nicht gefunden|introuvable|no encontrada|non trovato)"),
)
# Commands that many machines lack, and their substitutes.
_SUBSTITUTES = {"python": "python3", "pip": "python3 -m pip", "pytest": "python3 -m pytest"}
_MAX_NAMES = 8
# Arguments with more characters are free text rather than names.
_MAX_VALUE = 80
# An error about an offset beyond the end of a file.
# "The number of lines in the file: `120`" -> "120"; "must be within the lines of the file: [1, 80]" -> "80"
_FILE_LENGTH = re.compile(r"number of lines in the file: `?(\d{1,7})|lines of the file: \[1, (\d{1,7})\]")
# The same tool has different names in different agents.
_READERS = ("read", "read_file", "view_file", "open_file", "view")
_LISTERS = ("glob", "ls", "list_directory", "find_file", "list_dir", "list_files", "file_search", "search_files")
# "error: pathspec 'a.py' did not match any file(s) known to git"; not "fatal: not a git repository"
_NOT_A_FILE_OF_GIT = re.compile(r"pathspec|known to git|ambiguous argument|not in the working tree")
# "git mv a.py b.py"; not "git rm a.py"
_RENAMES = re.compile(r"\bmv\b|\brename\b")

_SchemaByTool = Mapping[str, Mapping[str, Any]]


def collect_facts(
    site: ErrorSite,
    conversation: Conversation,
    *,
    tool_schemas: Mapping[str, Mapping[str, Any]] | None = None,
    inferred_tools: Mapping[str, Mapping[str, Any]] | None = None,
    along: StateCursor | None = None,
) -> HintContext:
    """Return the facts about one site, for the template of its kind and for the stored hint.

    Args:
        site: The error site.
        conversation: The conversation that contains the site.
        tool_schemas: Hand-written schemas by tool. Schemas inferred from logged calls are no substitute: they do not
            show what a tool requires or rejects.
        inferred_tools: Tools called in sessions of the same agent, with the schemas inferred from these calls.
        along: A cursor shared by the sites of a conversation.
    """
    call, cursor = find_call(site, conversation), along or StateCursor(conversation)
    state = cursor.before(site.turn_id)
    schemas = tool_schemas or {}
    facts: HintContext = {"error_kind": site.kind, "tool_name": site.tool}
    if site.evidence_text:
        facts["error_message"] = site.evidence_text
    facts |= _tool_facts(site, state, schemas, inferred_tools or {})
    if call is not None:
        case = FailingCall(site, call, failing_result_text(site, conversation), state, cursor.edits_of_file)
        if case.path:
            facts["path"] = case.path
        if site.kind == "input_validation":
            facts |= parameter_facts(call, case.error_text, schemas.get(site.tool))
            facts |= _renamed_parameter_facts(call, facts, inferred_tools or {})
        if site.kind in _FACTS_BY_KIND:
            facts |= _FACTS_BY_KIND[site.kind](case)
    return facts


def _tool_facts(site: ErrorSite, state: SessionState, schemas: _SchemaByTool, inferred: _SchemaByTool) -> HintContext:
    """Return the facts about the session's tools, and how often the call had failed before."""
    facts: HintContext = {}
    # This session may not have called every tool; other sessions of the same agent supply the rest.
    tools = sorted({*schemas, *state.tools, *inferred} - ({site.tool} if site.kind == "tool_not_found" else set()))
    if tools:
        facts["available_tools"] = tools
    if site.tool in schemas:
        facts["tool_schema"] = schemas[site.tool]
    elif state.tools.get(site.tool):
        facts["seen_parameters"] = sorted(state.tools[site.tool])
    if site.repeats:
        facts["num_repeats"] = site.repeats
    for key, names in (("reader_tool", _READERS), ("finder_tool", _LISTERS), ("search_tool", TEXT_SEARCH_TOOLS)):
        tool = next((tool for tool in tools if plain_name(tool) in names), None)
        if tool is not None:
            facts[key] = tool
    return facts


# ---- The facts for each kind of failure ------------------------------------------------------------------------------


def _unknown_tool_facts(case: FailingCall) -> HintContext:
    choices = listed_choices(case.error_text)
    meant = suggested_name(case.error_text) or nearest_name(case.call.name, [*choices, *sorted(case.state.tools)])
    return nonempty_facts(available_tools=choices, meant=meant)


def _renamed_parameter_facts(call: ToolCall, facts: HintContext, inferred: _SchemaByTool) -> HintContext:
    """Return this tool's name for a parameter, if the call used the name that other tools have for it."""
    parameters = {*facts.get("seen_parameters", ()), *(inferred.get(call.name, {}).get("properties") or ())}
    for wrong in facts.get("unexpected_parameters", ()):
        for names in (PATH_KEYS, OLD_TEXT_KEYS, NEW_TEXT_KEYS):
            if wrong not in names:
                continue
            synonyms = [name for name in names if name in parameters and name not in call.arguments]
            if len(synonyms) == 1:
                return {"meant_parameter": synonyms[0]}
    return {}


def _wrong_value_facts(case: FailingCall) -> HintContext:
    """Return the valid values if the error lists them, and the intended value if it is clear."""
    choices = listed_choices(case.error_text)
    values = [value for value in case.call.arguments.values() if isinstance(value, str) and 0 < len(value) < _MAX_VALUE]
    wrong = max((value for value in values if value in case.error_text), key=len, default=None)
    meant = suggested_name(case.error_text) or (nearest_name(wrong, choices) if wrong and choices else None)
    num_lines = _FILE_LENGTH.search(case.error_text)
    advice = f"The file has {num_lines[1] or num_lines[2]} lines: ask for none after its last." if num_lines else None
    return advice_facts(case) | nonempty_facts(choices=choices, meant=meant, advice=advice)


def _missing_file_facts(case: FailingCall) -> HintContext:
    return missing_path_facts(case.path, case.error_text, case.state) if case.path else {}


def _unread_file_facts(case: FailingCall) -> HintContext:
    """Return whether a command had shown the file, and whether an earlier read has become invalid."""
    if not case.path:
        return {}
    name = case.path.rpartition("/")[2]
    is_renamed = any(_RENAMES.search(command) and name in command for command in case.state.commands)
    counts_no_more = case.state.texts.starts_with_summary or case.state.has_touched(case.path) or is_renamed
    return {"was_read": case.state.appeared_in_command(case.path), "counts_no_more": counts_no_more}


def _unmatched_edit_facts(case: FailingCall) -> HintContext:
    # Advice that matches the message, for example about notebooks, is more specific than a comparison with the file.
    old_text, facts = _text_to_replace(case.call.arguments), advice_facts(case)
    if not case.path or not old_text or facts:
        return facts
    return _compare_with_file(case.path, old_text, case.state, case.edits(case.path))


def _ambiguous_edit_facts(case: FailingCall) -> HintContext:
    # A parameter that the call already passes is not named: quoting it would make the same call more likely.
    has_parameter = any(key in case.call.arguments for key in REPLACE_ALL_KEYS)
    everywhere = None if has_parameter else next((key for key in REPLACE_ALL_KEYS if key in case.error_text), None)
    facts = nonempty_facts(meant_parameter=everywhere, can_replace_all=has_parameter)
    if not case.path:
        return facts
    return facts | _find_occurrences(case.path, _text_to_replace(case.call.arguments), case.error_text, case.state)


def _directory_facts(case: FailingCall) -> HintContext:
    return nonempty_facts(names_there=folder_entries(case.path, case.state)[:_MAX_NAMES] if case.path else None)


def _unknown_program_facts(case: FailingCall) -> HintContext:
    matches = (pattern.search(case.site.evidence_text) for pattern in _PROGRAM)
    match = next(filter(None, matches), None)
    program = match[1] if match else ""
    working_programs, substitute = sorted(case.state.programs - {program}), _SUBSTITUTES.get(program, "")
    meant = nearest_name(program, working_programs) if program else None
    if substitute.partition(" ")[0] in working_programs:
        meant = substitute
    return advice_facts(case) | nonempty_facts(meant=suggested_name(case.error_text) or meant)


def _wrong_use_facts(case: FailingCall) -> HintContext:
    wrong, facts = _unknown_option(case.error_text), advice_facts(case)
    if wrong is not None:
        meant = suggested_name(case.error_text) or _find_mistyped_option(wrong, _listed_options(case.error_text))
        return facts | nonempty_facts(meant=meant, is_unknown_option=True)
    # The names listed in the error are more specific than general advice.
    choices = listed_choices(case.error_text)
    if choices or not facts:
        facts = nonempty_facts(choices=choices)
    return facts | nonempty_facts(meant=suggested_name(case.error_text))


def _git_facts(case: FailingCall) -> HintContext:
    command = _requested_command(case.error_text) or ""
    # Git resolves paths from the shell's folder, which may not be the project's.
    if _NOT_A_FILE_OF_GIT.search(case.error_text) and case.path:
        shell_facts = shell_folder_facts(case)
        is_file = posixpath.splitext(case.path)[1] != ""
        if "path_from_shell" in shell_facts or ("shell_folder" in shell_facts and is_file):
            shell_facts.pop("advice", None)
            return shell_facts
    return advice_facts(case) | nonempty_facts(meant=command if command.startswith("git ") else None)


def _hook_facts(case: FailingCall) -> HintContext:
    return nonempty_facts(meant=_requested_command(case.error_text))


_FACTS_BY_KIND: dict[str, Callable[[FailingCall], HintContext]] = {
    "tool_not_found": _unknown_tool_facts,
    "input_validation": _wrong_value_facts,
    "file_not_found": _missing_file_facts,
    "shell_path_missing": missing_shell_path_facts,
    "wrong_folder": shell_folder_facts,
    "edit_not_read": _unread_file_facts,
    "edit_no_match": _unmatched_edit_facts,
    "edit_ambiguous": _ambiguous_edit_facts,
    "is_directory": _directory_facts,
    "output_too_large": advice_facts,
    "cmd_not_found": _unknown_program_facts,
    "usage_error": _wrong_use_facts,
    "shell_syntax": advice_facts,
    "other": advice_facts,
    "api_misuse": advice_facts,
    "git_state": _git_facts,
    "hook_blocked": _hook_facts,
}


def _text_to_replace(arguments: Mapping[str, Any]) -> str:
    """Return the text that an edit was meant to replace. For a list of edits, return that of the first edit."""
    text = first_string_argument(arguments, OLD_TEXT_KEYS)
    if text is not None:
        return text
    edits = arguments.get("edits")
    if isinstance(edits, list) and edits and isinstance(edits[0], dict):
        return _text_to_replace(edits[0])
    return ""


# ---- Failed edits: where the old text differs from the file as it was shown ------------------------------------------

# Line numbers in a view: "    12\tdef f():"; "12→def f():"; not "12 items"
_NUMBERED = re.compile(r"^ *\d{1,6}(?:\t|→)", re.MULTILINE)
# Marks a line of the file that was never shown, in `SessionState.texts`.
_UNSEEN_LINE = "\0"
# Maximum number of positions that a hint lists.
_MAX_HEADERS = 4
# Maximum number of file lines that are compared.
_MAX_LINES = 20_000
# Minimum similarity (`SequenceMatcher.ratio`) of two lines with about the same content.
_MIN_LINE_RATIO = 0.6
# Shorter lines, such as `}` or `else:`, occur in many places, so they do not reveal where a text belongs.
_MIN_ANCHOR = 4
# Lines of at least this length rarely occur in two files by chance.
_MIN_DISTINCTIVE = 12
# A word or a symbol, with the whitespace before it: "return x" -> "return"; "  (" -> "  ("
_TOKEN = re.compile(r"\s*(?:\w+|[^\w\s])")
_ELLIPSIS = "…"
# A comment at the start of a line: "# why"; "  // why"; "<!-- why"
_COMMENT = re.compile(r"\s*(?://|#|/?\*|--|<!--|\"\"\"|;)")
# "def load(path):" -> "load"; "func (s *Server) Run()" -> "Run"; not "return load(path)"
_DECLARED = re.compile(
    r"\b(?:def|func|function|fn|class|type|struct|interface|enum|trait|const|let|var|module|package)\s+"
    r"(?:\([^)]*\)\s*)?(\w+)"
)
_KEYWORDS = word_set(
    "return func function def class type struct interface const let var for while else elif switch case import from"
    " nil null none true false err error string int bool self this new async await public private static void with and"
    " not the end"
)


def _compare_with_file(path: str, old_text: str, state: SessionState, edits: Sequence[tuple[str, str]]) -> HintContext:
    """Return how a text differs from the file as it was last shown, given the earlier edits of the file in order."""
    file = state.texts.get(path)
    if len(_NUMBERED.findall(old_text)) >= max(1, old_text.count("\n")):
        return {"edit_problem": "line_numbers"}
    if _is_escaped(old_text, "" if file is None else file.text):
        return {"edit_problem": "escapes"}
    if file is None or not file.text.strip(_UNSEEN_LINE + "\n"):
        return {"edit_problem": "unread"}
    lines, old_lines = file.text.split("\n")[:_MAX_LINES], old_text.split("\n")
    other_path = _find_other_file(old_lines, lines, state, path)
    if other_path is not None:
        return {"edit_problem": "other_file", "meant": other_path}
    offset = _find_offset(old_lines, lines)
    if offset is None:
        facts = _nearest_line_facts(old_lines, lines, is_whole=file.is_whole)
    else:
        facts = _compare_at_offset(offset, old_lines, lines)
    # Reliable even if the file may have changed slightly (`doubt` 1).
    if facts.get("edit_problem") == "whitespace" and file.doubt < 2:
        return facts
    # The file may have changed since it was shown, so comparing with it would mislead.
    if file.doubt:
        return {"edit_problem": "changed" if file.doubt == 2 or file.may_be_reworked else "differs"}
    if _was_changed_by_edit(old_lines, lines, edits):
        facts["edit_problem"] = "own_edit"
    return facts


def _is_escaped(old_text: str, text: str) -> bool:
    """Return whether the text contains escape sequences where the file has real line breaks or tabs."""
    parts = [part.strip() for part in re.split(r"\\[nt]", old_text) if len(part.strip()) >= _MIN_ANCHOR]
    if not text:
        return "\n" not in old_text and re.search(r"\\n[ \w]", old_text) is not None
    return len(parts) > 1 and old_text not in text and all(part in text for part in parts)


def _find_offset(old_lines: Sequence[str], lines: Sequence[str]) -> int | None:
    """Return the file line where the text best aligns, ignoring whitespace, or None if none of its lines occurs."""
    positions_by_line: dict[str, list[int]] = {}
    for number, line in enumerate(lines):
        positions_by_line.setdefault(line.strip(), []).append(number)
    # Each line votes for the offsets at which it would match. Long lines have more weight, frequent lines less.
    votes: dict[int, float] = {}
    for number, line in enumerate(old_lines):
        stripped = line.strip()
        positions = positions_by_line.get(stripped, []) if len(stripped) >= _MIN_ANCHOR else []
        for position in positions:
            votes[position - number] = votes.get(position - number, 0) + len(stripped) / len(positions)
    return max(votes, key=lambda offset: (votes[offset], -abs(offset))) if votes else None


def _compare_at_offset(offset: int, old_lines: Sequence[str], lines: Sequence[str]) -> HintContext:
    """Return the facts about the first line that differs when the text is aligned with the file at an offset."""
    only_whitespace: str | None = None
    last = len(old_lines) - 1
    for number, line in enumerate(old_lines):
        position = offset + number
        file_line = lines[position] if 0 <= position < len(lines) else None
        if file_line == _UNSEEN_LINE or (file_line is None and position >= len(lines)):
            return {"edit_problem": "unshown"}
        # The first and the last line of the text may be only parts of file lines.
        if file_line is None or file_line == line or (number == last and file_line.startswith(line)):
            continue
        if number == 0 and file_line.endswith(line):
            continue
        if file_line.split() == line.split():
            only_whitespace = only_whitespace or file_line
            continue
        if file_line.strip() and _is_same_place(number, offset, old_lines, lines):
            return _line_facts(line.strip(), file_line.strip())
        return {"edit_problem": "differs"}
    if only_whitespace is not None:
        return {"edit_problem": "whitespace", "closest_line": only_whitespace}
    return {"edit_problem": "unshown"}


def _line_facts(wrong: str, right: str) -> HintContext:
    """Return the parts of the right line that the wrong line lacks.

    If the wrong line lacks nothing and only has additions, the facts say so instead.
    """
    differing = _describe_difference(wrong, right)
    return {"edit_problem": "line", "closest_line": differing} if differing else {"edit_problem": "longer"}


def _describe_difference(wrong: str, right: str) -> str:
    """Return the parts of a line that the wrong line lacks, each with one word or symbol of context on both sides.

    The result is "" if nothing is missing. The whole line is not quoted: it is almost equal to the wrong line, and
    quoting it would make the wrong line more likely.
    """
    words = _TOKEN.findall(right)
    wrong_words = [word.strip() for word in _TOKEN.findall(wrong)]
    right_words = [word.strip() for word in words]
    blocks = SequenceMatcher(None, wrong_words, right_words, autojunk=False).get_matching_blocks()
    added = set(range(len(words))) - {index for block in blocks for index in range(block.b, block.b + block.size)}
    if not added:
        return ""
    quoted_indices = {neighbor for index in added for neighbor in (index - 1, index, index + 1)}
    # A single word between two parts is no longer than the ellipsis that would replace it.
    quoted_indices |= {index for index in range(len(words)) if {index - 1, index + 1} <= quoted_indices}
    excerpt = "".join(word if index in quoted_indices else _ELLIPSIS for index, word in enumerate(words))
    return re.sub(f"{_ELLIPSIS}+", _ELLIPSIS, excerpt).strip(f"{_ELLIPSIS} ")


def _is_same_place(number: int, offset: int, old_lines: Sequence[str], lines: Sequence[str]) -> bool:
    """Return whether a differing line is the intended one: its neighbors are identical, or its content is similar."""
    line, shown_line = old_lines[number], lines[offset + number]
    neighbors = [
        (old_lines[near].strip(), lines[offset + near].strip() if 0 <= offset + near < len(lines) else None)
        for near in (_nearest_nonblank_line(number, old_lines, -1), _nearest_nonblank_line(number, old_lines, 1))
        if near is not None
    ]
    matching = [old_neighbor for old_neighbor, file_neighbor in neighbors if old_neighbor == file_neighbor]
    is_unique = any(sum(file_line.strip() == neighbor for file_line in lines) == 1 for neighbor in matching)
    return (is_unique and len(matching) == 2) or _is_about_the_same(line, shown_line, is_anchored=is_unique)


def _nearest_nonblank_line(number: int, old_lines: Sequence[str], step: int) -> int | None:
    """Return the number of the nearest nonblank line in the direction of `step`, or None if none exists."""
    indices = range(number + step, len(old_lines) if step > 0 else -1, step)
    return next((index for index in indices if old_lines[index].strip()), None)


def _is_about_the_same(line: str, right: str, *, is_anchored: bool = False) -> bool:
    """Return whether two lines have similar content: they declare the same name, if any, and share most of their names.

    Next to a line that is unique in the file (`is_anchored`), one shared name is enough, except in comments, whose
    words are not names.
    """
    is_comment = _COMMENT.match(line) is not None
    if is_comment != (_COMMENT.match(right) is not None):
        return False
    declared, right_declared = _DECLARED.search(line), _DECLARED.search(right)
    if (declared and declared[1]) != (right_declared and right_declared[1]):
        return False
    names, right_names = _identifiers(line), _identifiers(right)
    shared = names & right_names
    return bool(shared) and ((is_anchored and not is_comment) or 2 * len(shared) > len(names | right_names))


def _identifiers(line: str) -> set[str]:
    return {name for name in re.findall(r"\w{3,}", line) if name.lower() not in _KEYWORDS}


def _nearest_line_facts(old_lines: Sequence[str], lines: Sequence[str], *, is_whole: bool) -> HintContext:
    """Return how the longest line of a text differs from the most similar line of the file.

    It is used if the text has no line in common with the file. If no line is similar enough, the facts say so instead.
    """
    code = [line for line in old_lines if not _COMMENT.match(line)]
    longest = max((line.strip() for line in code), key=len, default="")[:200]
    likely = [line.strip() for line in lines if longest and _is_about_the_same(longest, line)]
    near = sorted(
        ((SequenceMatcher(None, longest, candidate[:200]).ratio(), candidate) for candidate in likely[:400]),
        reverse=True,
    )
    if near and near[0][0] >= _MIN_LINE_RATIO and (len(near) == 1 or near[1][0] < near[0][0]):
        return _line_facts(longest, near[0][1])
    return {"edit_problem": "elsewhere" if is_whole else "unshown"}


def _find_other_file(old_lines: Sequence[str], lines: Sequence[str], state: SessionState, path: str) -> str | None:
    """Return the only other file that was shown with all distinctive lines of the text, or None.

    The result is also None if `lines`, the lines of the edited file, contain one of these lines.
    """
    distinctive = {line.strip() for line in old_lines if len(line.strip()) >= _MIN_DISTINCTIVE}
    if not distinctive or distinctive & {line.strip() for line in lines}:
        return None
    candidates = [
        other_path
        for other_path, text in state.read.items()
        if other_path != path and all(line in text for line in distinctive)
    ]
    return short_path(candidates[0], state.paths.root) if len(candidates) == 1 else None


def _was_changed_by_edit(old_lines: Sequence[str], lines: Sequence[str], edits: Sequence[tuple[str, str]]) -> bool:
    """Return whether an edit in this session removed a line of the text from the file."""
    current_lines = {line.strip() for line in lines}
    missing = {line.strip() for line in old_lines if len(line.strip()) >= _MIN_ANCHOR} - current_lines
    removed_lines = {line.strip() for old, new in edits for line in old.split("\n") if line.strip() not in new}
    return bool(missing) and bool(missing & removed_lines)


def _find_occurrences(path: str, old_text: str, error_text: str, state: SessionState) -> HintContext:
    """Return how often the text occurs in the file and, if known, where.

    The places are line numbers, or the headers above the occurrences.
    """
    facts: HintContext = {}
    # "Found 3 matches of the string" -> "3"; "found 12" -> "12"
    number = re.search(
        r"\b(\d{1,4}) (?:matches|occurrences|times|places|locations)|\bfound (\d{1,4})\b", error_text[:400]
    )
    if number is not None:
        facts["num_matches"] = int(number[1] or number[2])
    # Some tools list the line numbers: "Multiple occurrences in lines [3, 17, 40]"
    lines = re.search(r" in lines \[((?:\d{1,6}, )+\d{1,6})\]", error_text[-400:])
    if lines is not None:
        return {
            "num_matches": lines[1].count(",") + 1,
            "places": [f"line {line_number}" for line_number in lines[1].split(", ")],
        }
    file = state.texts.get(path)
    text = "" if file is None or file.doubt else file.text
    offsets = [match.start() for match in re.finditer(re.escape(old_text), text)] if old_text else []
    if len(offsets) < 2 or len(offsets) != facts.get("num_matches", len(offsets)):
        return facts
    headers = [_header_above(text[:offset].split("\n")) for offset in offsets[:_MAX_HEADERS]]
    if None not in headers and len(set(headers)) == len(headers):
        facts["places"] = [header for header in headers if header is not None]
    return facts


def _header_above(lines: Sequence[str]) -> str | None:
    """Return the header above a position: the nearest line that is neither indented nor a bracket."""
    for line in reversed(lines[:-1]):
        if line == _UNSEEN_LINE:
            return None
        if line[:1].isalpha() or line[:1] in "_@#<":
            return line.strip()[:80]
    return None


# ---- Options and commands that the error message names ---------------------------------------------------------------

_MAX_ERROR, _MAX_OPTIONS = 6000, 40  # characters of a message that are searched, and options that are read from it
# "Usage: tool [options]"; not "see usage: below"
_USAGE = re.compile(r"^\s*usage:", re.IGNORECASE | re.MULTILINE)
# A line of an option list: "  -v, --verbose   print more" -> "--verbose"; "  --depth=N\n" -> "--depth"
_LISTED_OPTION = re.compile(r"^[ \t]+(?:-\w, )?(--?[A-Za-z][\w-]{1,40})(?=[ =,\[\n])", re.MULTILINE)
# "unknown option '--colour'" -> "--colour"; "flag provided but not defined: -x" -> "-x"
_UNKNOWN_OPTION = re.compile(
    r"(?:unknown|unrecogni[sz]ed|invalid|illegal|unexpected|no such|unsupported|bad)"
    r"(?: \w+)? (?:flag|option|argument|switch|parameter)s?(?: provided)?:?\s*(?:-- )?['\"`]?"
    r"(?P<named>-{0,2}[A-Za-z][\w-]{0,60})|flag provided but not defined:? (?P<go>-[\w-]{1,60})",
    re.IGNORECASE,
)
# "Please run `make fmt` first" -> "make fmt"; "run npm install" -> "npm install"
_REQUESTED_COMMAND = re.compile(
    r"(?:\b[Rr]un|\b[Uu]se|\b[Tt]ry|\b[Ee]xecute)(?: the following| this)?:?\s+"
    r"(?:['\"`](?P<quoted>[^'\"`\n]{3,80})['\"`]|(?P<bare>(?:mise|make|npm|pnpm|yarn|npx|cargo|go|gofmt|just|task|uv|ruff|black"
    r"|pre-commit|git|bundle|mvn|gradle)\b(?: [\w./:@=-]+){1,5}))"
    r"|\buse\s*\n\s+(?P<shown>git [^\n]{4,120})"
)
# Minimum similarity (`SequenceMatcher.ratio`) of a mistyped option to the right one.
_MIN_OPTION_RATIO = 0.8


def _unknown_option(error_text: str) -> str | None:
    """Return the option that a program rejects as unknown, or None if the error is about something else."""
    match = _UNKNOWN_OPTION.search(error_text[:_MAX_ERROR])
    return None if match is None else match["named"] or match["go"]


def _find_mistyped_option(wrong: str, options: Sequence[str]) -> str | None:
    """Return the only option that differs from the unknown option by a typo, or None."""
    names = [option.strip("-") for option in options]
    typed = wrong.strip("-").casefold()
    near = [name for name in names if SequenceMatcher(None, typed, name.casefold()).ratio() >= _MIN_OPTION_RATIO]
    return next(option for option in options if option.strip("-") == near[0]) if len(near) == 1 else None


def _listed_options(error_text: str) -> list[str]:
    """Return the options listed in the usage text that a program printed."""
    if _USAGE.search(error_text[:_MAX_ERROR]) is None:
        return []
    return list(dict.fromkeys(_LISTED_OPTION.findall(error_text[:_MAX_ERROR])))[:_MAX_OPTIONS]


def _requested_command(error_text: str) -> str | None:
    """Return the command that a check or a hook asks the model to run, or None."""
    match = _REQUESTED_COMMAND.search(error_text[:_MAX_ERROR])
    return None if match is None else next(group for group in match.groups() if group).strip()


# ---- Errors in the arguments, according to the error message and the tool's schema ----------------------------------

# Building blocks for the patterns: a quoted name, an unquoted name, and the words for a parameter.
_NAME = r"[`'\"]([A-Za-z_]\w{0,60})[`'\"]"
_BARE_NAME = r"([A-Za-z_]\w{0,60})(?=[.,;)]|\s*$)"
_NOUN = r"(?:parameter|property|argument|field|positional argument)s?"
# "missing required parameter 'path'" -> "path"; "parameter 'path' is required" -> "path"
_MISSING = re.compile(
    rf"(?:required|missing) (?:required )?{_NOUN}:? {_NAME}|must have required property {_NAME}"
    rf"|missing field {_NAME}"
    rf"|{_NOUN} {_NAME} is (?:required|missing)|missing (?:value for )?(?:a )?required {_NOUN}: {_BARE_NAME}"
    rf"|missing \d+ required \w+ arguments?: {_NAME}|(?<=and ){_NAME}\s*$",
    re.IGNORECASE | re.MULTILINE,
)
# "unexpected keyword argument 'file'" -> "file"; "unknown parameter `file`" -> "file"
_UNEXPECTED = re.compile(
    rf"unexpected (?:keyword )?{_NOUN}:? {_NAME}|unknown {_NOUN}:? {_NAME}|additional {_NOUN}:? {_NAME}", re.IGNORECASE
)
# Claude Code: "The parameter `limit` type is expected as `number` but provided as `string`" -> "limit"
_CLAUDE_TYPE_ERROR = re.compile(rf"parameter {_NAME} type is expected as {_NAME}", re.IGNORECASE)
# zod: `{"code": "invalid_type", "expected": "string", "received": "number", "path": ["query"]}` -> "query"
_ZOD_TYPE_ERROR = re.compile(r"\"expected\":\s*\"(\w{1,20})\"[^\[]{0,120}\"path\":\s*\[\s*\"(\w{1,60})\"")
# pydantic: "limit\n  Input should be a valid integer" -> "limit"
_PYDANTIC_TYPE_ERROR = re.compile(r"^(\w{1,60})\n\s+Input should be an? (?:valid )?(\w{1,20})", re.MULTILINE)
# "failed to parse function arguments: EOF"; "Unexpected token } in JSON"; not "missing field `path`"
_JSON_ERROR = re.compile(
    r"parse function arguments|not valid JSON|JSONDecodeError|Unexpected (?:token|end of JSON)"
    r"|Expecting (?:value|property|',')|(?:invalid|malformed) JSON|parse JSON",
    re.IGNORECASE,
)
# JSON schema types and their Python types. `bool` is an `int` in Python, hence the check in `_expected_type`.
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict,),
}


def is_json_error(call: ToolCall | None, message: str) -> bool:
    """Return whether the arguments were not a JSON object at all, as opposed to violating the schema."""
    if call is not None and call.raw_arguments is not None:
        return True
    names = _captured_names(_MISSING, message) or _captured_names(_UNEXPECTED, message)
    return _JSON_ERROR.search(message) is not None and not names


def parameter_facts(call: ToolCall | None, message: str, schema: Mapping[str, Any] | None) -> HintContext:
    """Return the missing, unexpected and wrongly typed parameters, according to the message or else to the schema."""
    facts: HintContext = {}
    missing, unexpected = _captured_names(_MISSING, message), _captured_names(_UNEXPECTED, message)
    wrong = _expected_types(message)
    properties = schema.get("properties") if schema is not None else None
    if call is not None and call.raw_arguments is None and isinstance(properties, Mapping):
        required = schema.get("required") if schema is not None else None
        missing = missing or [name for name in required or () if name not in call.arguments]
        is_closed = schema is not None and schema.get("additionalProperties") is False
        unexpected = unexpected or [name for name in call.arguments if is_closed and name not in properties]
        wrong = wrong or [
            f"{name}: {kind}"
            for name, value in call.arguments.items()
            if (kind := _expected_type(value, properties.get(name))) is not None
        ]
    if missing:
        facts["missing_parameters"] = missing
    if unexpected:
        facts["unexpected_parameters"] = unexpected
    if wrong:
        facts["wrong_types"] = wrong
    return facts


def _captured_names(pattern: re.Pattern[str], message: str) -> list[str]:
    """Return the distinct names that a pattern captures in a message."""
    names = (next(group for group in match.groups() if group) for match in pattern.finditer(message[:4000]))
    return list(dict.fromkeys(names))


def _expected_types(message: str) -> list[str]:
    """Return a text of the form "name: type" for each parameter whose type the message complains about."""
    text = message[:4000]
    typed_names = [
        *_CLAUDE_TYPE_ERROR.findall(text),
        *_PYDANTIC_TYPE_ERROR.findall(text),
        *((name, kind) for kind, name in _ZOD_TYPE_ERROR.findall(text)),
    ]
    return [f"{name}: {kind}" for name, kind in typed_names]


def _expected_type(value: Any, schema: Any) -> str | None:
    """Return the type that a value should have, or None if the value fits the schema or the type is unknown."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    allowed = _PYTHON_TYPES.get(kind) if isinstance(kind, str) else None
    if allowed is None or value is None:
        return None
    fits = isinstance(value, allowed) and (kind == "boolean" or not isinstance(value, bool))
    return None if fits else kind
