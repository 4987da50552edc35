"""The public names of the front door: conversations, ingestion, privacy. Same notation as expected_surface.py."""

from __future__ import annotations

_PROMPT = (
    "You are a senior software engineer working as a coding agent in a terminal. You read and change files and run "
    "commands through the tools you are given, one step at a time, and you check your work."
)

_KNOWN = {
    "SYSTEM_PROMPT": "value",
    "ClaudeCodeIngester": (
        f'(*, system_prompt="{_PROMPT}", skip_sidechain=True, strip_thinking=True, max_history_tokens=None, scrub=True)'
    ),
    "IngestionStats": (
        "(n_records_total=0, n_records_skipped=0, n_states_emitted=0, n_assistant_turns=0, n_tool_use_blocks=0, "
        "n_text_blocks=0, skipped_subagent=0, skipped_summary=0, skipped_truncated_lines=0, "
        "version_warnings=<factory>)"
    ),
}

NEW_SESSIONS: dict[str, dict[str, str]] = {
    "": _KNOWN,
    "ingestion": {
        **_KNOWN,
        "FORMATS": "value",
        "IngestReport": "(counts=<factory>, skipped=<factory>, skips=<factory>)",
        "Skip": "(reason, file, line)",
        "SourceFile": "(path, name)",
        "action_text": "(turn)",
        "detect": "(path)",
        "discover": "(path, report, *, exclude=())",
        "ingest": "(paths, report, *, scrubber, exclude=())",
    },
    "ingestion.claude_code": {
        **_KNOWN,
        "FORMAT": "value",
        "read": "(source, report, *, with_branches=False)",
        "sniff": "(head, path)",
    },
    "privacy": {
        "Rule": "(kind, pattern, triggers=(), group=0, accept=None)",
        "Scope": "(scanner, identity, seen)",
        "ScrubReport": "(counts=<factory>)",
        "Scrubber": "(*, env_values=None, home_dirs=(), user_names=(), extra_rules=(), entropy=True)",
        "kingfisher_rule": '(*, confidence="medium")',
        "secret_looking_environment": "(environ)",
    },
    "types": {
        "Action": "(*, text, calls)",
        "Conversation": (
            "(*, id, format, turns, parent=None, session_id=None, title=None, cwd=None, agent_version=None, "
            "extra=<factory>)"
        ),
        "Link": "(*, kind, conversation_id, turn_id=None, call_id=None)",
        "Provenance": "(*, file, lines)",
        "ToolCall": "(*, id, name, arguments, raw_arguments=None)",
        "ToolResult": "(*, call_id, text, is_error)",
        "Turn": (
            '(*, id, role, origin, text="", thinking="", calls=(), results=(), parent_id=None, model=None, usage=None, '
            "timestamp=None, provenance, token_ids=None, logprobs=None, extra=<factory>)"
        ),
        "Usage": "(*, input_tokens=0, output_tokens=0, cache_read_tokens=0, cache_creation_tokens=0)",
    },
}

MEMBERS_SESSIONS: dict[str, dict[str, str]] = {
    "ClaudeCodeIngester": {"ingest": "(path)", "ingest_conversation": "(path)", "ingest_conversations": "(path)"},
    "IngestReport": {"merge": "(other)", "skip": "(reason, file, line=0)"},
    "Rule": {"spans": "(text)", "triggered": "(text)"},
    "Scope": {"report": "property", "text": "(text)", "value": "(value)"},
    "ScrubReport": {"merge": "(*others)", "merge_all": "()", "to_dict": "()", "total": "property"},
    "Scrubber": {"scope": "()"},
    "Turn": {"action": "property"},
}
