"""One call against what is known when it is made."""

from __future__ import annotations

from composer_replication.actions.session_state import SessionState
from composer_replication.actions.shown.attempts import named_by
from composer_replication.actions.tools import channel_of, command_text, is_edit
from composer_replication.judge.checkout import Checkout
from composer_replication.judge.earlier import PathKnowledge
from composer_replication.judge.file_rules import judge_file_call
from composer_replication.judge.known import Known
from composer_replication.judge.schemas import NO_SKILLS, misfit
from composer_replication.judge.shell_rules import judge_command
from composer_replication.judge.verdict import Judgement
from composer_replication.sites.taxonomy import USUAL_BLAME
from composer_replication.types import ToolCall

UNKNOWN = Judgement("unknown", "no_rule")


class Judge:
    """Says of calls what would become of them in this state, which may grow between questions."""

    def __init__(
        self, state: SessionState, *, project: PathKnowledge | None = None, checkout: Checkout | None = None
    ) -> None:
        self.state = state
        self._known = Known(state, project, checkout)

    def verdict(self, call: ToolCall) -> Judgement:
        """What would become of this call if it were made now."""
        if call.raw_arguments is not None:
            return Judgement("fails", "arguments_no_json", "input_validation", "its arguments are no JSON object")
        wrong = misfit(call.name, frozenset(call.arguments))
        if wrong is not None:
            return Judgement("fails", "schema", "input_validation", wrong)
        before = self.state.attempts.last(call)
        if before is not None and before.is_unchanged and _may_be_told(before.kind) and not is_edit(call.name):
            return Judgement("fails", "same_again", before.kind, "it failed before, and nothing has changed since")
        channel = channel_of(call.name)
        if channel == "file":
            return judge_file_call(call, self._known)
        if channel == "shell":
            return judge_command(command_text(call.name, call.arguments), self._known)
        name = named_by(call)
        if name is None:
            return UNKNOWN
        kind = "other" if "skill" in name[0].lower() else "input_validation"
        is_there = self._known.has_name(name)
        if is_there is False:
            return Judgement("fails", "unknown_name", kind, "no agent or skill of this name was there")
        if is_there is None and name[0] == "Skill" and self._known.is_own_command(name[1]):
            says = "fails" if name[1] in NO_SKILLS else "risky"
            return Judgement(says, "unknown_name", kind, "the agent does this itself, when a person types it")
        return Judgement("ok" if is_there else "unknown", "name", kind)


def _may_be_told(kind: str) -> bool:
    """Whether a failure of this kind comes again: not work that failed, a network, or what somebody refused."""
    return USUAL_BLAME.get(kind) in ("model", "unknown")
