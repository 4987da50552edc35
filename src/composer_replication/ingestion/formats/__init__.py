"""One module a format, each with `FORMAT`, `sniff` (is this file one of ours) and `read` (its conversations).

Which of them a file is asked about, and in what order: `ingestion/registry.py`.

    claude_code      Claude Code: logs are trees of records, so it has a folder
    codex            Codex CLI rollouts
    gemini           Gemini CLI chats
    opencode         OpenCode exports
    openhands        OpenHands output and trajectories
    sweagent         SWE-agent trajectories
    mini_sweagent    mini-swe-agent trajectories
    openai_messages  OpenAI chat messages, tau-bench
    inspect_eval     Inspect logs
    atif             ATIF documents, read
    atif_write       ATIF documents, written
"""
