"""Redact secrets and people in text before it is written to disk, sent to a teacher or exported. On by default.

    scrubber = Scrubber(env_values=secret_looking_environment(environ), home_dirs=[home], user_names=[user])
    scope = scrubber.scope()          # one per session with its subagents
    scope.reserve(earlier_rows)       # first, if previously scrubbed rows are kept: reserves their numbers
    record = scope.value(record)      # or scope.text(text)
    scope.report                      # counts by kind, never a value

In reading order:

    scrubber       placeholders and their numbers in a session; caches of clean strings
    fields         names and values in JSON objects
    scan           all layers applied to one text; overlaps, repeated values, known values from the environment
    rules          the rule interface; secrets with a structure; which trigger words occur
    secret_names   which names indicate a secret; which words are ordinary
    assignments    values after a name
    values         where such a value begins and ends
    plausible      whether a value could be a secret
    command_lines  options and arguments of programs
    tables         values under a heading or in a known slot
    speech         secrets stated in sentences, lists and headings
    answers        secrets that one message asks for and the next message provides
    entropy        keys with a vendor prefix, and random strings
    public_values  whether the text around a random string shows that it is public
    encodings      text inside base64, hex, URLs, streams and escapes
    wrapped_lines  values interrupted by a line end
    personal_data  home directories, user names and other people
    outgoing       the last check before text leaves the machine

The comment above a pattern has examples: `text` that it matches, `text` -> `what it extracts`, not `text` that it
rejects. They are written as in a Python string, so backslashes are doubled and a newline is an escape.
"""

from __future__ import annotations

from composer_replication.privacy.rules import Rule, kingfisher_rule
from composer_replication.privacy.scrubber import Scope, Scrubber, ScrubReport
from composer_replication.privacy.secret_names import secret_looking_environment

__all__ = ["Rule", "Scope", "ScrubReport", "Scrubber", "kingfisher_rule", "secret_looking_environment"]
