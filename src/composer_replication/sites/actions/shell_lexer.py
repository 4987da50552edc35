"""Split shell text into words, operators and redirections: the lexer for `shell_parser`.

Quotes are removed, and each expansion is marked as a piece of its kind. Unsupported syntax raises
`UnsupportedShellSyntax`; the command is then compared as plain text. That is safer than guessing, because different
commands must never be treated as equal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Kind = Literal["text", "split", "kept", "glob", "home", "raw"]


class UnsupportedShellSyntax(ValueError):
    """Raised for shell syntax that the lexer or the parser does not support."""


class Piece(NamedTuple):
    """Part of a word: text, an expansion (`split` into words, or `kept` whole by quotes), a glob, `~`, or raw text."""

    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class ShellWord:
    """A word in a command: its pieces, and `raw`, the word as it was typed."""

    pieces: tuple[Piece, ...]
    raw: str

    @property
    def literal(self) -> str | None:
        """The word that the program receives, or None if it depends on an expansion."""
        if not self.pieces:
            return ""
        return self.pieces[0].text if len(self.pieces) == 1 and self.pieces[0].kind == "text" else None

    @property
    def splits(self) -> bool:
        """Whether the word may expand to any number of words, including options: an unquoted `$X`."""
        return any(piece.kind == "split" for piece in self.pieces)

    @property
    def key(self) -> str | list[list[str]]:
        """The word as JSON, equal for words that the shell treats alike, regardless of quoting."""
        literal = self.literal
        return literal if literal is not None else [list(piece) for piece in self.pieces]


def literal_word(text: str) -> ShellWord:
    """Return a word that consists of plain text."""
    return ShellWord((Piece("text", text),), text)


@dataclass(frozen=True, slots=True)
class Operator:
    """A token that separates or groups commands: `&&`, `|`, `;`, a newline, a parenthesis."""

    text: str


@dataclass(frozen=True, slots=True)
class Redirect:
    """A redirection. `op` is the operator without its file descriptor.

    The target of a here-document is its body; `op` is `<<` if the body is plain text, otherwise `<<expanded`.
    """

    descriptor: str
    op: str
    target: ShellWord


Token = ShellWord | Operator | Redirect
# Longer commands are data rather than commands worth comparing, and would take too long to parse.
_MAX_TOKENS = 20_000
_MAX_PIECES = 50_000
# "abc-1.py" in "abc-1.py;ls"; stops before quotes, expansions, globs, brackets, operators and comments
_PLAIN_TEXT = re.compile(r"[^ \t\n'\"\\$`|&;<>(){}*?\[~#]+")
# 'a b' of 'a b$X"': inside double quotes only `"`, `\`, `$` and a backtick are special
_DOUBLE_QUOTED_TEXT = re.compile(r"[^\"\\$`]+")
# "  " and a backslash at the end of a line; a newline by itself is an operator
_BLANKS = re.compile(r"(?:[ \t]|\\\n)+")
# "# all of it" up to the end of the line; only tried where a word may begin, so "a#b" contains no comment
_COMMENT = re.compile(r"#[^\n]*")
# "2>" -> ("2", ">"), "<<-" -> ("", "<<-"), "&>" -> "&>"; not "<(ls)", a process substitution
_REDIRECT = re.compile(r"(\d*)(<<<|<<-|<<|<&|<>|<(?!\()|>>|>&|>\||>(?!\())|()(&>>|&>)")
# "&&", "||", "|&", ";" and a newline; the longest first, so "&&" is not split into two "&"
_OPERATOR = re.compile(r"&&|\|\||\|&|[|&;()\n]")
# "{}" in `find -exec` and "{name}"; not "{a,b}" or "{1..3}", which a shell expands
_HARMLESS_BRACES = re.compile(r"\{[^\s,.{}'\"\\$`;|&<>()]*\}")
# "`date`", and "`echo \`date\``" with the inner ones escaped
_BACKTICKS = re.compile(r"`(?:[^`\\]|\\.)*`", re.DOTALL)


def tokenize_shell(text: str) -> list[Token]:
    """Return the tokens of a command. Newlines are operators; comments are dropped.

    Raises UnsupportedShellSyntax if the text cannot be tokenized reliably.
    """
    return _Lexer(text).run()


@dataclass
class _Lexer:
    """A lexer that tokenizes text from left to right. `at` is the position of the next character."""

    text: str
    at: int = 0
    tokens: list[Token] = field(default_factory=list[Token])
    # Here-documents whose bodies begin after the current line: token index, end mark, whether the mark is quoted (then
    # nothing in the body is expanded), whether leading tabs are stripped.
    pending_heredocs: list[tuple[int, str, bool, bool]] = field(default_factory=list[tuple[int, str, bool, bool]])

    def run(self) -> list[Token]:
        while len(self.tokens) <= _MAX_TOKENS:
            blanks = _BLANKS.match(self.text, self.at)
            self.at = blanks.end() if blanks else self.at
            if self.at >= len(self.text):
                break
            self._read_token()
        else:
            raise UnsupportedShellSyntax("too many tokens")
        if self.pending_heredocs:
            raise UnsupportedShellSyntax("here-document without a body")
        return self.tokens

    def _read_token(self) -> None:
        comment = _COMMENT.match(self.text, self.at)
        if comment:
            self.at = comment.end()
            return
        # Redirections are tried before operators, so that "2>" and "&>" are not read as a word or as "&".
        redirect = _REDIRECT.match(self.text, self.at)
        if redirect:
            self._read_redirect(redirect[1] or "", redirect[2] or redirect[4], redirect.end())
            return
        operator = _OPERATOR.match(self.text, self.at)
        if operator is None:
            self.tokens.append(self._read_word())
            return
        self.at = operator.end()
        self.tokens.append(Operator(operator.group()))
        if operator.group() == "\n":
            self._read_heredocs()

    def _read_redirect(self, descriptor: str, op: str, end: int) -> None:
        """Read the target of a redirection. The body of a here-document is read later, after the end of the line."""
        blanks = _BLANKS.match(self.text, end)
        self.at = blanks.end() if blanks else end
        target = self._read_word()
        if op in ("<<", "<<-"):
            if target.literal is None:
                raise UnsupportedShellSyntax("expansion in the end mark of a here-document")
            self.pending_heredocs.append((len(self.tokens), target.literal, target.raw != target.literal, op == "<<-"))
        self.tokens.append(Redirect(descriptor, op, target))

    def _read_heredocs(self) -> None:
        """Read the bodies of the here-documents that were opened on the line just ended."""
        for index, end_mark, is_quoted, strips_tabs in self.pending_heredocs:
            body, self.at = _read_heredoc_body(self.text, self.at, end_mark, strips_tabs=strips_tabs)
            # Without "$", a backtick or a backslash nothing expands, whether or not the end mark is quoted.
            is_plain = is_quoted or not re.search(r"[$`\\]", body)
            redirect = self.tokens[index]
            assert isinstance(redirect, Redirect)
            op = "<<" if is_plain else "<<expanded"
            self.tokens[index] = Redirect(redirect.descriptor, op, literal_word(body))
        self.pending_heredocs.clear()

    def _read_word(self) -> ShellWord:
        """Read a word, which ends at a blank, an operator or a redirection."""
        start, pieces, is_opaque = self.at, _WordPieces(), False
        while self.at < len(self.text):
            char = self.text[self.at]
            plain = _PLAIN_TEXT.match(self.text, self.at)
            if plain:
                self._add_text(plain.group(), pieces)
            elif char in "'\"\\$`":
                self._read_quote_or_expansion(char, pieces)
            elif char in "[{":  # a glob or a brace expansion, unless the braces are harmless
                harmless = _HARMLESS_BRACES.match(self.text, self.at)
                is_opaque = is_opaque or harmless is None
                self._add_text(harmless.group() if harmless else char, pieces)
            elif char in "*?":
                self._add_text(char, pieces, "glob")
            elif char in "~#}":
                self._add_text(char, pieces, "home" if char == "~" and self.at == start else "text")
            elif char in "<>" and self.text.startswith("(", self.at + 1):
                self.at = _expansion_at(self.text, self.at).end
                pieces.add("kept", self.text[start : self.at])
                is_opaque = True
            else:
                break
        if self.at == start:
            raise UnsupportedShellSyntax(f"expected a word at position {start}")
        raw = self.text[start : self.at]
        # A word that cannot be split into pieces is compared as typed. "[" and "{" alone are commands.
        if is_opaque and raw not in ("[", "{"):
            return ShellWord((Piece("raw", raw),), raw)
        return ShellWord(pieces.joined(), raw)

    def _add_text(self, text: str, pieces: _WordPieces, kind: Kind = "text") -> None:
        pieces.add(kind, text)
        self.at += len(text)

    def _read_quote_or_expansion(self, char: str, pieces: _WordPieces) -> None:
        """Read a quote, an escaped character or an expansion."""
        if char == "'":
            end = self.text.find("'", self.at + 1)
            if end < 0:
                raise UnsupportedShellSyntax("unterminated quote")
            pieces.add("text", self.text[self.at + 1 : end])
            self.at = end + 1
        elif char == "\\":
            following = self.text[self.at + 1 : self.at + 2]
            if not following:
                raise UnsupportedShellSyntax("backslash at the end")
            if following != "\n":  # a backslash at the end of a line joins it with the next one
                pieces.add("text", following)
            self.at += 2
        elif char == '"':
            self.at += 1
            self._read_double_quoted(pieces)
        else:
            self._read_expansion(pieces, "split")

    def _read_double_quoted(self, pieces: _WordPieces) -> None:
        """Read up to the closing double quote. Expansions inside are not split into words."""
        pieces.add("text", "")  # "" is a word, too
        while self.at < len(self.text):
            plain = _DOUBLE_QUOTED_TEXT.match(self.text, self.at)
            if plain:
                pieces.add("text", plain.group())
                self.at = plain.end()
                continue
            char = self.text[self.at]
            if char == '"':
                self.at += 1
                return
            if char == "\\":
                following = self.text[self.at + 1 : self.at + 2]
                pieces.add("text", {"\n": ""}.get(following, following if following in '"\\$`' else f"\\{following}"))
                self.at += 2
            else:
                self._read_expansion(pieces, "kept")
        raise UnsupportedShellSyntax("unterminated quote")

    def _read_expansion(self, pieces: _WordPieces, kind: Kind) -> None:
        """Read an expansion and add it to `pieces`.

        It becomes text if its value is constant, otherwise a piece of the given kind.
        """
        if self.text[self.at] == "`":
            ticks = _BACKTICKS.match(self.text, self.at)
            if ticks is None:
                raise UnsupportedShellSyntax("unterminated backtick")
            # Without backslashes inside, backticks are equivalent to $(…).
            inner = ticks.group()[1:-1]
            plain = "\\" not in inner and _expansion_at(f"$({inner})", 0).end == len(inner) + 3
            pieces.add(kind, f"$({inner})" if plain else ticks.group())
            self.at = ticks.end()
            return
        if kind == "split" and self.text.startswith("$'", self.at):
            text, self.at = _read_ansi_string(self.text, self.at)
            pieces.add("text", text)
            return
        if kind == "split" and self.text.startswith('$"', self.at):
            raise UnsupportedShellSyntax("translated strings are not supported")
        start, expansion = self.at, _expansion_at(self.text, self.at)
        self.at = expansion.end
        if expansion.is_text and (kind == "kept" or expansion.name == "$"):
            pieces.add("text", expansion.name)
        else:
            pieces.add(kind, self.text[start : self.at] if expansion.is_text else expansion.name)


@dataclass
class _WordPieces:
    """The pieces of a word under construction.

    Adjacent texts are joined at the end, so that quoting makes no difference.
    """

    pieces: list[Piece] = field(default_factory=list[Piece])

    def add(self, kind: Kind, text: str) -> None:
        if len(self.pieces) > _MAX_PIECES:
            raise UnsupportedShellSyntax("too many pieces in a word")
        self.pieces.append(Piece(kind, text))

    def joined(self) -> tuple[Piece, ...]:
        """Return the pieces with adjacent texts joined. An empty word has a single empty text."""
        joined: list[Piece] = []
        texts: list[str] = []
        for piece in self.pieces:
            if piece.kind == "text":
                texts.append(piece.text)
                continue
            if any(texts):
                joined.append(Piece("text", "".join(texts)))
            texts.clear()
            joined.append(piece)
        if any(texts) or not joined:
            joined.append(Piece("text", "".join(texts)))
        return tuple(joined)


class _Expansion(NamedTuple):
    """An expansion that was read from a command.

    `name` is its canonical form, or its constant value if `is_text` is set. `end` is the position after the expansion.
    """

    name: str
    end: int
    is_text: bool = False


# "$X" and "${X}" -> "X", "$?" -> "?"; not "${X:-1}", which _BRACED reads
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*|[0-9@*#?$!-])|\{([A-Za-z_]\w*)\})", re.ASCII)
# "${X:-1}" and "${#X}"; not "${X:-$Y}", a nested expansion
_BRACED = re.compile(r"\$\{[^{}'\"\\`$]*\}")
# "$(cat <<'EOF'\n" opens a here-document that is passed as an argument: how agents write commit messages
_CAT_HEREDOC = re.compile(r"\$\([ \t]*cat[ \t]*<<(-?)[ \t]*(?:'(\w+)'|\"(\w+)\"|(\w+))[ \t]*\n")
# ")" after any blanks and newlines
_CLOSING_PARENTHESIS = re.compile(r"\s*\)")
# What determines where "$(…)" ends: the quotes and parentheses in "$(a 'b)' (c))". It also matches unsupported syntax:
# here-documents, comments ("a #b", not "a#b") and `case`, whose patterns contain unpaired parentheses.
_SUBSTITUTION_MARK = re.compile(r"['\"\\()`]|<<|(?<=\s)#|\bcase\b")
# The same inside double quotes, where only "$(" opens a parenthesis: the quote and the "$(" in '$(ls) (x)"'
_QUOTED_MARK = re.compile(r"[\"\\`]|\$\(")
# "$'a\n'" -> "a\n", with the escape still to be decoded, and "$'it\'s'"
_ANSI_STRING = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL)
# "\n" (a backslash and a letter) -> "n"
_ANSI_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ANSI_CHARACTERS = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "e": "\x1b"}


def _expansion_at(text: str, at: int) -> _Expansion:
    """Return the expansion or process substitution that begins at `at`. A dollar sign without an expansion is text."""
    name = _VARIABLE.match(text, at)
    if name:
        return _Expansion(f"${name[1] or name[2]}", name.end())
    if text.startswith("(", at + 1):
        return _cat_heredoc(text, at) or _read_substitution(text, at)
    if text.startswith("{", at + 1):
        braced = _BRACED.match(text, at)
        if braced is None:
            raise UnsupportedShellSyntax("nested expansion")
        return _Expansion(braced.group(), braced.end())
    return _Expansion("$", at + 1, is_text=True)


def _read_heredoc_body(text: str, at: int, end_mark: str, *, strips_tabs: bool) -> tuple[str, int]:
    """Return the lines from `at` up to the end mark, and the position after the mark."""
    body: list[str] = []
    while at <= len(text):
        end = text.find("\n", at)
        line = text[at : end if end >= 0 else len(text)]
        if strips_tabs:
            line = line.lstrip("\t")
        if line == end_mark:
            return "".join(body), end if end >= 0 else len(text)
        if end < 0:
            break
        body.append(f"{line}\n")
        at = end + 1
    raise UnsupportedShellSyntax("unterminated here-document")


def _read_ansi_string(text: str, at: int) -> tuple[str, int]:
    """Return the text of the `$'…'` string that begins at `at`, and the position after it.

    Raises UnsupportedShellSyntax for other escapes than those in the table, such as octal and Unicode escapes.
    """
    match = _ANSI_STRING.match(text, at)
    if match is None or any(escape not in _ANSI_CHARACTERS for escape in _ANSI_ESCAPE.findall(match[1])):
        raise UnsupportedShellSyntax("unsupported escape in a quote")
    return _ANSI_ESCAPE.sub(lambda escape: _ANSI_CHARACTERS[escape[1]], match[1]), match.end()


def _cat_heredoc(text: str, at: int) -> _Expansion | None:
    """Return the text passed by `$(cat <<'EOF' …)`, or None for another substitution."""
    cat = _CAT_HEREDOC.match(text, at)
    if cat is None:
        return None
    end_mark = cat[2] or cat[3] or cat[4]
    body, end = _read_heredoc_body(text, cat.end(), end_mark, strips_tabs=bool(cat[1]))
    closes = _CLOSING_PARENTHESIS.match(text, end)
    if closes is None or (cat[4] and re.search(r"[$`\\]", body)):
        raise UnsupportedShellSyntax("unsupported here-document in an expansion")
    return _Expansion(body.rstrip("\n"), closes.end(), is_text=True)


def _read_substitution(text: str, at: int) -> _Expansion:
    """Return `$(…)` or `<(…)` as typed. The end is found by counting parentheses outside quotes."""
    stack, cursor = [")"], at + 2  # the closing character of each open quote or parenthesis, the innermost last
    while stack:
        pattern = _QUOTED_MARK if stack[-1] == '"' else _SUBSTITUTION_MARK
        match = pattern.search(text, cursor)
        if match is None or match.group() in ("<<", "#", "case", "`"):
            raise UnsupportedShellSyntax("the end of an expansion is uncertain")
        mark, cursor = match.group(), match.end()
        if mark == "\\":
            cursor += 1
        elif mark == "'":
            cursor = text.find("'", cursor) + 1
            if not cursor:
                raise UnsupportedShellSyntax("unterminated quote")
        elif mark == stack[-1]:
            stack.pop()
        elif mark == ")":
            raise UnsupportedShellSyntax("unmatched parenthesis")
        else:
            stack.append('"' if mark == '"' else ")")
    return _Expansion(text[at:cursor], cursor)
