"""Collect the facts that a hint may state: what the session showed before the erring turn, and the failing result.

Later turns are not used: a hint has hindsight about a single result. `collect_facts` looks up the function for the kind
of failure (`_BY_KIND`). The second half compares the old text of a failed edit with the file as it was last shown.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from composer_replication.hint_generator.context import (
    Case,
    HintContext,
    StateCursor,
    choices_in,
    command_to_run,
    find_call,
    meant_name,
    missing_path_facts,
    names_in,
    near_option,
    nearest,
    options_in,
    parameter_facts,
    result_text_of,
    short_path,
    unknown_option,
)
from composer_replication.hint_generator.shell_facts import (
    advice_facts,
    missing_shell_path_facts,
    nonempty_facts,
    shell_folder_facts,
)
from composer_replication.hint_generator.templates import SEARCHERS
from composer_replication.sites.actions.session_state import SessionState
from composer_replication.sites.actions.tools import (
    EVERYWHERE,
    NEW_TEXT,
    OLD_TEXT,
    PATH,
    first_text,
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
_INSTEAD = {"python": "python3", "pip": "python3 -m pip", "pytest": "python3 -m pytest"}
_MAX_NAMES = 8
# Arguments with more characters are free text rather than names.
_MAX_VALUE = 80
# An error about an offset beyond the end of a file.
# "The number of lines in the file: `120`" -> "120"; "must be within the lines of the file: [1, 80]" -> "80"
_NUM_LINES = re.compile(r"number of lines in the file: `?(\d{1,7})|lines of the file: \[1, (\d{1,7})\]")
# The same tool has different names in different agents.
_READERS = ("read", "read_file", "view_file", "open_file", "view")
_LISTERS = ("glob", "ls", "list_directory", "find_file", "list_dir", "list_files", "file_search", "search_files")
# "error: pathspec 'a.py' did not match any file(s) known to git"; not "fatal: not a git repository"
_NOT_A_FILE_OF_GIT = re.compile(r"pathspec|known to git|ambiguous argument|not in the working tree")
# "git mv a.py b.py"; not "git rm a.py"
_RENAMES = re.compile(r"\bmv\b|\brename\b")

_Schemas = Mapping[str, Mapping[str, Any]]


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
        case = Case(site, call, result_text_of(site, conversation), state, cursor.edits_of)
        if case.path:
            facts["path"] = case.path
        if site.kind == "input_validation":
            facts |= parameter_facts(call, case.error_text, schemas.get(site.tool))
            facts |= _renamed_parameter(call, facts, inferred_tools or {})
        if site.kind in _BY_KIND:
            facts |= _BY_KIND[site.kind](case)
    return facts


def _tool_facts(site: ErrorSite, state: SessionState, schemas: _Schemas, inferred: _Schemas) -> HintContext:
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
    for key, names in (("reader_tool", _READERS), ("finder_tool", _LISTERS), ("search_tool", SEARCHERS)):
        tool = next((tool for tool in tools if plain_name(tool) in names), None)
        if tool is not None:
            facts[key] = tool
    return facts


# ---- The facts for each kind of failure ------------------------------------------------------------------------------


def _unknown_tool(case: Case) -> HintContext:
    choices = choices_in(case.error_text)
    meant = meant_name(case.error_text) or nearest(case.call.name, [*choices, *sorted(case.state.tools)])
    return nonempty_facts(available_tools=choices, meant=meant)


def _renamed_parameter(call: ToolCall, facts: HintContext, inferred: _Schemas) -> HintContext:
    """Return this tool's name for a parameter, if the call used the name that other tools have for it."""
    parameters = {*facts.get("seen_parameters", ()), *(inferred.get(call.name, {}).get("properties") or ())}
    for wrong in facts.get("unexpected_parameters", ()):
        for names in (PATH, OLD_TEXT, NEW_TEXT):
            if wrong not in names:
                continue
            synonyms = [name for name in names if name in parameters and name not in call.arguments]
            if len(synonyms) == 1:
                return {"meant_parameter": synonyms[0]}
    return {}


def _wrong_value(case: Case) -> HintContext:
    """Return the valid values, if the error lists them, and the intended one, if that is clear."""
    choices = choices_in(case.error_text)
    values = [value for value in case.call.arguments.values() if isinstance(value, str) and 0 < len(value) < _MAX_VALUE]
    wrong = max((value for value in values if value in case.error_text), key=len, default=None)
    meant = meant_name(case.error_text) or (nearest(wrong, choices) if wrong and choices else None)
    num_lines = _NUM_LINES.search(case.error_text)
    advice = f"The file has {num_lines[1] or num_lines[2]} lines: ask for none after its last." if num_lines else None
    return advice_facts(case) | nonempty_facts(choices=choices, meant=meant, advice=advice)


def _missing_file(case: Case) -> HintContext:
    return missing_path_facts(case.path, case.error_text, case.state) if case.path else {}


def _unread_file(case: Case) -> HintContext:
    """Return whether a command had shown the file, and whether an earlier read has become invalid."""
    if not case.path:
        return {}
    name = case.path.rpartition("/")[2]
    is_renamed = any(_RENAMES.search(command) and name in command for command in case.state.commands)
    counts_no_more = case.state.texts.starts_with_summary or case.state.has_touched(case.path) or is_renamed
    return {"was_read": case.state.was_in_a_command(case.path), "counts_no_more": counts_no_more}


def _no_match(case: Case) -> HintContext:
    # Advice that matches the message, for example about notebooks, is more specific than a comparison with the file.
    old_text, facts = _old_text(case.call.arguments), advice_facts(case)
    if not case.path or not old_text or facts:
        return facts
    return _no_match_facts(case.path, old_text, case.state, case.edits(case.path))


def _ambiguous(case: Case) -> HintContext:
    # A parameter that the call already passes is not named: quoting it would make the same call more likely.
    has_parameter = any(key in case.call.arguments for key in EVERYWHERE)
    everywhere = None if has_parameter else next((key for key in EVERYWHERE if key in case.error_text), None)
    facts = nonempty_facts(meant_parameter=everywhere, can_replace_all=has_parameter)
    if not case.path:
        return facts
    return facts | _ambiguous_facts(case.path, _old_text(case.call.arguments), case.error_text, case.state)


def _directory(case: Case) -> HintContext:
    return nonempty_facts(names_there=names_in(case.path, case.state)[:_MAX_NAMES] if case.path else None)


def _unknown_program(case: Case) -> HintContext:
    matches = (pattern.search(case.site.evidence_text) for pattern in _PROGRAM)
    match = next(filter(None, matches), None)
    program = match[1] if match else ""
    working_programs, instead = sorted(case.state.programs - {program}), _INSTEAD.get(program, "")
    meant = nearest(program, working_programs) if program else None
    if instead.partition(" ")[0] in working_programs:
        meant = instead
    return advice_facts(case) | nonempty_facts(meant=meant_name(case.error_text) or meant)


def _wrong_use(case: Case) -> HintContext:
    wrong, facts = unknown_option(case.error_text), advice_facts(case)
    if wrong is not None:
        meant = meant_name(case.error_text) or near_option(wrong, options_in(case.error_text))
        return facts | nonempty_facts(meant=meant, is_unknown_option=True)
    # The names listed in the error are more specific than general advice.
    choices = choices_in(case.error_text)
    if choices or not facts:
        facts = nonempty_facts(choices=choices)
    return facts | nonempty_facts(meant=meant_name(case.error_text))


def _git_command(case: Case) -> HintContext:
    command = command_to_run(case.error_text) or ""
    # Git resolves paths from the shell's folder, which may not be the project's.
    if _NOT_A_FILE_OF_GIT.search(case.error_text) and case.path:
        shell_facts = shell_folder_facts(case)
        is_file = posixpath.splitext(case.path)[1] != ""
        if "path_from_shell" in shell_facts or ("shell_folder" in shell_facts and is_file):
            shell_facts.pop("advice", None)
            return shell_facts
    return advice_facts(case) | nonempty_facts(meant=command if command.startswith("git ") else None)


def _hook(case: Case) -> HintContext:
    return nonempty_facts(meant=command_to_run(case.error_text))


_BY_KIND: dict[str, Callable[[Case], HintContext]] = {
    "tool_not_found": _unknown_tool,
    "input_validation": _wrong_value,
    "file_not_found": _missing_file,
    "shell_path_missing": missing_shell_path_facts,
    "wrong_folder": shell_folder_facts,
    "edit_not_read": _unread_file,
    "edit_no_match": _no_match,
    "edit_ambiguous": _ambiguous,
    "is_directory": _directory,
    "output_too_large": advice_facts,
    "cmd_not_found": _unknown_program,
    "usage_error": _wrong_use,
    "shell_syntax": advice_facts,
    "other": advice_facts,
    "api_misuse": advice_facts,
    "git_state": _git_command,
    "hook_blocked": _hook,
}


def _old_text(arguments: Mapping[str, Any]) -> str:
    """Return the text that an edit was to replace; for a list of edits, the text of the first."""
    text = first_text(arguments, OLD_TEXT)
    if text is not None:
        return text
    edits = arguments.get("edits")
    if isinstance(edits, list) and edits and isinstance(edits[0], dict):
        return _old_text(edits[0])
    return ""


# ---- Failed edits: where the old text differs from the file as it was shown ------------------------------------------

# Line numbers in a view: "    12\tdef f():"; "12→def f():"; not "12 items"
_NUMBERED = re.compile(r"^ *\d{1,6}(?:\t|→)", re.MULTILINE)
# Marks a line of the file that was never shown, in `SessionState.texts`.
_UNSEEN = "\0"
# Maximum number of positions that a hint lists.
_MAX_HEADS = 4
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


def _no_match_facts(path: str, old_text: str, state: SessionState, edits: Sequence[tuple[str, str]]) -> HintContext:
    """Return how a text differs from the file as it was last shown, given the earlier edits of the file in order."""
    file = state.texts.get(path)
    if len(_NUMBERED.findall(old_text)) >= max(1, old_text.count("\n")):
        return {"edit_problem": "line_numbers"}
    if _is_escaped(old_text, "" if file is None else file.text):
        return {"edit_problem": "escapes"}
    if file is None or not file.text.strip(_UNSEEN + "\n"):
        return {"edit_problem": "unread"}
    lines, old_lines = file.text.split("\n")[:_MAX_LINES], old_text.split("\n")
    other_path = _other_file(old_lines, lines, state, path)
    if other_path is not None:
        return {"edit_problem": "other_file", "meant": other_path}
    offset = _find_offset(old_lines, lines)
    if offset is None:
        facts = _nearest_line_facts(old_lines, lines, is_whole=file.is_whole)
    else:
        facts = _facts_at(offset, old_lines, lines)
    # Reliable even if the file may have changed slightly (`doubt` 1).
    if facts.get("edit_problem") == "whitespace" and file.doubt < 2:
        return facts
    # The file may have changed since it was shown, so comparing with it would mislead.
    if file.doubt:
        return {"edit_problem": "changed" if file.doubt == 2 or file.may_be_reworked else "differs"}
    if _was_changed(old_lines, lines, edits):
        facts["edit_problem"] = "own_edit"
    return facts


def _is_escaped(old_text: str, text: str) -> bool:
    """Whether the text contains escape sequences where the file has real line breaks or tabs."""
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


def _facts_at(offset: int, old_lines: Sequence[str], lines: Sequence[str]) -> HintContext:
    """Return the facts about the first line that differs when the text is aligned with the file at an offset."""
    only_whitespace: str | None = None
    last = len(old_lines) - 1
    for number, line in enumerate(old_lines):
        position = offset + number
        right = lines[position] if 0 <= position < len(lines) else None
        if right == _UNSEEN or (right is None and position >= len(lines)):
            return {"edit_problem": "unshown"}
        # The first and the last line of the text may be only parts of file lines.
        if right is None or right == line or (number == last and right.startswith(line)):
            continue
        if number == 0 and right.endswith(line):
            continue
        if right.split() == line.split():
            only_whitespace = only_whitespace or right
            continue
        if right.strip() and _is_same_place(number, offset, old_lines, lines):
            return _line_facts(line.strip(), right.strip())
        return {"edit_problem": "differs"}
    if only_whitespace is not None:
        return {"edit_problem": "whitespace", "closest_line": only_whitespace}
    return {"edit_problem": "unshown"}


def _line_facts(wrong: str, right: str) -> HintContext:
    """Return what the right line contains and the wrong one lacks; empty if the wrong one only has additions."""
    differing = _what_differs(wrong, right)
    return {"edit_problem": "line", "closest_line": differing} if differing else {"edit_problem": "longer"}


def _what_differs(wrong: str, right: str) -> str:
    """Return the parts of a line that the wrong one lacks, each with one word or symbol of context on both sides.

    The result is "" if nothing is missing. The whole line is not quoted: it is almost the wrong one, and quoting it
    would make the wrong one more likely.
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
    """Whether a differing line is the intended one: its neighbors are identical, or its content is similar."""
    line, right = old_lines[number], lines[offset + number]
    neighbors = [
        (old_lines[near].strip(), lines[offset + near].strip() if 0 <= offset + near < len(lines) else None)
        for near in (_neighbor(number, old_lines, -1), _neighbor(number, old_lines, 1))
        if near is not None
    ]
    matching = [old_neighbor for old_neighbor, file_neighbor in neighbors if old_neighbor == file_neighbor]
    is_unique = any(sum(file_line.strip() == neighbor for file_line in lines) == 1 for neighbor in matching)
    return (is_unique and len(matching) == 2) or _is_about_the_same(line, right, is_anchored=is_unique)


def _neighbor(number: int, old_lines: Sequence[str], step: int) -> int | None:
    """Return the number of the nearest nonblank line in the direction of `step`, or None if none exists."""
    indices = range(number + step, len(old_lines) if step > 0 else -1, step)
    return next((index for index in indices if old_lines[index].strip()), None)


def _is_about_the_same(line: str, right: str, *, is_anchored: bool = False) -> bool:
    """Whether two lines have similar content: they declare the same name, if any, and share most of their names.

    Next to a line that is unique in the file (`is_anchored`), one shared name is enough, except in comments, whose
    words are not names.
    """
    is_comment = _COMMENT.match(line) is not None
    if is_comment != (_COMMENT.match(right) is not None):
        return False
    declared, right_declared = _DECLARED.search(line), _DECLARED.search(right)
    if (declared and declared[1]) != (right_declared and right_declared[1]):
        return False
    names, right_names = _names(line), _names(right)
    shared = names & right_names
    return bool(shared) and ((is_anchored and not is_comment) or 2 * len(shared) > len(names | right_names))


def _names(line: str) -> set[str]:
    return {name for name in re.findall(r"\w{3,}", line) if name.lower() not in _KEYWORDS}


def _nearest_line_facts(old_lines: Sequence[str], lines: Sequence[str], *, is_whole: bool) -> HintContext:
    """Return a file line similar to the longest line of a text that has no line in common with the file."""
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


def _other_file(old_lines: Sequence[str], lines: Sequence[str], state: SessionState, path: str) -> str | None:
    """Return the only other file shown with all distinctive lines of the text; None if `lines` already contain one."""
    distinctive = {line.strip() for line in old_lines if len(line.strip()) >= _MIN_DISTINCTIVE}
    if not distinctive or distinctive & {line.strip() for line in lines}:
        return None
    holders = [
        other_path
        for other_path, text in state.read.items()
        if other_path != path and all(line in text for line in distinctive)
    ]
    return short_path(holders[0], state.paths.root) if len(holders) == 1 else None


def _was_changed(old_lines: Sequence[str], lines: Sequence[str], edits: Sequence[tuple[str, str]]) -> bool:
    """Whether an edit in this session removed a line of the text from the file."""
    current_lines = {line.strip() for line in lines}
    missing = {line.strip() for line in old_lines if len(line.strip()) >= _MIN_ANCHOR} - current_lines
    removed_lines = {line.strip() for old, new in edits for line in old.split("\n") if line.strip() not in new}
    return bool(missing) and bool(missing & removed_lines)


def _ambiguous_facts(path: str, old_text: str, error_text: str, state: SessionState) -> HintContext:
    """Return how often the text occurs in the file, and the header above each occurrence if these headers differ."""
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
    heads = [_head_above(text[:offset].split("\n")) for offset in offsets[:_MAX_HEADS]]
    if None not in heads and len(set(heads)) == len(heads):
        facts["places"] = [head for head in heads if head is not None]
    return facts


def _head_above(lines: Sequence[str]) -> str | None:
    """Return the header above a position: the nearest line that is neither indented nor a bracket."""
    for line in reversed(lines[:-1]):
        if line == _UNSEEN:
            return None
        if line[:1].isalpha() or line[:1] in "_@#<":
            return line.strip()[:80]
    return None
