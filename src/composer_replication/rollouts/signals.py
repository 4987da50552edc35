"""What an environment itself says went wrong in a rollout, as error sites."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer_replication.rollouts.conversation import Rollout, assistant_id
from composer_replication.sites.taxonomy import USUAL_BLAME
from composer_replication.types import Conversation, ErrorSite


def signalled_sites(rollout: Rollout, conversation: Conversation) -> list[ErrorSite]:
    """What the environment itself says; it knows whose doing it was, and says so by saying it."""
    known = {turn.id for turn in conversation.turns}
    found: list[ErrorSite] = []
    for number, signal in enumerate(rollout.signals):
        kind, message = str(signal.get("kind", "other")), str(signal.get("message", ""))
        turn_id = assistant_id(int(signal.get("turn", -1)))
        blame = signal.get("blame") or ("model" if USUAL_BLAME.get(kind, "model") in ("model", "unknown") else None)
        is_kept = turn_id in known and blame == "model"
        why = "the environment's signal" if is_kept else "blame or turn of a signal: not the model's, or no such turn"
        found.append(
            ErrorSite(
                id=f"{rollout.rollout_id}-signal-{number}",
                conversation_id=rollout.rollout_id,
                turn_id=turn_id,
                call_id=str(signal.get("call", "")),
                result_turn_id=None,
                tool=str(signal.get("tool", "")),
                kind=kind,
                blame="model" if blame == "model" else "env",
                confidence=1.0,
                evidence=(0, len(message)),
                evidence_text=message,
                is_soft=False,
                is_rewound=False,
                repeats=0,
                repeat_of=None,
                between=0,
                is_kept=is_kept,
                reason=why,
            )
        )
    return found


def signal_of(site: ErrorSite, rollout: Rollout) -> Mapping[str, Any] | None:
    prefix = f"{rollout.rollout_id}-signal-"
    return rollout.signals[int(site.id.removeprefix(prefix))] if site.id.startswith(prefix) else None
