"""Rules for tools that read, search and change files."""

from __future__ import annotations

from composer_replication.actions.edits import Put, Replace, edit_operations
from composer_replication.actions.shown.file_text import FileText
from composer_replication.actions.tools import is_edit, path_argument, plain_name, word_set
from composer_replication.judge.checkout import without_blanks
from composer_replication.judge.known import Known
from composer_replication.judge.schemas import PLANS, READ_FIRST
from composer_replication.judge.verdict import Judgement
from composer_replication.types import ToolCall

_MIN_LENGTH = 24  # of a text that is recognised without its blanks
_TAKE_FOLDERS = word_set("grep glob ls list list_directory list_dir list_files search_file_content find_file")


def judge_file_call(call: ToolCall, known: Known) -> Judgement:
    """A call of a file tool: first its path, then, for an edit, whether the file was read and holds the text."""
    argument = path_argument(call.arguments)
    if not argument:
        return Judgement("unknown", "no_path")
    path = known.paths.absolute(argument)
    standing = known.standing(path)
    takes_folders = plain_name(call.name) in _TAKE_FOLDERS
    if standing.is_folder and not takes_folders:
        return Judgement("fails", "a_folder", "is_directory", "the session has shown it to be a folder")
    if is_edit(call.name):
        return _judge_edit(call, path, known)
    if known.is_doubled(argument, known.paths.shell.path):
        return Judgement("fails", "from_another_folder", "file_not_found", "the shell stands in another folder")
    if standing.is_there is False and known.texts.was_read(path) is not True:
        known.said_missing(path, standing)
        return Judgement("fails", standing.why, "file_not_found", "the path is not there")
    if plain_name(call.name) == "read" and not call.arguments.get("limit") and known.is_too_large(path):
        return Judgement("fails", "too_large", "output_too_large", "it was too large to be shown at once before")
    if standing.is_there:
        return Judgement("ok", standing.why, "file_not_found")
    return Judgement("unknown", standing.why, "file_not_found", "nobody has shown the path")


def _judge_edit(call: ToolCall, path: str, knowledge: Known) -> Judgement:
    operations = edit_operations(call, knowledge.paths.root) or []
    replaces = [operation for operation in operations if isinstance(operation, Replace)]
    if replaces and all(edit.old == edit.new for edit in replaces):
        return Judgement("fails", "edit_noop", "edit_noop", "what is to be replaced equals what replaces it")
    standing, was_read = knowledge.standing(path), knowledge.texts.was_read(path)
    writes = bool(operations) and all(isinstance(operation, Put) for operation in operations)
    if was_read is True:
        return _judge_read(call, replaces, path, knowledge)
    if writes and knowledge.texts.has_plan and PLANS in path:
        return Judgement("fails", "plan_is_there", "edit_not_read", "the plan that the session carries out lies there")
    if writes or (replaces and not replaces[0].old):
        if not standing.is_there:
            return Judgement("unknown", "new_file", "edit_not_read", "it may be a new file")
    elif standing.is_there is False:
        return Judgement("fails", standing.why, "file_not_found", "the path is not there")
    if call.name not in READ_FIRST:
        return Judgement("unknown", "text_not_shown", "edit_no_match", "nobody has shown the file")
    if was_read is None and replaces and knowledge.is_untouched(path, replaces[0].old):
        return Judgement("fails", "not_read_since", "edit_not_read", "nothing says that it was read before the summary")
    if was_read is None:
        return Judgement("unknown", "read_before", "edit_not_read", "it may have been read before this log")
    return Judgement("fails", "not_read", "edit_not_read", "the agent has not read it")


def _judge_read(call: ToolCall, replaces: list[Replace], path: str, knowledge: Known) -> Judgement:
    """An edit of a file that was read: a command may have made that void since."""
    change = knowledge.is_lost(path) if call.name in READ_FIRST else ""
    lost = Judgement("fails", "changed_and_too_large", "edit_not_read", "a command changed it, and it is too large")
    if change == "surely":
        return lost
    judgement = _judge_text(replaces[0], path, knowledge) if replaces else Judgement("ok", "was_read", "edit_not_read")
    is_doubtful = change == "maybe" and judgement.says != "fails"
    return (
        Judgement("risky", lost.rule, lost.kind, "a formatter ran, and it is too large") if is_doubtful else judgement
    )


def _judge_text(edit: Replace, path: str, knowledge: Known) -> Judgement:
    text, source = knowledge.text(path)
    if text is None:
        return Judgement("unknown", "text_not_shown", "edit_no_match")
    number = _times(text, edit.old)
    if number > 1 and not edit.everywhere:
        says = "fails" if text.doubt < 2 else "risky"
        return Judgement(says, f"ambiguous{source}", "edit_ambiguous", f"it is there {number} times")
    if number:
        rule = "found_in_whole_file" if text.is_whole and not text.doubt else "found_in_part"
        return Judgement("ok", f"{rule}{source}", "edit_no_match")
    return _judge_missing(edit, path, text, source, knowledge)


def _judge_missing(edit: Replace, path: str, text: FileText, source: str, knowledge: Known) -> Judgement:
    """A text that is not in what is known of the file."""
    why, old = "it is not in the file", edit.old.replace("\r\n", "\n")
    if text.is_whole and not text.doubt:
        return Judgement("fails", f"no_match{source}", "edit_no_match", why)
    if text.is_whole and text.doubt < 2:
        # Somebody came by: what they may have written is in some commit, or they did not say that they wrote.
        is_sure = not text.may_be_reworked and knowledge.was_never_committed(path, old)
        rule = "no_match_in_any_commit" if is_sure else f"no_match_long_ago{source}"
        return Judgement("fails" if is_sure else "risky", rule, "edit_no_match", why)
    if not text.doubt and _differs_in_blanks(text, old):
        says = "fails" if knowledge.was_never_committed(path, old, but_for_blanks=False) else "risky"
        return Judgement(says, "other_blanks", "edit_no_match", "it was shown with other blanks")
    if not text.doubt and text.contradicts(old):
        says = "fails" if knowledge.was_never_committed(path, old) else "risky"
        return Judgement(says, "contradicts", "edit_no_match", "what was shown of the file goes on differently")
    return Judgement("unknown", "text_not_shown", "edit_no_match")


def _differs_in_blanks(text: FileText, old: str) -> bool:
    squeezed = without_blanks(old)
    return len(squeezed) >= _MIN_LENGTH and squeezed in without_blanks(text.text)


def _times(text: FileText, old: str) -> int:
    plain = old.replace("\r\n", "\n")
    return text.count(plain) or (text.count(plain.rstrip("\n")) if plain.rstrip("\n") else 0)
