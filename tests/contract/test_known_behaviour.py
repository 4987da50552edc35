"""What the published names do: the errors they raise, and what their results hold.

The tables come first. Names and signatures are in `test_known_imports.py`. Nothing here depends on where code lives.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import composer_replication as crf
from composer_replication.batch import build_batch
from composer_replication.diloco.serverless import MockManager, ObjectStoreAllReduce
from composer_replication.diloco.serverless.allreduce import _ImmediateWork
from composer_replication.diloco.serverless.executor import ServerlessExecutor
from composer_replication.diloco.serverless.hf_jobs import HFJobsExecutor
from composer_replication.diloco.serverless.local_process import LocalProcessExecutor
from composer_replication.diloco.serverless.modal import ModalExecutor
from composer_replication.diloco.serverless.replica_entrypoint import main
from composer_replication.distillation import TAIDScheduler, entropy_aware_opd_loss, taid_loss
from composer_replication.loss.jsd import generalized_jsd_loss
from composer_replication.pairs.export import replay_and_normalize_trace_sync
from composer_replication.recipes.prime_rl.composer_loss import loss_fn
from composer_replication.replaysim import DJNormalizer
from composer_replication.teacher_replay import extract_dpo_pairs, replay_trace, save_pairs
from composer_replication.trainer.data_collator import CollatorConfig, ComposerDataCollator

FLAT_KEYS = {"input_ids", "attention_mask", "response_mask"}
SITE_KEYS = {"ctx_teacher_input_ids", "sdpo_loss_mask", "sdpo_student_index", "sdpo_teacher_index"}
PAIR_KEYS = {f"dpo_{side}_{key}" for side in ("chosen", "rejected") for key in ("input_ids", "response_mask")}
REFERENCES = {"dpo_chosen_ref_logprobs", "dpo_rejected_ref_logprobs"}
LOGGED = {"loss/grpo", "loss/trace_replay_dpo", "loss/total", "loss/alpha_sdpo", "loss/beta_replay"}
CHANNELS = ("lm_ce", "sdpo_jsd", "trace_replay_dpo")
FLAGS = ["--rendezvous", "--world-size", "--trainer-module", "--trainer-fn", "--trainer-kwargs-json"]
LOGITS = torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(0))
SPEC = {"slug": "a/b", "input_per_mtok": 1.0, "output_per_mtok": 1.0}
STATE = {"state_id": "s::0000", "messages": [{"role": "user", "content": "Look."}], "student_action": "I give up now."}
PAIR = {
    "state_id": "s::0000",
    "state_messages": STATE["messages"],
    "chosen": "I will look at it.",
    "rejected": "I give up now.",
    "n_teachers_agreeing": 2,
}
TRACE = {
    "trace_id": "t",
    "turns": [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "I look.", "tool_call": {"name": "Read", "arguments": {"path": "a"}}},
        {"role": "tool", "content": "No such file", "tool_error": "file_not_found"},
        {"role": "assistant", "content": "It is gone."},
    ],
    "final_reward": 0.5,
    "dpo_pairs": [PAIR],
}
ASKED = {"type": "user", "uuid": "1", "message": {"role": "user", "content": "Look."}}
BLOCKS = [
    {"type": "thinking", "thinking": "Hm."},
    {"type": "text", "text": "I look."},
    {"type": "tool_use", "id": "c", "name": "Read", "input": {"path": "a"}},
]
ANSWERED = {"type": "assistant", "uuid": "2", "message": {"id": "m", "role": "assistant", "content": BLOCKS}}
PRIME = {
    name: torch.full((3,), -1.0) for name in ("trainer_logprobs", "inference_logprobs", "ref_logprobs", "advantages")
} | {"loss_mask": torch.ones(3), "loss_weights": torch.ones(3)}

# What is called, and the class of the error; a callable takes the flat batch and a model.
COMPOSE_ERRORS = {
    "unknown variant": {"dpo_variant": "other"},
    "unknown wrapper": {"sdpo_wrapper": "other"},
    "taid without taid_t": {"sdpo_wrapper": "taid"},
    "taid_t above 1": {"sdpo_wrapper": "taid", "taid_t": 1.5},
}
ERRORS = {
    "jsd: shapes": (ValueError, lambda: generalized_jsd_loss(LOGITS, LOGITS[:, :2])),
    "jsd: reduction": (ValueError, lambda: generalized_jsd_loss(LOGITS, LOGITS, reduction="other")),
    "opd: shapes": (ValueError, lambda: entropy_aware_opd_loss(LOGITS, LOGITS[:, :2])),
    "opd: reduction": (ValueError, lambda: entropy_aware_opd_loss(LOGITS, LOGITS, reduction="other")),
    "taid: shapes": (ValueError, lambda: taid_loss(LOGITS, LOGITS[:, :2], t=0.5)),
    "prime: not 1-D": (ValueError, lambda: loss_fn(SimpleNamespace(**PRIME | {"advantages": torch.ones(3, 1)}))),
    "prime: negative": (ValueError, lambda: loss_fn(SimpleNamespace(**PRIME), adv_tau=-1.0)),
    "recipe": (FileNotFoundError, lambda: DJNormalizer("/no/such/recipe.yaml")),
    "rank": (ValueError, lambda: ObjectStoreAllReduce("unused", 2, 2)),
    "REPLICA_RANK missing": (RuntimeError, lambda: main("unused", 2, "json", "dumps")),
    "replay without a key": (RuntimeError, lambda: asyncio.run(replay_trace([STATE], [SPEC, {**SPEC, "slug": "c/d"}]))),
}
# A package that is not installed, what needs it, and the class of the error.
MISSING = {
    "modal": (ImportError, lambda: ModalExecutor()),
    "huggingface_hub": (ImportError, lambda: HFJobsExecutor()),
    "data_juicer": (ImportError, lambda: DJNormalizer(backend="data_juicer")),
    "obstore": (RuntimeError, lambda: ObjectStoreAllReduce("s3://bucket/run", 0, 2)),
    "httpx": (ImportError, lambda: asyncio.run(replay_trace([STATE], [SPEC, {**SPEC, "slug": "c/d"}], api_key="k"))),
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with a chat template."""
    specials = ["<pad>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({token: index for index, token in enumerate([*specials, *alphabet])}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    named = {"pad_token": "<pad>", "eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=template, **named)


@pytest.fixture(scope="module")
def model(tokenizer) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=2048, **sizes, **ends))


@pytest.fixture
def no_environment(monkeypatch) -> None:
    for name in ("REPLICA_RANK", "OPENROUTER_API_KEY"):
        monkeypatch.delenv(name, raising=False)


# ---- errors


@pytest.mark.parametrize("name", ERRORS)
def test_what_is_wrong_raises_the_published_error(name, no_environment):
    error, call = ERRORS[name]
    with pytest.raises(error):
        call()


@pytest.mark.parametrize("package", MISSING)
def test_a_missing_package_raises_the_published_error_with_what_to_install(package, monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    error, call = MISSING[package]
    with pytest.raises(error, match=r"composer-replication\[") as caught:
        call()
    assert isinstance(caught.value, ImportError)


def test_a_rank_outside_the_world_and_peers_that_stay_away(monkeypatch, tmp_path):
    monkeypatch.setenv("REPLICA_RANK", "2")
    with pytest.raises(ValueError, match="REPLICA_RANK"):
        main(str(tmp_path), 2, "json", "dumps")
    with pytest.raises(TimeoutError):
        ObjectStoreAllReduce(str(tmp_path), 0, 2, timeout_s=0.2, poll_interval_s=0.05).allreduce(torch.ones(2))


# ---- losses and batches


@pytest.mark.parametrize("variant", ["factorial", "binary_search"])
def test_a_built_batch_feeds_all_three_channels(tokenizer, model, variant):
    batch = build_batch(tokenizer, variant=variant)
    assert set(batch) >= FLAT_KEYS | SITE_KEYS | PAIR_KEYS | REFERENCES
    assert not batch["dpo_chosen_ref_logprobs"].any()
    components = crf.compose_loss(model, batch)
    assert components.active == CHANNELS
    numbers = components.detached()
    assert numbers["total"] == pytest.approx(
        numbers["lm_ce"] + 0.1 * numbers["sdpo_jsd"] + 0.05 * numbers["trace_replay_dpo"], rel=1e-5
    )
    assert set(numbers) == {*CHANNELS, "total"}
    assert {type(number) for number in numbers.values()} == {float}
    assert crf.compose_loss(model, batch, alpha_sdpo=0.0, beta_replay=0.0).active == ("lm_ce",)


def test_the_old_form_of_channel_2_gives_the_same_number(tokenizer, model):
    ids = torch.tensor([tokenizer("abcdefgh")["input_ids"]])
    teacher = ids.clone()
    teacher[0, 0] += 1
    mask = torch.full_like(ids, -100)
    mask[0, 3:] = 1
    pairs = torch.stack([torch.zeros(5, dtype=torch.long), torch.arange(2, 7)], dim=1)
    flat = {"input_ids": ids, "response_mask": torch.ones_like(ids), "ctx_teacher_input_ids": teacher}
    old = crf.compose_loss(model, {**flat, "sdpo_loss_mask": mask}, beta_replay=0.0)
    new = crf.compose_loss(model, {**flat, "sdpo_student_index": pairs, "sdpo_teacher_index": pairs}, beta_replay=0.0)
    assert old.sdpo_jsd.item() == pytest.approx(new.sdpo_jsd.item(), rel=1e-6)
    assert old.sdpo_jsd.item() > 0
    every = crf.compose_loss(model, {**flat, "ctx_teacher_input_ids": ids}, beta_replay=0.0)  # every token
    assert every.active == CHANNELS[:2]


@pytest.mark.parametrize("name", COMPOSE_ERRORS)
def test_what_a_loss_or_a_batch_does_not_know_is_an_error(tokenizer, model, name):
    with pytest.raises(ValueError, match="variant"):
        build_batch(tokenizer, variant="other")
    with pytest.raises(ValueError):  # noqa: PT011 - the class is what is published
        crf.compose_loss(model, build_batch(tokenizer), **COMPOSE_ERRORS[name])


@pytest.mark.parametrize("key", ["ctx_teacher_input_ids", "dpo_rejected_input_ids", "dpo_chosen_ref_logprobs"])
def test_half_of_a_channel_is_an_error(tokenizer, model, key):
    batch = build_batch(tokenizer)
    del batch[key]
    with pytest.raises(ValueError):  # noqa: PT011
        crf.compose_loss(model, batch)


def test_every_wrapper_runs_and_simpo_reads_no_reference(tokenizer, model):
    for wrapper in ({"sdpo_wrapper": "taid", "taid_t": 0.5}, {"sdpo_wrapper": "entropy_opd", "entropy_opd_h_max": 2.0}):
        assert crf.compose_loss(model, build_batch(tokenizer), **wrapper).active == CHANNELS
    batch = {name: value for name, value in build_batch(tokenizer).items() if name not in REFERENCES}
    assert crf.compose_loss(model, batch, dpo_variant="simpo").active == CHANNELS


def test_masks_and_reductions_mean_what_is_published():
    teacher = LOGITS.flip(-1)
    labels = torch.tensor([[0, -100, 5, -100]])
    plain = generalized_jsd_loss(LOGITS, teacher, labels, reduction="none")
    assert plain.shape == (1, 4)
    assert (plain == 0).tolist() == [[False, True, False, True]]
    total = plain.sum().item()
    assert generalized_jsd_loss(LOGITS, teacher, labels, reduction="sum").item() == pytest.approx(total, rel=1e-5)
    assert generalized_jsd_loss(LOGITS, teacher, labels).item() == pytest.approx(total / 2, rel=1e-5)
    assert generalized_jsd_loss(LOGITS, teacher, labels, reduction="mean").item() == pytest.approx(total / 12, rel=1e-5)
    counted = torch.tensor([[1, 0, 1, 0]])
    for loss in (
        lambda mask: taid_loss(LOGITS, teacher, mask, t=0.5),
        lambda mask: entropy_aware_opd_loss(LOGITS, teacher, labels=mask, reduction="sum"),
        lambda mask: entropy_aware_opd_loss(LOGITS, teacher, labels=mask, reduction="sum", gate="hard", top_k=3),
    ):
        assert loss(None).item() == loss(torch.ones_like(counted)).item() != loss(counted).item()


def test_the_taid_scheduler():
    scheduler = TAIDScheduler(10)
    assert (type(scheduler.t), scheduler.t) == (float, pytest.approx(0.4))
    assert scheduler.update_t(torch.tensor(1.0), 0) is None
    assert isinstance(scheduler.update_t(torch.tensor(0.5), 1), torch.Tensor)
    other = TAIDScheduler(10)
    other.load_state_dict(scheduler.state_dict())
    assert other.t == scheduler.t


# ---- logs, pairs


def test_an_ingester_yields_a_state_for_each_assistant_message(tmp_path):
    path = tmp_path / "session.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in (ASKED, ANSWERED | {"parentUuid": "1"})))
    (tmp_path / "agent-1.jsonl").write_text(path.read_text())
    ingester = crf.ClaudeCodeIngester()
    (state,) = ingester.ingest(path)
    assert state["state_id"] == "session::0000"
    assert state["messages"][0] == {"role": "system", "content": crf.SYSTEM_PROMPT}
    lines = state["student_action"].split("\n")
    assert lines[:2] == ["[THINKING] Hm.", "I look."]
    assert lines[2].startswith("[TOOL_USE] name=Read input={")
    stats = ingester.last_stats
    assert (stats.n_records_total, stats.n_states_emitted, stats.n_tool_use_blocks, stats.version_warnings) == (
        2,
        1,
        1,
        [],
    )
    assert len(ingester.ingest_conversation(path).turns) == 2
    assert list(ingester.ingest(tmp_path / "agent-1.jsonl")) == []
    assert ingester.last_stats.skipped_subagent > 0


def test_pairs_are_agreed_extracted_saved_and_normalised(tmp_path):
    texts = ["I will look at it.", "I will look at it.", "Another thing altogether."]
    answers = [{"state_id": "s::0000", "teacher_slug": f"t/{n}", "response_text": text} for n, text in enumerate(texts)]
    rest = {"latency_s": 0.1, "prompt_tokens": 1, "completion_tokens": 1, "cost_usd": 0.0, "error": None}
    pairs = extract_dpo_pairs([STATE], [{**answer, **rest} for answer in answers])
    assert pairs == [PAIR]
    save_pairs(pairs, tmp_path / "new" / "pairs.jsonl")
    assert [json.loads(line) for line in (tmp_path / "new" / "pairs.jsonl").read_text().splitlines()] == [PAIR]
    (passed,) = DJNormalizer(skip_dj=True).normalize(pairs)
    assert passed.metadata == {"skipped": True}
    assert passed.chosen_messages == [{"role": "assistant", "content": PAIR["chosen"]}]
    assert [pair.state_id for pair in DJNormalizer().normalize(pairs)] == ["s::0000"]
    assert replay_and_normalize_trace_sync(states=[], teachers=[SPEC, {**SPEC, "slug": "c/d"}], api_key="k") == ([], [])


# ---- training


def test_a_collated_batch_has_the_published_keys(tokenizer):
    config = CollatorConfig(hint_generator=lambda kind, meta: "Look at the folder first.")
    batch = ComposerDataCollator(tokenizer, config)([TRACE])
    assert FLAT_KEYS | {"rewards"} | SITE_KEYS | PAIR_KEYS <= set(batch)
    assert batch["rewards"].tolist() == [0.5]
    assert int((batch["sdpo_loss_mask"] == 1).sum()) == len(batch["sdpo_student_index"])
    bare = ComposerDataCollator(tokenizer, CollatorConfig(enable_replay_dpo=False))([TRACE])
    assert set(bare) == FLAT_KEYS | {"rewards"}


def test_a_step_of_the_trainer_logs_the_published_names(tokenizer, model, tmp_path):
    from trl import GRPOConfig, GRPOTrainer

    assert issubclass(crf.ComposerReplicationTrainer, GRPOTrainer)
    off = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "bf16": False}
    size = {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 2, "max_steps": 1}
    args = GRPOConfig(output_dir=str(tmp_path), logging_steps=1, gradient_checkpointing=False, **size, **off)
    collator = ComposerDataCollator(tokenizer, CollatorConfig(hint_generator=lambda kind, meta: "Look there first."))
    trainer: Any = crf.ComposerReplicationTrainer(
        model,
        reward_funcs=lambda completion_ids, **columns: [float(len(ids)) for ids in completion_ids],
        args=args,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "Look."}]}]),
        processing_class=tokenizer,
        alpha_sdpo=0.1,
        beta_replay=0.05,
        trace_dataset=[TRACE],
        data_collator=collator,
    )
    trainer.train()
    logged = trainer.state.log_history[0]
    assert set(logged) >= LOGGED
    assert logged["loss/sdpo_kl_logged"] > 0  # of logged traces; loss/sdpo_kl is of rollouts, of which none erred
    assert (logged["loss/alpha_sdpo"], logged["loss/beta_replay"]) == (pytest.approx(0.1), pytest.approx(0.05))
    assert logged["loss/trace_replay_dpo"] == pytest.approx(math.log(2), abs=1e-3)


# ---- several replicas, other engines


def test_the_all_reduce_of_one_process_and_its_manager(tmp_path):
    store = ObjectStoreAllReduce(str(tmp_path), 0, 1)
    tensor = torch.arange(3.0)
    assert store.allreduce(tensor, name="x") is tensor
    assert (tensor.tolist(), store.round_id) == ([0.0, 1.0, 2.0], 1)
    manager = MockManager(store)
    assert type(manager).__name__ == "ObjectStoreManager"
    assert (manager.rank, manager.num_participants(), manager.is_leader()) == (0, 1, True)
    assert (manager._step, manager.current_step(), manager._use_async_quorum) == (0, 0, False)
    manager.register_state_dict_fn("key", lambda state: None, dict)
    assert "key" in manager._state_dict_fns
    manager.disallow_state_dict_read()
    manager.allow_state_dict_read()
    manager.start_quorum()
    manager.wait_quorum()
    work = manager.allreduce(tensor)
    assert isinstance(work, _ImmediateWork)
    assert work.get_future() is not None
    assert work.wait() is True
    assert manager.should_commit()
    assert manager.current_step() == 1


def test_replicas_of_this_machine(monkeypatch):
    executor = LocalProcessExecutor()
    assert isinstance(executor, ServerlessExecutor)
    assert (executor.backend_name, executor.supports_inter_replica_network) == ("local_process", True)
    with pytest.warns(UserWarning, match="gpu"):
        handles = executor.launch_replicas(2, "os.getpid", {"rank_env": "MY_RANK"}, gpu="A100")
    assert [(handle.rank, handle.backend_name) for handle in handles] == [(0, "local_process"), (1, "local_process")]
    assert all({"pid", "start_ts"} <= set(handle.metadata) for handle in handles)
    outcomes = executor.collect(handles, timeout=60)
    assert [(each["rank"], each["status"], each["exit_code"], each["error"]) for each in outcomes] == [
        (rank, "succeeded", 0, None) for rank in (0, 1)
    ]
    assert all(isinstance(each["result"], int) and each["result"] != os.getpid() for each in outcomes)
    assert executor.poll(handles[0]) == "succeeded"
    assert isinstance(executor.stream_logs(handles[0], n_lines=5), str)
    executor.cancel(handles[0])


def test_the_entrypoint_calls_the_trainer_with_its_place(monkeypatch, tmp_path):
    (tmp_path / "a_trainer.py").write_text("def train(**given):\n    return sorted(given), given['rank'], given['x']\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("REPLICA_RANK", "0")
    value = main(str(tmp_path / "store"), 1, "a_trainer", trainer_kwargs={"x": 7})
    assert value == (["manager", "rank", "world_size", "x"], 0, 7)


def test_the_entrypoint_has_the_published_flags():
    module = "composer_replication.diloco.serverless.replica_entrypoint"
    shown = subprocess.run([sys.executable, "-m", module, "--help"], check=True, capture_output=True, text=True).stdout
    assert [flag for flag in FLAGS if flag not in shown] == []


def test_the_loss_of_prime_rl_returns_an_object_and_warns_of_dpo():
    outputs = loss_fn(SimpleNamespace(**PRIME), alpha_sdpo=0.1)
    assert outputs.loss.ndim == 0
    assert isinstance(outputs.metrics, dict)
    with pytest.warns(UserWarning, match="beta_dpo"):
        loss_fn(SimpleNamespace(**PRIME), beta_dpo=0.1)
