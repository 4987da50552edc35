"""Make preference pairs: teachers' actions over the student's, and a session's corrections over its errors.

extract      make pairs from states and teachers' answers
corrections  make pairs from a session's own failed calls and what should have been done instead
later_calls  find what a session did after a failed call, and whether two calls are about the same thing
normalise    filter pairs with a data-juicer recipe
export       write pairs as a data set for TRL; replay, extract and filter in one call
"""

from __future__ import annotations

from composer_replication.action_text import parse_reply
from composer_replication.pairs.extract import extract_dpo_pairs, save_pairs
from composer_replication.sites.actions.equality import same_action

__all__ = ["extract_dpo_pairs", "parse_reply", "same_action", "save_pairs"]
