"""Preference pairs: what most teachers did against what the student did, and what a session itself put right.

agreement         what became of the states, and how far teachers agree
extract           states and answers to pairs
later_calls       what a session did after a call that failed
likeness          whether two calls are about the same thing
searches          which look should have come before a path that was not there
needless_looks    states in which acting at once was right
failed_call       a call that failed, what its session knew by then, and what it did afterwards
edit_rules        what should have been done in place of an edit
correction_rules  what should have been done in place of any call, by the kind of failure
corrections       a session's own pairs
normalise/        which pairs are worth training on
replayed          from states to such pairs in one call
export            pairs as rows for other trainers, their actions as messages
"""

from __future__ import annotations

from composer_replication.action_text import parse_reply
from composer_replication.pairs.extract import extract_dpo_pairs, save_pairs
from composer_replication.sites.actions.equality import same_action

__all__ = ["extract_dpo_pairs", "parse_reply", "same_action", "save_pairs"]
