"""The hints' words about commands: programs, folders, options, git, services and checks of the project."""

from __future__ import annotations

from collections.abc import Callable

from composer_replication.hint_generator.context import HintContext, first_sentences, given, listed, text_fact
from composer_replication.hint_generator.file_templates import names_shown

_FOLDER = (
    "Mind the folder that the shell stands in: earlier commands may have changed it. Name paths from that folder,"
    " or give the absolute path."
)
_BEHIND_CD = "A command's paths hold from the folder that its own `cd` goes to: name them from there."
_LIST_FIRST = "List a folder before naming it, or a file in it, in a command."


def advised(text: str) -> Callable[[HintContext | None], str]:
    """A template that says the advice for the message, or what holds for all of the kind."""

    def hint(ctx: HintContext | None = None) -> str:
        return str(given(ctx, "advice") or text)

    return hint


def hint_cmd_not_found(ctx: HintContext | None = None) -> str:
    """A command that is not there."""
    meant, advice = text_fact(ctx, "meant"), given(ctx, "advice")
    if meant:
        return f"The command here is {meant}. Use commands that have worked in this session."
    fallback = "Use commands that this session has shown to work, or check with `command -v` before relying on another."
    return str(advice or fallback)


def hint_shell_path_missing(ctx: HintContext | None = None) -> str:
    """A path in a command that does not exist from where the shell stands."""
    meant, names, advice = text_fact(ctx, "meant"), given(ctx, "names_there"), given(ctx, "advice")
    if given(ctx, "path_from_shell"):
        return hint_wrong_folder(ctx)
    if meant:
        return f"The path is {meant}, as this session has shown. Take paths from listings, not from memory."
    if advice:
        return str(advice)
    if names:
        return f"{_LIST_FIRST} {names_shown(ctx)}"
    if given(ctx, "is_absolute"):
        return _LIST_FIRST
    return "List a folder before naming a file in it, and mind which folder the shell stands in."


def hint_wrong_folder(ctx: HintContext | None = None) -> str:
    """A path that is there, from another folder."""
    here, root, path = (text_fact(ctx, key) for key in ("shell_folder", "project_folder", "path_from_shell"))
    is_behind_cd = given(ctx, "own_cd") == "before"
    if is_behind_cd and here and path:
        return f"Behind its own `cd` the command stands in {here}: from there the path is {path}."
    if given(ctx, "path_from_shell") == "." and here:
        what = "Leave the `cd` out" if given(ctx, "own_cd") else "Call it `.`"
        return f"{what}: since an earlier command the shell already stands in the folder meant."
    if here and path:
        return f"The shell stands in {here} since an earlier command: from there the path is {path}."
    if here and root and not is_behind_cd and not given(ctx, "is_absolute"):
        back = f"`cd {root.strip('`')}`"
        return f"The shell stands in {here} since an earlier command. Name paths from there, or go back with {back}."
    if meant := text_fact(ctx, "meant"):
        return f"From the project's folder the path is {meant}: mind which folder the shell stands in."
    fallback = _LIST_FIRST if given(ctx, "is_absolute") else _BEHIND_CD if is_behind_cd else _FOLDER
    return str(given(ctx, "advice") or fallback)


def hint_usage_error(ctx: HintContext | None = None) -> str:
    """An option, an argument or a name that a program does not have."""
    meant, choices, advice = text_fact(ctx, "meant"), given(ctx, "choices"), given(ctx, "advice")
    if meant:
        return f"The name here is {meant}. Look at a program's `--help` before using an option that it has not shown."
    if choices:
        return f"This command takes {listed(choices)}: use one of these."
    if given(ctx, "is_unknown_option"):
        fallback = (
            "Leave out an option that the program has not shown, or look it up in its `--help` first: options differ"
            " between programs and between systems."
        )
    else:
        fallback = (
            "Look up what the call takes before making it: the program's `--help`, or its list of tasks or commands,"
            " shows which arguments it needs and in which form."
        )
    return str(advice or fallback)


def hint_git_state(ctx: HintContext | None = None) -> str:
    """A git command that the state of the repository does not allow."""
    advice, command = given(ctx, "advice"), text_fact(ctx, "meant")
    if given(ctx, "shell_folder"):
        return hint_wrong_folder(ctx)
    rule = "Look at `git status` before a command that depends on the branch, the remote or a clean tree."
    rule = str(advice or rule)
    return f"{first_sentences(rule, 1)} Here that is {command}." if command else rule


def hint_hook_blocked(ctx: HintContext | None = None) -> str:
    """What a check of the project refuses for the second time."""
    command = text_fact(ctx, "meant")
    if command:
        return f"This project checks such calls: run {command} before them, as it has asked for before."
    return "This project checks such calls and has refused one before. Do first what the check asks for, then call."


hint_shell_syntax = advised(
    "Close every quote and bracket, and put single quotes around text that the shell must not read, such as patterns,"
    " addresses and inline programs. Longer text is safer in a file or a here-document."
)
hint_api_misuse = advised(
    "Take the endpoint, the identifiers and the fields from what the service has returned or from its documentation,"
    " instead of composing them from memory."
)
