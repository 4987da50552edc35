"""Parse shell tokens into a tree of lists, pipelines, simple commands, subshells, loops and conditionals.

A recursive descent parser over the tokens from `shell_lexer`. `case`, functions, `[[ … ]]` and arithmetic are not
supported and raise `UnsupportedShellSyntax`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from composer_replication.sites.actions.shell_lexer import (
    Operator,
    Piece,
    Redirect,
    ShellWord,
    Token,
    UnsupportedShellSyntax,
    literal_word,
    tokenize_shell,
)
from composer_replication.sites.actions.tools import word_set

_MAX_DEPTH = 30
# "CI=" in "CI=1"; not "--name=1" or "1A="
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=", re.ASCII)
_SHELLS = word_set("bash sh zsh /bin/bash /bin/sh /bin/zsh /usr/bin/bash dash")
_LOOPS = {"while": "do", "until": "do"}
# "in" is only supported after `for`; anywhere else it belongs to `case` or `select`.
_UNSUPPORTED = frozenset({"case", "esac", "select", "function", "[[", "coproc", "in"})
_CLOSING_WORDS = frozenset({"then", "do", "done", "fi", "elif", "else", "}"})


@dataclass(frozen=True, slots=True)
class Simple:
    """A program with its arguments. `assignments` are the variables set before it, as in `CI=1 make`."""

    assignments: tuple[tuple[str, ShellWord], ...]
    words: tuple[ShellWord, ...]
    redirects: tuple[Redirect, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """A compound command (`(`, `{`, `if`, `while`, `until`, `for`) with its lists.

    `names` are the words of a `for` loop.
    """

    kind: str
    parts: tuple[Script, ...]
    names: tuple[ShellWord, ...]
    redirects: tuple[Redirect, ...]


ParsedCommand = Simple | Block


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Commands joined by `|`. `is_negated` is set if the pipeline begins with `!`."""

    is_negated: bool
    commands: tuple[ParsedCommand, ...]


@dataclass(frozen=True, slots=True)
class CommandChain:
    """Pipelines joined by `&&` and `||`. `is_background` is set if the chain ends with `&`."""

    pipelines: tuple[Pipeline, ...]
    operators: tuple[str, ...]
    is_background: bool


Script = tuple[CommandChain, ...]


@lru_cache(maxsize=64)
def parse_script(text: str) -> Script:
    """Return the syntax tree of a command. Raises UnsupportedShellSyntax if the syntax is not supported."""
    parser = _ScriptParser(tokenize_shell(text))
    script = parser.script(0)
    if parser.at < len(parser.tokens):
        raise UnsupportedShellSyntax("unmatched closing word or parenthesis")
    return script


def commands_in(script: Script) -> Iterator[tuple[CommandChain, ParsedCommand]]:
    """Yield every command that a script may run, with the chain that contains it. A block comes before its parts."""
    for chain in script:
        for command in (stage for pipeline in chain.pipelines for stage in pipeline.commands):
            yield chain, command
            for part in command.parts if isinstance(command, Block) else ():
                yield from commands_in(part)


def single_command(text: str) -> Simple | None:
    """Return the only command in a text, or None if there are several or a variable is set."""
    try:
        commands = [command for _, command in commands_in(parse_script(text))]
    except UnsupportedShellSyntax:
        return None
    only = commands[0] if len(commands) == 1 else None
    return only if isinstance(only, Simple) and only.words and not only.assignments else None


def nested_script(words: Sequence[str | None]) -> str | None:
    """Return the script in `bash -c script`, or None for other words."""
    return words[2] if len(words) == 3 and words[0] in _SHELLS and words[1] in ("-c", "-lc", "-ic") else None


@dataclass
class _ScriptParser:
    """A recursive descent parser. `at` is the index of the next token; `depth` counts nested blocks."""

    tokens: list[Token]
    at: int = 0

    def script(self, depth: int) -> Script:
        if depth > _MAX_DEPTH:
            raise UnsupportedShellSyntax("nested too deeply")
        chains: list[CommandChain] = []
        self._skip_lines()
        while self.at < len(self.tokens) and not self._is_op(")") and self._keyword() not in _CLOSING_WORDS:
            chains.append(self._chain(depth))
            self._skip_lines()
        return tuple(chains)

    def _chain(self, depth: int) -> CommandChain:
        """Parse pipelines joined by `&&` or `||`, and the `;`, `&` or newline after them."""
        pipelines, operators = [self._pipeline(depth)], list[str]()
        while self._is_op("&&", "||"):
            operators.append(self._operator())
            self._skip_lines()
            pipelines.append(self._pipeline(depth))
        is_background = self._is_op("&")
        if self._is_op("&", ";", "\n"):
            self.at += 1
        return CommandChain(tuple(pipelines), tuple(operators), is_background)

    def _pipeline(self, depth: int) -> Pipeline:
        is_negated = self._keyword() == "!"
        self.at += is_negated
        commands = [self._command(depth)]
        while self._is_op("|", "|&"):
            if self._operator() == "|&":  # `a |& b` is `a 2>&1 | b`
                commands[-1] = _with_stderr(commands[-1])
            self._skip_lines()
            commands.append(self._command(depth))
        return Pipeline(is_negated, tuple(commands))

    def _command(self, depth: int) -> ParsedCommand:
        """Parse a block or a simple command, depending on the first word."""
        word = self._keyword()
        if word in _UNSUPPORTED or word in _CLOSING_WORDS:
            raise UnsupportedShellSyntax(f"unexpected or unsupported {word}")
        if self._is_op("("):
            self.at += 1
            if self._is_op("("):  # arithmetic; a subshell directly inside another one is rare
                raise UnsupportedShellSyntax("arithmetic is not supported")
            body = self.script(depth + 1)
            self._expect_op(")")
            return self._block("(", body)
        if word == "{":
            self.at += 1
            body = self.script(depth + 1)
            self._expect("}")
            return self._block("{", body)
        if word == "if":
            return self._if(depth)
        if word in _LOOPS:
            self.at += 1
            condition = self.script(depth + 1)
            return self._block(word, condition, self._loop_body(depth))
        return self._for(depth) if word == "for" else self._simple()

    def _if(self, depth: int) -> Block:
        parts: list[Script] = []
        self._expect("if")
        while True:
            parts.append(self.script(depth + 1))
            self._expect("then")
            parts.append(self.script(depth + 1))
            if self._keyword() != "elif":
                break
            self.at += 1
        kind = "if"
        if self._keyword() == "else":
            self.at += 1
            parts.append(self.script(depth + 1))
            kind = "if else"
        self._expect("fi")
        return self._block(kind, *parts)

    def _for(self, depth: int) -> Block:
        self._expect("for")
        names = [self._word()]
        if self._keyword() == "in":
            self.at += 1
            while self.at < len(self.tokens) and isinstance(self.tokens[self.at], ShellWord):
                names.append(self._word())
        if not self._is_op(";", "\n"):
            raise UnsupportedShellSyntax("for without a list")
        self._skip_lines(and_semicolon=True)
        return self._block("for", self._loop_body(depth), names=tuple(names))

    def _loop_body(self, depth: int) -> Script:
        self._expect("do")
        body = self.script(depth + 1)
        self._expect("done")
        return body

    def _block(self, kind: str, *parts: Script, names: tuple[ShellWord, ...] = ()) -> Block:
        """Return a block with the redirections that follow it."""
        # A shell reports a syntax error for an empty list, as in "if true; then fi".
        if not all(parts):
            raise UnsupportedShellSyntax("empty list of commands")
        redirects: list[Redirect] = []
        while self.at < len(self.tokens) and isinstance(token := self.tokens[self.at], Redirect):
            redirects.append(token)
            self.at += 1
        return Block(kind, parts, names, tuple(redirects))

    def _simple(self) -> Simple:
        """Parse a program with its arguments, assignments and redirections."""
        parts = _SimpleBuilder()
        while self.at < len(self.tokens) and not isinstance(token := self.tokens[self.at], Operator):
            parts.add(token)
            self.at += 1
        # "name()" defines a function.
        if self._is_op("(") or not (parts.words or parts.assignments or parts.redirects):
            raise UnsupportedShellSyntax("expected a command")
        return Simple(tuple(parts.assignments), tuple(parts.words), tuple(parts.redirects))

    def _keyword(self) -> str:
        """Return the next token if it is an unquoted word, otherwise "". A quoted "if" is not a keyword."""
        token = self.tokens[self.at] if self.at < len(self.tokens) else None
        return token.raw if isinstance(token, ShellWord) and token.raw == token.literal else ""

    def _word(self) -> ShellWord:
        token = self.tokens[self.at] if self.at < len(self.tokens) else None
        if not isinstance(token, ShellWord):
            raise UnsupportedShellSyntax("expected a word")
        self.at += 1
        return token

    def _operator(self) -> str:
        token = self.tokens[self.at]
        assert isinstance(token, Operator)
        self.at += 1
        return token.text

    def _is_op(self, *texts: str) -> bool:
        token = self.tokens[self.at] if self.at < len(self.tokens) else None
        return isinstance(token, Operator) and token.text in texts

    def _expect(self, keyword: str) -> None:
        if self._keyword() != keyword:
            raise UnsupportedShellSyntax(f"expected {keyword}")
        self.at += 1

    def _expect_op(self, text: str) -> None:
        if not self._is_op(text):
            raise UnsupportedShellSyntax(f"expected {text}")
        self.at += 1

    def _skip_lines(self, *, and_semicolon: bool = False) -> None:
        while self._is_op("\n") or (and_semicolon and self._is_op(";")):
            self.at += 1


@dataclass
class _SimpleBuilder:
    """A simple command under construction, to which the parser adds tokens."""

    assignments: list[tuple[str, ShellWord]] = field(default_factory=list[tuple[str, ShellWord]])
    words: list[ShellWord] = field(default_factory=list[ShellWord])
    redirects: list[Redirect] = field(default_factory=list[Redirect])

    def add(self, token: ShellWord | Redirect) -> None:
        if isinstance(token, Redirect):
            self.redirects.append(token)
            return
        # After the first word, "A=1" is an argument.
        assigned = parse_assignment(token) if not self.words else None
        if assigned is None:
            self.words.append(token)
        else:
            self.assignments.append(assigned)


def parse_assignment(word: ShellWord) -> tuple[str, ShellWord] | None:
    """Return the name and the value of `NAME=value`, or None for any other word."""
    assignment = _ASSIGNMENT.match(word.raw)
    if assignment is None:
        return None
    name = assignment.group()
    # The name is part of the first piece: "A=$X" consists of the text "A=" and an expansion.
    first, *other_pieces = word.pieces
    rest = [Piece(first.kind, first.text.removeprefix(name)), *other_pieces]
    value = ShellWord(tuple(piece for piece in rest if piece.text) or (Piece("text", ""),), word.raw[len(name) :])
    return name[:-1], value


def _with_stderr(command: ParsedCommand) -> ParsedCommand:
    redirects = (*command.redirects, Redirect("2", ">&", literal_word("1")))
    if isinstance(command, Simple):
        return Simple(command.assignments, command.words, redirects)
    return Block(command.kind, command.parts, command.names, redirects)
