"""One module a format, each with `FORMAT`, `sniff` (is this file one of ours) and `read` (its conversations).

`claude_code` (a folder: those logs are trees), `codex`, `gemini`, `opencode`, `openhands`, `sweagent`,
`mini_sweagent`, `openai_messages`, `inspect_eval`, and `atif`, which `atif_write` writes. `codex_items` reads the
items of a Codex rollout. Which of them a file is asked about, and in what order: `ingestion/registry.py`.
"""
