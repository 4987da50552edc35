"""All that a verdict may rest on: the session so far, earlier sessions of the project, a checkout."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import islice

from composer_replication.actions.edits import Replace
from composer_replication.actions.paths import normal_path
from composer_replication.actions.session_state import SessionState
from composer_replication.actions.shown.changes import Change
from composer_replication.actions.shown.file_text import FileText
from composer_replication.actions.shown.paths import KnownPaths, Standing
from composer_replication.actions.shown.texts import FileTexts
from composer_replication.judge.checkout import Checkout
from composer_replication.judge.earlier import PathKnowledge
from composer_replication.judge.schemas import AGENTS, OWN_COMMANDS

_MIN_SHOWN, _MIN_SHARE = 3, 0.5  # files of the session that a checkout must have to be its project's
_MAX_SHOWN = 50
# A reader refuses more than 25,000 tokens of a whole file, however many lines it would show of it. Words, digits and
# runs of signs are about 0.78 of the tokens where lines are those of programs; for shorter ones nobody has measured it.
_MAX_PIECES = 19_500
_MIN_A_LINE = 5
_PIECE = re.compile(r"[A-Za-z]+|\d|[^\sA-Za-z\d]+|\n+")
# What the session knows of a path -> whose word that it is not there is taken.
_BELIEVED_WHERE = {
    "only_its_name": ("not_in_checkout", "missing_in_earlier_session"),
    "unseen": ("not_in_checkout", "missing_in_earlier_session", "in_no_earlier_session"),
}
_RELATIVE = re.compile(r"[\w@+][\w.@+-]*(?:/[\w.@+-]+)+/?")


class Known:
    """One session's state with what is known beside it."""

    def __init__(self, state: SessionState, project: PathKnowledge | None, checkout: Checkout | None) -> None:
        self.state, self._project, self._checkout = state, project, checkout
        self._said_missing: dict[str, set[str]] = {}  # how it was known -> what others said is not there

    @property
    def paths(self) -> KnownPaths:
        return self.state.paths

    @property
    def texts(self) -> FileTexts:
        return self.state.texts

    def standing(self, path: str) -> Standing:
        """Whether a path is there: by the session, then by those who know more."""
        standing, relative = self.paths.standing(path), self.paths.relative(path)
        if standing.is_there is not None or relative is None:
            return standing
        by_project = self._project.standing(relative, self.paths.relative_files()) if self._project else None
        opinions = [opinion for opinion in (self._in_checkout(relative), by_project) if opinion is not None]
        if any(opinion.is_there for opinion in opinions):
            return next(opinion for opinion in opinions if opinion.is_there)
        is_anothers = self._checkout is not None and _is_anothers(relative, standing.why, self._checkout.files)
        believed = _BELIEVED_WHERE.get("only_its_name" if is_anothers else standing.why, ())
        opinions = [opinion for opinion in opinions if opinion.why in believed]
        if not opinions or self._is_behind(opinions[0]):
            return standing
        return opinions[0]

    def said_missing(self, path: str, standing: Standing) -> None:
        """That a verdict rested on somebody else's word: where the path turns up, that word counts no more."""
        self._said_missing.setdefault(standing.why, set()).add(path)

    def _is_behind(self, opinion: Standing) -> bool:
        """Whether the session has since shown what this source said is not there."""
        missing_paths = self._said_missing.get(opinion.why, ())
        return any(path in self.paths.files or path in self.paths.folders for path in missing_paths)

    def _in_checkout(self, relative: str) -> Standing | None:
        if self._checkout is None or not self._is_its_project(relative, self._checkout):
            return None
        is_there = self._checkout.exists(relative)
        if relative in self._checkout.folders:
            return Standing(True, "folder")
        if is_there is None or (not is_there and not _is_committed(relative, self._checkout.files)):
            return None
        return Standing(is_there, "in_checkout" if is_there else "not_in_checkout")

    def _is_its_project(self, relative: str, checkout: Checkout) -> bool:
        """Whether the session works in what was checked out: by its files, or by the folder that it asks for."""
        shown_paths = list(islice((path for path in self.paths.relative_files() if "/" in path), _MAX_SHOWN))
        if len(shown_paths) >= _MIN_SHOWN:
            return sum(path in checkout.files for path in shown_paths) >= _MIN_SHARE * len(shown_paths)
        parts = relative.split("/")
        return len(parts) > 2 and "/".join(parts[:2]) in checkout.folders

    def has_name(self, name: tuple[str, str]) -> bool | None:
        """Whether there is such an agent or skill: by the session, by the agent's own list, by earlier sessions."""
        attempts = self.state.attempts
        if name in attempts.names:
            return attempts.names[name]
        if name[0] in ("Task", "Agent") and (name[1] in AGENTS or attempts.agents is not None):
            return name[1] in AGENTS | (attempts.agents or frozenset())
        return self._project.has_name(name, self.paths.relative_files()) if self._project else None

    def is_own_command(self, name: str) -> bool:
        """Whether the agent itself does what is asked for, and the project has no skill or command of that name."""
        definitions = (f".claude/skills/{name}/SKILL.md", f".claude/commands/{name}.md")
        return name in OWN_COMMANDS and not (self._checkout and self._checkout.files.intersection(definitions))

    def is_doubled(self, word: str, here: str | None) -> bool:
        """Whether a path is there from the project's root, while the shell stands in another of its folders."""
        root = self.paths.root
        if root is None or here is None or not here.startswith(f"{root}/") or not _RELATIVE.fullmatch(word):
            return False
        from_root, from_here = self.paths.absolute(word, root), self.paths.absolute(word, here)
        if not self.paths.standing(from_root).is_there or self.paths.standing(from_here).is_there:
            return False
        above = from_here.rpartition("/")[0]
        return above == here or not self.paths.standing(above).is_there

    def text(self, path: str) -> tuple[FileText | None, str]:
        """A file as it is known, and who knows it: the session where it was shown whole, else others that agree."""
        file_text = self.texts.get(path)
        if file_text is None or file_text.is_whole or file_text.doubt == 2:
            return file_text, ""
        for source, whole in self._whole_texts(path):
            rebuilt = _with_edits(whole, self.texts.edits(path))
            if rebuilt is not None and file_text.is_part_of(rebuilt):
                completed = FileText()
                completed.write(rebuilt)
                completed.doubt, completed.may_be_reworked = file_text.doubt, file_text.may_be_reworked
                return completed, source
        return file_text, ""

    def was_never_committed(self, path: str, text: str, *, but_for_blanks: bool = True) -> bool:
        """Whether no commit of any time has this text in the file, which is committed otherwise."""
        relative = self.paths.relative(path)
        if relative is None or self._checkout is None or not self._is_its_project(relative, self._checkout):
            return False
        return self._checkout.has_ever_held(relative, text, but_for_blanks=but_for_blanks) is False

    def is_untouched(self, path: str, text: str) -> bool:
        """Whether a session that goes on after a summary has yet to begin with a file.

        Its part before the summary has not read it; or the text is still the commit's: files that were read before are
        those it worked on, and what it changes there has changed already.
        """
        relative = self.paths.relative(path)
        if not self.texts.is_continued or self.texts.was_named(path):
            return False
        before = self._project.read_before if self._project and self.texts.starts_with_summary else None
        if before is not None and normal_path(path, self.texts.cwd) not in before:
            return True
        if relative is None or self._checkout is None:
            return False
        is_same = text in (self._checkout.text(relative) or "") and self._checkout.is_trunks(relative, text)
        return is_same and self._is_its_project(relative, self._checkout)

    def _whole_texts(self, path: str) -> list[tuple[str, str]]:
        relative = self.paths.relative(path)
        if relative is None:
            return []
        checkout = self._checkout.text(relative) if self._checkout else None
        project = self._project.text(relative, self.paths.relative_files()) if self._project else None
        return [(who, text) for who, text in (("_in_checkout", checkout), ("_in_earlier_session", project)) if text]

    def is_too_large(self, path: str) -> bool:
        """Whether a file was too large to be shown at once, in this session or an earlier one, or would be now."""
        if path in self.paths.too_large:
            return True
        relative = self.paths.relative(path)
        if relative is None or self.texts.was_read_in_full(path):
            return False
        is_known = self._project is not None and self._project.is_too_large(relative, self.paths.relative_files())
        return is_known or self._is_large_in_checkout(relative)

    def is_lost(self, path: str) -> Change:
        """Whether a command has changed a file since it was read, or may have, and it is too large to be read again.

        Where a file changed, the agent takes a new look by itself, and goes on; where it cannot, it counts as unread.
        """
        relative = self.paths.relative(path)
        change = "" if relative is None else self.texts.change_by_command(path)
        if relative is None or not change:
            return ""
        return change if path in self.paths.too_large or self._is_large_in_checkout(relative) else ""

    def _is_large_in_checkout(self, relative: str) -> bool:
        text = self._checkout.text(relative) if self._checkout is not None else None
        if text is None or self._checkout is None or len(text) <= _MAX_PIECES:
            return False
        least = max(_MAX_PIECES + 1, _MIN_A_LINE * text.count("\n"))
        return self._is_its_project(relative, self._checkout) and len(_PIECE.findall(text)) >= least


def _is_committed(relative: str, files: Collection[str]) -> bool:
    """Whether a file of this path would be in a commit: not in a hidden folder, nor anybody's own notes at the root."""
    folder, _, name = relative.rpartition("/")
    if folder:
        return not any(part.startswith(".") for part in folder.split("/"))
    stem = name.rpartition(".")[0] or name
    return any(file.rpartition(".")[0] == stem for file in files)


def _is_anothers(relative: str, why: str, files: Collection[str]) -> bool:
    """Whether what was named is another file of the checkout, which ends alike: people leave out where paths begin."""
    if why not in ("its_end_named", "named") or "/" not in relative:
        return False
    end = "/" + (relative if why == "named" else "/".join(relative.split("/")[-2:]))
    return any(f"/{path}".endswith(end) for path in files if path != relative)


def _with_edits(text: str, edits: Sequence[Replace]) -> str | None:
    """The text after edits that all worked; None where one cannot have."""
    for edit in edits:
        number = text.count(edit.old) if edit.old else 0
        if not number or (number > 1 and not edit.everywhere):
            return None
        text = text.replace(edit.old, edit.new)
    return text
