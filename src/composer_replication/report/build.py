"""A run directory becomes `report.html` and `report.md`: from its files alone, the same bytes for the same files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from composer_replication.atomic import atomic_write_bytes
from composer_replication.report import account, decisions, figures, findings, plots, sessions, training
from composer_replication.report.count_words import MEANINGS
from composer_replication.report.credit import Credit
from composer_replication.report.pages import page
from composer_replication.report.records import Absent, RunRecords, by_command
from composer_replication.runs import RunDir
from composer_replication.runs.evaluation import WORSE_BESIDES

MOST_IN_ONE_FILE = 50
"""Sessions that still stand in the page itself; of more, each has a page of its own in a folder beside it."""
_ROLES = {
    "erring": ("erring calls", plots.BAD),
    "correction": ("corrections", plots.TWO),
    "good": ("good calls", plots.ONE),
}
_FEWEST_FOR_A_PLOT = 3


class Report(NamedTuple):
    """What was written, and what `crf report` says of it.

    `folder` holds a page a session, where there are too many for one file.
    """

    html: Path
    markdown: Path
    folder: Path | None
    verdict: figures.Verdict
    num_sessions: int
    absent: list[Absent]
    hint_tests: findings.HintTests


def folder_of(html: Path) -> Path:
    """Where the pages of single sessions are, if there are any."""
    return html.with_name(f"{html.stem}_sessions")


def build_report(run: RunDir, html: Path, *, trained_in: Path) -> Report:
    """Write the report of a run to `html`, and beside it the same in markdown, from nothing but the run's files.

    Pages of sessions come first, so that a page that is there leads to pages that are. What the run lacks is said.
    """
    records = RunRecords(run, trained_in)
    listed = sessions.list_sessions(records)
    folder = folder_of(html) if len(listed.sessions) > MOST_IN_ONE_FILE else None
    values = _values(records, listed)
    links = _Links(listed, folder)
    credit = Credit(records, MEANINGS)
    bodies: dict[str, Any] = {}
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    for session, conversations in sessions.conversations_by_session(records, listed):
        parts = credit.parts(conversations)
        if folder is None:
            bodies[session.key] = parts
            continue
        text = page(
            "session.html.jinja", session=session, parts=parts, home=f"../{html.name}", run_name=values["run_name"]
        )
        _write_page(folder / _file_name(session), text)
    absent = records.absent()
    values |= {"absent": absent, "missing": by_command(absent), "on_request": records.on_request()}
    values |= {"link": links, "bodies": bodies}
    markdown = html.with_suffix(".md")
    atomic_write_bytes(markdown, page("report.md.jinja", **values, page_name=html.name))
    atomic_write_bytes(html, page("report.html.jinja", **values, is_lazy=folder is not None))
    return Report(
        html, markdown, folder, values["verdict"], len(listed.sessions), values["absent"], values["hint_tests"]
    )


def _values(records: RunRecords, listed: sessions.SessionList) -> dict[str, Any]:
    """What both pages show."""
    return {
        "run_name": records.run.root.resolve().name,
        **_of_evaluation(records, listed),
        **_of_sites(records, listed),
        **_of_training(records),
        "conventions": _by_project(records),
        "drops": account.drops(records, MEANINGS),
        "files": account.files_of(records),
        "config_text": account.config_text(records),
        "sessions": listed.sessions,
    }


def _of_evaluation(records: RunRecords, listed: sessions.SessionList) -> dict[str, Any]:
    """The verdict, every figure, and what the models drew."""
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


def _of_sites(records: RunRecords, listed: sessions.SessionList) -> dict[str, Any]:
    """The failures by kind, blame and project, and what their hints showed."""
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
    """The curves and the record of the training, its pairs, and what all of it took."""
    costs = training.adviser_costs(records)
    return {
        "training": training.training_of(records),
        "record": records.training_record,
        "pair_groups": account.pair_groups(records),
        "num_pairs": len(records.pairs),
        "time_spent": training.time_spent(records),
        "costs": costs,
        "usd": sum(cost.usd for cost in costs),
    }


def _changes_plot(records: RunRecords) -> str:
    """How single decisions of held-out sessions moved, by role, with the control's below them."""
    moved = decisions.changes(records.evaluated.values())
    groups: dict[str, tuple[list[float], str]] = {}
    for role, (label, colour) in _ROLES.items():
        if len(moved.after.get(role, ())) >= _FEWEST_FOR_A_PLOT:
            groups[label] = (moved.after[role], colour)
        if len(moved.control.get(role, ())) >= _FEWEST_FOR_A_PLOT and role == "erring":
            groups["erring, control"] = (moved.control[role], plots.QUIET)
    if not groups:
        return ""
    medians = ", ".join(f"{label} {figures.signed(sorted(v)[len(v) // 2], 'nats')}" for label, (v, _) in groups.items())
    return plots.histograms(groups, name="changes", description=f"Medians of the change in nats a token: {medians}")


def _by_project(records: RunRecords) -> Mapping[str, list[Any]]:
    rules_by_project: dict[str, list[Any]] = defaultdict(list)
    for rule in records.conventions:
        rules_by_project[rule.project].append(rule)
    return dict(rules_by_project)


class _Links:
    """Where a session or a site is shown."""

    def __init__(self, listed: sessions.SessionList, folder: Path | None) -> None:
        self._listed, self._folder = listed, folder

    def session(self, session: sessions.Session) -> str:
        return f"#{session.key}" if self._folder is None else f"{self._folder.name}/{_file_name(session)}"

    def site(self, conversation_id: str, site_id: str) -> str:
        """Empty where the conversation is gone."""
        session = self._listed.of_conversation.get(conversation_id)
        if session is None:
            return ""
        page = "" if self._folder is None else f"{self._folder.name}/{_file_name(session)}"
        return f"{page}#site-{site_id}"


def _write_page(path: Path, text: bytes) -> None:
    """Whole or not at all, but not waited for until it is on the disk: of a thousand pages that is most of the time.

    After a power cut the same command writes them again.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(text)
    temporary.replace(path)


def _file_name(session: sessions.Session) -> str:
    return f"{session.number:05d}.html"
