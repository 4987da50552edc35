"""Claude Code's logs, CLI 1.x to 2.1.x, in the order in which a log goes through.

log          a file's records, and at the end its conversations by name
attachments  what a record shows beside its message
record       one record, and which records are one message
order        records put where they belong: copies out, each behind its parent
ancestry     what is above a record, and whether clock and token counts say that it went on
sidechains   which sub-agent a record is of
links        which parents are believed
tree         all of a log's records, and the contexts that were lived
queue        messages that were typed meanwhile
turns        records of one context as turns
"""

from composer_replication.ingestion.formats.claude_code.log import FORMAT, read, sniff

__all__ = ["FORMAT", "read", "sniff"]
