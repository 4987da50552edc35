"""Read session logs of coding agents as exact conversations, with secrets removed.

source           files, lines and JSON text, however damaged
documents        JSON documents, and which files are lines
turn_list        turns under construction, shared by the formats
formats          one module per format
registry         session files below a path, their format, and their conversations
scrubbing        secrets removed from whole conversations
session_sources  accounts of the files of each session, and the last ingest
gather           what is read again, what is reused from the last ingest, and all rows
into_run         an ingest into a run directory
forget           sessions removed from a run
states           conversations as the states that teachers are asked about; tool schemas
claude_code      `ClaudeCodeIngester`, the public class for Claude Code logs
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
