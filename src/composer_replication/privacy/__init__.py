"""Secrets and people out of text, before it reaches disk, a teacher or a data set. On by default wherever it is used.

scrubber = Scrubber(env_values=secret_looking_environment(environ), home_dirs=[home], user_names=[user])
scope = scrubber.scope()          # one per conversation and the sub-agents linked to it
record = scope.value(record)      # or scope.text(text)
scope.report                      # counts by kind, never a value
scope.reserve(earlier_rows)       # before that, where rows scrubbed earlier are taken over: their numbers stay theirs

In reading order: `scrubber` (placeholders), `gather` and `fields` (records), `seen` (what is clean), `scan` (all layers
over a text), `merging` (spans), `keywords` (which words occur), `rules` (what a rule is; keys with a frame), the layers
`named`, `spoken`, `shapes` and `encodings`, `identity` and `people`, `numbering`, `report`, `kingfisher`.
"""

from __future__ import annotations

from composer_replication.privacy.kingfisher import kingfisher_rule
from composer_replication.privacy.named.names import secret_looking_environment
from composer_replication.privacy.report import ScrubReport
from composer_replication.privacy.rules import Rule
from composer_replication.privacy.scrubber import Scope, Scrubber

__all__ = ["Rule", "Scope", "ScrubReport", "Scrubber", "kingfisher_rule", "secret_looking_environment"]
