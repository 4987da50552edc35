"""Read logs of Claude Code, CLI 1.x to 2.1.x. The modules, in the order in which they build on each other:

record   one record, which records are one message, and attachments
links    which parent links to trust, and which subagent a sidechain record belongs to
tree     all records of a log as a tree, and the contexts that the model really saw
log      the whole log: format detection, messages typed meanwhile, contexts as conversations
"""

from composer_replication.ingestion.formats.claude_code.log import FORMAT, read, sniff

__all__ = ["FORMAT", "read", "sniff"]
