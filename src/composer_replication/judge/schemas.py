"""What the tools of an agent take, as the agent documents them; schemas of other tools are in no log."""

from __future__ import annotations

from typing import NamedTuple

from composer_replication.actions.tools import word_set


class Parameters(NamedTuple):
    required: frozenset[str]
    others: frozenset[str] = frozenset()


# Claude Code's. A parameter that a later version takes is no reason to fail, so only tools that refuse others are here.
PARAMETERS = {
    "Read": Parameters(word_set("file_path"), word_set("offset limit pages")),
    "Edit": Parameters(word_set("file_path old_string new_string"), word_set("replace_all")),
    "Write": Parameters(word_set("file_path content")),
    "Glob": Parameters(word_set("pattern"), word_set("path")),
    "Grep": Parameters(
        word_set("pattern"),
        word_set("path glob type output_mode -A -B -C -n -i -o head_limit offset multiline context"),
    ),
    "Bash": Parameters(
        word_set("command"),
        word_set("description timeout run_in_background dangerouslyDisableSandbox sandbox _simulatedSedEdit"),
    ),
}
READ_FIRST = word_set("Edit MultiEdit Write NotebookEdit")
"""Tools that refuse a file which was not read before: other agents' editors take any."""
PLANS = "/.claude/plans/"
"""Where Claude Code keeps the plan of a session: one file, also for the session that carries the plan out."""
AGENTS = word_set("general-purpose Explore Plan Bash statusline-setup claude-code-guide output-style-setup")

# What Claude Code does itself when a person types it: the tool for skills refuses these, unless somebody has made one.
OWN_COMMANDS = word_set(
    "add-dir agents clear compact config context cost doctor exit export help hooks ide login logout mcp memory model"
    " output-style permissions plugin resume rewind status statusline terminal-setup usage vim"
)
NO_SKILLS = word_set("add-dir clear compact exit logout rewind terminal-setup")
"""Those of them that nobody calls a skill; the others may lie in somebody's home, or in a plug-in."""


def misfit(tool: str, given: frozenset[str]) -> str | None:
    """What is missing or too much in a call; None where nothing is, or the tool is not known."""
    parameters = PARAMETERS.get(tool)
    if parameters is None:
        return None
    missing, unexpected = parameters.required - given, given - parameters.required - parameters.others
    words = [f"{name} is missing" for name in sorted(missing)] + [
        f"{name} is none of its own" for name in sorted(unexpected)
    ]
    return "; ".join(words)[:200] or None
