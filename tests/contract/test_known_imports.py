"""The published API: every path, name, parameter, field, key and default in users' code.

What the names do and raise is in `test_known_behaviour.py`. The tables come first and are the whole specification.
Signatures are written as in a `def`; a parameter that a table does not list may be there if it is keyword-only and has
a default. Nothing here depends on where the code lives.
"""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

PACKAGE = "composer_replication"
IMPORTS = {
    "": "ClaudeCodeIngester ComposerReplicationTrainer DEFAULT_TEACHERS DPOPair IngestionStats LossComponents"
    " SYSTEM_PROMPT TeacherCallResult TeacherSpec TraceState _DILOCO_AVAILABLE __version__ build_batch compose_loss"
    " extract_dpo_pairs generalized_jsd_loss make_diloco_outer_loop replay_trace",
    "batch": "build_batch",
    "diloco": "DiLoCo Manager _DummyWork _TORCHFT_AVAILABLE make_diloco_outer_loop",
    "diloco.serverless": "LocalProcessExecutor MockManager ObjectStoreAllReduce ReplicaHandle ServerlessExecutor",
    "diloco.serverless.allreduce": "MockManager ObjectStoreAllReduce _ImmediateWork",
    "diloco.serverless.executor": "LocalProcessExecutor ReplicaHandle ServerlessExecutor",
    "diloco.serverless.hf_jobs": "HFJobsExecutor",
    "diloco.serverless.modal": "ModalExecutor",
    "diloco.serverless.replica_entrypoint": "main",
    "distillation": "TAIDScheduler entropy_aware_opd_loss sdpo_loss simpo_loss taid_loss",
    "distillation.entropy_aware_opd": "entropy_aware_opd_loss teacher_entropy",
    "distillation.simpo": "avg_sequence_logprob simpo_loss",
    "distillation.taid": "TAIDScheduler taid_loss",
    "hint_generator": "HINT_TEMPLATES HintContext dispatch hint_json_decode hint_repeated_failure hint_runtime_error"
    " hint_tool_not_found hint_type_error register",
    "ingestion": "ClaudeCodeIngester IngestionStats SYSTEM_PROMPT",
    "ingestion.claude_code": "ClaudeCodeIngester IngestionStats SYSTEM_PROMPT",
    "loss": "LossComponents compose_loss",
    "opsd": "generalized_jsd_loss sdpo_loss",
    "recipes.monarch.actors": "GeneratorActor RewarderActor TeacherPoolActor TrainerActor",
    "recipes.prime_rl.composer_loss": "loss_fn",
    "replaysim": "DJNormalizer DPOPair NormalizedDPOPair TeacherCallResult extract_dpo_pairs replay_and_normalize_trace"
    " replay_trace",
    "replaysim.normalize": "DJNormalizer replay_and_normalize_trace_sync",
    "teacher_replay": "DEFAULT_TEACHERS DPOPair TeacherCallResult TeacherSpec TraceState extract_dpo_pairs replay_trace"
    " save_pairs",
    "trainer": "ComposerReplicationTrainer",
    "trainer.composer_trainer": "ComposerReplicationTrainer",
    "trainer.data_collator": "CollatorConfig ComposerDataCollator TokenizerLike TraceExample TraceTurn",
    "trainer.reference": "precompute_ref_logprobs",
}
NAMES = [(module, name) for module, names in IMPORTS.items() for name in names.split()]
SUBPACKAGES = sorted({module.partition(".")[0] for module in IMPORTS} - {""})

# Before a name: module and class. `self` is left out; "FACTORY" is a default that is made anew for each object.
FACTORY = object()
SIGNATURES = {
    "loss.compose_loss": "model, inputs, *, alpha_sdpo=0.1, beta_replay=0.05, sdpo_jsd_beta=0.5, sdpo_temperature=1.0,"
    " sdpo_token_clip=None, replay_dpo_beta=0.1, lm_ce_label_smoothing=0.0, dpo_variant='dpo', sdpo_wrapper='none',"
    " taid_t=None, simpo_beta=2.0, simpo_gamma=1.0, entropy_opd_h_max=None",
    "loss.LossComponents": "lm_ce, sdpo_jsd, trace_replay_dpo, total, *, active=()",
    "loss.LossComponents.detached": "",
    "batch.build_batch": "tokenizer, *, device='cpu', seed=42, variant='factorial', align_sdpo_shapes=False,"
    " model=None",
    "opsd.generalized_jsd_loss": "student_logits, teacher_logits, labels=None, beta=0.5, temperature=1.0,"
    " reduction='batchmean', logits_are_probs=False, top_k=None, token_clip=None",
    "opsd.sdpo_loss": "student_logits, teacher_logits, mask, *, beta=1.0, top_k=None, add_tail=True, token_ids=None,"
    " old_logprobs=None, is_clip=None",
    "distillation.simpo_loss": "chosen_avg_logprobs, rejected_avg_logprobs, *, beta=2.0, gamma=1.0",
    "distillation.simpo.avg_sequence_logprob": "model_logprobs, response_mask",
    "distillation.taid_loss": "student_logits, teacher_logits, mask=None, *, t",
    "distillation.TAIDScheduler": "num_train_steps, *, t_start=0.4, t_end=1.0, alpha=5e-4, beta=0.99,"
    " disable_adaptive=False, device='cpu'",
    "distillation.TAIDScheduler.update_t": "loss, global_step",
    "distillation.TAIDScheduler.state_dict": "",
    "distillation.TAIDScheduler.load_state_dict": "state",
    "distillation.entropy_aware_opd_loss": "student_logits, teacher_logits, *, labels=None, h_max=None,"
    " temperature=1.0, reduction='batchmean', gate='soft', tau=1.0, top_k=16",
    "distillation.entropy_aware_opd.teacher_entropy": "teacher_logits",
    "ingestion.IngestionStats": "n_records_total=0, n_records_skipped=0, n_states_emitted=0, n_assistant_turns=0,"
    " n_tool_use_blocks=0, n_text_blocks=0, skipped_subagent=0, skipped_summary=0, skipped_truncated_lines=0,"
    " version_warnings=FACTORY",
    "ingestion.ClaudeCodeIngester": "*, system_prompt=SYSTEM_PROMPT, skip_sidechain=True, strip_thinking=True,"
    " max_history_tokens=None, scrub=True",
    "ingestion.ClaudeCodeIngester.ingest": "path",
    "ingestion.ClaudeCodeIngester.ingest_conversation": "path",
    "hint_generator.dispatch": "error_kind, ctx=None",
    "hint_generator.register": "error_kind, fn",
    **{
        f"hint_generator.hint_{kind}": "ctx=None"
        for kind in ("tool_not_found", "json_decode", "type_error", "runtime_error", "repeated_failure")
    },
    "teacher_replay.replay_trace": "states, teachers=DEFAULT_TEACHERS, max_total_usd=5.0, api_key=None, *,"
    " base_url=None, cache=None, resume=True, max_concurrency=64, gate=None",
    "teacher_replay.extract_dpo_pairs": "states, teacher_actions, agreement_threshold=2",
    "teacher_replay.save_pairs": "pairs, path",
    "replaysim.NormalizedDPOPair": "state_id, state_messages, chosen_messages, rejected_messages,"
    " n_teachers_agreeing, metadata",
    "replaysim.DJNormalizer": "recipe_path=None, *, skip_dj=False, backend='native'",
    "replaysim.DJNormalizer.normalize": "pairs",
    **{
        f"replaysim.{path}": "*, states, teachers=None, agreement_threshold=2, max_total_usd=5.0, normalizer=None,"
        " **replay_kwargs"
        for path in ("replay_and_normalize_trace", "normalize.replay_and_normalize_trace_sync")
    },
    "trainer.ComposerReplicationTrainer": "*args, alpha_sdpo=0.0, beta_replay=0.0, sdpo_jsd_beta=0.5,"
    " sdpo_temperature=1.0, sdpo_token_clip=None, replay_dpo_beta=0.1, trace_dataset=None, data_collator=None,"
    " **kwargs",
    "trainer.data_collator.CollatorConfig": "max_seq_len=4096, max_dpo_seq_len=2048, pad_token_id=0,"
    " ignore_index=-100, enable_sdpo=True, hint_generator=None, enable_replay_dpo=True,"
    " rlvr_reward_key='final_reward'",
    "trainer.data_collator.ComposerDataCollator": "tokenizer, config",
    "trainer.data_collator.ComposerDataCollator.__call__": "batch",
    "trainer.reference.precompute_ref_logprobs": "model, renderer, pairs",
    "diloco.make_diloco_outer_loop": "manager, model_fragments, inner_optimizer, *, outer_lr=0.7, outer_momentum=0.9,"
    " nesterov=True, sync_every=100, fragment_sync_delay=0, fragment_update_alpha=0.0",
    "diloco.serverless.ReplicaHandle": "rank, backend_name, metadata=FACTORY",
    **{
        f"diloco.serverless.executor.{executor}.{method}": parameters
        for executor in ("ServerlessExecutor", "LocalProcessExecutor")
        for method, parameters in {
            "launch_replicas": "n_replicas, entrypoint, entrypoint_args, *, gpu=None, timeout=3600",
            "poll": "handle",
            "stream_logs": "handle, *, n_lines=200",
            "cancel": "handle",
            "collect": "handles, *, timeout=None",
        }.items()
    },
    "diloco.serverless.LocalProcessExecutor": "",
    "diloco.serverless.modal.ModalExecutor": "image='modal:python3.11', gpu='A100'",
    "diloco.serverless.hf_jobs.HFJobsExecutor": "hardware='a10g-large'",
    "diloco.serverless.ObjectStoreAllReduce": "uri, rank, world_size, *, round_id=None, timeout_s=1800.0,"
    " poll_interval_s=1.0",
    "diloco.serverless.ObjectStoreAllReduce.allreduce": "tensor, *, name=None",
    "diloco.serverless.MockManager": "store",
    "diloco.serverless.replica_entrypoint.main": "rendezvous_uri, world_size, trainer_module, trainer_fn='train',"
    " trainer_kwargs=None",
    "recipes.prime_rl.composer_loss.loss_fn": "inputs, *, alpha_sdpo=0.0, beta_dpo=0.0, dppo_mask_high=0.2,"
    " dppo_mask_low=0.2, adv_tau=1.0, kl_tau=1e-3",
    "recipes.monarch.actors.TrainerActor.train_outer_step": "batch_id",
    "recipes.monarch.actors.GeneratorActor.rollout": "prompts",
    "recipes.monarch.actors.RewarderActor.score": "completions",
}
# Values that are defaults in the table, and where they are.
HOMES = {"SYSTEM_PROMPT": "ingestion", "DEFAULT_TEACHERS": "teacher_replay"}
COROUTINES = [
    "teacher_replay.replay_trace",
    "replaysim.replay_and_normalize_trace",
    "recipes.monarch.actors.TrainerActor.train_outer_step",
    "recipes.monarch.actors.GeneratorActor.rollout",
    "recipes.monarch.actors.RewarderActor.score",
]
DATACLASSES = [
    "loss.LossComponents",
    "ingestion.IngestionStats",
    "replaysim.NormalizedDPOPair",
    "trainer.data_collator.CollatorConfig",
    "trainer.data_collator.ComposerDataCollator",
    "diloco.serverless.ReplicaHandle",
]
# Keys that a TypedDict has and all it may require.
TYPED_DICTS = {
    "teacher_replay.TeacherSpec": ("slug input_per_mtok output_per_mtok base_url api_key_env extra", "slug"),
    "teacher_replay.TraceState": ("state_id messages student_action", "state_id messages student_action"),
    "teacher_replay.TeacherCallResult": (
        "state_id teacher_slug response_text latency_s prompt_tokens completion_tokens cost_usd error",
        "state_id teacher_slug response_text latency_s prompt_tokens completion_tokens cost_usd error",
    ),
    "teacher_replay.DPOPair": (
        "state_id state_messages chosen rejected n_teachers_agreeing",
        "state_id state_messages chosen rejected n_teachers_agreeing",
    ),
    "hint_generator.HintContext": ("error_kind error_message available_tools tool_name tool_schema intent", ""),
    "trainer.data_collator.TraceTurn": ("role content tool_call tool_error error_meta", ""),
    "trainer.data_collator.TraceExample": ("trace_id turns final_reward dpo_pairs", ""),
}
PROTOCOLS = {
    "diloco.serverless.ServerlessExecutor": "backend_name supports_inter_replica_network launch_replicas poll"
    " stream_logs cancel collect",
    "trainer.data_collator.TokenizerLike": "pad_token_id __call__ apply_chat_template",
}
ROLES = {
    "TrainerActor": "trainer",
    "GeneratorActor": "generator",
    "RewarderActor": "rewarder",
    "TeacherPoolActor": "teacher_pool",
}
DEFAULT_TEACHERS = ["anthropic/claude-opus-4.7", "openai/gpt-5", "deepseek/deepseek-v4-pro"]
HINT_KINDS = {"tool_not_found", "json_decode", "type_error", "runtime_error", "repeated_failure"}
# Operator, what it reads, and its limits.
DEFAULT_RECIPE = [
    {operator: {"text_key": side, **limits}}
    for operator, limits in (
        ("text_length_filter", {"min_len": 8, "max_len": 32000}),
        ("words_num_filter", {"min_num": 2, "max_num": 4096}),
        ("special_characters_filter", {"max_ratio": 0.9}),  # the measured limit; published as 0.5
    )
    for side in ("chosen", "rejected")
] + [{"document_deduplicator": {"text_key": "state_chosen_rejected", "lowercase": True}}]


def at(path: str) -> Any:
    """Return what a dotted path below the package leads to: modules first, then attributes."""
    parts, found, index = path.split("."), import_module(PACKAGE), 0
    while index < len(parts):
        try:
            found = import_module(".".join([PACKAGE, *parts[: index + 1]]))
        except ModuleNotFoundError:
            break
        index += 1
    for name in parts[index:]:
        found = getattr(found, name)
    return found


def module_at(path: str) -> Any:
    return import_module(f"{PACKAGE}.{path}".rstrip("."))


# ---- names


@pytest.mark.parametrize(("module", "name"), NAMES, ids=map(".".join, NAMES))
def test_a_name_is_where_users_import_it_from(module, name):
    assert hasattr(module_at(module), name)


@pytest.mark.parametrize("name", sorted({name for _, name in NAMES} - {"main"}))
def test_a_name_is_one_object_at_all_its_paths(name):
    objects = [getattr(module_at(module), name) for module, each in NAMES if each == name]
    assert all(each is objects[0] for each in objects)


def test_imports_are_lazy_and_a_missing_package_is_an_error_where_it_is_used():
    code = f"""
import sys
sys.modules["torchft"] = None
import {PACKAGE} as c
assert not {{"torch", "transformers", "trl"}} & sys.modules.keys()
assert {{"compose_loss", "replay_trace"}} <= set(dir(c))
for name in {SUBPACKAGES}: getattr(c, name)
assert (c._DILOCO_AVAILABLE, c.make_diloco_outer_loop, c.diloco.DiLoCo, c.diloco.Manager) == (False, None, None, None)
try: c.diloco.make_diloco_outer_loop(None, [], None)
except RuntimeError as error: assert "torchft" in str(error)
else: raise SystemExit("the outer loop was made without torchft")
sys.modules.update(dict.fromkeys(["modal", "huggingface_hub", "obstore", "trl"]))
import {PACKAGE}.diloco.serverless.modal, {PACKAGE}.diloco.serverless.hf_jobs
for name in ("modal", "huggingface_hub", "obstore"): del sys.modules[name]
try: c.ComposerReplicationTrainer()
except ImportError as error: assert "composer-replication[train]" in str(error)
else: raise SystemExit("the trainer was made without trl")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_versions_and_switches_have_their_types():
    package = module_at("")
    assert isinstance(package.__version__, str)
    assert package._DILOCO_AVAILABLE is at("diloco._TORCHFT_AVAILABLE")
    assert type(package._DILOCO_AVAILABLE) is bool


# ---- signatures, fields and keys


@pytest.mark.parametrize("path", SIGNATURES)
def test_a_signature_has_the_published_parameters_and_adds_keywords_with_defaults_alone(path):
    names = {"FACTORY": FACTORY} | {
        name: at(f"{home}.{name}") for name, home in HOMES.items() if name in SIGNATURES[path]
    }
    published = dict(inspect.signature(eval(f"lambda {SIGNATURES[path]}: 0", names)).parameters)
    value = at(path)
    actual = dict(inspect.signature(value).parameters)
    actual.pop("self", None)
    by_position = [name for name, each in actual.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert by_position == [name for name, each in published.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    for name, each in published.items():
        assert actual[name].kind is each.kind
        if each.default is FACTORY:
            assert repr(actual[name].default) == "<factory>"
        else:
            assert actual[name].default == each.default
    for each in (each for name, each in actual.items() if name not in published):
        assert each.kind is each.VAR_KEYWORD or (each.kind is each.KEYWORD_ONLY and each.default is not each.empty)


@pytest.mark.parametrize("path", COROUTINES)
def test_what_users_await_is_a_coroutine_function(path):
    assert inspect.iscoroutinefunction(at(path))


@pytest.mark.parametrize("path", DATACLASSES)
def test_a_dataclass_is_one(path):
    assert dataclasses.is_dataclass(at(path))


@pytest.mark.parametrize("path", TYPED_DICTS)
def test_a_typed_dict_has_the_published_keys_and_requires_no_other(path):
    keys, required = map(str.split, TYPED_DICTS[path])
    assert set(keys) <= set(at(path).__annotations__)
    assert at(path).__required_keys__ == set(required)


@pytest.mark.parametrize("path", PROTOCOLS)
def test_a_protocol_has_the_published_members(path):
    protocol = at(path)
    assert protocol._is_protocol
    members = set(dir(protocol)) | set(protocol.__annotations__)
    assert set(PROTOCOLS[path].split()) <= members


# ---- values


def test_the_default_teachers():
    teachers = at("teacher_replay.DEFAULT_TEACHERS")
    assert [teacher["slug"] for teacher in teachers] == DEFAULT_TEACHERS
    assert (teachers[1]["input_per_mtok"], teachers[1]["output_per_mtok"]) == (1.25, 10.0)


def test_the_default_recipe_is_found_by_the_class_and_holds_the_published_steps():
    import yaml

    path = Path(at("replaysim.DJNormalizer").DEFAULT_RECIPE)
    assert path.parts[-3:] == ("recipes", "replaysim", "default.yaml")
    assert yaml.safe_load(path.read_text(encoding="utf-8"))["process"] == DEFAULT_RECIPE


def test_hint_templates_and_the_system_prompt():
    hints = module_at("hint_generator")
    assert set(hints.HINT_TEMPLATES) >= HINT_KINDS
    assert all(isinstance(hints.dispatch(kind), str) for kind in HINT_KINDS)
    assert hints.dispatch("json_decode").startswith("Reminder: tool arguments must be valid JSON")
    assert hints.dispatch("no_such_kind", {"tool_name": "Read"}) is None
    hints.register("a_kind_of_this_test", lambda ctx: f"Hint for {ctx['tool_name']}.")
    assert hints.dispatch("a_kind_of_this_test", {"tool_name": "Read"}) == "Hint for Read."
    del hints.HINT_TEMPLATES["a_kind_of_this_test"]
    assert "coding agent in a terminal" in at("SYSTEM_PROMPT")


@pytest.mark.parametrize("name", ROLES)
def test_an_actor_has_its_backend_and_role(name):
    actor = at(f"recipes.monarch.actors.{name}")
    assert (actor.backend, actor.role) == ("monarch", ROLES[name])
