"""Commands that could not work as they were typed, in many programs' words; beside them the same words of others."""

from __future__ import annotations

import pytest

from composer_replication.sites import classify

# family, command, what it printed
TYPED = {
    "usage_error": [
        ("GNU long", "ls --tree", "ls: unrecognized option '--tree'\nTry 'ls --help' for more information."),
        ("BSD letter", "sed -r 's/a/b/' f", "sed: illegal option -- r\nusage: sed script [-EHalnru] [file ...]"),
        ("BSD stat", "stat -c %s a.txt", "stat: illegal option -- c\nusage: stat [-FLnq] [-f format] [file ...]"),
        ("BSD date", "date -d yesterday", "date: illegal option -- d\nusage: date [-jnRu]"),
        ("BSD head", "head -n -5 a.txt", "head: illegal line count -- -5"),
        ("find", "find . -regextype egrep -name x", "find: -regextype: unknown primary or operator"),
        ("xargs", "ls | xargs -d '\\n' rm", "xargs: illegal option -- d\nusage: xargs [-0opt]"),
        (
            "cobra",
            "kubectl get pods --watching",
            "error: unknown flag: --watching\nSee 'kubectl get --help' for usage.",
        ),
        (
            "cobra, among others",
            "./build.sh && gh pr diff 4 --stat",
            "built\nunknown flag: --stat\n\nUsage:  gh pr diff",
        ),
        ("cobra, short", "docker ps -z", "unknown shorthand flag: 'z' in -z\nSee 'docker ps --help'."),
        ("cobra, value", "gh pr list --limit many", 'invalid argument "many" for "-L, --limit" flag: strconv.ParseInt'),
        ("cobra, count", "gh pr view 1 2", "accepts at most 1 arg(s), received 2"),
        ("cobra, required", "helm upgrade --dry-run", 'Error: "helm upgrade" requires 2 arguments'),
        ("Go flags", "go vet -fix ./...", "flag provided but not defined: -fix\nusage: go vet [build flags]"),
        ("Go output", "go build -o app ./... && ./app", "go: cannot write multiple packages to non-directory app"),
        ("go doc", "go doc net/http Servant", "doc: no symbol Servant in package net/http\nexit status 1"),
        (
            "clap",
            "cargo build --relase",
            "error: unexpected argument '--relase' found\n\n  tip: a similar argument exists",
        ),
        ("clap, older", "rg --filez", "error: Found argument '--filez' which wasn't expected, or isn't valid"),
        ("clap, value", "cargo test --jobs x", "error: invalid value 'x' for '--jobs <N>': could not parse"),
        ("clap, command", "cargo biuld", "error: no such command: `biuld`\n\n\tDid you mean `build`?"),
        ("cargo target", "cargo test --test clii", "error: no test target named `clii`."),
        ("argparse", "mypy --stricter a.py", "usage: mypy [-h]\nmypy: error: unrecognized arguments: --stricter"),
        ("argparse, choice", "aws s3 lss", "aws: error: argument subcommand: Invalid choice, valid choices are:\n\nls"),
        ("argparse, value", "black --line-length wide a.py", "Error: Invalid value for '--line-length': 'wide' is not"),
        ("click", "black --foo a.py", "Usage: black [OPTIONS] SRC ...\n\nError: No such option: --foo"),
        ("npm", "npm instal-all", 'Unknown command: "instal-all"\n\nTo see a list of supported npm commands, run:'),
        ("yarn", "yarn typecheckk", 'error Command "typecheckk" not found.'),
        ("pnpm", "pnpm lint:all", " ERR_PNPM_NO_SCRIPT  Missing script: lint:all"),
        ("BSD, long", "cp --parents a b", "cp: illegal option -- -\nusage: cp [-R]"),
        ("packages", "go vet ./nope/...", 'go: warning: "./nope/..." matched no packages\nno packages to vet'),
        ("label", "gh issue edit 1 --add-label bugg", "failed to update 1 issue: 'bugg' not found"),
        ("git option", "git log --onelin", "fatal: unrecognized argument: --onelin"),
        ("git switch", "git commit --ammend", "error: unknown option `ammend'\nusage: git commit [-a]"),
        ("git, needs a value", "git commit -m", "error: switch `m' requires a value"),
        ("git command", "git comit", "git: 'comit' is not a git command. See 'git --help'."),
        ("terraform", "terraform aply", 'Terraform has no command named "aply". Did you mean "apply"?'),
        (
            "terraform flag",
            "terraform plan --foo",
            "Error: Failed to parse command-line flags\n\nflag provided but not defined: -foo",
        ),
        ("docker command", "docker bild .", "docker: 'bild' is not a docker command.\nSee 'docker --help'"),
        ("docker service", "docker compose logs webb", "no such service: webb"),
        ("kubectl type", "kubectl get podz", 'error: the server doesn\'t have a resource type "podz"'),
        (
            "curl",
            "curl --jsonn x https://host/",
            "curl: option --jsonn: is unknown\ncurl: try 'curl --help' for more information",
        ),
        ("curl address", "curl 'https:/ /x y'", "curl: (3) URL using bad/illegal format or missing URL"),
        ("jq option", "jq --rawr . a.json", "jq: Unknown option: --rawr\nUsage:\tjq [OPTIONS]"),
        (
            "jq filter",
            "gh pr list --json number | jq '.number'",
            'jq: error (at <stdin>:1): Cannot index array with string "number"',
        ),
        (
            "linters",
            "golangci-lint run -E nilness",
            "Error: unknown linters: 'nilness', run 'golangci-lint help linters'",
        ),
        (
            "without input",
            'claude --print --tools "" "hi"',
            "Error: Input must be provided either through stdin or as a prompt argument",
        ),
        (
            "no terminal",
            "./app list | head",
            "failed to run TUI: could not open a new TTY: open /dev/tty: device not configured",
        ),
        ("no editor", "git rebase -i HEAD~3", "error: Terminal is dumb, but EDITOR unset"),
        ("not recursive", "cp src dst", "cp: src is a directory (not copied)."),
        ("mkdir", "mkdir build", "mkdir: build: File exists"),
        (
            "PowerShell",
            "Get-Item -Pathh x",
            "Get-Item : A parameter cannot be found that matches parameter name 'Pathh'.",
        ),
    ],
    "shell_syntax": [
        (
            "heredoc",
            "cat <<EOF\nx",
            "bash: line 1: warning: here-document at line 1 delimited by end-of-file (wanted `EOF')",
        ),
        ("test", "[ $a == 1 ] && ls", "bash: line 1: [: ==: unary operator expected"),
        ("zsh equals", "[ $a == 1 ] && ls", "(eval):1: = not found"),
        ("zsh status", "status=$(ls)", "(eval):1: read-only variable: status"),
        ("zsh builtin", "[ -zz $x ]", "(eval):[:1: unknown condition: -zz"),
        ("zsh read", "read -p 'name? ' x", "(eval):read:1: -p: no coprocess"),
        ("old bash", "declare -A m; m[a]=1", "bash: line 1: declare: -A: invalid option"),
        ("backticks", 'gh pr comment 1 -b "see `retry` here"', "(eval):1: command not found: retry"),
        ("backticks, path", 'git commit -m "move `cli/a.go`"', "(eval):1: permission denied: cli/a.go"),
        ("words in a variable", "T='deploy now'; $T", "(eval):1: command not found: deploy now"),
        ("zsh path", "path=/srv; ls $path", "(eval):1: command not found: ls"),
        ("pattern replaced", "find . -name *.go", "find: a.go: unknown primary or operator"),
        ("redirect", "cat > $F", "bash: line 1: $F: ambiguous redirect"),
        ("fish status", "ls; echo $?", "fish: $? is not the exit status. In fish, please use $status."),
        ("fish", "for i in 1 2; do echo $i; done", "fish: Expected end of the statement, but found a ';'"),
        ("PowerShell", "cat < a.txt", "The '<' operator is reserved for future use."),
        ("cmd", "if x", "The syntax of the command is incorrect."),
        ("sed, BSD", "sed -i 's/a/b/' a.txt", 'sed: 1: "a.txt": command a expects \\ followed by text'),
        ("awk", "awk '{print $1' a.txt", "awk: syntax error at source line 1"),
        ("grep", "grep -E '(a' f.txt", "grep: parentheses not balanced"),
        ("rg", "rg '(a' src", "rg: regex parse error:\n    (a\n    ^"),
        ("node", "node -e 'if('", "[eval]:1\nif(\n   ^\n\nSyntaxError: Unexpected end of input"),
        ("ruby", "ruby -e 'puts ('", "-e:1: syntax error, unexpected end-of-input"),
        ("perl", "perl -e 'if ('", "syntax error at -e line 1, at EOF"),
        ("php", "php -r 'echo ;'", "PHP Parse error:  syntax error, unexpected token in Command line code on line 1"),
        ("psql", "psql -c 'selct 1'", 'ERROR:  syntax error at or near "selct"\nLINE 1: selct 1'),
        ("sqlite", "sqlite3 a.db 'selct 1'", 'Error: in prepare, near "selct": syntax error'),
    ],
    "wrong_folder": [
        ("cargo", "cargo build", "error: could not find `Cargo.toml` in `/r` or any parent directory"),
        ("compose", "docker compose up -d", "no configuration file provided: not found"),
        ("terraform", "terraform plan", "Error: No configuration files"),
    ],
    "git_state": [
        (
            "refspec",
            "git push origin topik",
            "error: src refspec topik does not match any\nerror: failed to push some refs",
        ),
        ("beside gh", "git push -u origin topik && gh pr create", "error: src refspec topik does not match any"),
        ("stash", "git stash pop", "No stash entries found."),
    ],
    "api_misuse": [
        ("REST", "gh api repos/a/b/pulls/1/comments/2", "gh: Not Found (HTTP 404)"),
        ("GraphQL", "gh api graphql -f query=x", "gh: Field 'nam' doesn't exist on type 'User'"),
        ("address", "curl -fsS https://api.host.dev/v9/x", "curl: (22) The requested URL returned error: 404"),
    ],
}
FLAT = [pytest.param(kind, *row[1:], id=f"{kind}, {row[0]}") for kind, rows in TYPED.items() for row in rows]

# The same words, where nothing was typed wrongly: tests, checks, scripts, texts, the program under work.
NOT_TYPED = [
    ("a test prints it", "go test ./cli -run TestFlags", "--- FAIL: TestFlags\n    unknown flag: --stat\nFAIL"),
    ("a compiler says it", "go vet ./...", "# cli\ncli/a.go:12:4: not enough arguments in call to run"),
    ("a linter says it", "mise run lint", "[lint] cli/a.go:12:4: not enough arguments in call to run (typecheck)"),
    ("a file says it", "cat docs/errors.md --", "unknown flag: --\ncat: a: Is not there"),
    ("the project's own program", "./bin/app show --brief", "Error: unknown flag: --brief\nUsage:\n  app show"),
    ("run from source", "go run ./cmd/app --brief", "Error: unknown flag: --brief"),
    ("a script's option", "make deploy", "kubectl: error: unknown flag: --watching\nmake: *** [deploy] Error 1"),
    ("another's option", "./app --brief | jq .x", "unknown flag: --brief"),
    ("infrastructure", "terraform validate", "Error: Missing required argument\n\n  on main.tf line 3"),
    ("an interactive test", "go test ./tui", "could not open a new TTY: open /dev/tty: device not configured\nFAIL"),
    ("a file of SQL", "psql -f migrate.sql", 'psql:migrate.sql:3: ERROR:  syntax error at or near "selct"'),
    ("a script's syntax", "bash build.sh", "build.sh: line 3: syntax error near unexpected token `fi'"),
    ("a file's syntax", "node app.js", "/r/app.js:3\nif(\nSyntaxError: Unexpected end of input"),
    ("elsewhere", "ssh host 'ls --tree'", "bash: -c: line 1: syntax error near unexpected token"),
    ("own server", "curl -fsS http://localhost:3000/x", "curl: (22) The requested URL returned error: 404"),
    (
        "after other trouble",
        "docker compose up; docker logs db",
        "Error: pull access denied\nError: No such container: db",
    ),
    ("a program in backticks", 'cd "x" && echo `golangci-lint version`', "(eval):1: command not found: golangci-lint"),
    ("a script that needs git", "git add -A && ./check.sh", "error: src refspec topik does not match any"),
    ("a look at the usage", "git commit -h", "usage: git commit [-a | --interactive | --patch]"),
    ("plugins", "pytest --cov src", "pytest: error: unrecognized arguments: --cov"),
    ("a missing build", "mkdir -p out && ./gen.sh out", "mkdir: out: File exists"),
]


@pytest.mark.parametrize(("kind", "command", "text"), FLAT)
def test_a_command_that_was_typed_wrongly_is_the_models_in_every_programs_words(kind, command, text):
    verdict = classify("Bash", {"command": command}, f"Exit code 2\n{text}", True)
    assert (verdict.kind, verdict.blame) == (kind, "model")


@pytest.mark.parametrize(("command", "text"), [pytest.param(*row[1:], id=row[0]) for row in NOT_TYPED])
def test_the_same_words_of_somebody_else_are_not(command, text):
    assert classify("Bash", {"command": command}, f"Exit code 2\n{text}", True).blame != "model"


@pytest.mark.parametrize(
    ("command", "text", "is_kept"),
    [
        ("gh pr diff 4 --stat 2>&1 | head -20", "unknown flag: --stat\n\nUsage:  gh pr diff", True),
        (
            "gh pr diff 4 --stat",
            "unknown flag: --stat\n\nUsage:  gh pr diff",
            False,
        ),  # the status was its own, and good
        ("cat errors.md; gh pr diff 4 --stat", "# Errors\nunknown flag: --stat", False),  # not the first thing printed
        ("grep -rn 'unknown flag: --stat' . | head", "a.go:3: unknown flag: --stat", False),
        ("./app --stat | head", "unknown flag: --stat", False),
    ],
)
def test_a_status_that_is_another_commands_does_not_hide_a_usage_message(command, text, is_kept):
    verdict = classify("Bash", {"command": command}, text, False)
    assert (verdict.blame == "model" and verdict.confidence >= 0.5) is is_kept
