"""Error sites and hints for the tests of what is trained at a site."""

from __future__ import annotations

from composer_replication.types import ErrorSite, Hint

HINT = Hint(text="Hint: the file is b.py, not a.py.", source="template", template="test", version=1)


def site_at(turn_id, *, conversation_id="c", is_kept=True, reason="rule test", identity="0123456789ab"):
    return ErrorSite(
        id=identity,
        conversation_id=conversation_id,
        turn_id=turn_id,
        call_id="c1",
        result_turn_id=None,
        tool="bash",
        kind="file_not_found",
        blame="model" if is_kept else "task",
        confidence=0.9,
        evidence=(0, 0),
        evidence_text="",
        is_soft=False,
        is_rewound=False,
        repeats=0,
        repeat_of=None,
        between=0,
        is_kept=is_kept,
        reason=reason,
    )
