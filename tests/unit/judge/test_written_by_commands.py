"""What a command surely writes, from where the shell stands, and what it may only have formatted."""

from __future__ import annotations

import os
import subprocess

import pytest

from composer_replication.sites.actions.session_state import SessionState
from composer_replication.sites.actions.shell_command import _WrittenFiles, files_written_by
from composer_replication.sites.judge import Judge, Repository
from composer_replication.types import ToolCall

LINE = "\tif err := check(item, number); err != nil {\n"  # 16 words and signs, with its end
FILE = "src/app/large.go"
SED = f"sed -i s/a/b/ {FILE}"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    names = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    (folder / "src" / "app").mkdir(parents=True)
    (folder / FILE).write_text(LINE * 1500)
    for words in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-q", "-m", "x"]):
        settings = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_COMMITTER_DATE": "2026-01-01T10:00:00Z"}
        subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, env=os.environ | names | settings)
    return Repository(folder).at("2026-01-02T00:00:00Z")


def edit(old="check(item, number)"):
    arguments = {"file_path": f"/repo/{FILE}", "old_string": old, "new_string": "z", "replace_all": True}
    return ToolCall(id="c", name="Edit", arguments=arguments)


def after(*commands):
    """A session that has read a part of the large file; then commands, each alone or with its output."""
    state = SessionState("/repo")
    read = ToolCall(id="c", name="Read", arguments={"file_path": f"/repo/{FILE}", "offset": 5, "limit": 1})
    state.add(read, f"     5→{LINE}", failed=False)
    for each in commands:
        command, output = each if isinstance(each, tuple) else (each, "")
        state.add(ToolCall(id="c", name="Bash", arguments={"command": command}), output, failed=False)
    return state


LEAVES_IT = [
    "black --check .",
    f"black --diff {FILE}",
    "isort --check-only .",
    "rustfmt --check src/lib.rs",
    "cargo fmt -- --check",
    "cargo fmt --check",
    "ruff format --check .",
    "ruff check --fix --diff .",
    "dotnet format --verify-no-changes",
    "prettier --write --list-different src --check",
    "make format --dry-run",
    "git add -A && git commit -m format",
    "git branch format",
    "mkdir format",
    "cd format && ls",
    "pip install fmt",
    "rm -rf format",
    "npm view format",
    "docker compose run format",
    "sed -n '10,20p' format",
    f"perl -MList::Util=sum -ne 'print if /x/' {FILE}",
    f"perl -Mstrict -ne 'print' {FILE}",
    f"perl -Ilib -ne 'print' {FILE}",
    f"perl tool.pl -pi {FILE}",
    f"ruby -rdigest -e 'puts 1' {FILE}",
    f"cp -t out {FILE}",
    f"cp --target-directory=out {FILE}",
    f"mv -vt out {FILE}",
    f"cp {FILE} $OUT",
    f"cp -n other.go {FILE}",
    f"cd sub && {SED}",
    f"cd sub; {SED}",
    f"(cd sub && ls)\ncd sub\n{SED}",
    f"test -f nope && {SED}",
    f"test -f nope || {SED}",
    f"{SED} || true",
    f"cp nope {FILE}; true",  # nobody says whether it worked
    f"cp nope {FILE} | cat",
    f"! cp nope {FILE}",
    f"cp --help {FILE} {FILE}",
    f"tee --version {FILE}",
    f"if false; then {SED}; fi",
    f"for x in; do {SED}; done",
    f"exit 0; {SED}",
    f"{SED} &",
    f"sed -n '/-i/p' {FILE}",
    f"sed -n -e /import/p -E {FILE}",
]


@pytest.mark.parametrize("command", LEAVES_IT)
def test_a_command_that_may_have_left_the_file_alone_makes_no_alarm(checkout, command):
    judgement = Judge(after(command), checkout=checkout).verdict(edit())
    assert judgement.says == "ok", judgement


@pytest.mark.parametrize(
    "command",
    [
        SED,
        f"sed --in-place s/a/b/ {FILE}",
        f"sed --in-place=.bak -e s/a/b/ {FILE}",
        f'sed -Ei "s/$FROM/b/" {FILE}',
        f"go build ./...; {SED}",
        f"{SED} && go build ./...",
        f"echo x > {FILE}; go build ./...",
        f"echo x | tee {FILE} | cat; ls",
        f"perl -0777 -pi -e s/a/b/ {FILE}",
        f"ruby -pi.bak -e 'x' ./{FILE}",
        f"cat >> {FILE} <<'E'\nx\nE",
        f"echo x | tee -a {FILE}",
        f"mv new.go {FILE}",
        f"cd sub; sed -i s/a/b/ /repo/{FILE}",
    ],
)
def test_a_command_that_writes_the_file_makes_it_unread(checkout, command):
    judgement = Judge(after(command), checkout=checkout).verdict(edit())
    assert (judgement.says, judgement.rule) == ("fails", "changed_and_too_large")


def test_names_are_read_from_where_the_shell_stands(checkout):
    def says(*commands):
        return Judge(after(*commands), checkout=checkout).verdict(edit()).says

    assert says("cd sub", SED) == "ok"
    assert says("cd src", "sed -i s/a/b/ app/large.go") == "fails"
    assert says("cd src", "cd ..", SED) == "fails"
    assert says(("cd src", "Shell cwd was reset to /repo"), SED) == "fails"
    assert says("cd $SOMEWHERE", SED) == "ok"
    state = after()
    failed = ToolCall(id="c", name="Bash", arguments={"command": "cd src && make"})
    state.add(failed, "make: *** failed\nShell cwd was reset to /elsewhere", failed=True)
    state.add(ToolCall(id="c", name="Bash", arguments={"command": SED}), "", failed=False)
    assert Judge(state, checkout=checkout).verdict(edit()).says == "ok"


@pytest.mark.parametrize(
    ("command", "output", "says"),
    [
        ("black .", "All done! 3 files left unchanged.", "risky"),
        ("go fmt ./...", "", "risky"),
        (f"gofmt -w {FILE}", "", "risky"),  # it may have been well formed before
        ("mise run fmt && mise run lint", "", "risky"),
        ("go fmt ./...", f"src/app/other.go\n{FILE}\n", "fails"),
        ("go fmt ./...", "src/app/other.go\n", "risky"),
        ("black .", f"reformatted /repo/{FILE}\nAll done!", "fails"),
        ("npx prettier --write .", f"{FILE} 20ms\n", "fails"),
        ("npx prettier --write .", f"{FILE} 20ms (unchanged)\n", "risky"),
        ("go fmt ./... ; git diff --name-only", f"{FILE}\n", "risky"),  # whoever has changed it
    ],
)
def test_a_formatter_may_have_found_nothing_to_do_unless_it_names_the_file(checkout, command, output, says):
    judgement = Judge(after((command, output)), checkout=checkout).verdict(edit())
    assert (judgement.says, judgement.rule) == (says, "changed_and_too_large")


def test_after_a_formatter_a_text_that_is_not_there_fails_all_the_same(checkout):
    same = edit("z")  # replaced by itself
    assert Judge(after("black ."), checkout=checkout).verdict(same).says == "fails"


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("cat a > b", {"b"}),
        ("cat a 2>/dev/null >> 'b c'", {"b c"}),
        ("{ echo x; } > b", {"b"}),
        ("sed -n 1,3p a", set()),
        ("perl -pi -e s/a/b/ x.py", {"x.py"}),
        ("perl -i -pe s/a/b/ x.py y.py", {"x.py", "y.py"}),
        ("sed -i '' s/a/b/ x.py y.py", {"x.py", "y.py"}),
        ("sed -i -e s/a/b/ -e s/c/d/ x.py", {"x.py"}),
        ("cp -r a b/c", {"b/c"}),
        ("cp a", set()),
        ("echo x | tee a b", {"a", "b"}),
        ("cat > $OUT", set()),
        ("cat > 'unclosed", set()),
        ("cd x; cat a > b; cat a > /c", {"/c"}),
        ("", set()),
    ],
)
def test_what_a_command_surely_writes(command, names):
    assert files_written_by(command).names == names


@pytest.mark.parametrize(
    ("command", "formats"),
    [
        *((command, "alone") for command in ("gofmt -w .", "npm run format", "prettier --write src", "ruff check --fix",
                                             "ruff format", "cargo fmt", "make fmt", "dotnet format", "deno fmt",
                                             "black a", "uv run ruff format .", "python -m black .",
                                             "npx eslint --fix")),
        *((command, "") for command in ("prettier --check src", "echo format", "gofmt -l .", "go build fmt",
                                        "npm format", "make test fmt=1", "cargo build --bin fmt",
                                        "npm run format:check", "ls && black .")),
        ("black . && pytest", "among_others"),
        ("cd src; black .", "among_others"),
    ],
)  # fmt: skip
def test_what_may_format_whatever_there_is(command, formats):
    assert files_written_by(command) == _WrittenFiles(frozenset(), formats)
