"""Hints about shell commands."""

from __future__ import annotations

from composer_replication.hint_generator.context import HintContext, text_fact


def hint_cmd_not_found(ctx: HintContext | None = None) -> str:
    """A command that is not there."""
    program = text_fact(ctx, "program")
    missing = f"There is no command {program} here" if program else "There is no such command here"
    return f"{missing}. Use commands that this session has shown to work, or check with `command -v` first."


def hint_shell_path_missing(ctx: HintContext | None = None) -> str:
    """A path in a command that does not exist from where the shell stands."""
    path, similar, advice = text_fact(ctx, "path"), text_fact(ctx, "similar_path"), (ctx or {}).get("git_advice")
    if advice:
        return f"{path} is not known to git. {advice}" if path else advice
    missing = (
        f"{path} does not exist from the folder the shell is in" if path else "A path of this command does not exist"
    )
    if similar:
        return (
            f"{missing}; this session has shown {similar}. Use paths that were listed, and mind where the shell stands."
        )
    return f"{missing}. Name only paths that were listed or made before, and mind where the shell stands."


def hint_git_state(ctx: HintContext | None = None) -> str:
    """A git command that the state of the repository does not allow."""
    advice, message = (ctx or {}).get("git_advice"), text_fact(ctx, "error_message")
    rule = advice or "Look at `git status` before a command that depends on the branch, the remote or a clean tree."
    return f"{rule} Git said {message}." if message else rule
