"""`crf judge`: would each call of a run have failed, said before it ran, against what really happened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from composer_replication.judge import JudgedCall, Repository, Score, judged_calls
from composer_replication.judge.walk import earlier_sessions
from composer_replication.runs import RunDir
from composer_replication.runs.conversations import read_conversations
from composer_replication.types import Conversation, ErrorSite


def judge_run(run: RunDir, *, earlier: bool = True, repo: Path | None = None) -> Score:
    """Judge every call of a run; nothing is written.

    `earlier` lets a session know what earlier ones of the same project had shown, `repo` what a clone of the project
    held at the session's date.
    """
    calls = judged_sessions(run, earlier=earlier, repository=None if repo is None else Repository(repo))
    return Score(judged for _, judged in calls)


def judged_sessions(
    run: RunDir,
    *,
    earlier: bool = True,
    repository: Repository | None = None,
    sites: Mapping[str, Mapping[str, ErrorSite]] | None = None,
) -> Iterator[tuple[Conversation, JudgedCall]]:
    """Every call of every conversation; with `earlier` they are read twice, for what earlier ones knew.

    `sites` are failures by conversation and call, where somebody else has classed them.
    """
    sessions = earlier_sessions(read_conversations(run)) if earlier else None
    for conversation in read_conversations(run):
        calls = judged_calls(
            conversation,
            sites=None if sites is None else sites.get(conversation.id, {}),
            project=None if sessions is None else sessions.before(conversation),
            checkout=None if repository is None else repository.before(conversation),
        )
        yield from ((conversation, judged) for judged in calls)
