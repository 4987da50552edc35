"""Scripted rollouts, second half: unreadable calls, several calls in a turn, budgets, and the environment's signals."""

from __future__ import annotations

from data.scripted_rollout_types import Budget, Scripted, call, failed, site
from data.scripted_rollouts_failures import DONE

_GONE = failed("[Errno 2] No such file or directory: 'gone.txt'")
_READ_GONE = call("read_file", path="gone.txt")
_FILE = "file_not_found|shell_path_missing"
_ADD = call("add", first=3, second=4)

UNREADABLE = (
    Scripted(
        name="malformed JSON",
        why="a brace is missing; TRL takes the turn for plain text and the rollout ends",
        turns=('<tool_call>\n{"name": "add", "arguments": {"first": 3, "second": 4}\n</tool_call>',),
        sites=(site(0, "input_validation"),),
    ),
    Scripted(
        name="single quotes",
        why="Python's quotes are no JSON",
        turns=("<tool_call>\n{'name': 'add', 'arguments': {'first': 3}}\n</tool_call>",),
        sites=(site(0, "input_validation"),),
    ),
    Scripted(
        name="unclosed tag",
        why="the call is not closed before the turn ends",
        turns=('I add.\n<tool_call>\n{"name": "add", "arguments": {"first": 3, "second": 4}}\n',),
        sites=(site(0, "input_validation"),),
    ),
    Scripted(
        name="call without a name",
        why="JSON, but no call",
        turns=('<tool_call>\n{"arguments": {"first": 3, "second": 4}}\n</tool_call>',),
        sites=(site(0, "input_validation|tool_not_found"),),
    ),
    Scripted(
        name="one of two calls malformed",
        why="the good call of the turn is not run either",
        turns=(_ADD + '\n<tool_call>\n{"name": "add", "arguments": {"first": 3,}}\n</tool_call>',),
        sites=(site(0, "input_validation"),),
    ),
    Scripted(
        name="malformed after a good turn",
        why="the last turn errs, the first does not",
        turns=(_ADD, '<tool_call>\n{"name": "add", "arguments": {"first": 7, "second"}}\n</tool_call>'),
        results=(("7",),),
        sites=(site(1, "input_validation"),),
    ),
)

TURNS = (
    Scripted(
        name="two calls, the second fails",
        why="one site, at the turn of both",
        turns=(_ADD + "\n" + _READ_GONE, DONE),
        results=(("7", _GONE),),
        sites=(site(0, _FILE, tool="read_file"),),
    ),
    Scripted(
        name="two calls fail in two ways",
        why="two failures of one turn",
        turns=(call("grep", pattern="x") + "\n" + _READ_GONE, DONE),
        results=((failed("Tool grep not found."), _GONE),),
        sites=(site(0, "tool_not_found", tool="grep"), site(0, _FILE, tool="read_file")),
    ),
    Scripted(
        name="async before sync",
        why="TRL puts the results of async tools last, so results are not in the order of the calls",
        turns=(call("fetch", url="ftp://old.example") + "\n" + _ADD, DONE),
        results=(("7", failed("Invalid argument: url must start with https://")),),
        sites=(site(0, "input_validation", tool="fetch"),),
    ),
    Scripted(
        name="same call fails twice",
        why="each erring turn is a site of its own",
        turns=(_READ_GONE, _READ_GONE, DONE),
        results=((_GONE,), (_GONE,)),
        sites=(site(0, _FILE, tool="read_file"), site(1, _FILE, tool="read_file")),
    ),
    Scripted(
        name="first and last of three fail",
        why="the middle turn is fine",
        turns=(_READ_GONE, _ADD, call("grep", pattern="x"), DONE),
        results=((_GONE,), ("7",), (failed("Tool grep not found."),)),
        sites=(site(0, _FILE, tool="read_file"), site(2, "tool_not_found", tool="grep")),
    ),
    Scripted(
        name="the middle of three fails",
        why="good turns before and after",
        turns=(_ADD, call("read_file"), call("read_file", path="page.txt"), DONE),
        results=(
            ("7",),
            (failed("Workshop.read_file() missing 1 required positional argument: 'path'"),),
            ("x" * 40,),
        ),
        sites=(site(1, "input_validation", tool="read_file"),),
    ),
    Scripted(
        name="result with an end-of-turn token",
        why="a log holds the template's own tokens, which must not be taken for the end of a turn",
        turns=(call("read_file", path="chat.log"), _READ_GONE, DONE),
        results=(("user said <|im_end|>\n<|im_start|>assistant\nand left",), (_GONE,)),
        sites=(site(1, _FILE, tool="read_file"),),
    ),
    Scripted(
        name="words split oddly",
        why="sampled ids are not what the tokenizer would write; only the ids are the record",
        turns=(
            (
                "I re",
                "ad.\n<tool_call>\n{",
                '"name": "re',
                "ad_fi",
                'le", "arguments": {"path": "go',
                'ne.txt"}}\n</tool_call>',
            ),
            DONE,
        ),
        results=((_GONE,),),
        sites=(site(0, _FILE, tool="read_file"),),
    ),
    Scripted(
        name="an empty last turn",
        why="the model says nothing but the end-of-turn token after a failure",
        turns=(_READ_GONE, ""),
        results=((_GONE,),),
        sites=(site(0, _FILE, tool="read_file"),),
    ),
    Scripted(
        name="thinking before a failing call",
        why="the turn's tokens include its thinking",
        turns=("<think>\nWhich file is it?\n</think>\n\n" + _READ_GONE, DONE),
        results=((_GONE,),),
        sites=(site(0, _FILE, tool="read_file"),),
    ),
)

BUDGETS = (
    Scripted(
        name="last turn cut",
        why="the budget ends inside a plain answer; the failure before it stands",
        turns=(_READ_GONE, "I am done, and this is a long farewell that does not fit."),
        results=((_GONE,),),
        budget=Budget("inside", 1, 4),
        sites=(site(0, _FILE, tool="read_file"),),
    ),
    Scripted(
        name="call cut by the budget",
        why="half a call is unreadable because the budget ended, not because the model erred",
        turns=(_ADD, call("add", first=7, second=8)),
        results=(("7",),),
        budget=Budget("inside", 1, 9),
    ),
    Scripted(
        name="first call cut by the budget",
        why="the same in the only turn",
        turns=(_ADD,),
        budget=Budget("inside", 0, 8),
    ),
    Scripted(
        name="result too long",
        why="the result does not fit, TRL takes it back and the rollout ends with the call",
        turns=(_ADD, call("open_page", path="page.txt", number=3)),
        results=(("7",),),
        dropped=("x" * 120,),
        budget=Budget("short", 1, 1),
    ),
    Scripted(
        name="failure, then result too long",
        why="the earlier failure stands, the call whose result was taken back is no failure",
        turns=(_READ_GONE, call("open_page", path="page.txt", number=3)),
        results=((_GONE,),),
        dropped=("x" * 120,),
        budget=Budget("short", 1, 5),
        sites=(site(0, _FILE, tool="read_file"),),
    ),
    Scripted(
        name="nothing fits after the failure",
        why="the result fills the budget to the last token: the erring turn is the last one",
        turns=(_READ_GONE, DONE),
        results=((_GONE,),),
        budget=Budget("after", 0),
        sites=(site(0, _FILE, tool="read_file"),),
    ),
    Scripted(
        name="second call never run",
        why="one round of tools is allowed; a call to a tool that does not exist was never made",
        turns=(_ADD, call("grep", pattern="x")),
        results=(("7",),),
        max_iterations=1,
    ),
)

SIGNALS = (
    Scripted(
        name="signal about the first turn",
        why="the environment says the edit was made on a stale file; no result shows it",
        turns=(call("review", verdict="edit_stale: the file changed since it was read"), DONE),
        results=(("Thank you.",),),
        signals=((0, "edit_stale"),),
        sites=(site(0, "edit_stale"),),
    ),
    Scripted(
        name="signals about two turns",
        why="the second of three turns was fine",
        turns=(
            call("review", verdict="edit_noop: nothing was changed"),
            call("review", verdict="fine"),
            call("review", verdict="input_validation: the summary is empty"),
            DONE,
        ),
        results=(("Thank you.",), ("Thank you.",), ("Thank you.",)),
        signals=((0, "edit_noop"), (2, "input_validation")),
        sites=(site(0, "edit_noop"), site(2, "input_validation")),
    ),
    Scripted(
        name="signal that is the task's",
        why="failing tests are the work: reported, not taught",
        turns=(call("review", verdict="test_failure: 2 tests fail"), DONE),
        results=(("Thank you.",),),
        signals=((0, "test_failure"),),
        sites=(site(0, "test_failure", "task"),),
    ),
    Scripted(
        name="signal and failure",
        why="one turn the environment complains about, another whose tool failed",
        turns=(call("review", verdict="edit_stale: the file changed since it was read"), _READ_GONE, DONE),
        results=(("Thank you.",), (_GONE,)),
        signals=((0, "edit_stale"),),
        sites=(site(0, "edit_stale"), site(1, _FILE, tool="read_file")),
    ),
    Scripted(
        name="signal of a call whose result was taken back",
        why="the call was made and the environment saw it; only its answer did not fit",
        turns=(call("review", verdict="edit_stale: the file changed since it was read"),),
        dropped=("Thank you.",),
        budget=Budget("short", 0, 1),
        signals=((0, "edit_stale"),),
        sites=(site(0, "edit_stale"),),
    ),
)
