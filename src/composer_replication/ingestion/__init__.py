"""Session logs of coding agents as exact conversations, secrets out.

discovery     which files below a path may be sessions, and which belong together
reading/      lines and documents of any make; turns in the making
formats/      one module a format
registry      which format a file is, and its conversations
scrubbing     secrets out of a conversation, and what a run knows of secrets and people
cache/        what is read again, what is taken over from the last ingest, and what stays
tool_schemas  tools of a run, inferred or from a file
into_run      all of it, into a run directory
forget        a session out of a run
states        conversations as the states teachers are asked about
claude_code   `ClaudeCodeIngester`, the interface users already know
gate_view     what the last gate looks at
last_gate     the last look before text leaves the machine
"""

from composer_replication.action_text import action_text
from composer_replication.ingestion.claude_code import ClaudeCodeIngester, IngestionStats
from composer_replication.ingestion.registry import (
    FORMATS,
    detect,
    discover,
    ingest,
)
from composer_replication.ingestion.source import IngestReport, Skip, SourceFile
from composer_replication.ingestion.states import SYSTEM_PROMPT

__all__ = [
    "FORMATS",
    "SYSTEM_PROMPT",
    "ClaudeCodeIngester",
    "IngestReport",
    "IngestionStats",
    "Skip",
    "SourceFile",
    "action_text",
    "detect",
    "discover",
    "ingest",
]
