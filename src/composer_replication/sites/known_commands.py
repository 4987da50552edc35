"""Commands by name: what a project has installed, and what one may take for granted."""

from __future__ import annotations

from composer_replication.actions.tools import word_set

# Part of a project's set-up rather than of the shell: where one is missing, the machine was not prepared.
SET_UP = word_set(
    "pytest tox nox jest vitest mocha eslint prettier tsc ruff mypy flake8 black isort pylint pyright phpunit rspec"
    " rubocop npm npx yarn pnpm bun deno cargo rustc rustup go gofmt golangci-lint mvn gradle javac java dotnet"
    " cmake ninja gcc g++ clang cc poetry pipenv uv pip pip3 bundle gem ruby php composer mix elixir iex swift"
    " flutter dart ghc stack cabal sbt lein vite webpack storybook cypress alembic celery gunicorn uvicorn flask"
    " rails bazel just task buf protoc sqlc phpstan asdf ponyc playwright pre-commit coverage hatch pdm node"
)
# What one may take for granted on the wrong machine.
UTILITIES = word_set(
    "tree rg fd ag ack bat batcat jq yq wget curl sed awk gsed gawk grep egrep find cat head tail less more vim vi"
    " nano open pbcopy pbpaste xclip top htop unzip zip tar python python2 sqlite3 make apt apt-get brew yum dnf"
    " which where dir cls ipconfig ifconfig netstat ss lsof telnet nc nmap rsync timeout gtimeout watch column tac"
    " shuf xmllint nslookup dig strings xxd hexdump md5 md5sum shasum sha256sum readlink realpath greadlink gdate"
    " seq bc xdg-open lsd exa"
)
WELL_KNOWN = sorted(UTILITIES | SET_UP | word_set("python3 git ls cp mv rm mkdir echo chmod docker kubectl"))
