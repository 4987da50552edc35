"""Read session logs of coding agents as exact conversations, with secrets removed.

source_files     fault-tolerant reading of files, lines and JSON text
json_documents   JSON documents, and how to distinguish them from JSON lines
turn_list        turns under construction, shared by the format modules
formats          one module per format
registry         finding session files, their formats and conversations
scrubbing        removing secrets from whole conversations
session_sources  accounts of the files of each session, and access to the last ingest
read_sessions    planning what is read again or reused, and collecting all rows
ingest_run       an ingest into a run directory
forget           removing sessions from a run
states           conversations as states for teachers; tool schemas
claude_code      `ClaudeCodeIngester`, the public class for Claude Code logs
"""

from composer_replication.action_text import action_text
from composer_replication.ingestion.claude_code import ClaudeCodeIngester, IngestionStats
from composer_replication.ingestion.registry import FORMATS, detect, discover, ingest
from composer_replication.ingestion.source_files import IngestReport, Skip, SourceFile
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
