"""Teachers' answers to preference pairs: actions compared by meaning, voted on, and set against the student's own."""

from __future__ import annotations

from composer_replication.actions.equality import same_action
from composer_replication.actions.reply import parse_reply
from composer_replication.pairs.extract import extract_dpo_pairs, save_pairs

__all__ = ["extract_dpo_pairs", "parse_reply", "same_action", "save_pairs"]
