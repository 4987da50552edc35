"""Secrets and people out of text, before it reaches disk, a teacher or a data set. On by default wherever it is used.

scrubber = Scrubber(env_values=secret_looking_environment(environ), home_dirs=[home], user_names=[user])
scope = scrubber.scope()          # one per conversation and the sub-agents linked to it
record = scope.value(record)      # or scope.text(text)
scope.report                      # counts by kind, never a value
scope.reserve(earlier_rows)       # before that, where rows scrubbed earlier are taken over: their numbers stay theirs

In reading order:

scrubber    placeholders in a conversation
gather      the strings of a record, to be scanned together
fields      what the shape of a JSON object says
seen        which strings are known to be clean
scan        all layers over a text
merging     spans that overlap, values that stand there twice
keywords    which trigger words occur
rules       what a rule is; keys with a frame
named       values that something names
spoken      secrets that people tell
shapes      secrets known by what they look like
encodings   secrets that are written differently
identity    home folders and user names
people      other people, when asked for
numbering   which placeholder stands for which value
kingfisher  its rules as one more, where it is installed
"""

from __future__ import annotations

from composer_replication.privacy.names import secret_looking_environment
from composer_replication.privacy.rules import Rule, kingfisher_rule
from composer_replication.privacy.scrubber import Scope, Scrubber, ScrubReport

__all__ = ["Rule", "Scope", "ScrubReport", "Scrubber", "kingfisher_rule", "secret_looking_environment"]
