"""Claude Code's logs, in the order in which a log goes through.

`log` reads a file and names its conversations. `record` is one record and `attachments` what it shows beside its
message; `tree` takes all records of a log: `order` puts them where they belong, `links` judges their parents with
`ancestry` (what is above a record), `context` (what clock and token counts say), `sidechains` (which sub-agent it is
of) and `messages` (which records are one message). `paths` are the contexts that were lived, `queue` the messages that
were typed meanwhile, `turns` the result.
"""

from composer_replication.ingestion.formats.claude_code.log import FORMAT, read, sniff

__all__ = ["FORMAT", "read", "sniff"]
