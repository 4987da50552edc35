"""`ClaudeCodeIngester`, the public class that reads Claude Code logs as states."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from composer_replication.errors import InputError, explain
from composer_replication.ingestion.formats.claude_code import read
from composer_replication.ingestion.scrubbing import scrub_conversation
from composer_replication.ingestion.source_files import IngestReport, SourceFile
from composer_replication.ingestion.states import SYSTEM_PROMPT, states, trace_state
from composer_replication.privacy import Scrubber
from composer_replication.types import Conversation, TraceState

__all__ = ["SYSTEM_PROMPT", "ClaudeCodeIngester", "IngestionStats"]

# CLI versions that the reader was tested on: "1.0.98", "2.1.39"; not "2.10.0".
_TESTED_VERSIONS = re.compile(r"^(1\.|2\.[01]\.)")


@dataclass
class IngestionStats:
    """Counts for one file. Files from unknown CLI versions are read as well and listed in `version_warnings`."""

    n_records_total: int = 0
    n_records_skipped: int = 0
    n_states_emitted: int = 0
    n_assistant_turns: int = 0
    n_tool_use_blocks: int = 0
    n_text_blocks: int = 0
    skipped_subagent: int = 0
    skipped_summary: int = 0
    skipped_truncated_lines: int = 0
    version_warnings: list[str] = field(default_factory=list[str])


class ClaudeCodeIngester:
    """A reader of Claude Code logs as states, one per assistant message. Secrets are scrubbed unless `scrub=False`."""

    def __init__(
        self,
        *,
        system_prompt: str = SYSTEM_PROMPT,
        skip_sidechain: bool = True,
        strip_thinking: bool = True,
        max_history_tokens: int | None = None,
        scrub: bool | Scrubber = True,
    ) -> None:
        if max_history_tokens is not None and max_history_tokens < 0:
            raise InputError(
                explain("max_history_tokens", got=max_history_tokens, expected="None or a nonnegative number of tokens")
            )
        self._system_prompt = system_prompt
        self._skip_sidechain = skip_sidechain
        self._strip_thinking = strip_thinking
        self._max_history_tokens = max_history_tokens
        self._scrubber = scrub if isinstance(scrub, Scrubber) else Scrubber() if scrub else None
        self.last_stats = IngestionStats()
        self.last_report = IngestReport()

    def ingest(self, path: str | Path) -> Iterator[TraceState]:
        """Yield one state per assistant message, in order.

        `last_stats` is complete once the iterator is exhausted.
        """
        path = Path(path)
        index = 0
        for conversation in self.ingest_conversations(path):
            for messages, turn in states(
                conversation,
                system_prompt=self._system_prompt,
                strip_thinking=self._strip_thinking,
                max_history_tokens=self._max_history_tokens,
            ):
                self.last_stats.n_states_emitted += 1
                yield trace_state(f"{path.stem}::{index:04d}", messages, turn)
                index += 1

    def ingest_conversation(self, path: str | Path) -> Conversation:
        """Return the conversation as it was at the end of the session.

        After a compaction this is only the last part; `ingest_conversations` also returns the earlier parts.
        """
        main = [
            conversation
            for conversation in self.ingest_conversations(path)
            if conversation.parent is None or _continues(conversation)
        ]
        if not main:
            raise InputError(
                explain(f"{path}", got="a file without a conversation", expected="a Claude Code session log")
            )
        return main[-1]

    def ingest_conversations(self, path: str | Path) -> list[Conversation]:
        """Return every context in a log: all parts of the session and, with `skip_sidechain=False`, the subagents."""
        path = Path(path)
        if not path.is_file():
            raise InputError(explain(str(path), got="no such file", expected="a Claude Code session log"))
        self.last_report, self.last_stats = IngestReport(), IngestionStats()
        contexts = list(read(SourceFile(path, path.name), self.last_report))
        conversations = contexts
        if self._skip_sidechain:
            # Records in a subagent's file may not be marked as such, so the file name decides.
            is_agent_file = path.match("agent-*.jsonl")
            conversations = [
                context for context in contexts if not is_agent_file and (context.parent is None or _continues(context))
            ]
        if self._scrubber is not None:
            scope = self._scrubber.scope()
            conversations = [scrub_conversation(conversation, scope) for conversation in conversations]
        self._count(contexts, conversations)
        return conversations

    def _count(self, contexts: list[Conversation], conversations: list[Conversation]) -> None:
        stats, report = self.last_stats, self.last_report
        stats.n_records_total = report.counts["records"]
        stats.n_records_skipped = report.skipped.total() + report.counts["records without a message"]
        stats.skipped_truncated_lines = report.skipped["truncated last line"]
        stats.skipped_summary = report.counts["summaries"]
        # Turns in the contexts that were skipped.
        stats.skipped_subagent = sum(len(context.turns) for context in contexts) - sum(
            len(conversation.turns) for conversation in conversations
        )
        assistants = [turn for conversation in conversations for turn in conversation.turns if turn.role == "assistant"]
        stats.n_assistant_turns = len(assistants)
        stats.n_tool_use_blocks = sum(len(turn.calls) for turn in assistants)
        stats.n_text_blocks = sum(bool(turn.text) for turn in assistants)
        versions = sorted({context.agent_version for context in contexts if context.agent_version})
        stats.version_warnings = [f"untested CLI version {v}" for v in versions if not _TESTED_VERSIONS.match(v)]


def _continues(conversation: Conversation) -> bool:
    """Return whether a conversation continues its parent after a compaction; subagents and rewound branches do not."""
    return conversation.parent is not None and conversation.parent.kind == "compaction"
