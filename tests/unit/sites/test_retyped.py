"""Commands that were typed anew: the next one shows that the first was wrong, unless it shows something else."""

from __future__ import annotations

import pytest

from composer_replication.sites import find_error_sites
from composer_replication.types import ToolCall, ToolResult
from session_pieces import Session

UNDEFINED = "Exit code 1\n# r/e2e\ne2e/env.go:40:2: undefined: binary"
NO_REASON = "Exit code 1\nsomething is missing"


def _site(first, text, second, *, worked=True, between=None, says="", is_error=True):
    """The first failure of a session in which a command fails and another one follows."""
    session = Session()
    session.user("go on")
    session.call("Bash", text, is_error=is_error, command=first)
    if between == "edit":
        session.call("Edit", "ok", is_error=False, file_path="/r/a.go", old_string="a", new_string="b")
    elif between == "user":
        session.user("try it from the root")
    elif between == "look":
        session.call("Bash", "a.go", is_error=False, command="ls")
    call = ToolCall(id="next", name="Bash", arguments={"command": second})
    result = ToolResult(call_id="next", text="" if worked else NO_REASON, is_error=not worked)
    session._add(role="assistant", origin="model", text=says, calls=(call,))
    session._add(role="tool", origin="tool", results=(result,))
    return find_error_sites(session.conversation())[0]


WRONG = [
    ("a tag", "go vet ./e2e/...", UNDEFINED, "go vet -tags=e2e ./e2e/...", "usage_error"),
    (
        "a tag, of a linter",
        "golangci-lint run ./e2e",
        UNDEFINED,
        "golangci-lint run --build-tags=e2e ./e2e",
        "usage_error",
    ),
    (
        "only tests use it",
        "go build -tags=e2e ./e2e/...",
        UNDEFINED,
        "go test -tags=e2e -c ./e2e/... -o /dev/null",
        "usage_error",
    ),
    ("an option", "deno task build", NO_REASON, "deno task --cwd=web build", "wrong_folder"),
    ("the folder", "go test ./e2e", NO_REASON, "cd /r && go test ./e2e", "wrong_folder"),
    ("the folder's name", "go test ./cli/e2e", NO_REASON, "go test ./e2e/x ./cli", None),
    ("the path", "sqlc vet cli/db/q.sql", NO_REASON, "sqlc vet db/q.sql", "wrong_folder"),
]
RIGHT = [
    ("checks less", "go vet ./...", UNDEFINED, "go vet ./cli"),
    ("the work, shown in full", "go test ./cli", "Exit code 1\n--- FAIL: TestA\nFAIL", "go test -v ./cli"),
    ("leaves findings out", "golangci-lint run", "Exit code 1\na.go:3:4: unused (unused)", "golangci-lint run --new"),
    ("does without", "cmake ..", "Exit code 1\nCMake Error at a.txt:27 (find_package):", "cmake -DX=OFF .."),
    ("goes round", "npm install", NO_REASON, "npm install --legacy-peer-deps"),
    ("the same again", "go vet ./e2e", UNDEFINED, "go vet ./e2e"),
    ("another program", "go vet ./e2e", UNDEFINED, "ls ./e2e"),
]


@pytest.mark.parametrize(
    ("first", "text", "second", "kind"), [each[1:] for each in WRONG], ids=[each[0] for each in WRONG]
)
@pytest.mark.parametrize("between", [None, "look"])
def test_what_works_typed_otherwise_with_nothing_changed_was_typed_wrongly(first, text, second, kind, between):
    site = _site(first, text, second, between=between)
    assert (site.kind if site.is_kept else None) == kind


@pytest.mark.parametrize(("first", "text", "second"), [each[1:] for each in RIGHT], ids=[each[0] for each in RIGHT])
def test_what_only_shows_less_or_more_says_nothing(first, text, second):
    assert not _site(first, text, second).is_kept


@pytest.mark.parametrize("change", [{"between": "edit"}, {"between": "user"}, {"worked": False}])
def test_something_else_may_have_made_it_work(change):
    assert not _site("go vet ./e2e/...", UNDEFINED, "go vet -tags=e2e ./e2e/...", **change).is_kept


@pytest.mark.parametrize(
    ("first", "text", "says", "second", "kind"),
    [
        ("go test ./e2e", NO_REASON, "Oops, I'm in the wrong directory.", "pwd", "wrong_folder"),
        ("go vet ./e2e", UNDEFINED, "That needs the `e2e` build tag.", "go vet -tags=e2e ./e2e", "usage_error"),
        ("sqlc vet a.sql", NO_REASON, "Wrong command. Let me fix it:", "sqlc diff a.sql", "usage_error"),
        ("sqlc vet a.sql", NO_REASON, "Let me look at the logs.", "sqlc diff a.sql", None),
        ("go vet ./e2e", UNDEFINED, "I passed the wrong path to Open in env.go.", "grep -n Open e2e/env.go", None),
        ("gh api x --jq 'select(.a != 1)'", NO_REASON, "A quoting issue.", "gh api x --jq .", None),
    ],
)
def test_what_the_model_calls_a_wrong_command_is_one(first, text, says, second, kind):
    site = _site(first, text, second, says=says, worked=False)
    assert (site.kind if site.is_kept else None) == kind
