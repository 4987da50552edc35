"""The facts of a session that a hint may state: only what the session had shown by the time of the erring turn.

What the failing result says is known too: a hint is written with hindsight about one turn, not about later ones.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any

from composer_replication.hint_generator.context import (
    Case,
    HintContext,
    StateAlong,
    call_of,
    choices_in,
    command_to_run,
    meant_name,
    missing_path_facts,
    names_in,
    near_option,
    nearest,
    options_in,
    parameter_facts,
    said_of,
    short_path,
    unknown_option,
)
from composer_replication.hint_generator.shell_facts import (
    advised_facts,
    known,
    missing_in_shell,
    place_of_shell,
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

if TYPE_CHECKING:
    from composer_replication.sites.actions.session_state import SessionState


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
    return _no_match_facts(case.path, old_text, case.seen, case.edits(case.path))


def _ambiguous(case: Case) -> HintContext:
    # A parameter that the call has already is not named: its name alone makes the same call likelier.
    has = any(key in case.call.arguments for key in EVERYWHERE)
    everywhere = None if has else next((key for key in EVERYWHERE if key in case.said), None)
    facts = known(meant_parameter=everywhere, can_replace_all=has)
    if not case.path:
        return facts
    return facts | _ambiguous_facts(case.path, _old_text(case.call.arguments), case.said, case.seen)


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


# Why a text is not in a file, or is there more than once: where it differs from what the session has shown.

_NUMBERED = re.compile(r"^ *\d{1,6}(?:\t|→)", re.MULTILINE)
_UNSEEN = "\0"
_EDIT_TEXTS_MAX_NAMES = 8
_MAX_LINES = 20_000
_LIKE = 0.6
_MIN_ANCHOR, _MIN_TELLING = 4, 12
_WORD_OR_SIGN = re.compile(r"\s*(?:\w+|[^\w\s])")
_LEFT_OUT = "…"
_COMMENT = re.compile(r"\s*(?://|#|/?\*|--|<!--|\"\"\"|;)")
_DECLARED = re.compile(
    r"\b(?:def|func|function|fn|class|type|struct|interface|enum|trait|const|let|var|module|package)\s+"
    r"(?:\([^)]*\)\s*)?(\w+)"
)
_KEYWORDS = word_set(
    "return func function def class type struct interface const let var for while else elif switch case import from"
    " nil null none true false err error string int bool self this new async await public private static void with and"
    " not the end"
)


def _no_match_facts(path: str, wanted: str, seen: SessionState, edits: Sequence[tuple[str, str]]) -> HintContext:
    """Where a text differs from the file as it was shown; `edits` are those of this session on the file, in order."""
    file = seen.texts.get(path)
    if len(_NUMBERED.findall(wanted)) >= max(1, wanted.count("\n")):
        return {"edit_problem": "line_numbers"}
    if _is_escaped(wanted, "" if file is None else file.text):
        return {"edit_problem": "escapes"}
    if file is None or not file.text.strip(_UNSEEN + "\n"):
        return {"edit_problem": "unread"}
    lines, wanted_lines = file.text.split("\n")[:_MAX_LINES], wanted.split("\n")
    other_path = _other_file(wanted_lines, lines, seen, path)
    if other_path is not None:
        return {"edit_problem": "other_file", "meant": other_path}
    offset = _place_of(wanted_lines, lines)
    facts = _alone(wanted_lines, lines, is_whole=file.is_whole) if offset is None else _at(offset, wanted_lines, lines)
    if facts.get("edit_problem") == "whitespace" and file.doubt < 2:
        return facts
    if file.doubt:  # what was shown then may not be what is there now
        return {"edit_problem": "changed" if file.doubt == 2 or file.may_be_reworked else "differs"}
    if _was_changed(wanted_lines, lines, edits):
        facts["edit_problem"] = "own_edit"
    return facts


def _is_escaped(old_text: str, text: str) -> bool:
    """Whether breaks between lines of the file were written as two characters."""
    parts = [part.strip() for part in re.split(r"\\[nt]", old_text) if len(part.strip()) >= _MIN_ANCHOR]
    if not text:
        return "\n" not in old_text and re.search(r"\\n[ \w]", old_text) is not None
    return len(parts) > 1 and old_text not in text and all(part in text for part in parts)


def _place_of(old_lines: Sequence[str], lines: Sequence[str]) -> int | None:
    """Where most lines of the text stand in the file, whatever their whitespace; None where none does."""
    positions_by_line: dict[str, list[int]] = {}
    for number, line in enumerate(lines):
        positions_by_line.setdefault(line.strip(), []).append(number)
    votes: dict[int, float] = {}
    for number, line in enumerate(old_lines):
        stripped = line.strip()
        positions = positions_by_line.get(stripped, []) if len(stripped) >= _MIN_ANCHOR else []
        for position in positions:
            votes[position - number] = votes.get(position - number, 0) + len(stripped) / len(positions)
    return max(votes, key=lambda offset: (votes[offset], -abs(offset))) if votes else None


def _at(offset: int, old_lines: Sequence[str], lines: Sequence[str]) -> HintContext:
    """The first line that differs where the text stands."""
    only_whitespace: str | None = None
    last = len(old_lines) - 1
    for number, line in enumerate(old_lines):
        position = offset + number
        right = lines[position] if 0 <= position < len(lines) else None
        if right == _UNSEEN or (right is None and position >= len(lines)):
            return {"edit_problem": "unshown"}
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
    differing = _what_differs(wrong, right)
    return {"edit_problem": "line", "closest_line": differing} if differing else {"edit_problem": "longer"}


def _what_differs(wrong: str, right: str) -> str:
    """The parts of a line that the wrong one does not have, each with a word or sign on both sides; empty without any.

    A line that is nearly the wrong one, quoted whole, makes the wrong one likelier.
    """
    words = _WORD_OR_SIGN.findall(right)
    bare = [[word.strip() for word in line_words] for line_words in (_WORD_OR_SIGN.findall(wrong), words)]
    blocks = SequenceMatcher(None, *bare, autojunk=False).get_matching_blocks()
    own_indices = set(range(len(words))) - {k for block in blocks for k in range(block.b, block.b + block.size)}
    near = {k for index in own_indices for k in (index - 1, index, index + 1)}
    near |= {k for k in range(len(words)) if {k - 1, k + 1} <= near}  # one word is no shorter as three dots
    excerpt = "".join(word if index in near else _LEFT_OUT for index, word in enumerate(words)) if own_indices else ""
    return re.sub(f"{_LEFT_OUT}+", _LEFT_OUT, excerpt).strip(f"{_LEFT_OUT} ")


def _is_same_place(number: int, offset: int, old_lines: Sequence[str], lines: Sequence[str]) -> bool:
    """Whether a line that differs is the one that was meant: both neighbours stand next to it, or it says the same."""
    line, right = old_lines[number], lines[offset + number]
    neighbours = [
        (old_lines[near].strip(), lines[offset + near].strip() if 0 <= offset + near < len(lines) else None)
        for near in (_neighbour(number, old_lines, -1), _neighbour(number, old_lines, 1))
        if near is not None
    ]
    match = [neighbour for neighbour, is_there in neighbours if neighbour == is_there]
    is_alone = any(sum(other_line.strip() == neighbour for other_line in lines) == 1 for neighbour in match)
    return (is_alone and len(match) == 2) or _says_the_same(line, right, is_anchored=is_alone)


def _neighbour(number: int, old_lines: Sequence[str], step: int) -> int | None:
    """The next line of the text that is not empty."""
    indices = range(number + step, len(old_lines) if step > 0 else -1, step)
    return next((index for index in indices if old_lines[index].strip()), None)


def _says_the_same(line: str, right: str, *, is_anchored: bool = False) -> bool:
    """Whether two lines are about the same: what one declares the other does, and most of their names are shared.

    Next to a line that stands once in the file one shared name is enough, but not for comments, which are language.
    """
    is_comment = _COMMENT.match(line) is not None
    if is_comment != (_COMMENT.match(right) is not None):
        return False
    declared, other_declared = _DECLARED.search(line), _DECLARED.search(right)
    if (declared and declared[1]) != (other_declared and other_declared[1]):
        return False
    names, other_names = _names(line), _names(right)
    shared = names & other_names
    return bool(shared) and ((is_anchored and not is_comment) or 2 * len(shared) > len(names | other_names))


def _names(line: str) -> set[str]:
    return {name for name in re.findall(r"\w{3,}", line) if name.lower() not in _KEYWORDS}


def _alone(old_lines: Sequence[str], lines: Sequence[str], *, is_whole: bool) -> HintContext:
    """No line of the text is in the file: the nearest one to its longest, if one is near and says the same."""
    code = [line for line in old_lines if not _COMMENT.match(line)]
    longest = max((line.strip() for line in code), key=len, default="")[:200]
    likely = [line.strip() for line in lines if longest and _says_the_same(longest, line)]
    near = sorted(
        ((SequenceMatcher(None, longest, candidate[:200]).ratio(), candidate) for candidate in likely[:400]),
        reverse=True,
    )
    if near and near[0][0] >= _LIKE and (len(near) == 1 or near[1][0] < near[0][0]):
        return _line_facts(longest, near[0][1])
    return {"edit_problem": "elsewhere" if is_whole else "unshown"}


def _other_file(old_lines: Sequence[str], lines: Sequence[str], state: SessionState, path: str) -> str | None:
    """The one other file that was shown with all of the text, where none of its telling lines is in this one."""
    telling = {line.strip() for line in old_lines if len(line.strip()) >= _MIN_TELLING}
    if not telling or telling & {line.strip() for line in lines}:
        return None
    holders = [
        other_path
        for other_path, text in state.read.items()
        if other_path != path and all(line in text for line in telling)
    ]
    return short_path(holders[0], state.paths.root) if len(holders) == 1 else None


def _was_changed(old_lines: Sequence[str], lines: Sequence[str], edits: Sequence[tuple[str, str]]) -> bool:
    """Whether what is missing in the file stood there until an edit of this session replaced it."""
    there = {line.strip() for line in lines}
    missing = {line.strip() for line in old_lines if len(line.strip()) >= _MIN_ANCHOR} - there
    removed_lines = {line.strip() for old, new in edits for line in old.split("\n") if line.strip() not in new}
    return bool(missing) and bool(missing & removed_lines)


def _ambiguous_facts(path: str, wanted: str, said: str, seen: SessionState) -> HintContext:
    """How often the text stands in the file, and below which lines that only one of the places has."""
    facts: HintContext = {}
    number = re.search(r"\b(\d{1,4}) (?:matches|occurrences|times|places|locations)|\bfound (\d{1,4})\b", said[:400])
    if number is not None:
        facts["num_matches"] = int(number[1] or number[2])
    lines = re.search(r" in lines \[((?:\d{1,6}, )+\d{1,6})\]", said[-400:])
    if lines is not None:
        return {
            "num_matches": lines[1].count(",") + 1,
            "places": [f"line {line_number}" for line_number in lines[1].split(", ")],
        }
    file = seen.texts.get(path)
    text = "" if file is None or file.doubt else file.text
    offsets = [match.start() for match in re.finditer(re.escape(wanted), text)] if wanted else []
    if len(offsets) < 2 or len(offsets) != facts.get("num_matches", len(offsets)):
        return facts
    heads = [_head_above(text[:offset].split("\n")) for offset in offsets[: _EDIT_TEXTS_MAX_NAMES // 2]]
    if None not in heads and len(set(heads)) == len(heads):
        facts["places"] = [head for head in heads if head is not None]
    return facts


def _head_above(lines: Sequence[str]) -> str | None:
    """The line that opens what a place stands in: the nearest above that is not indented and no closing bracket."""
    for line in reversed(lines[:-1]):
        if line == _UNSEEN:
            return None
        if line[:1].isalpha() or line[:1] in "_@#<":
            return line.strip()[:80]
    return None
