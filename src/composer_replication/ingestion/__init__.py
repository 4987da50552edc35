"""Session logs of coding agents as exact conversations, secrets out."""

from composer_replication.ingestion.claude_code import ClaudeCodeIngester, IngestionStats
from composer_replication.ingestion.reading.source import IngestReport, Skip, SourceFile
from composer_replication.ingestion.registry import FORMATS, detect, discover, ingest
from composer_replication.ingestion.states import SYSTEM_PROMPT, action_text

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
