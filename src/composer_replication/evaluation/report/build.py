"""Build `report.html` and `report.md` from the files of a run; the same files give the same bytes.

A page is a Jinja template in `templates/`. Runs with many sessions get a page per session in a folder beside it.
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
from composer_replication.evaluation.report import figures, findings, plots
from composer_replication.evaluation.report.credit import Credit
from composer_replication.evaluation.report.findings import failures
from composer_replication.evaluation.report.records import (
    MEANINGS,
    Absent,
    PairView,
    RunRecords,
    by_command,
    changes,
    pair_view,
)
from composer_replication.optional import require
from composer_replication.runs import ARTEFACTS, RunDir
from composer_replication.runs.conventions import project_of
from composer_replication.runs.files import WORSE_BESIDES, read_conversations
from composer_replication.types import Conversation

if TYPE_CHECKING:
    from jinja2 import Environment


MOST_IN_ONE_FILE = 50
"""With more sessions than this, each gets a page of its own in a folder beside the report."""
_ROLES = {
    "erring": ("erring calls", plots.BAD),
    "correction": ("corrections", plots.TWO),
    "good": ("good calls", plots.ONE),
}
# A distribution of one or two values is no distribution.
_FEWEST_FOR_A_PLOT = 3


class Report(NamedTuple):
    """The files of a report, and what `crf report` prints about it.

    `folder` holds the session pages, or is None if all sessions are in one file.
    """

    html: Path
    markdown: Path
    folder: Path | None
    verdict: figures.ReportVerdict
    num_sessions: int
    absent: list[Absent]
    hint_tests: findings.HintTests


def folder_of(html: Path) -> Path:
    """Return the folder for pages of single sessions."""
    return html.with_name(f"{html.stem}_sessions")


def build_report(run: RunDir, html: Path, *, trained_in: Path) -> Report:
    """Write the report of a run to `html`, and the same as markdown beside it.

    Session pages are written first, so that no link of the report leads nowhere. What the run lacks is listed.
    """
    records = RunRecords(run, trained_in)
    listed = list_sessions(records)
    folder = folder_of(html) if len(listed.sessions) > MOST_IN_ONE_FILE else None
    values = _values(records, listed)
    links = _Links(listed, folder)
    credit = Credit(records, MEANINGS)
    bodies: dict[str, Any] = {}
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    for session, conversations in conversations_by_session(records, listed):
        parts = credit.parts(conversations)
        if folder is None:
            bodies[session.key] = parts
            continue
        text = page(
            "session.html.jinja", session=session, parts=parts, home=f"../{html.name}", run_name=values["run_name"]
        )
        # Not synced: for a thousand pages that would be most of the time. The same command writes them again.
        with staged_path(folder / _file_name(session)) as unfinished:
            unfinished.write_bytes(text)
    absent = records.absent()
    values |= {"absent": absent, "missing": by_command(absent), "on_request": records.on_request()}
    values |= {"link": links, "bodies": bodies}
    markdown = html.with_suffix(".md")
    atomic_write_bytes(markdown, page("report.md.jinja", **values, page_name=html.name))
    atomic_write_bytes(html, page("report.html.jinja", **values, is_lazy=folder is not None))
    return Report(
        html, markdown, folder, values["verdict"], len(listed.sessions), values["absent"], values["hint_tests"]
    )


def _values(records: RunRecords, listed: _SessionList) -> dict[str, Any]:
    """Return the values that both pages show."""
    return {
        "run_name": records.run.root.resolve().name,
        **_of_evaluation(records, listed),
        **_of_sites(records, listed),
        **_of_training(records),
        "conventions": _by_project(records),
        "drops": drops(records, MEANINGS),
        "files": files_of(records),
        "config_text": config_text(records),
        "sessions": listed.sessions,
    }


def _of_evaluation(records: RunRecords, listed: _SessionList) -> dict[str, Any]:
    """Return the verdict, every metric, and the sampled actions."""
    evaluation = records.evaluation
    arms, counts = figures.sampled_table(evaluation)
    mix_arms, mix = figures.call_mix(evaluation)
    all_figures = figures.figures(evaluation)
    verdict, worse = figures.verdict(records, len(listed.sessions)), figures.got_worse(all_figures)
    return {
        "verdict": verdict,
        "remarks": [remark for remark in verdict.remarks if not (worse and remark.startswith(WORSE_BESIDES))],
        "evaluation": evaluation,
        "other_weights": records.other_weights,
        "of_shuffles": figures.of_shuffles(evaluation),
        "figures": all_figures,
        "still": [figure for figure in all_figures if figure.is_still],
        "got_worse": worse,
        "near_duplicates": figures.near_duplicates(evaluation),
        "primary": figures.primary_figure(evaluation),
        "figures_of_kinds": figures.figures_of_kinds(evaluation),
        "sampled_arms": arms,
        "sampled_counts": counts,
        "mix_arms": mix_arms,
        "mix": mix,
        "changes_svg": _changes_plot(records),
    }


def _of_sites(records: RunRecords, listed: _SessionList) -> dict[str, Any]:
    """Return the error sites by kind, blame and project, and what their hints did."""
    groups = findings.by_kind(records)
    return {
        "kinds": groups,
        "blames": findings.by_blame(records),
        "projects": findings.by_project(records, listed.projects),
        "num_failures": sum(group.number for group in groups),
        "num_taught": sum(session.num_taught for session in listed.sessions),
        "misfires": findings.worst_misfires(records),
        "proof": findings.proof_of(records),
        "hint_tests": findings.hint_tests(records),
        "meanings": MEANINGS,
    }


def _of_training(records: RunRecords) -> dict[str, Any]:
    """Return the curves and the record of the training, its pairs, and the time and money spent."""
    costs = plots.adviser_costs(records)
    return {
        "training": plots.training_of(records),
        "record": records.training_record,
        "pair_groups": pair_groups(records),
        "num_pairs": len(records.pairs),
        "time_spent": plots.time_spent(records),
        "costs": costs,
        "usd": sum(cost.usd for cost in costs),
    }


def _changes_plot(records: RunRecords) -> str:
    """Return a plot of how the held-out decisions changed, by role, with the control's below."""
    moved = changes(records.evaluated.values())
    groups: dict[str, tuple[list[float], str]] = {}
    for role, (label, colour) in _ROLES.items():
        if len(moved.after.get(role, ())) >= _FEWEST_FOR_A_PLOT:
            groups[label] = (moved.after[role], colour)
        if len(moved.control.get(role, ())) >= _FEWEST_FOR_A_PLOT and role == "erring":
            groups["erring, control"] = (moved.control[role], plots.QUIET)
    if not groups:
        return ""
    # The description is read aloud by screen readers in place of the plot.
    medians = ", ".join(f"{label} {figures.signed(sorted(v)[len(v) // 2], 'nats')}" for label, (v, _) in groups.items())
    return plots.histograms(groups, name="changes", description=f"Medians of the change in nats a token: {medians}")


def _by_project(records: RunRecords) -> Mapping[str, list[Any]]:
    rules_by_project: dict[str, list[Any]] = defaultdict(list)
    for rule in records.conventions:
        rules_by_project[rule.project].append(rule)
    return dict(rules_by_project)


class _Links:
    """Links to sessions and sites."""

    def __init__(self, listed: _SessionList, folder: Path | None) -> None:
        self._listed, self._folder = listed, folder

    def session(self, session: Session) -> str:
        return f"#{session.key}" if self._folder is None else f"{self._folder.name}/{_file_name(session)}"

    def site(self, conversation_id: str, site_id: str) -> str:
        """Return the link to a site, or an empty string if its conversation is not in the run any more."""
        session = self._listed.of_conversation.get(conversation_id)
        if session is None:
            return ""
        page = "" if self._folder is None else f"{self._folder.name}/{_file_name(session)}"
        return f"{page}#site-{site_id}"


def _file_name(session: Session) -> str:
    return f"{session.number:05d}.html"


# ---- templates

_TEMPLATES = Path(__file__).parent / "templates"
# Control characters, bidirectional marks and lone surrogates: a page shows that there is one, and no more.
# "a\u202eb" -> matches the right-to-left override; not tab or newline
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
# "from -0.5 to -2" -> both signs; not "gpt-4", "1-2" or "--set"
_NEGATIVE = re.compile(r"(?<![\w.-])-(?=\d)")
# "a_b" -> "_"; "https://x.y" -> ":" and "www.x.y" -> the dot after www, or viewers would make links; not "a: b"
_MARKUP = re.compile(r"[\\`*_{}\[\]<>#|~&!$^=@]|:(?=//)|(?<=www)\.", re.IGNORECASE)


def page(template: str, **values: Any) -> bytes:
    """Return a filled-in template as bytes."""
    return _environment().get_template(template).render(**values).encode()


@cache
def _environment() -> Environment:
    jinja2 = require("jinja2", extra="report")
    environment: Environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=lambda name: not str(name).endswith(".md.jinja"),
        # A misspelled name in a template is an error, not an empty cell.
        undefined=jinja2.StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    markup = require("markupsafe", extra="report").Markup
    style, script = (_text(name) for name in ("style.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # The page may run its own script only, by its digest, and load nothing.
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"script-src 'sha256-{digest}'"
    )
    environment.globals.update(style=markup(style), script=markup(script), policy=policy)
    environment.filters.update(
        count=lambda number: f"{number:,}",
        plain=lambda name: str(name).replace("_", " "),
        number=_number,
        tenth=lambda value: f"{value:,.1f}" if isinstance(value, float) else _number(value),
        short=lambda value: "" if value is None else f"{value:g}",
        gap=lambda gap: f"{gap:+.2f}".replace("-", "\N{MINUS SIGN}"),
        svg=markup,
        minus=lambda text: _NEGATIVE.sub("\N{MINUS SIGN}", str(text)),
        md=_markdown_text,
        url=lambda text: quote(str(text), safe="/#"),
        duration=_duration,
        percent=lambda share: f"{share:.0%}",
    )
    return environment


def _text(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def _visible(value: Any) -> Any:
    """Return the value that a template writes, before escaping: no invisible characters, nothing for None."""
    # Not isinstance: Markup is a subclass, trusted, and must stay one.
    if type(value) is str:
        return _INVISIBLE.sub("\N{REPLACEMENT CHARACTER}", value)
    return "" if value is None else value


def _number(value: Any) -> str:
    """Return a number of unknown unit as text."""
    if isinstance(value, bool) or value is None:
        return {None: "", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        text = f"{value:,.3f}" if abs(value) < 10 else f"{value:,.1f}"
        return text.replace("-", "\N{MINUS SIGN}")
    return f"{value:,}" if isinstance(value, int) else str(value)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


def _markdown_text(text: Any) -> str:
    """Return text on one line, escaped so that neither markdown nor HTML interprets it."""
    line = " ".join(_INVISIBLE.sub("\N{REPLACEMENT CHARACTER}", str(text)).split())
    return _MARKUP.sub(r"\\\g<0>", line).replace("\\<", "&lt;").replace("\\&", "&amp;")


# ---- sessions

# Characters of a session's name in the list.
_MAX_NAME = 110


@dataclass(slots=True)
class Session:
    """A line in the list of sessions. `number` is its position, from 1; `kinds` counts the kinds of its errors."""

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
    """All sessions, the earliest first; the session and the project of each conversation."""

    sessions: list[Session]
    of_conversation: Mapping[str, Session]
    projects: Mapping[str, str]


def list_sessions(records: RunRecords) -> _SessionList:
    """Return the sessions of a run in one pass over its conversations; none if they cannot be read."""
    sessions: dict[str, Session] = {}
    home: dict[str, Session] = {}
    projects: dict[str, str] = {}
    for conversation in _read(records, verify=True):
        session = _session_of(conversation, records, sessions, home)
        home[conversation.id] = session
        projects[conversation.id] = project_of(conversation)
        session.conversations.append(conversation.id)
        session.num_turns += len(conversation.turns)
        began = next((turn.timestamp for turn in conversation.turns if turn.timestamp), "") or ""
        session.began = min(filter(None, (session.began, began)), default="")
    _count(records, home)
    # Sessions without a time stamp come first; the id makes the order unique.
    ordered = sorted(sessions.values(), key=lambda session: (session.began, session.id))
    for number, session in enumerate(ordered, start=1):
        session.number = number
    return _SessionList(ordered, home, projects)


def _session_of(
    conversation: Conversation, records: RunRecords, sessions: dict[str, Session], home: Mapping[str, Session]
) -> Session:
    """Return the session of a conversation as the split has it.

    Without a split it is that of the parent conversation, else the log's own session id.
    """
    row = records.sides.get(conversation.id)
    parent = home.get(conversation.parent.conversation_id) if conversation.parent else None
    identity = row["session"] if row else parent.id if parent else conversation.session_id or conversation.id
    if identity not in sessions:
        side = row["side"] if row else ""
        name = _name(conversation)
        sessions[identity] = Session(identity, name, project_of(conversation), "", side, conversation.format)
    return sessions[identity]


def _name(conversation: Conversation) -> str:
    """Return the title of a conversation, or the beginning of its first prompt."""
    prompts = (turn.text for turn in conversation.turns if turn.role == "user" and turn.origin == "human")
    text = " ".join((conversation.title or next(filter(str.strip, prompts), "") or conversation.id).split())
    return text if len(text) <= _MAX_NAME else text[: _MAX_NAME - 1] + "…"


def _count(records: RunRecords, home: Mapping[str, Session]) -> None:
    for site, hint in failures(records):
        if session := home.get(site.conversation_id):
            session.num_failures += 1
            session.num_taught += site.is_kept and hint is not None
            session.kinds[site.kind] += 1
    for row in records.pairs:
        if session := home.get(row["conversation_id"]):
            session.num_pairs += 1


def conversations_by_session(
    records: RunRecords, listed: _SessionList
) -> Iterator[tuple[Session, Sequence[Conversation]]]:
    """Yield each session with its conversations as soon as the last of them is read; only open
    sessions are in memory.
    """
    waiting: dict[str, list[Conversation]] = defaultdict(list)
    for conversation in _read(records, verify=False):
        session = listed.of_conversation[conversation.id]
        waiting[session.id].append(conversation)
        if len(waiting[session.id]) == len(session.conversations):
            yield session, waiting.pop(session.id)


def _read(records: RunRecords, *, verify: bool) -> Iterator[Conversation]:
    if not records.has("conversations"):
        return
    try:
        yield from read_conversations(records.run, verify=verify)
    except RunError as error:
        records.unreadable["conversations"] = str(error)


# ---- pairs, drops, files and config

_SOURCES = {
    "teachers": "what advisers agreed on, against what the model did",
    "correction": "what the session did itself after a call failed, against the failing call",
    "user": "what the user let through, against the call that was refused",
    "acted_at_once": "acting at once where that was right, against looking once more: the balance to look-first pairs",
}
_EXAMPLES = 2
_UNLISTED_ARTEFACTS = ("report_html", "report_md", "teacher_cache")  # being written, and a store that changes when read
# Artifacts whose metadata counts what their step dropped.
_STAGES = {
    "conversations": "ingest",
    "split": "split",
    "sites": "sites",
    "teacher_calls": "replay",
    "pairs": "pairs",
}
_CHANNELS = {"lm_ce": "good turns", "sdpo_kl": "hints", "trace_replay_dpo": "pairs"}


class _PairGroup(NamedTuple):
    source: str
    meaning: str
    number: int
    by_kind: list[tuple[str, int]]
    examples: list[tuple[str, PairView]]


def pair_groups(records: RunRecords) -> list[_PairGroup]:
    """Return the pairs by source, each with examples of different kinds of errors and their conversations."""
    grouped: dict[str, list[int]] = defaultdict(list)
    for at, row in enumerate(records.pairs):
        grouped[str(row.get("source") or "teachers")].append(at)
    groups: list[_PairGroup] = []
    for source, indices in grouped.items():
        kinds = Counter(_kind(records.pairs[at].get("metadata") or {}) for at in indices)
        # Backwards, so that the first pair of a kind is the one that remains.
        first = {_kind(records.pairs[at].get("metadata") or {}): at for at in reversed(indices)}
        examples = [records.pairs[at] for at in sorted(first.values())[:_EXAMPLES]]
        views = [(str(row["conversation_id"]), pair_view(row)) for row in examples]
        groups.append(_PairGroup(source, _SOURCES.get(source, ""), len(indices), kinds.most_common(), views))
    return sorted(groups, key=lambda group: (-group.number, group.source))


def _kind(metadata: Mapping[str, object]) -> str:
    failures = metadata.get("rejected_failures")
    return str(failures[0]) if isinstance(failures, list) and failures else "none"


class Drop(NamedTuple):
    stage: str
    reason: str
    number: int
    meaning: str


def drops(records: RunRecords, meanings: Mapping[str, str]) -> list[Drop]:
    """Return what each step left out, by reason, the most frequent first; what the hint check
    dropped is listed once.
    """
    return list(_drops(records, meanings))


def _drops(records: RunRecords, meanings: Mapping[str, str]) -> Iterator[Drop]:
    counted: list[tuple[str, Mapping[str, int]]] = [
        (stage, records.run.meta(name).drops)
        for name, stage in _STAGES.items()
        if records.has(name) and name not in records.unreadable
    ]
    reasons = Counter(str(row["reason"]) for row in records.proofs.values() if not row["is_kept"])
    counted.append(("hint proof", reasons))
    # The training counts what the hint check dropped as well; those are listed above.
    trained: Mapping[str, int] = (records.training_record or {}).get("drops") or {}
    counted.append(("train", {why: n for why, n in trained.items() if why.rpartition(": ")[2] not in reasons}))
    counted.append(("evaluate", (records.evaluation or {}).get("drops") or {}))
    for stage, numbers in counted:
        for reason, number in sorted(numbers.items(), key=lambda reason_count: (-reason_count[1], reason_count[0])):
            channel, _, why = reason.rpartition(": ")
            # "sdpo_kl: without_hint" -> "hints: without hint".
            label = f"{_CHANNELS.get(channel, channel)}: {why}" if channel else why
            yield Drop(stage, label.replace("_", " "), number, meanings.get(why, ""))


class _FileOfRun(NamedTuple):
    """One artifact in the lineage. `state` is current, stale, of other weights, or unreadable."""

    name: str
    command: str
    rows: int | None
    sha256: str
    made_from: str
    created: str
    tool_version: str
    state: str


def files_of(records: RunRecords) -> list[_FileOfRun]:
    """Return the records and checked files of a run, in the order of the pipeline."""
    files: list[_FileOfRun] = []
    for name, artefact in ARTEFACTS.items():
        if not records.has(name) or artefact.kind not in ("records", "file") or name in _UNLISTED_ARTEFACTS:
            continue
        try:
            files.append(_file(records, name))
        except ComposerError as error:
            files.append(_FileOfRun(artefact.file_name, artefact.command, None, "", "", "", "", f"unreadable: {error}"))
    return files


def _file(records: RunRecords, name: str) -> _FileOfRun:
    artefact = ARTEFACTS[name]
    if artefact.kind != "records":
        # evaluation.json contains the time of the evaluation, so its digest would differ each time.
        is_hashed = records.path(name).parent == records.run.root and name != "evaluation"
        sha256 = records.run.source(name).sha256 if is_hashed else ""
        state = "of other weights" if name == "evaluation" and records.other_weights else "current"
        return _FileOfRun(artefact.file_name, artefact.command, None, sha256, "", "", "", state)
    meta = records.run.meta(name)
    artefact_names = [source.name for source in meta.sources if source.kind == "artefact"]
    outside = len(meta.sources) - len(artefact_names)
    made_from = ", ".join([*artefact_names, *([f"{outside:,} files outside the run"] if outside else [])])
    state = "current" if records.run.is_current(name) else "stale: what it was made from has changed since"
    return _FileOfRun(
        artefact.file_name, artefact.command, meta.rows, meta.sha256, made_from, meta.created, meta.tool_version, state
    )


def config_text(records: RunRecords) -> str:
    """Return the resolved config of the training, as it was written."""
    path = records.path("config")
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
