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

_TEACHERS = (
    '[{"slug": "anthropic/claude-opus-4.7", "input_per_mtok": 5.0, "output_per_mtok": 25.0}, '
    '{"slug": "openai/gpt-5", "input_per_mtok": 1.25, "output_per_mtok": 10.0}, '
    '{"slug": "deepseek/deepseek-v4-pro", "input_per_mtok": 1.32, "output_per_mtok": 3.96}]'
)
REPLAY_TRACE = (
    f"(states, teachers={_TEACHERS}, max_total_usd=5.0, api_key=None, *, base_url=None, cache=None, resume=True, "
    "max_concurrency=64, gate=None, options=None)"
)

_REPLAY_TRACE = (
    "(states, teachers=[{'slug': 'anthropic/claude-opus-4.7', 'input_per_mtok': 5.0, 'output_per_mtok': 25.0}, "
    "{'slug': 'openai/gpt-5', 'input_per_mtok': 1.25, 'output_per_mtok': 10.0}, {'slug': 'deepseek/deepseek-v4-pro', "
    "'input_per_mtok': 1.32, 'output_per_mtok': 3.96}], max_total_usd=5.0, api_key=None, "
    "*, base_url=None, cache=None, resume=True, max_concurrency=64, gate=None, options=None)"
)
# The page writes its fields out; here they are a signature.
_NORMALIZED = "(state_id, state_messages, chosen_messages, rejected_messages, n_teachers_agreeing, metadata)"
_EXTRACT = "(states, teacher_actions, agreement_threshold=2, *, teachers=None, cwd=None, tools=None)"

NEW_SESSIONS: dict[str, dict[str, str]] = {
    "": {**_KNOWN, "DEFAULT_TEACHERS": "value", "extract_dpo_pairs": _EXTRACT, "replay_trace": _REPLAY_TRACE},
    "ingestion": {
        **_KNOWN,
        "FORMATS": "value",
        "IngestReport": "(counts=<factory>, skipped=<factory>, skips=<factory>)",
        "Skip": "(reason, file, line)",
        "SourceFile": "(path, name)",
        "action_text": "(turn)",
        "detect": "(path)",
        "discover": "(path, report, *, exclude=(), ignored=None, follow_links=False)",
        "ingest": "(paths, report, *, scrubber, exclude=(), follow_links=False)",
    },
    "ingestion.claude_code": _KNOWN,
    "ingestion.formats.claude_code": {
        "FORMAT": "value",
        "read": "(source, report, *, with_branches=False)",
        "sniff": "(head, path)",
    },
    "hint_generator": {
        "HINT_TEMPLATES": "value",
        "HintContext": (
            "record: error_kind, error_message, available_tools, tool_name, tool_schema, intent, path, meant, "
            "is_from_error, names_there, other_ending, was_read, counts_no_more, closest_line, edit_problem, "
            "num_matches, can_replace_all, places, missing_parameters, unexpected_parameters, meant_parameter, "
            "wrong_types, choices, command, num_repeats, advice, seen_parameters, reader_tool, finder_tool, "
            "search_tool, shell_folder, project_folder, path_from_shell, own_cd, is_absolute, is_unknown_option"
        ),
        "count_sentences": "(text)",
        "dispatch": "(error_kind, ctx=None)",
        "hint_cmd_not_found": "(ctx=None)",
        "hint_edit_ambiguous": "(ctx=None)",
        "hint_edit_no_match": "(ctx=None)",
        "hint_edit_noop": "(ctx=None)",
        "hint_edit_not_read": "(ctx=None)",
        "hint_edit_stale": "(ctx=None)",
        "hint_file_not_found": "(ctx=None)",
        "hint_git_state": "(ctx=None)",
        "hint_is_directory": "(ctx=None)",
        "hint_json_decode": "(ctx=None)",
        "hint_output_too_large": "(ctx=None)",
        "hint_repeated_failure": "(ctx=None)",
        "hint_runtime_error": "(ctx=None)",
        "hint_shell_path_missing": "(ctx=None)",
        "hint_tool_not_found": "(ctx=None)",
        "hint_type_error": "(ctx=None)",
        "register": "(error_kind, fn)",
        "write_hint": (
            '(site, conversation, *, sources=("template", "raw_error"), writer=None, tool_schemas=None, '
            "inferred_tools=None, scrubber=None, along=None)"
        ),
    },
    "sites": {
        "BLAMES": "value",
        "FailureRule": (
            '(*, kind, pattern, needles, channels=("shell", "file", "other"), where="line", blame=None, '
            "confidence=0.9, accept=None)"
        ),
        "KINDS": "value",
        "MIN_CONFIDENCE": "value",
        "USUAL_BLAME": "value",
        "Verdict": "(kind, blame, confidence, span, is_soft, reason)",
        "classify": "(tool, arguments, text, is_error, *, before=None, extra_rules=())",
        "find_error_sites": "(conversation, *, min_confidence=0.5, extra_rules=(), passed_over=None, refusals=None)",
        "register_rule": "(rule)",
        "rule": (
            '(kind, pattern, *needles, channels="shell file other", where="line", ignore_case=True, blame=None, '
            "confidence=0.9, accept=None)"
        ),
        "unregister_rule": "(rule)",
    },
    "sites.judge": {
        "Checkout": "(repository, commit, *, seconds=0, is_branch=True)",
        "EarlierSessions": "()",
        "Judge": "(state, *, project=None, checkout=None)",
        "JudgedCall": "(turn, call, judgement, result, site, judge)",
        "Judgement": '(says, rule, kind="", why="")',
        "KindScore": "(kind, failures, predicted)",
        "PathKnowledge": "(sessions, root, when, *, read_before=None)",
        "Repository": "(path)",
        "RuleScore": "(says, rule, kind, said, failed, num_of_kind)",
        "Score": "(calls=())",
        "judged_calls": "(conversation, *, sites=None, project=None, checkout=None)",
        "state_at_end": "(conversation)",
    },
    "privacy": {
        "Rule": "(kind, pattern, triggers=(), group=0, accept=None)",
        "Scope": "(scanner, unblurred, identity, seen)",
        "ScrubReport": "(counts=<factory>)",
        "Scrubber": "(*, env_values=None, home_dirs=(), user_names=(), extra_rules=(), entropy=True, people=False)",
        "kingfisher_rule": '(*, confidence="medium")',
        "secret_looking_environment": "(environ)",
    },
    "pairs": {
        "extract_dpo_pairs": _EXTRACT,
        "parse_reply": "(reply)",
        "same_action": "(a, b, context=None)",
        "save_pairs": "(pairs, path)",
    },
    "teacher_replay": {
        "DEFAULT_TEACHERS": "value",
        "DPOPair": "record: state_id, state_messages, chosen, rejected, n_teachers_agreeing",
        "ReplayOptions": (
            "(*, base_url=None, cache=None, max_concurrency=64, gate=None, order='longest_first', "
            "agreement_threshold=2, timeout_s=120.0, settings=<factory>, patience=<factory>, prices=<factory>, "
            "environment=None, last_gate=None)"
        ),
        "TeacherCallResult": (
            "record: state_id, teacher_slug, response_text, latency_s, prompt_tokens, completion_tokens, cost_usd, "
            "error, message, finish_reason, is_cached, attempts, flags"
        ),
        "TeacherSpec": ("record: slug, input_per_mtok, output_per_mtok, per_request_usd, base_url, api_key_env, extra"),
        "TraceState": "record: state_id, messages, student_action, session_id, tools, cwd",
        "extract_dpo_pairs": _EXTRACT,
        "replay_trace": _REPLAY_TRACE,
        "save_pairs": "(pairs, path)",
    },
    "replaysim": {"NormalizedDPOPair": _NORMALIZED, "replay_trace": REPLAY_TRACE},
    "replaysim.normalize": {
        "DEFAULT_RECIPE": "value",
        "NormalizedDPOPair": _NORMALIZED,
        "replay_and_normalize_trace_sync": (
            "(*, states, teachers=None, agreement_threshold=2, max_total_usd=5.0, normalizer=None, **replay_kwargs)"
        ),
    },
    "types": {
        "Action": "(*, text, calls)",
        "Conversation": (
            "(*, id, format, turns, parent=None, session_id=None, title=None, cwd=None, agent_version=None, "
            "extra=<factory>)"
        ),
        "ErrorSite": (
            "(*, id, conversation_id, turn_id, call_id, result_turn_id, tool, kind, blame, confidence, evidence, "
            "evidence_text, is_soft, is_rewound, repeats, repeat_of, between, is_kept, reason)"
        ),
        "Hint": "(*, text, source, template, version, facts=<factory>)",
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
    "DJNormalizer": {"normalize": "(pairs)"},
    "Checkout": {
        "exists": "(relative)",
        "files": "property",
        "has_ever_held": "(relative, text, *, but_for_blanks=False)",
        "is_trunks": "(relative, text)",
        "text": "(relative)",
    },
    "EarlierSessions": {"add": "(conversation, state)", "before": "(conversation)", "sort": "()"},
    "Judge": {"verdict": "(call)"},
    "PathKnowledge": {
        "has_name": "(name, shown)",
        "is_too_large": "(relative, shown)",
        "standing": "(relative, shown)",
        "text": "(relative, shown)",
    },
    "Repository": {
        "at": "(when, branch=None)",
        "before": "(conversation)",
    },
    "RuleScore": {"share_failed": "property"},
    "Score": {
        "add": "(judged)",
        "false_per_thousand": "property",
        "kinds": "property",
        "num_failures": "property",
        "num_false": "property",
        "num_predicted": "property",
        "precision": "property",
        "rules": "property",
        "share_predicted": "property",
    },
    "FailureRule": {"matches": "(view, command, is_own=None)", "whose": "property"},
    "IngestReport": {"merge": "(other)", "skip": "(reason, file, line=0)"},
    "Rule": {"spans": "(text)", "triggered": "(text)"},
    "Scope": {
        "answer": "(text, spans)",
        "report": "property",
        "reserve": "(value)",
        "text": "(text)",
        "value": "(value)",
    },
    "ScrubReport": {"to_dict": "()"},
    "Scrubber": {"scope": "()"},
    "Turn": {"action": "property"},
    "Verdict": {"is_failure": "property"},
}
