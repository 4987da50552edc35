"""Build preference pairs, which prefer a teacher's action to the student's, or the correction of an error to the error.

extract      pairs from states and the teachers' answers
corrections  pairs from a session's failed calls and the calls that should have been made instead
later_calls  the successful calls after a failed one, and the similarity of calls
normalise    filtering pairs with a data-juicer recipe
export       writing pairs as a data set for TRL; replaying, extracting and filtering in one call
"""

from __future__ import annotations

from composer_replication.action_text import parse_reply
from composer_replication.pairs.extract import extract_dpo_pairs, save_pairs
from composer_replication.sites.actions.equality import same_action

__all__ = ["extract_dpo_pairs", "parse_reply", "same_action", "save_pairs"]
