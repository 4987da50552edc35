"""What a Markdown page holds that can be checked: fenced blocks, links, a printed tree, `make` commands."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

_FENCE = re.compile(r"^ {0,3}(?P<marks>`{3,}|~{3,})\s*(?P<language>[\w+-]*)")
_NOT_RUN = re.compile(r"^\s*<!--\s*not run:(?P<reason>.*?)-->\s*$")
_INLINE_CODE = re.compile(r"(`+)(?P<code>.+?)\1", re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(\s*<?(?P<target>[^)\s>]+)>?(?:\s+[\"'][^)]*)?\)")
_LINK_DEFINITION = re.compile(r"^ {0,3}\[[^\]]+\]:\s*<?(?P<target>[^\s>]+)", re.MULTILINE)
_HTML_TARGET = re.compile(r"<(?:a|img)\b[^>]*\b(?:href|src)=[\"'](?P<target>[^\"']+)[\"']")
_ADDRESS = re.compile(r"^(?:[a-z][a-z0-9+.-]*:|//|#)", re.IGNORECASE)
_MAKE = re.compile(r"(?:^|[\s;&|(])make\s+(?P<words>[a-z][\w -]*)", re.MULTILINE)
_TREE_ART = re.compile(r"[│├└─┬|]|`--")
_PATH = re.compile(r"^[\w.*/-]+/$|^[\w.*/-]*\.\w+$|^(?:Makefile|LICENSE)$")


class Block(NamedTuple):
    language: str
    code: str
    line: int  # of the first line of the code
    not_run: str | None  # the reason written above the block


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page; one that is not closed is an error."""
    found: list[Block] = []
    lines = iter(enumerate(text.splitlines(), start=1))
    reason: str | None = None
    for number, line in lines:
        if mark := _NOT_RUN.match(line):
            reason = mark["reason"].strip()
        elif fence := _FENCE.match(line):
            code = list(_until_closed(lines, fence["marks"], number))
            indent = len(line) - len(line.lstrip())
            body = "\n".join(each[indent:] if each[:indent].isspace() else each for each in code)
            found.append(Block(fence["language"], body, number + 1, reason))
            reason = None
        elif line.strip():
            reason = None
    return found


def _until_closed(lines: Iterator[tuple[int, str]], marks: str, opened: int) -> Iterator[str]:
    for _, line in lines:
        if line.strip().startswith(marks) and not line.strip().strip(marks[0]):
            return
        yield line
    raise ValueError(f"the block opened on line {opened} is not closed")


def prose(text: str) -> str:
    """The page without its fenced blocks."""
    kept, marks = [], ""
    for line in text.splitlines():
        if marks:
            marks = "" if line.strip().startswith(marks) and not line.strip().strip(marks[0]) else marks
        elif fence := _FENCE.match(line):
            marks = fence["marks"]
        else:
            kept.append(line)
    return "\n".join(kept)


def relative_links(text: str) -> list[str]:
    """Targets of links and images that are files, without their anchors."""
    words = _INLINE_CODE.sub("", prose(text))
    targets = [match["target"] for kind in (_LINK, _LINK_DEFINITION, _HTML_TARGET) for match in kind.finditer(words)]
    return [target.partition("#")[0] for target in targets if not _ADDRESS.match(target)]


def make_targets(text: str) -> set[str]:
    """X of every `make X` that stands in code; several may follow one `make`."""
    code = [re.sub("#.*", "", block.code) for block in blocks(text) if block.language != "python"]
    code += [match["code"] for match in _INLINE_CODE.finditer(prose(text))]
    words = [match["words"] for each in code for match in _MAKE.finditer(each)]
    return {word for group in words for word in re.split(r"\s{2,}", group)[0].split() if not word.startswith("-")}


def tree_paths(code: str) -> list[str]:
    """The paths that a printed tree names, each with the folders it is indented under."""
    paths: list[str] = []
    above: list[tuple[int, str]] = []
    for line in code.splitlines():
        plain = _TREE_ART.sub(" ", line)
        names = _leading_paths(plain)
        if not names:
            continue
        column = len(plain) - len(plain.lstrip())
        while above and above[-1][0] >= column:
            above.pop()
        folder = above[-1][1] if above else ""
        paths += [folder + name for name in names]
        if names[-1].endswith("/"):
            above.append((column, folder + names[-1]))
    return paths


def _leading_paths(line: str) -> list[str]:
    """The names at the start of a line, one space apart; wider space begins the phrase about them."""
    names = re.split(r"\s{2,}", line.strip())[0].split()
    return [name.removeprefix("./") for name in itertools.takewhile(_PATH.match, names)]
