"""The public names and signatures of the parts built so far.

DOCUMENTED, RECORDS, VALUES and PATHS are written from the public-api page, in its notation: names, parameters and
defaults that users already have in their code; `"a"|"b"` means that "a" is the default. ADDED holds the keyword-only
parameters that documented names have gained since. HOMES and NEW hold paths and names that are ours alone.
"""

from __future__ import annotations

from expected_surface_diloco import MEMBERS_DILOCO, NEW_DILOCO
from expected_surface_envs import MEMBERS_ENVS, NEW_ENVS
from expected_surface_recipes import MEMBERS_RECIPES, NEW_RECIPES
from expected_surface_serverless import MEMBERS_SERVERLESS, NEW_SERVERLESS
from expected_surface_sessions import MEMBERS_SESSIONS, NEW_SESSIONS
from expected_surface_training import NEW_TRAINING, TRAIN_CONFIG

PACKAGE = "composer_replication"

DOCUMENTED = {
    "compose_loss": (
        "(model, inputs, *, alpha_sdpo=0.1, beta_replay=0.05, sdpo_jsd_beta=0.5, sdpo_temperature=1.0, "
        "sdpo_token_clip=None, replay_dpo_beta=0.1, lm_ce_label_smoothing=0.0, "
        'dpo_variant="dpo"|"simpo", sdpo_wrapper="none"|"taid"|"entropy_opd", taid_t=None, simpo_beta=2.0, '
        "simpo_gamma=1.0, entropy_opd_h_max=None)"
    ),
    "build_batch": (
        '(tokenizer, *, device="cpu", seed=42, variant="factorial"|"binary_search", align_sdpo_shapes=False)'
    ),
    "generalized_jsd_loss": (
        "(student_logits, teacher_logits, labels=None, beta=0.5, temperature=1.0, "
        'reduction="batchmean", logits_are_probs=False, top_k=None, token_clip=None)'
    ),
    "simpo_loss": "(chosen_avg_logprobs, rejected_avg_logprobs, *, beta=2.0, gamma=1.0)",
    "avg_sequence_logprob": "(model_logprobs, response_mask)",
    "taid_loss": "(student_logits, teacher_logits, mask=None, *, t)",
    "TAIDScheduler": (
        '(num_train_steps, *, t_start=0.4, t_end=1.0, alpha=5e-4, beta=0.99, disable_adaptive=False, device="cpu")'
    ),
    "entropy_aware_opd_loss": (
        '(student_logits, teacher_logits, *, labels=None, h_max=None, temperature=1.0, reduction="batchmean")'
    ),
    "teacher_entropy": "(teacher_logits)",
    "sdpo_loss": (
        "(student_logits, teacher_logits, mask, *, beta=1.0, top_k=None, add_tail=True, "
        "token_ids=None, old_logprobs=None, is_clip=None)"
    ),
    "loss_fn": (
        "(inputs, *, alpha_sdpo=0.0, beta_dpo=0.0, dppo_mask_high=0.2, dppo_mask_low=0.2, adv_tau=1.0, kl_tau=1e-3)"
    ),
    "make_diloco_outer_loop": (
        "(manager, model_fragments, inner_optimizer, *, outer_lr=0.7, outer_momentum=0.9, nesterov=True, "
        "sync_every=100, fragment_sync_delay=0, fragment_update_alpha=0.0)"
    ),
    "update_t": "(loss, global_step)",
    "DJNormalizer": "(recipe_path=None, *, skip_dj=False)",
    "extract_dpo_pairs": "(states, teacher_actions, agreement_threshold=2)",
    "replay_and_normalize_trace": (
        "(*, states, teachers=None, agreement_threshold=2, max_total_usd=5.0, normalizer=None, **replay_kwargs)"
    ),
}

ADDED = {
    "DJNormalizer": 'backend="native"|"data_juicer"',
    "LossComponents": "active=(), counts=<factory>, ran_as=''",
    "build_batch": "model=None",
    "compose_loss": "denominators=None, sdpo_teachers=None, sdpo_weighting=None",
    "extract_dpo_pairs": "teachers=None, cwd=None, tools=None",
    "entropy_aware_opd_loss": 'gate="soft"|"hard", tau=1.0, top_k=16',
    "sdpo_loss": "sampled_token=False",
}

RECORDS = {
    "LossComponents": "lm_ce, sdpo_jsd, trace_replay_dpo, total",
    "TeacherSpec": "slug, input_per_mtok, output_per_mtok",
    "TraceState": "state_id, messages, student_action",
    "TeacherCallResult": (
        "state_id, teacher_slug, response_text|None, latency_s, prompt_tokens, completion_tokens, cost_usd, error|None"
    ),
    "DPOPair": "state_id, state_messages, chosen, rejected, n_teachers_agreeing",
    "TraceExample": "trace_id, turns, final_reward, dpo_pairs",
}

# Fields that records have gained; none of them has to be there.
ADDED_FIELDS = {
    "TeacherSpec": "per_request_usd, base_url, api_key_env, extra",
    "TraceState": "session_id, tools, cwd",
    "TeacherCallResult": "message, finish_reason, is_cached, attempts, flags",
}

VALUES = {"__version__": "0.1.0"}

# Where each documented name is imported from.
PATHS = {
    "": (
        "__version__",
        "compose_loss",
        "LossComponents",
        "build_batch",
        "generalized_jsd_loss",
        "make_diloco_outer_loop",
        "DPOPair",
        "TeacherCallResult",
        "TeacherSpec",
        "TraceState",
    ),
    "batch": ("build_batch",),
    "diloco": ("make_diloco_outer_loop",),
    "distillation": ("simpo_loss", "taid_loss", "TAIDScheduler", "entropy_aware_opd_loss", "sdpo_loss"),
    "distillation.entropy_aware_opd": ("entropy_aware_opd_loss", "teacher_entropy"),
    "distillation.simpo": ("simpo_loss", "avg_sequence_logprob"),
    "distillation.taid": ("taid_loss", "TAIDScheduler"),
    "loss": ("LossComponents", "compose_loss"),
    "trainer.objective.compose": ("LossComponents", "compose_loss"),
    "opsd": ("generalized_jsd_loss", "sdpo_loss"),
    "recipes.prime_rl.composer_loss": ("loss_fn",),
    "replaysim": ("DJNormalizer", "DPOPair", "TeacherCallResult", "extract_dpo_pairs", "replay_and_normalize_trace"),
    "replaysim.normalize": ("DJNormalizer", "replay_and_normalize_trace"),
    "trainer.data_collator": ("TraceExample",),
    "types": ("DPOPair", "TeacherCallResult", "TeacherSpec", "TraceState"),
}

# The same objects at the path where the code lives now.
HOMES = {
    "loss": (
        "TAIDScheduler",
        "avg_sequence_logprob",
        "entropy_aware_opd_loss",
        "generalized_jsd_loss",
        "sdpo_loss",
        "simpo_loss",
        "taid_loss",
        "teacher_entropy",
    ),
}

_DPO = {"dpo_loss": "(chosen_logprobs, rejected_logprobs, ref_chosen_logprobs, ref_rejected_logprobs, *, beta=0.1)"}

NEW: dict[str, dict[str, str]] = {
    **NEW_SESSIONS,
    **NEW_TRAINING,
    **NEW_ENVS,
    **NEW_DILOCO,
    **NEW_RECIPES,
    **NEW_SERVERLESS,
    "distillation": _DPO,
    "loss": {
        **_DPO,
        "CrossEntropyToTeacher": "()",
        "EntropyGate": '(*, gate="soft"|"hard", h_max=None, temperature=1.0, tau=1.0, top_k=16)',
        "JSD": "(*, beta=0.5, temperature=1.0, top_k=None)",
        "StudentTopK": "(*, beta=1.0, top_k=20, add_tail=True)",
        "group_advantages": "(rewards, num_generations, scale_rewards)",
        "grpo_loss": (
            "(logprobs_BT, old_logprobs_BT, advantages, mask_BT, *, "
            'loss_type="dapo"|"grpo"|"bnpo"|"dr_grpo", epsilon=0.2, '
            "epsilon_high=None, max_completion_length=None, num_items=None, accumulation=1)"
        ),
        "lm_cross_entropy": "(logits, token_ids, mask=None, *, label_smoothing=0.0)",
    },
    "loss.linear": {
        "LinearHead": "(weight, bias=None, scale=1.0, softcap=None)",
        "LinearLoss": "(loss, row_values)",
        "TeacherTerm": "(hidden, head, coefficient=1.0)",
        "linear_cross_entropy": (
            '(hidden_NH, head, token_ids_N, *, row_weights=None, label_smoothing=0.0, tile_rows=None, backend="auto")'
        ),
        "linear_divergence": (
            "(hidden_NH, head, teacher_terms, divergence, *, row_weights=None, token_clip=None, tile_rows=None, "
            'backend="auto")'
        ),
        "linear_token_logprobs": '(hidden_NH, head, token_ids_N, *, tile_rows=None, backend="auto")',
    },
    "trainer.objective.reference": {
        "pair_logprobs": "(model, batch)",
        "reference_logprobs": "(model, inputs)",
        "response_logprobs": "(model, responses)",
        "token_logprobs": "(model, responses)",
        "with_reference": "(model, batch)",
    },
    "trainer.sessions.reference": {
        "ReferenceLogprobs": "(fingerprint, values=None, *, of_steps=False)",
        "ReferenceLogprobs.add": "(response, value)",
        "ReferenceLogprobs.load": "(path, expected)",
        "ReferenceLogprobs.lookup": "(chosen_ids, chosen_start, rejected_ids, rejected_start)",
        "ReferenceLogprobs.save": "(path)",
        "ReferenceLogprobs.take_over": "(other)",
        "precompute_ref_logprobs": "(model, renderer, pairs, *, path=None, max_tree_tokens=32768, with_adapter=False)",
    },
    "errors": {
        "ComposerError.expected": "property",
        "ComposerError.fix": "property",
        "ComposerError.got": "property",
        "ComposerError.what": "property",
        "explain": '(what, *, got, expected, fix="")',
        "is_rust_panic": "(error)",
    },
    "optional": {
        "available": "(package)",
        "importing": "(package, *, extra)",
        "is_object_name": "(text)",
        "load_function": "(module, name, *, what)",
        "load_object": "(name, *, what, fix, error_class)",
        "require": "(module, *, extra)",
    },
    "recipes.prime_rl.hinted_turns": {
        "HintSettings": (
            '(*, alpha_sdpo=0.1, teacher_name=None, teacher_url=None, placement="before_turn", part="turn", '
            'hints="template", unhinted_kinds=(), max_teacher_length=None)'
        ),
        "HintedTurns": "(finder, alpha, *, max_length=None)",
        "HintedTurns.annotate": "(trace, branches, score)",
        "composer_algorithm": "(grpo, settings, traces_of, branches_of, model_config)",
        "engine_module": "(name)",
        "make_finder": "(model_name, settings)",
        "node_at": "(branch, turn)",
        "register": "(settings=None)",
        "rollout_of": "(trace, branch)",
        "write_reference": "(branch, turn, logprobs, alpha)",
    },
    "recipes.prime_rl.composer_loss": {"LossInputs": "protocol", "LossOutputs": "(loss, metrics)"},
    # The page writes these out as fields with types; here they are signatures.
    "trainer.data_collator": {
        "CollatorConfig": (
            "(max_seq_len=4096, max_dpo_seq_len=2048, pad_token_id=0, ignore_index=-100, enable_sdpo=True, "
            'hint_generator=None, enable_replay_dpo=True, rlvr_reward_key="final_reward", *, '
            'placement="before_turn", tools=None, chat_template=None, thinking=None)'
        ),
        "ComposerDataCollator": "(tokenizer, config, *, reference=None)",
        "ComposerDataCollator.pairs": "(traces)",
        "TokenizerLike": "protocol",
        "TraceTurn": "record: role, content, tool_call, tool_error, error_meta",
    },
    "config": {
        "CrfConfig": (
            "(*, ingest=<factory>, sites=<factory>, replay=<factory>, pairs=<factory>, loss=<factory>, "
            "render=<factory>, split=<factory>, train=<factory>, evaluation=<factory>, "
            "run=<factory>)"
        ),
        "EvaluationConfig": (
            '(*, primary="forced_gap", context=8192, good_calls=4, samples=4, states=40, new_tokens=192, '
            "temperature=0.7, sampler='auto', good_turns=100, token_gaps=200, gsm8k=None, code=None, "
            'precision="auto"|"float32"|"bfloat16", fewest_sessions=5, seed=0)'
        ),
        "IngestConfig": (
            "(*, paths=(), exclude=(), follow_links=False, tools=None, workers=None, kingfisher=False, people=False)"
        ),
        "PairsConfig": (
            "(*, threshold=None, where_it_worked=False, thinking=False, words=True, corrections=True, recipe=None, "
            'filters="native"|"data_juicer"|"none")'
        ),
        "ReplayConfig": (
            '(*, teachers=None, max_usd=5.0, states="sites"|"all"|"failed", limit=None, gate="exact"|"agree"|"none", '
            'threshold=2, order="longest_first"|"in_order", concurrency=64, max_tokens=1024, max_history_tokens=None, '
            "timeout_s=120.0, send_tools=True)"
        ),
        "RunConfig": "(*, control=False, shuffles=1, fewest=10, without_verdict=False)",
        "SitesConfig": "(*, min_confidence=0.5, writer=None, max_usd=5.0)",
        "SplitConfig": '(*, by="time"|"project", validation=0.1, test=None)',
        "RenderConfig": (
            "(*, chat_template=None, template_variables=<factory>, student_models=(), "
            'own_thinking="target"|"context"|"left_out", other_thinking="left_out"|"context"|"target")'
        ),
        "LossConfig": (
            "(*, alpha_sdpo=0.1, beta_replay=0.05, sdpo_jsd_beta=0.5, sdpo_temperature=1.0, sdpo_token_clip=None, "
            'replay_dpo_beta=0.1, lm_ce_label_smoothing=0.0, dpo_variant="dpo"|"simpo", '
            'sdpo_wrapper="none"|"taid"|"entropy_opd", taid_t=None, simpo_beta=2.0, simpo_gamma=1.0, '
            "entropy_opd_h_max=None)"
        ),
        "TrainConfig": TRAIN_CONFIG,
        "TrainConfig.required_model": "()",
        "OptionDoc": "(path, type_text, default, sentence)",
        "config_hash": "(config)",
        "describe": '(config_class, prefix="")',
        "load": "(config_class, path=None, overrides=())",
        "loads": "(config_class, text, overrides=())",
        "option": "(default, doc, *, at_least=None, above=None, at_most=None, below=None)",
        "section": "(config_class, doc)",
        "table": "(path)",
        "to_toml": "(config)",
        "write_resolved": "(config, run_dir_path)",
    },
    "runs": {
        "ARTEFACTS": "value",
        "Artefact": "(name, file_name, command, kind)",
        "ArtefactMeta": (
            "(*, artefact, schema, version, tool_version, sources, config_hash, counts, drops, "
            'settings=<factory>, keys=(), rows=0, num_bytes=0, sha256="", created="")'
        ),
        "Journal": "(path)",
        "JournalContents": "(rows, torn)",
        "Lineage": "(*, artefacts, inputs, stale, missing)",
        "RunDir": "(root)",
        "Source": "(*, kind, name, sha256)",
        "TornLine": "(number, num_bytes)",
    },
}

NEW["trainer.reference"] = NEW["trainer.sessions.reference"]  # a known path
_TRAINER = NEW_TRAINING["trainer.composer_trainer"]
NEW[""] = NEW[""] | {name: text for name, text in _TRAINER.items() if name.startswith("ComposerReplicationTrainer")}

# The public methods and properties of every class above; a class that is not here has none.
MEMBERS = {
    **MEMBERS_SESSIONS,
    **MEMBERS_ENVS,
    **MEMBERS_DILOCO,
    **MEMBERS_RECIPES,
    **MEMBERS_SERVERLESS,
    "Artefact": {"sidecar_name": "property", "command_for": "(run)", "not_found": "(run)"},
    "ArtefactMeta": {"to_bytes": "()"},
    "CrossEntropyToTeacher": {"check": "(vocab)"},
    "EntropyGate": {"check": "(vocab)", "entropy_scale": "(vocab)"},
    "JSD": {"check": "(vocab)"},
    "Journal": {"append": "(row)", "close": "()"},
    "LinearHead": {
        "detached": "()",
        "grad_through_transform": "(grad_nV, logits_nV)",
        "logits": "(hidden)",
        "vocab": "property",
        "write_logits": "(hidden_nH, out_nV)",
    },
    "LossComponents": {"detached": "()"},
    "RunDir": {
        "changed_sources": "(name)",
        "used_alone": "(what)",
        "append_jsonl": "(name)",
        "is_current": "(name)",
        "source": "(name)",
        "create": "(path)",
        "exclusive": "(what, *, against=('replay',))",
        "used_for": "(use)",
        "lineage": "(name)",
        "meta": "(name)",
        "open": "(path)",
        "path": "(name)",
        "read_journal": "(name)",
        "read_jsonl": "(name, *, schema, version=1, verify=True)",
        "remove_leftovers": "(*names)",
        "write_jsonl": (
            "(name, rows, *, schema, version, sources=(), config_hash=None, counts=None, drops=None, settings=None)"
        ),
    },
    "StudentTopK": {"check": "(vocab)"},
    "TAIDScheduler": {
        "load_state_dict": "(state)",
        "state_dict": "()",
        "t": "property",
        "update_t": "(loss, global_step)",
    },
    "TeacherTerm": {"detached": "()", "student": "(coefficient)"},
    "TokenizerLike": {"apply_chat_template": "property", "pad_token_id": "property"},
}

# The exception tree: each class with the classes it can be caught as.
ERRORS = {
    "ComposerError": "Exception",
    "InputError": "ComposerError, ValueError",
    "ShapeError": "InputError",
    "BatchKeyError": "InputError",
    "AlignmentError": "InputError",
    "ConfigError": "InputError",
    "NonFiniteError": "ComposerError, ArithmeticError",
    "UnsupportedModelError": "ComposerError, TypeError",
    "MissingExtraError": "ComposerError, ImportError, RuntimeError",
    "NotEnoughMemoryError": "ComposerError, MemoryError",
    "InactiveChannelError": "ComposerError, RuntimeError",
    "SandboxError": "ComposerError, RuntimeError",
    "RunError": "ComposerError, RuntimeError",
    "ArtefactNotFoundError": "RunError, FileNotFoundError",
    "ArtefactCorruptError": "RunError",
    "StaleArtefactError": "RunError",
}

# The artefacts of the pipeline and the files they are kept in (architecture page, "Flow").
ARTEFACT_FILES = {
    "config": "config.resolved.toml",
    "conversations": "conversations.jsonl",
    "session_sources": "session_sources.jsonl",
    "forgotten": "forgotten.jsonl",
    "tools": "tools.jsonl",
    "elsewhere": "elsewhere.jsonl",
    "split": "split.jsonl",
    "sites": "sites.jsonl",
    "struck_hints": "struck_hints.jsonl",
    "conventions": "conventions.md",
    "teacher_calls": "teacher_calls.jsonl",
    "teacher_cache": "teacher_cache.sqlite",
    "asked_tools": "asked_tools.jsonl",
    "pairs": "pairs.jsonl",
    "ref_logprobs": "ref_logprobs.safetensors",
    "hint_proof": "hint_proof.jsonl",
    "metrics": "metrics.jsonl",
    "checkpoints": "checkpoints",
    "adapter": "adapter",
    "model": "model",
    "control": "control",
    "earlier": "earlier",
    "evaluation": "evaluation.json",
    "evaluated": "evaluated.jsonl",
    "sampled": "sampled.jsonl",
    "token_gaps": "token_gaps.jsonl",
    "report_html": "report.html",
    "report_md": "report.md",
    "report_sessions": "report_sessions",
}
