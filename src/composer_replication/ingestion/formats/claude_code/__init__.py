"""Read Claude Code logs from CLI 1.x to 2.1.x. Each module builds on the previous ones:

record   a single record, records that belong to the same message, and attachments
links    which parent links to trust, and the subagent to which a sidechain record belongs
tree     all records of a log as a tree, and the contexts that the model really saw
log      the whole log: format detection, queued messages, and contexts as conversations
"""

from composer_replication.ingestion.formats.claude_code.log import FORMAT, read, sniff

__all__ = ["FORMAT", "read", "sniff"]
