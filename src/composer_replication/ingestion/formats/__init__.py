"""One module per format, with `FORMAT`, `sniff` (detects the format of a file) and `read` (yields its conversations).

`ingestion/registry.py` decides which modules are tried, and in what order.

    claude_code      Claude Code (a package, since its logs are trees of records)
    codex            Codex CLI rollouts
    gemini           Gemini CLI chats
    opencode         OpenCode exports
    openhands        OpenHands output and trajectories
    sweagent         SWE-agent trajectories
    mini_sweagent    mini-swe-agent trajectories
    openai_messages  OpenAI chat messages, tau-bench
    inspect_eval     Inspect logs
    atif             ATIF documents
    atif_write       writing conversations as ATIF documents
"""
