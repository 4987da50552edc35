"""`conventions.md`: rules that users stated when they refused a call, by project, in a file that the user edits.

A rule is a list item with brackets; an `x` in them keeps it, and only kept rules are used for other states. Lines that
the user wrote or changed are left alone: only new rules and new mentions of a rule are added. The text comes from logs,
so it is written without markup, links or invisible characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import quote, unquote

from composer_replication.atomic import staged
from composer_replication.errors import InputError, explain
from composer_replication.runs.directory import RunDir
from composer_replication.types import Conversation

NAME = "conventions"
NO_PROJECT = "no folder in the log"
_HEAD = """# Conventions

Rules that users named when they refused a call. Put an x into the brackets of what holds elsewhere: `[x]`. Only those
are used, in their project, where a call of the kind after `for:` was refused without a word. Change words and kinds as
you like, and add rules of your own under their project. `crf sites` adds what is new and keeps what you wrote.
"""
# "## /srv/shop" -> "/srv/shop"
_PROJECT = re.compile(r"##\s+(.+?)\s*\Z")
# "- [x] Do not push to main" -> "x", "Do not push to main"
_RULE = re.compile(r"[-*+]\s+\[\s*([xX]?)\s*\]\s+(\S.*?)\s*\Z")
# "  - for: git push, git commit" -> "git push, git commit"
_FOR = re.compile(r"\s+[-*+]\s+for:\s*(.*?)\s*\Z", re.IGNORECASE)
# "  - said at site 0123456789ab of s-1" -> "0123456789ab", "s-1"
_SAID = re.compile(r"\s+[-*+]\s+said at site ([0-9a-f]{12}) of (\S+)\s*\Z")
# What Markdown would interpret, addresses included: each of the marks in "*bold* <b> www.a.org".
_MARKUP = re.compile(r"[\\`*_{}\[\]<>#|~&!$^=@]|:(?=//)|(?<=www)\.", re.IGNORECASE)
# the reverse: "\\*bold\\*" -> "*bold*"
_ESCAPED = re.compile(r"\\([!-/:-@\[-`{-~])")
# "/srv/shop/.claude/worktrees/fix" belongs to "/srv/shop"
_WORKTREE = re.compile(r"/\.?(?:worktrees|claude/worktrees)(?:/.*)?\Z")
# Probably meant as a rule, but not written as one: "[x] no dash", "- for git push"
_MEANT = re.compile(r"\s*(?:[-*+]\s*\[|\[[\sxX]*\]|[-*+]\s+(?:for|said)\b)")
_MAX_WORDS = 300
_MAX_BYTES = 4_000_000


class Heard(NamedTuple):
    """A rule as a user stated it, with its project, the kind of call (empty if unknown), and the site."""

    project: str
    words: str
    call_kind: str
    site_id: str
    conversation_id: str


@dataclass(slots=True)
class Convention:
    """A rule of the file, with its text, the kinds of calls it is for, and where users stated it.

    `said` are (site, conversation); `lines` are the rule's own line and the lines below that belong to it.
    """

    project: str
    words: str
    is_kept: bool = False
    call_kinds: list[str] = field(default_factory=list[str])
    said: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    lines: list[str] = field(default_factory=list[str], repr=False)

    def note(self, line: str) -> None:
        """Read a line below the rule's own."""
        kinds, mention = _FOR.match(line), _SAID.match(line)
        if kinds is not None:
            self.call_kinds += [kind for name in kinds[1].split(",") if (kind := _plain(name.strip()))]
        elif mention is not None:
            self.said.append((mention[1], unquote(mention[2])))
        self.lines.append(line)


class _RulesFile:
    """The rules of the file in order, and every other line unchanged.

    `unread` are the numbers of lines that look like rules but are not.
    """

    def __init__(self, text: str) -> None:
        self.parts: list[str | Convention] = []
        self.unread: list[int] = []
        project = None
        for number, line in enumerate(text.splitlines(), start=1):
            heading, rule = _PROJECT.match(line), _RULE.match(line)
            last = self.parts[-1] if self.parts else None
            if heading is not None:
                project = _plain(heading[1])
            elif rule is not None and project is not None:
                self.parts.append(Convention(project, _plain(rule[2]), bool(rule[1]), lines=[line]))
                continue
            elif isinstance(last, Convention) and line.startswith((" ", "\t")) and line.strip():
                last.note(line)
                if not (_FOR.match(line) or _SAID.match(line)):
                    self.unread.append(number)
                continue
            elif _MEANT.match(line):
                self.unread.append(number)
            self.parts.append(line)

    @property
    def rules(self) -> list[Convention]:
        return [part for part in self.parts if isinstance(part, Convention)]

    def add(self, heard: Heard) -> Convention:
        """Add a rule at the end of its project, and the project if it is new. Returns the rule."""
        rule = Convention(heard.project, _shown(heard.words))
        positions = [at for at, part in enumerate(self.parts) if _is_in(part, rule.project)]
        if not positions:
            self.parts += ["", f"## {_escaped(rule.project)}", ""]
        self.parts.insert((positions or [len(self.parts) - 1])[-1] + 1, rule)
        rule.lines.append(f"- [ ] {_escaped(rule.words)}")
        if heard.call_kind:
            rule.note(f"  - for: {_escaped(heard.call_kind)}")
        return rule

    def text(self) -> str:
        return "".join(f"{line}\n" for part in self.parts for line in ([part] if isinstance(part, str) else part.lines))


def project_of(conversation: Conversation) -> str:
    """Return the folder that a session worked in; a worktree counts as its project."""
    folder = (conversation.cwd or "").rstrip("/")
    return _shown(_WORKTREE.sub("", folder)) or NO_PROJECT


def read_conventions(run: RunDir) -> list[Convention]:
    """Return the rules of the file; none without a file."""
    return _read(run).rules


def unread_lines(run: RunDir) -> list[int]:
    """Return the numbers of lines that the user may have meant as rules, but that cannot be read as such."""
    return _read(run).unread


def add_conventions(run: RunDir, heard: Sequence[Heard]) -> list[Convention]:
    """Update the file with the rules that users stated, and return all of its rules. Without rules, no file is made.

    Mentions that no longer exist are removed, and so are rules without a mention unless the user has kept them.
    """
    heard = [remark._replace(project=_shown(remark.project)) for remark in heard]
    file = _read(run)
    before = file.text()
    _keep_said(file, {remark.site_id for remark in heard}, with_kept=False)
    words = {remark.site_id: (remark.project, _key(remark.words)) for remark in heard}
    known_rules = {(rule.project, _key(rule.words)): rule for rule in file.rules}
    for rule in file.rules:
        known_rules |= {words[site]: rule for site, _ in rule.said if site in words}
    noted = {site for rule in file.rules for site, _ in rule.said}
    for remark in heard:
        if remark.site_id not in noted and _shown(remark.words):
            rule = known_rules.get(words[remark.site_id]) or file.add(remark)
            known_rules[words[remark.site_id]] = rule
            rule.note(
                f"  - said at site {remark.site_id} of {quote(remark.conversation_id, safe='#', errors='replace')}"
            )
    if file.rules or run.path(NAME).exists():
        _write(run, file, before)
    return file.rules


def kept_by_call(rules: Iterable[Convention]) -> dict[tuple[str, str], str]:
    """Return the text of the first kept rule for each project and kind of call."""
    words_by_call: dict[tuple[str, str], str] = {}
    for rule in rules:
        for kind in rule.call_kinds if rule.is_kept else ():
            words_by_call.setdefault((rule.project, kind), rule.words)
    return words_by_call


def num_forgotten(run: RunDir, forgotten_ids: Set[str]) -> int:
    """Return how many rules were stated only in these conversations."""
    return sum(bool(rule.said) and {where for _, where in rule.said} <= forgotten_ids for rule in read_conventions(run))


def forget_conventions(run: RunDir, forgotten_ids: Set[str]) -> None:
    """Remove rules that were stated only in these conversations, kept or not; the user's own rules stay."""
    file = _read(run)
    before = file.text()
    remaining_sites = {site for rule in file.rules for site, where in rule.said if where not in forgotten_ids}
    _keep_said(file, remaining_sites, with_kept=True)
    _write(run, file, before)


def _keep_said(file: _RulesFile, sites: Set[str], *, with_kept: bool) -> None:
    """Remove mentions at other sites, and rules without mentions. Kept rules are changed only `with_kept`."""
    for rule in [candidate for candidate in file.rules if candidate.said and (with_kept or not candidate.is_kept)]:
        rule.said = [mention for mention in rule.said if mention[0] in sites]
        rule.lines = [line for line in rule.lines if (mention := _SAID.match(line)) is None or mention[1] in sites]
        if not rule.said:
            file.parts = [part for part in file.parts if part is not rule]


def _read(run: RunDir) -> _RulesFile:
    path = run.path(NAME)
    if not path.exists():
        return _RulesFile(_HEAD)
    if path.stat().st_size > _MAX_BYTES:
        got = f"{path.stat().st_size:,} bytes"
        raise InputError(explain(str(path), got=got, expected=f"a list of rules of at most {_MAX_BYTES:,}"))
    try:
        return _RulesFile(path.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InputError(explain(str(path), got=error, expected="text in UTF-8", fix="Save it as UTF-8")) from error


def _write(run: RunDir, file: _RulesFile, before: str) -> None:
    path, text = run.path(NAME), file.text()
    if path.exists() and text == before:
        return  # do not even normalize line ends of the user's file
    with staged(path) as stage:
        stage.file.write(text.encode("utf-8", "replace"))
        stage.commit()


def _is_in(part: str | Convention, project: str) -> bool:
    """Return whether it is a rule of the project, or the heading of the project."""
    heading = _PROJECT.match(part) if isinstance(part, str) else None
    return part.project == project if isinstance(part, Convention) else bool(heading and _plain(heading[1]) == project)


def _key(words: str) -> str:
    return re.sub(r"\W+", " ", words.casefold()).strip()


def _shown(words: str) -> str:
    """Return the text on one line, without invisible characters, cut to its maximal length."""
    line = " ".join("".join(character if character.isprintable() else " " for character in words).split())
    return line if len(line) <= _MAX_WORDS else line[: _MAX_WORDS - 1] + "…"


def _escaped(words: str) -> str:
    return _MARKUP.sub(r"\\\g<0>", _shown(words))


def _plain(text: str) -> str:
    return _ESCAPED.sub(r"\1", text)
