"""Sessions with failures, hints and pairs, a tiny model and settings for the tests of offline training."""

from __future__ import annotations

from functools import cache

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, TrainingArguments

from composer_replication.batch.render.renderer import Renderer
from composer_replication.runs import RunDir
from composer_replication.runs import files as site_rows
from composer_replication.runs.files import LoggedPair, conversation_to_row
from composer_replication.trainer.offline_trainer import OfflineTrainer
from composer_replication.trainer.sessions.dataset import LoggedSessions
from composer_replication.trainer.sessions.rendering import LoggedSession
from composer_replication.types import ErrorSite, Hint
from session_pieces import Session
from tokenizer_assets import load

torch.set_num_threads(1)  # tensors this small are only slower with more
HINTS = {"cmd_not_found": "The program is called pytest.", "file_not_found": "List the folder before you read."}


@cache
def renderer() -> Renderer:
    return Renderer(load("llama3"))


def site(conversation, turn_id, kind="cmd_not_found", *, is_kept=True):
    return ErrorSite(
        id=f"{conversation.id}-{turn_id}-{kind}",
        conversation_id=conversation.id,
        turn_id=turn_id,
        call_id="c",
        result_turn_id=None,
        tool="bash",
        kind=kind,
        blame="model",
        confidence=0.9,
        evidence=(0, 1),
        evidence_text="x",
        is_soft=False,
        is_rewound=False,
        repeats=0,
        repeat_of=None,
        between=0,
        is_kept=is_kept,
        reason="kept" if is_kept else "unsure",
    )


def hint_of(kind):
    return Hint(text=HINTS[kind], source="template", template=kind, version=1)


def logged(number, *, with_site=True, with_pair=True, kind=None):
    """A session of three assistant turns: a call that failed, another call, an answer."""
    session = Session(identity=f"s{number}").user(f"Run test {number}.")
    session.call("bash", "error: not found", command=f"pytset {number}")
    session.call("bash", "passed", command="pytest -q")
    conversation = session.says(f"All {number} passed.").conversation()
    kind = kind or tuple(HINTS)[number % 2]
    erring = conversation.turns[1].id
    sites = [(site(conversation, erring, kind), hint_of(kind))] if with_site else []
    chosen = '[TOOL_USE] name=bash input={"command":"pytest -q"}'
    pairs = [LoggedPair(f"s{number}::0000", 0, chosen)] if with_pair else []
    return LoggedSession(conversation=conversation, sites=sites, pairs=pairs)


def sessions_of(*numbers, budget=512, made=None, **options) -> LoggedSessions:
    chosen = [logged(number) for number in numbers] if made is None else made
    return LoggedSessions.from_sessions(chosen, renderer(), budget=budget, **options)


def write_run(folder, sessions):
    run = RunDir.create(folder)
    run.write_jsonl(
        "conversations", (conversation_to_row(s.conversation) for s in sessions), schema="conversation", version=2
    )
    sites = (site_rows.site_to_row(*each) for s in sessions for each in s.sites)
    run.write_jsonl("sites", sites, schema="error_site", version=1, sources=["conversations"])
    pairs = (
        {"state_id": p.state_id, "conversation_id": s.conversation.id, "turn_number": p.turn_number, "chosen": p.chosen}
        for s in sessions
        for p in s.pairs
    )
    run.write_jsonl("pairs", pairs, schema="dpo_pair", version=2, sources=["conversations"])
    return run


def tiny(seed=0, *, layers=2, dropout=0.0):
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(renderer().tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.2,
        attention_dropout=dropout,
    )
    config._attn_implementation = "sdpa"
    return AutoModelForCausalLM.from_config(config)


def arguments(folder, **changes):
    settings = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "per_device_train_batch_size": 2,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "max_grad_norm": 0.0,
        "dataloader_pin_memory": False,
        "seed": 3,
        "optim": "adamw_torch",
    }
    return TrainingArguments(**settings | changes)


def trainer_of(folder, sessions, *, model=None, arguments_changes=None, **options) -> OfflineTrainer:
    args = arguments(folder, **(arguments_changes or {}))
    return OfflineTrainer(tiny() if model is None else model, args, sessions, **options)
