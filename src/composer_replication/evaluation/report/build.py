"""Build `report.html` and `report.md` from the files of a run; the same files give the same bytes.

Pages are Jinja templates in `templates/`. If a run has many sessions, each gets a page of its own in a folder next to
the report.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from composer_replication.atomic import atomic_write_bytes, staged_path
from composer_replication.errors import ComposerError, RunError
from composer_replication.evaluation.report.credit import Credit, PairView, pair_view
from composer_replication.evaluation.report.figures import ReportVerdict, evaluation_values
from composer_replication.evaluation.report.findings import HintTests, failures, site_values
from composer_replication.evaluation.report.plots import training_values
from composer_replication.evaluation.report.records import MEANINGS, Absent, RunRecords, by_command
from composer_replication.optional import require
from composer_replication.runs import ARTEFACTS, RunDir
from composer_replication.runs.conventions import project_of
from composer_replication.runs.files import read_conversations
from composer_replication.types import Conversation

if TYPE_CHECKING:
    from jinja2 import Environment


# With more sessions than this, each gets a page of its own.
MOST_IN_ONE_FILE = 50


class Report(NamedTuple):
    """The files of a report, and what `crf report` prints about them.

    `folder` contains the session pages; it is None if all sessions are in a single file.
    """

    html: Path
    markdown: Path
    folder: Path | None
    verdict: ReportVerdict
    num_sessions: int
    absent: list[Absent]
    hint_tests: HintTests


def folder_of(html: Path) -> Path:
    """Return the folder for the session pages of a report."""
    return html.with_name(f"{html.stem}_sessions")


def build_report(run: RunDir, html: Path, *, trained_in: Path) -> Report:
    """Write the report of a run to `html`, and as Markdown to the same path with the suffix `.md`.

    Session pages are written first, so that the report has no broken links. Artifacts that the run lacks are listed.
    """
    records = RunRecords(run, trained_in)
    session_list = _list_sessions(records)
    folder = folder_of(html) if len(session_list.sessions) > MOST_IN_ONE_FILE else None
    values = _template_values(records, session_list)
    links = _Links(session_list, folder)
    credit = Credit(records, MEANINGS)
    bodies: dict[str, Any] = {}
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    for session, conversations in _conversations_by_session(records, session_list):
        parts = credit.parts(conversations)
        if folder is None:
            bodies[session.key] = parts
            continue
        text = _render_page(
            "session.html.jinja", session=session, parts=parts, home=f"../{html.name}", run_name=values["run_name"]
        )
        # Not synced, which would take most of the time for many pages. Running the command again rewrites them.
        with staged_path(folder / _page_name(session)) as unfinished:
            unfinished.write_bytes(text)
    absent = records.absent()
    values |= {"absent": absent, "missing": by_command(absent), "on_request": records.on_request()}
    values |= {"link": links, "bodies": bodies}
    markdown = html.with_suffix(".md")
    atomic_write_bytes(markdown, _render_page("report.md.jinja", **values, page_name=html.name))
    atomic_write_bytes(html, _render_page("report.html.jinja", **values, is_lazy=folder is not None))
    return Report(
        html, markdown, folder, values["verdict"], len(session_list.sessions), values["absent"], values["hint_tests"]
    )


def _template_values(records: RunRecords, session_list: _SessionList) -> dict[str, Any]:
    """Return the values that the templates of the HTML page and of the Markdown page need."""
    return {
        "run_name": records.run.root.resolve().name,
        **evaluation_values(records, len(session_list.sessions)),
        **site_values(records, session_list.projects),
        "num_taught": sum(session.num_taught for session in session_list.sessions),
        "meanings": MEANINGS,
        **training_values(records),
        "pair_groups": _pair_groups(records),
        "num_pairs": len(records.pairs),
        "conventions": _rules_by_project(records),
        "drops": _list_drops(records),
        "files": _list_files(records),
        "config_text": _read_config(records),
        "sessions": session_list.sessions,
    }


def _rules_by_project(records: RunRecords) -> Mapping[str, list[Any]]:
    rules_by_project: dict[str, list[Any]] = defaultdict(list)
    for rule in records.conventions:
        rules_by_project[rule.project].append(rule)
    return dict(rules_by_project)


class _Links:
    """Creates the links to sessions and error sites in the pages."""

    def __init__(self, session_list: _SessionList, folder: Path | None) -> None:
        self._session_list, self._folder = session_list, folder

    def session(self, session: _Session) -> str:
        return f"#{session.key}" if self._folder is None else f"{self._folder.name}/{_page_name(session)}"

    def site(self, conversation_id: str, site_id: str) -> str:
        """Return the link to an error site, or an empty string if the run lacks the site's conversation."""
        session = self._session_list.by_conversation.get(conversation_id)
        if session is None:
            return ""
        page = "" if self._folder is None else f"{self._folder.name}/{_page_name(session)}"
        return f"{page}#site-{site_id}"


def _page_name(session: _Session) -> str:
    return f"{session.number:05d}.html"


# ---- templates

_TEMPLATES = Path(__file__).parent / "templates"
# Control characters, bidirectional marks and lone surrogates, which a page replaces by a visible character.
# "a\u202eb" -> matches the right-to-left override; not tab or newline
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
# "from -0.5 to -2" -> both signs; not "gpt-4", "1-2" or "--set"
_NEGATIVE = re.compile(r"(?<![\w.-])-(?=\d)")
# "a_b" -> "_"; "https://x.y" -> ":" and "www.x.y" -> the dot after www, or viewers would make links; not "a: b"
_MARKDOWN_SYNTAX = re.compile(r"[\\`*_{}\[\]<>#|~&!$^=@]|:(?=//)|(?<=www)\.", re.IGNORECASE)


def _render_page(template: str, **values: Any) -> bytes:
    """Render a template as UTF-8 bytes."""
    return _environment().get_template(template).render(**values).encode()


@cache
def _environment() -> Environment:
    jinja2 = require("jinja2", extra="report")
    environment: Environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=lambda name: not str(name).endswith(".md.jinja"),
        # A misspelled name in a template raises an error instead of leaving an empty cell.
        undefined=jinja2.StrictUndefined,
        finalize=_replace_invisible,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    markup = require("markupsafe", extra="report").Markup
    style, script = (_read_template(name) for name in ("style.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # The page may run only its own script, which is identified by its digest, and load nothing.
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"script-src 'sha256-{digest}'"
    )
    environment.globals.update(style=markup(style), script=markup(script), policy=policy)
    environment.filters.update(
        count=lambda number: f"{number:,}",
        plain=lambda name: str(name).replace("_", " "),
        number=_number_text,
        tenth=lambda value: f"{value:,.1f}" if isinstance(value, float) else _number_text(value),
        short=lambda value: "" if value is None else f"{value:g}",
        gap=lambda gap: f"{gap:+.2f}".replace("-", "\N{MINUS SIGN}"),
        svg=markup,
        minus=lambda text: _NEGATIVE.sub("\N{MINUS SIGN}", str(text)),
        md=_markdown_text,
        url=lambda text: quote(str(text), safe="/#"),
        duration=_duration_text,
        percent=lambda share: f"{share:.0%}",
    )
    return environment


def _read_template(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def _replace_invisible(value: Any) -> Any:
    """Return a value as a template should write it, before escaping.

    Invisible characters become replacement characters, and None becomes an empty string.
    """
    # Not isinstance: Markup, a subclass of str, is trusted and must stay Markup.
    if type(value) is str:
        return _INVISIBLE.sub("\N{REPLACEMENT CHARACTER}", value)
    return "" if value is None else value


def _number_text(value: Any) -> str:
    """Return a number as text, with a number of decimals that suits its size."""
    if isinstance(value, bool) or value is None:
        return {None: "", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        text = f"{value:,.3f}" if abs(value) < 10 else f"{value:,.1f}"
        return text.replace("-", "\N{MINUS SIGN}")
    return f"{value:,}" if isinstance(value, int) else str(value)


def _duration_text(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


def _markdown_text(text: Any) -> str:
    """Return text on one line, escaped for Markdown and HTML."""
    line = " ".join(_INVISIBLE.sub("\N{REPLACEMENT CHARACTER}", str(text)).split())
    return _MARKDOWN_SYNTAX.sub(r"\\\g<0>", line).replace("\\<", "&lt;").replace("\\&", "&amp;")


# ---- sessions

# Maximum characters of a session's name in the list.
_MAX_NAME_CHARS = 110


@dataclass(slots=True)
class _Session:
    """A row in the list of sessions. `number` is its position from 1; `kinds` counts its errors by kind."""

    id: str
    name: str
    project: str
    began: str
    side: str
    format: str
    conversations: list[str] = field(default_factory=list[str])
    num_turns: int = 0
    num_failures: int = 0
    num_taught: int = 0
    num_pairs: int = 0
    kinds: Counter[str] = field(default_factory=Counter[str])
    number: int = 0

    @property
    def key(self) -> str:
        return f"session-{self.number}"


class _SessionList(NamedTuple):
    """All sessions in order of time, and the session and project of each conversation."""

    sessions: list[_Session]
    by_conversation: Mapping[str, _Session]
    projects: Mapping[str, str]


def _list_sessions(records: RunRecords) -> _SessionList:
    """Return the sessions of a run, or an empty list if its conversations cannot be read."""
    sessions: dict[str, _Session] = {}
    by_conversation: dict[str, _Session] = {}
    projects: dict[str, str] = {}
    for conversation in _read_conversations(records, verify=True):
        session = _find_session(conversation, records, sessions, by_conversation)
        by_conversation[conversation.id] = session
        projects[conversation.id] = project_of(conversation)
        session.conversations.append(conversation.id)
        session.num_turns += len(conversation.turns)
        began = next((turn.timestamp for turn in conversation.turns if turn.timestamp), "") or ""
        session.began = min(filter(None, (session.began, began)), default="")
    _count_rows(records, by_conversation)
    # Sessions without a timestamp come first; the id makes the order unique.
    ordered = sorted(sessions.values(), key=lambda session: (session.began, session.id))
    for number, session in enumerate(ordered, start=1):
        session.number = number
    return _SessionList(ordered, by_conversation, projects)


def _find_session(
    conversation: Conversation,
    records: RunRecords,
    sessions: dict[str, _Session],
    by_conversation: Mapping[str, _Session],
) -> _Session:
    """Return the session that a conversation belongs to, and add the session to `sessions` if it is new.

    The split determines the session. Without a split, it is the session of the parent conversation, or else the session
    named in the log.
    """
    row = records.sides.get(conversation.id)
    parent = by_conversation.get(conversation.parent.conversation_id) if conversation.parent else None
    session_id = row["session"] if row else parent.id if parent else conversation.session_id or conversation.id
    if session_id not in sessions:
        side = row["side"] if row else ""
        name = _session_name(conversation)
        sessions[session_id] = _Session(session_id, name, project_of(conversation), "", side, conversation.format)
    return sessions[session_id]


def _session_name(conversation: Conversation) -> str:
    """Return the title of a conversation or, if it has none, the beginning of its first prompt."""
    prompts = (turn.text for turn in conversation.turns if turn.role == "user" and turn.origin == "human")
    text = " ".join((conversation.title or next(filter(str.strip, prompts), "") or conversation.id).split())
    return text if len(text) <= _MAX_NAME_CHARS else text[: _MAX_NAME_CHARS - 1] + "…"


def _count_rows(records: RunRecords, by_conversation: Mapping[str, _Session]) -> None:
    for site, hint in failures(records):
        if session := by_conversation.get(site.conversation_id):
            session.num_failures += 1
            session.num_taught += site.is_kept and hint is not None
            session.kinds[site.kind] += 1
    for row in records.pairs:
        if session := by_conversation.get(row["conversation_id"]):
            session.num_pairs += 1


def _conversations_by_session(
    records: RunRecords, session_list: _SessionList
) -> Iterator[tuple[_Session, Sequence[Conversation]]]:
    """Yield each session with its conversations as soon as all of these have been read, which limits memory use."""
    incomplete: dict[str, list[Conversation]] = defaultdict(list)
    for conversation in _read_conversations(records, verify=False):
        session = session_list.by_conversation[conversation.id]
        incomplete[session.id].append(conversation)
        if len(incomplete[session.id]) == len(session.conversations):
            yield session, incomplete.pop(session.id)


def _read_conversations(records: RunRecords, *, verify: bool) -> Iterator[Conversation]:
    if not records.has("conversations"):
        return
    try:
        yield from read_conversations(records.run, verify=verify)
    except RunError as error:
        records.unreadable["conversations"] = str(error)


# ---- pairs, drops, files and config

_SOURCE_TEXTS = {
    "teachers": "what advisers agreed on, against what the model did",
    "correction": "what the session did itself after a call failed, against the failing call",
    "user": "what the user let through, against the call that was refused",
    "acted_at_once": "acting at once where that was right, against looking once more: the balance to look-first pairs",
}
# Examples of pairs that are shown for each source.
_MAX_EXAMPLES = 2
# The report itself is just being written, and the cache changes when it is read.
_UNLISTED_ARTEFACTS = ("report_html", "report_md", "teacher_cache")
# Artifacts whose metadata counts drops, and the steps that wrote them.
_STEPS = {
    "conversations": "ingest",
    "split": "split",
    "sites": "sites",
    "teacher_calls": "replay",
    "pairs": "pairs",
}
_CHANNELS = {"lm_ce": "good turns", "sdpo_kl": "hints", "trace_replay_dpo": "pairs"}


class _PairGroup(NamedTuple):
    """The preference pairs from one source: counts by kind of error, and examples with their conversations."""

    source: str
    meaning: str
    number: int
    by_kind: list[tuple[str, int]]
    examples: list[tuple[str, PairView]]


def _pair_groups(records: RunRecords) -> list[_PairGroup]:
    """Return the preference pairs grouped by source, with the largest group first."""
    grouped: dict[str, list[int]] = defaultdict(list)
    for at, row in enumerate(records.pairs):
        grouped[str(row.get("source") or "teachers")].append(at)
    groups: list[_PairGroup] = []
    for source, indices in grouped.items():
        kinds = Counter(_kind(records.pairs[at].get("metadata") or {}) for at in indices)
        # In reverse, so that the first pair of each kind remains.
        first_by_kind = {_kind(records.pairs[at].get("metadata") or {}): at for at in reversed(indices)}
        examples = [records.pairs[at] for at in sorted(first_by_kind.values())[:_MAX_EXAMPLES]]
        views = [(str(row["conversation_id"]), pair_view(row)) for row in examples]
        groups.append(_PairGroup(source, _SOURCE_TEXTS.get(source, ""), len(indices), kinds.most_common(), views))
    return sorted(groups, key=lambda group: (-group.number, group.source))


def _kind(metadata: Mapping[str, object]) -> str:
    failures = metadata.get("rejected_failures")
    return str(failures[0]) if isinstance(failures, list) and failures else "none"


class _Drop(NamedTuple):
    """The number of items that a pipeline step left out for one reason."""

    stage: str
    reason: str
    number: int
    meaning: str


def _list_drops(records: RunRecords) -> list[_Drop]:
    """Return the items that each step left out, in pipeline order, with the most frequent reason first."""
    drops_by_step: dict[str, Mapping[str, int]] = {
        step: records.run.meta(name).drops
        for name, step in _STEPS.items()
        if records.has(name) and name not in records.unreadable
    }
    rejected_hints = Counter(str(row["reason"]) for row in records.proofs.values() if not row["is_kept"])
    drops_by_step["hint proof"] = rejected_hints
    trained: Mapping[str, int] = (records.training_record or {}).get("drops") or {}
    # The training counts rejected hints too; they are listed only once.
    drops_by_step["train"] = {
        reason: number for reason, number in trained.items() if reason.rpartition(": ")[2] not in rejected_hints
    }
    drops_by_step["evaluate"] = (records.evaluation or {}).get("drops") or {}
    drops: list[_Drop] = []
    for step, numbers in drops_by_step.items():
        for reason, number in sorted(numbers.items(), key=lambda reason_count: (-reason_count[1], reason_count[0])):
            channel, _, why = reason.rpartition(": ")
            # "sdpo_kl: without_hint" -> "hints: without hint"
            label = f"{_CHANNELS.get(channel, channel)}: {why}" if channel else why
            drops.append(_Drop(step, label.replace("_", " "), number, MEANINGS.get(why, "")))
    return drops


class _File(NamedTuple):
    """An artifact in the report's table of files. `made_from` names the artifacts from which it was made."""

    name: str
    command: str
    rows: int | None
    sha256: str
    made_from: str
    created: str
    tool_version: str
    state: str


def _list_files(records: RunRecords) -> list[_File]:
    """Return the files of a run in pipeline order."""
    files: list[_File] = []
    for name, artefact in ARTEFACTS.items():
        if not records.has(name) or artefact.kind not in ("records", "file") or name in _UNLISTED_ARTEFACTS:
            continue
        try:
            files.append(_describe_file(records, name))
        except ComposerError as error:
            files.append(_File(artefact.file_name, artefact.command, None, "", "", "", "", f"unreadable: {error}"))
    return files


def _describe_file(records: RunRecords, name: str) -> _File:
    artefact = ARTEFACTS[name]
    if artefact.kind != "records":
        # evaluation.json contains the time of the evaluation, so its digest would differ every time.
        is_hashed = records.path(name).parent == records.run.root and name != "evaluation"
        sha256 = records.run.source(name).sha256 if is_hashed else ""
        state = "of other weights" if name == "evaluation" and records.other_weights else "current"
        return _File(artefact.file_name, artefact.command, None, sha256, "", "", "", state)
    meta = records.run.meta(name)
    artefact_names = [source.name for source in meta.sources if source.kind == "artefact"]
    num_outside = len(meta.sources) - len(artefact_names)
    made_from = ", ".join([*artefact_names, *([f"{num_outside:,} files outside the run"] if num_outside else [])])
    state = "current" if records.run.is_current(name) else "stale: what it was made from has changed since"
    return _File(
        artefact.file_name, artefact.command, meta.rows, meta.sha256, made_from, meta.created, meta.tool_version, state
    )


def _read_config(records: RunRecords) -> str:
    """Return the resolved config of the training as text."""
    path = records.path("config")
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
