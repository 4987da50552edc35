"""The facts of a session that a hint may state: only what the session had shown by the time of the erring turn.

What the failing result says is known too: a hint is written with hindsight about one turn, not about later ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from composer_replication.actions.session_state import SessionState
from composer_replication.actions.tools import OLD_TEXT, channel_of, command_text, first_text, path_argument
from composer_replication.hint_generator.context import HintContext
from composer_replication.hint_generator.parameters import parameter_facts
from composer_replication.types import Conversation, ErrorSite, ToolCall

_THING = re.compile(
    r"['\"`‘’]([^'\"`‘’]{1,200})['\"`‘’]|(\S+?)(?=: (?:No such|Is a|command not|not found))|: (\S+)\s*$"
)
# In this order: in some shells' words the place comes where others put the name.
_PROGRAM = (
    re.compile(r"(?:command not found|未找到命令|找不到命令)[:：] ?([\w.+-]+)"),
    re.compile(r"['\"]([\w.+-]+)['\"] is not rec"),
    re.compile(r"(?:^|[:\s])([\w.+-]+): (?:\S+ )?(?:not found|nicht gefunden|introuvable|no encontrada|non trovato)"),
)
_NAMES_A_BRANCH = re.compile(r"\bgit (?:checkout|switch|merge|rebase)\b")
_GIT_ADVICE = (
    ("is not a git command", "Use only commands that git has: `git help -a` lists them."),
    ("no upstream", "The first push of a branch needs `git push --set-upstream origin` and its name."),
    ("not a git repo", "Git commands work only inside a repository: change to it first."),
    ("ignored by", "Ignored files are not added: leave them out of `git add`."),
    ("nothing to commit", "Check with `git status` that there is something to commit."),
    ("untracked working tree", "Move, commit or remove untracked files that the command would overwrite."),
    ("would be overwritten", "Commit or stash local changes before switching, merging or pulling."),
    ("unstaged changes", "Commit or stash local changes before switching, merging or pulling."),
    ("ambiguous argument", "Check that a branch, revision or path exists before naming it."),
    ("unknown revision", "Check that a branch, revision or path exists before naming it."),
    ("bad revision", "Check that a branch, revision or path exists before naming it."),
    ("branch named", "Check with `git branch` which names are taken before creating one."),
    ("remote ", "Check with `git remote -v` which remotes there are before adding or using one."),
    ("tag ", "Check with `git tag` which tags there are before creating one."),
)


def collect_facts(
    site: ErrorSite,
    conversation: Conversation,
    *,
    tool_schemas: Mapping[str, Mapping[str, Any]] | None = None,
    along: StateAlong | None = None,
) -> HintContext:
    """Facts about one site, for the template of its kind and for those that read the hint's record.

    `tool_schemas` are those that somebody wrote down: what calls merely happened to have says nothing about what a tool
    needs or refuses.
    """
    call = call_of(site, conversation)
    seen = (along or StateAlong(conversation)).before(site.turn_id)
    schemas = tool_schemas or {}
    facts: HintContext = {"error_kind": site.kind, "tool_name": site.tool}
    if site.evidence_text:
        facts["error_message"] = site.evidence_text
    tools = sorted({*schemas, *seen.tools} - ({site.tool} if site.kind == "tool_not_found" else set()))
    if tools:
        facts["available_tools"] = tools
    if site.tool in schemas:
        facts["tool_schema"] = schemas[site.tool]
    elif seen.tools.get(site.tool):
        facts["seen_parameters"] = sorted(seen.tools[site.tool])
    if site.repeats:
        facts["num_repeats"] = site.repeats
    if site.kind == "input_validation":
        facts |= parameter_facts(call, site.evidence_text, schemas.get(site.tool))
    elif site.kind == "git_state":
        facts |= _git_facts(site.evidence_text)
    elif site.kind == "cmd_not_found":
        facts |= _program_fact(site.evidence_text)
    elif call is not None:
        facts |= _path_facts(site, call, seen)
    return facts


def _path_facts(site: ErrorSite, call: ToolCall, seen: SessionState) -> HintContext:
    facts: HintContext = {}
    command = command_text(call.name, call.arguments)
    is_shell = channel_of(call.name) == "shell"
    path = _typed_path(site.evidence_text, command) if is_shell else path_argument(call.arguments)
    if path:
        facts["path"] = path
        if site.kind in ("file_not_found", "shell_path_missing"):
            similar = seen.similar_path(path)
            if similar:
                facts["similar_path"] = similar
            if _NAMES_A_BRANCH.search(command):
                facts["git_advice"] = "Check with `git branch -a` or `git ls-files` that a name is known to git."
        if site.kind == "edit_not_read":
            facts["was_read"] = seen.was_in_a_command(path)
        if site.kind == "edit_no_match":
            wanted = _old_text(call.arguments)
            closest = seen.closest_line(path, wanted)
            if closest:
                facts["closest_line"] = closest.strip()
                first = next((line for line in wanted.splitlines() if line.strip()), "")
                facts["only_whitespace"] = closest.split() == first.split() and closest != first
    if seen.reader:
        facts["reader_tool"] = seen.reader
    if seen.finder:
        facts["finder_tool"] = seen.finder
    return facts


def _typed_path(message: str, command: str) -> str | None:
    """The path that a shell's message is about, if the command names it."""
    for match in _THING.finditer(message):
        thing = next(each for each in match.groups() if each)
        if thing in command or thing.rpartition("/")[2] in command:
            return thing
    return None


def _program_fact(message: str) -> HintContext:
    match = next((found for each in _PROGRAM if (found := each.search(message))), None)
    return {"program": match[1]} if match else {}


def _git_facts(message: str) -> HintContext:
    lowered = message.lower()
    advice = next((advice for words, advice in _GIT_ADVICE if words in lowered), None)
    return {"git_advice": advice} if advice else {}


def _old_text(arguments: Mapping[str, Any]) -> str:
    text = first_text(arguments, OLD_TEXT)
    if text is not None:
        return text
    edits = arguments.get("edits")
    if isinstance(edits, list) and edits and isinstance(edits[0], dict):
        return _old_text(edits[0])
    return ""


def call_of(site: ErrorSite, conversation: Conversation) -> ToolCall | None:
    """The call that failed."""
    calls = (call for turn in conversation.turns if turn.id == site.turn_id for call in turn.calls)
    return next((call for call in calls if call.id == site.call_id), None)


class StateAlong:
    """What a conversation had shown before one turn after the other; a turn further back is read from the start."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._index = {turn.id: number for number, turn in enumerate(conversation.turns)}
        self._restart()

    def before(self, turn_id: str) -> SessionState:
        end = self._index.get(turn_id, 0)
        if end < self._next:
            self._restart()
        for turn in self._conversation.turns[self._next : end]:
            self._made |= {call.id: call for call in turn.calls}
            for result in turn.results:
                call = self._made.get(result.call_id)
                if call is not None:
                    self._state.add(call, result.text, failed=result.is_error is True)
        self._next = max(self._next, end)
        return self._state

    def _restart(self) -> None:
        self._state, self._made, self._next = SessionState(), dict[str, ToolCall](), 0
