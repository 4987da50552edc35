"""Actions and contexts in few words, for the tests of this folder."""

from __future__ import annotations

from composer_replication.messages import tool_call
from composer_replication.sites.actions.equality import ActionContext, action_key
from composer_replication.types import Action

CWD = "/repo"
HERE = ActionContext(cwd=CWD)


def calls(*pairs: tuple[str, object]) -> Action:
    """An action of calls, each a name and its arguments."""
    made = [tool_call(f"call_{number}", name, given) for number, (name, given) in enumerate(pairs)]
    return Action(text="", calls=tuple(made))


def call(name: str, **arguments: object) -> Action:
    return calls((name, arguments))


def bash(command: str, **others: object) -> Action:
    return call("Bash", command=command, **others)


def said(text: str) -> Action:
    return Action(text=text, calls=())


def key(action: Action, context: ActionContext = HERE) -> str:
    return action_key(action, context)
