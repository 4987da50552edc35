"""Read and update `conventions.md`, the rules that users stated when they refused a call, listed by project.

The user edits the file. A rule is a list item with brackets, and only rules with an `x` in the brackets are applied to
other states. Lines that the user wrote or changed stay as they are: only new rules and new mentions of a rule are
added. The text comes from logs, so it is written without markup, links or invisible characters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

from composer_replication.atomic import atomic_write_bytes
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
_MENTION = re.compile(r"\s+[-*+]\s+said at site ([0-9a-f]{12}) of (\S+)\s*\Z")
# Characters that Markdown would interpret, also in addresses: each of the marks in "*bold* <b> www.a.org".
_MARKUP = re.compile(r"[\\`*_{}\[\]<>#|~&!$^=@]|:(?=//)|(?<=www)\.", re.IGNORECASE)
# The reverse: "\\*bold\\*" -> "*bold*"
_ESCAPED = re.compile(r"\\([!-/:-@\[-`{-~])")
# "/srv/shop/.claude/worktrees/fix" belongs to "/srv/shop"
_WORKTREE = re.compile(r"/\.?(?:worktrees|claude/worktrees)(?:/.*)?\Z")
# A line that is probably meant as a rule but not written as one: "[x] no dash", "- for git push"
_MEANT = re.compile(r"\s*(?:[-*+]\s*\[|\[[\sxX]*\]|[-*+]\s+(?:for|said)\b)")
_MAX_WORDS = 300
_MAX_BYTES = 4_000_000


class StatedRule(NamedTuple):
    """A rule as a user stated it at an error site; `call_kind` is empty if the kind of call is unknown."""

    project: str
    words: str
    call_kind: str
    site_id: str
    conversation_id: str


@dataclass(slots=True)
class Convention:
    """A rule in the file: its text, the kinds of calls that it applies to, and the places where users stated it.

    `mentions` are pairs of site and conversation ids; `lines` are the rule's own line and the lines below it that
    belong to the rule.
    """

    project: str
    words: str
    is_kept: bool = False
    call_kinds: list[str] = field(default_factory=list[str])
    mentions: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    lines: list[str] = field(default_factory=list[str], repr=False)

    def read_line(self, line: str) -> None:
        """Parse a line below the rule, and add its kinds of calls or its mention to the rule."""
        kinds, mention = _FOR.match(line), _MENTION.match(line)
        if kinds is not None:
            self.call_kinds += [kind for name in kinds[1].split(",") if (kind := _plain(name.strip()))]
        elif mention is not None:
            self.mentions.append((mention[1], unquote(mention[2])))
        self.lines.append(line)


class ConventionsFile:
    """The contents of `conventions.md`: its rules in order, and every other line unchanged.

    `unread` has the numbers of lines that look like rules but cannot be parsed as rules.
    """

    def __init__(self, run: RunDir) -> None:
        self._path = run.path(NAME)
        self._parts: list[str | Convention] = []
        self.unread: list[int] = []
        project = None
        for number, line in enumerate(_read_text(self._path).splitlines(), start=1):
            heading, rule = _PROJECT.match(line), _RULE.match(line)
            last = self._parts[-1] if self._parts else None
            if heading is not None:
                project = _plain(heading[1])
            elif rule is not None and project is not None:
                self._parts.append(Convention(project, _plain(rule[2]), bool(rule[1]), lines=[line]))
                continue
            elif isinstance(last, Convention) and line.startswith((" ", "\t")) and line.strip():
                last.read_line(line)
                if not (_FOR.match(line) or _MENTION.match(line)):
                    self.unread.append(number)
                continue
            elif _MEANT.match(line):
                self.unread.append(number)
            self._parts.append(line)
        self._original_text = self._text()

    @property
    def rules(self) -> list[Convention]:
        return [part for part in self._parts if isinstance(part, Convention)]

    def update(self, stated_rules: Sequence[StatedRule]) -> None:
        """Add rules that users stated, and save the file. If there are no rules, no file is created.

        Mentions at sites that no longer exist are removed, and so are rules left without a mention, unless the user has
        marked them.
        """
        stated_rules = [stated._replace(project=_one_line(stated.project)) for stated in stated_rules]
        self._keep_mentions({stated.site_id for stated in stated_rules}, with_kept=False)
        keys = {stated.site_id: (stated.project, _key(stated.words)) for stated in stated_rules}
        known_rules = {(rule.project, _key(rule.words)): rule for rule in self.rules}
        for rule in self.rules:
            known_rules |= {keys[site]: rule for site, _ in rule.mentions if site in keys}
        noted_sites = {site for rule in self.rules for site, _ in rule.mentions}
        for stated in stated_rules:
            if stated.site_id not in noted_sites and _one_line(stated.words):
                rule = known_rules.get(keys[stated.site_id]) or self._add(stated)
                known_rules[keys[stated.site_id]] = rule
                conversation = quote(stated.conversation_id, safe="#", errors="replace")
                rule.read_line(f"  - said at site {stated.site_id} of {conversation}")
        if self.rules or self._path.exists():
            self._save()

    def forget(self, conversation_ids: Set[str]) -> None:
        """Remove rules that were stated only in these conversations, even rules that the user marked. Rules that the
        user wrote stay.
        """
        sites = {site for rule in self.rules for site, where in rule.mentions if where not in conversation_ids}
        self._keep_mentions(sites, with_kept=True)
        self._save()

    def num_stated_only_in(self, conversation_ids: Set[str]) -> int:
        """Return the number of rules that were stated only in these conversations."""
        return sum(
            bool(rule.mentions) and {where for _, where in rule.mentions} <= conversation_ids for rule in self.rules
        )

    def _add(self, stated: StatedRule) -> Convention:
        """Add a rule at the end of its project's list, with a heading for the project if it is new; return the rule."""
        rule = Convention(stated.project, _one_line(stated.words))
        positions = [at for at, part in enumerate(self._parts) if _is_in(part, rule.project)]
        if not positions:
            self._parts += ["", f"## {_escaped(rule.project)}", ""]
        self._parts.insert((positions or [len(self._parts) - 1])[-1] + 1, rule)
        rule.lines.append(f"- [ ] {_escaped(rule.words)}")
        if stated.call_kind:
            rule.read_line(f"  - for: {_escaped(stated.call_kind)}")
        return rule

    def _keep_mentions(self, sites: Set[str], *, with_kept: bool) -> None:
        """Keep only mentions at these sites, and remove rules left without a mention. Marked rules change only if
        `with_kept` is true.
        """
        for rule in [
            candidate for candidate in self.rules if candidate.mentions and (with_kept or not candidate.is_kept)
        ]:
            rule.mentions = [mention for mention in rule.mentions if mention[0] in sites]
            rule.lines = [line for line in rule.lines if (match := _MENTION.match(line)) is None or match[1] in sites]
            if not rule.mentions:
                self._parts = [part for part in self._parts if part is not rule]

    def _save(self) -> None:
        text = self._text()
        if self._path.exists() and text == self._original_text:
            return  # do not even normalize the line ends of the user's file
        atomic_write_bytes(self._path, text.encode("utf-8", "replace"))

    def _text(self) -> str:
        return "".join(
            f"{line}\n" for part in self._parts for line in ([part] if isinstance(part, str) else part.lines)
        )


def project_of(conversation: Conversation) -> str:
    """Return the project folder of a session. A Git worktree counts as part of the project it belongs to."""
    folder = (conversation.cwd or "").rstrip("/")
    return _one_line(_WORKTREE.sub("", folder)) or NO_PROJECT


def _read_text(path: Path) -> str:
    if not path.exists():
        return _HEAD
    if path.stat().st_size > _MAX_BYTES:
        got = f"{path.stat().st_size:,} bytes"
        raise InputError(explain(str(path), got=got, expected=f"at most {_MAX_BYTES:,} bytes"))
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(explain(str(path), got=error, expected="UTF-8 text", fix="Save the file as UTF-8")) from error


def _is_in(part: str | Convention, project: str) -> bool:
    """Return whether a part of the file is a rule of the project or the heading above the project's rules."""
    heading = _PROJECT.match(part) if isinstance(part, str) else None
    return part.project == project if isinstance(part, Convention) else bool(heading and _plain(heading[1]) == project)


def _key(words: str) -> str:
    return re.sub(r"\W+", " ", words.casefold()).strip()


def _one_line(words: str) -> str:
    """Return the text as a single line, without invisible characters and truncated to the maximum length."""
    line = " ".join("".join(character if character.isprintable() else " " for character in words).split())
    return line if len(line) <= _MAX_WORDS else line[: _MAX_WORDS - 1] + "…"


def _escaped(words: str) -> str:
    return _MARKUP.sub(r"\\\g<0>", _one_line(words))


def _plain(text: str) -> str:
    return _ESCAPED.sub(r"\1", text)
