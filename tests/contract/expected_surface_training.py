"""The public names of training. Same notation as expected_surface.py."""

from __future__ import annotations

NEW_TRAINING: dict[str, dict[str, str]] = {
    "trainer.objective.compose": {
        "channel_options": (
            "(model, knobs, *, taid_t=None, label_smoothing=0.0, denominators=None, sdpo_teachers=None, "
            "sdpo_weighting=None)"
        ),
    },
    "trainer": {
        "ChannelSettings": (
            "(*, alpha_sdpo=0.1, beta_replay=0.05, sdpo_jsd_beta=0.5, sdpo_temperature=1.0, "
            'sdpo_token_clip=None, replay_dpo_beta=0.1, dpo_variant="dpo", sdpo_wrapper="none", '
            "simpo_beta=2.0, simpo_gamma=1.0, entropy_opd_h_max=None, sdpo_is_clip=None, taid_start=0.4, "
            'taid_end=1.0, taid_rate=0.0005, taid_momentum=0.99, anneal="none", anneal_end=0.0)'
        ),
        "ChannelSettings.alpha_at": "(step, total_steps)",
        "ChannelSettings.loss_options": "()",
        "ChannelSettings.taid_schedule": "(total_steps)",
        "ComposerReplicationTrainer": (
            "(*args, alpha_sdpo=0.0, beta_replay=0.0, sdpo_jsd_beta=0.5, sdpo_temperature=1.0, "
            'sdpo_token_clip=None, replay_dpo_beta=0.1, settings=None, teacher="live", rollouts=None, '
            "sdpo_weighting=None, heed_gate=False, trace_dataset=None, data_collator=None, logged_sessions=None, "
            "logged_batch_size=1, measure_channels=False, alarm=None, diagnosis=None, metrics_path=None, "
            "**kwargs)"
        ),
        "ComposerReplicationTrainer.after_step": "()",
        "ComposerReplicationTrainer.before_steps": "()",
        "ComposerReplicationTrainer.channels_on": "()",
        "ComposerReplicationTrainer.extra_state": "()",
        "ComposerReplicationTrainer.load_extra_state": "(tree)",
        "ComposerReplicationTrainer.log": "(logs, start_time=None)",
        "ComposerReplicationTrainer.mode": "()",
        "ComposerReplicationTrainer.resume_geometry": "()",
        "ComposerReplicationTrainer.sum_over": "(values)",
        "LoggedSessions": "(rendered, renderer, settings, *, run=None, pack=False, proofs=None)",
        "LoggedSessions.from_run": "(run, renderer, *, budget, only=None, pack=False, **settings)",
        "LoggedSessions.from_sessions": "(sessions, renderer, *, budget, only=None, pack=False, **settings)",
        "LoggedSessions.items": "property",
        "LoggedSessions.batches": '(device="cpu")',
        "LoggedSessions.channels": "property",
        "LoggedSessions.check_references": "(model)",
        "LoggedSessions.digest": "property",
        "LoggedSessions.models": "property",
        "LoggedSessions.longest_tree": "property",
        "LoggedSessions.has_references": "property",
        "LoggedSessions.prove": "(model, margin=0.0, *, max_context=None, seed=0, with_adapter=False)",
        "LoggedSessions.with_proofs": "(proofs)",
        "LoggedSessions.shuffled": "(seed=0)",
        "LoggedSessions.with_references": "(model, path=None, *, with_adapter=False)",
        "LoggedSessions.only_responses": "(*, hinted_corrections=False)",
        "LoggedSessions.without_responses": "()",
        "LoggedSessions.require_items": "()",
        "OfflineTrainer": (
            "(model, args, sessions, *, settings=None, teacher=None, weighting=None, lm_weight=1.0, "
            'eval_sessions=None, peft_config=None, quantization="none", fsdp=False, warmed_up=None, hint_margin=None, '
            "shuffle_seed=None, reference_path=None, metrics_path=None, callbacks=(), **options)"
        ),
        "OfflineTrainer.plan": "()",
        "OfflineTrainer.weights": "()",
        "OfflineTrainer.get_batch_samples": "(epoch_iterator, num_batches, device)",
        "OfflineTrainer.compute_loss": "(model, inputs, return_outputs=False, num_items_in_batch=None)",
        "OfflineTrainer.prediction_step": "(model, inputs, prediction_loss_only, ignore_keys=None)",
        "OfflineTrainer.evaluation_loop": '(*args, metric_key_prefix="eval", **options)',
        "OfflineTrainer.taid": "property",
        "OfflineTrainer.before_steps": "()",
        "OfflineTrainer.after_step": "()",
        "OfflineTrainer.log": "(logs, start_time=None)",
        "OfflineTrainer.floating_point_ops": "(inputs)",
        "OfflineTrainer.resume_geometry": "()",
        "OfflineTrainer.extra_state": "()",
        "OfflineTrainer.load_extra_state": "(tree)",
        "RolloutOptions": (
            '(*, placement="before_turn", part="turn", hints="template", unhinted_kinds=(), hint_generator=None, '
            "hint_writer=None, extra_rules=(), "
            "min_confidence=0.5, max_teacher_length=None, only_failed_rollouts=False, max_resamples=0, "
            'k1_coefficient=0.0, fast_generation="auto", generation_batch=None)'
        ),
        "TeacherKeeper": '(kind="live", *, ema_rate=0.05, live_share=0.01)',
        "TeacherKeeper.attach": "(model, *, with_adapter=False)",
        "TeacherKeeper.model": "property",
        "TeacherKeeper.replace_model": "(model)",
        "TeacherKeeper.shares": "()",
        "TeacherKeeper.after_step": "(model)",
        "TeacherKeeper.state": "()",
        "TeacherKeeper.load_state": "(tree)",
        "TeacherKeeper.settle": "()",
        "composer_grpo_config": '(output_dir, *, preset="composer", **overrides)',
        "warm_up": (
            "(model, args, sessions, *, held_out=None, patience=None, on_held_out=None, hinted_corrections=False, "
            "**options)"
        ),
        "trainer_arguments": '(preset="composer")',
    },
    "trainer.checkpoints": {
        "check_manifest": "(folder, *, hashes=True)",
        "load_tree": '(folder, name, *, device="cpu")',
        "newest_complete": "(output_dir)",
        "rng_tree": "()",
        "save_tree": "(folder, name, tree)",
        "set_rng_tree": "(tree)",
        "weights_digest": "(model, *, with_adapter=False)",
        "write_manifest": "(folder, *, step, about)",
    },
    "trainer.composer_trainer": {
        "ComposerReplicationTrainer": (
            "(*args, alpha_sdpo=0.0, beta_replay=0.0, sdpo_jsd_beta=0.5, sdpo_temperature=1.0, "
            'sdpo_token_clip=None, replay_dpo_beta=0.1, settings=None, teacher="live", rollouts=None, '
            "sdpo_weighting=None, heed_gate=False, trace_dataset=None, data_collator=None, logged_sessions=None, "
            "logged_batch_size=1, measure_channels=False, alarm=None, diagnosis=None, metrics_path=None, "
            "**kwargs)"
        ),
        "ComposerReplicationTrainer.after_step": "()",
        "ComposerReplicationTrainer.before_steps": "()",
        "ComposerReplicationTrainer.channels_on": "()",
        "ComposerReplicationTrainer.extra_state": "()",
        "ComposerReplicationTrainer.load_extra_state": "(tree)",
        "ComposerReplicationTrainer.log": "(logs, start_time=None)",
        "ComposerReplicationTrainer.mode": "()",
        "ComposerReplicationTrainer.resume_geometry": "()",
        "ComposerReplicationTrainer.sum_over": "(values)",
        "RolloutOptions": (
            '(*, placement="before_turn", part="turn", hints="template", unhinted_kinds=(), hint_generator=None, '
            "hint_writer=None, extra_rules=(), "
            "min_confidence=0.5, max_teacher_length=None, only_failed_rollouts=False, max_resamples=0, "
            'k1_coefficient=0.0, fast_generation="auto", generation_batch=None)'
        ),
    },
    "trainer.sessions.dataset": {
        "LoggedPair": '(state_id, turn_number, chosen, action=None, rejected=None, source="teachers")',
        "LoggedPair.rejects_turn": "property",
        "LoggedSession": "(*, conversation, sites=(), pairs=(), corrections=<factory>)",
        "LoggedSession.right_call": "(site)",
        "LoggedSessions": "(rendered, renderer, settings, *, run=None, pack=False, proofs=None)",
        "LoggedSessions.from_run": "(run, renderer, *, budget, only=None, pack=False, **settings)",
        "LoggedSessions.from_sessions": "(sessions, renderer, *, budget, only=None, pack=False, **settings)",
        "LoggedSessions.items": "property",
        "LoggedSessions.batches": '(device="cpu")',
        "LoggedSessions.channels": "property",
        "LoggedSessions.check_references": "(model)",
        "LoggedSessions.digest": "property",
        "LoggedSessions.models": "property",
        "LoggedSessions.longest_tree": "property",
        "LoggedSessions.has_references": "property",
        "LoggedSessions.prove": "(model, margin=0.0, *, max_context=None, seed=0, with_adapter=False)",
        "LoggedSessions.with_proofs": "(proofs)",
        "LoggedSessions.shuffled": "(seed=0)",
        "LoggedSessions.with_references": "(model, path=None, *, with_adapter=False)",
        "LoggedSessions.only_responses": "(*, hinted_corrections=False)",
        "LoggedSessions.without_responses": "()",
        "LoggedSessions.require_items": "()",
        "SessionItem": "(windows)",
        "SessionItem.num_tokens": "property",
        "SessionItem.batch": '(device="cpu")',
        "sessions_of_run": "(run, *, budget, **settings)",
    },
    "trainer.from_config.training": {
        "TrainingCallbacks": "(say=<factory>, on_step=<factory>, on_log=<factory>, on_phase=<factory>)",
        "run_training": "(config, *, resume=False, must_fit=True, progress=None, replica=None)",
    },
}

TRAIN_CONFIG = (
    '(*, model=None, run=None, output=None, mode="offline", control="none", shuffle=1, preset="composer", resume=True, '
    'report_to="none", log_every=1, eval_every=0, diagnose_every=50, adapter=<factory>, '
    "teacher=<factory>, channels=<factory>, switches=<factory>, batch=<factory>, warmup=<factory>, "
    "proof=<factory>, optimiser=<factory>, fsdp=<factory>, save=<factory>, alarm=<factory>, "
    "grpo=<factory>, effort=<factory>)"
)
