"""The exported file goes through `datasets` unchanged, and TRL's DPOTrainer trains on the text that we would.

Runs where trl is installed (`make test-replaysim`), with a tiny random Qwen2 and a small tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from composer_replication.pairs.export import build_preference_row, export_preferences

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")
pytestmark = [pytest.mark.replaysim, pytest.mark.filterwarnings("ignore")]

BASH = {
    "type": "function",
    "function": {
        "name": "Bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}


def pair(number: int, chosen: str, rejected: str) -> dict[str, Any]:
    read = {"name": "Read", "arguments": json.dumps({"path": f"src/{number}.py", "from": number})}
    return {
        "state_id": f"state-{number}",
        "state_messages": [
            {"role": "system", "content": "You are a coding agent."},
            {"role": "user", "content": f"Repair test {number}."},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "t1", "type": "function", "function": read}]},
            {"role": "tool", "tool_call_id": "t1", "content": '{"looks": "like JSON"}'},
        ],
        "chosen": chosen,
        "rejected": rejected,
        "n_teachers_agreeing": 2,
    }


def call(name: str, **arguments: Any) -> str:
    return f"[TOOL_USE] name={name} input={json.dumps(arguments)}"


PAIRS = [
    pair(0, call("Bash", command="ls -la"), "I give up."),
    pair(1, "Let me see.\n" + call("Edit", old="x", new=["y", 1, None], count=3), call("Edit", new="é", old={})),
    pair(2, "It is repaired.", call("Bash", command="ls")),
    pair(3, call("Bash"), call("Bash", command=7, timeout=2.5)),
]


def load(path: Path, folder: Path) -> Any:
    return datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(folder / "cache"))


def unmarked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in message.items() if key != "schema"} for message in messages]


@pytest.mark.parametrize("form", ["object", "text"])
def test_datasets_reads_what_was_written_whatever_the_arguments_are(form, tmp_path):
    export_preferences(PAIRS, tmp_path / "p.jsonl", tools=[BASH], arguments=form)
    loaded = load(tmp_path / "p.jsonl", tmp_path)
    for given, row in zip(PAIRS, loaded, strict=True):
        wanted = build_preference_row(given, tools=[BASH], arguments=form)
        assert json.loads(row["tools"]) == [BASH]
        for column in ("prompt", "chosen", "rejected"):
            assert json.dumps(unmarked(row[column])) == json.dumps(wanted[column])  # the order of keys, too


def test_types_do_not_depend_on_the_first_ten_megabytes(tmp_path):
    """Without the marked messages this fails, or gives 3 back as "3"."""
    same = pair(0, call("Bash", command="ls"), call("Bash", command="pwd"))
    same["state_messages"] = [{"role": "user", "content": "x" * 500_000}]
    late = pair(1, call("Bash", command=3), call("Edit", path="a", edits=[{"old": 1}]))
    export_preferences([same] * 24 + [late], tmp_path / "p.jsonl")
    last = load(tmp_path / "p.jsonl", tmp_path)[24]
    assert last["chosen"][0]["tool_calls"][0]["function"]["arguments"] == {"command": 3}
    assert last["rejected"][0]["tool_calls"][0]["function"]["arguments"] == {"path": "a", "edits": [{"old": 1}]}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    import tokenizer_assets

    folder = tmp_path_factory.mktemp("dpo")
    tokenizer = tokenizer_assets.load("llama3")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), intermediate_size=48, **sizes))
    model.save_pretrained(folder / "model")  # the reference is loaded from where the model came from
    export_preferences(PAIRS, folder / "p.jsonl", tools=[BASH])
    settings = trl.DPOConfig(
        output_dir=str(folder / "out"),
        max_steps=2,
        per_device_train_batch_size=2,
        max_length=None,
        learning_rate=1e-2,
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
    )
    dataset = load(folder / "p.jsonl", folder)
    return trl.DPOTrainer(model=str(folder / "model"), args=settings, train_dataset=dataset, processing_class=tokenizer)


def test_dpo_trainer_sees_the_text_that_our_collator_makes(trainer):
    from composer_replication.action_text import answer_turn
    from composer_replication.batch.pair_tokens import _pair_ids
    from composer_replication.batch.render.renderer import Renderer
    from composer_replication.batch.trace_messages import to_conversation

    renderer = Renderer(trainer.processing_class, tools=[BASH])
    for given, row in zip(PAIRS, trainer.train_dataset, strict=True):
        turns = to_conversation(given["state_messages"], conversation_id="p").turns
        answers = [answer_turn(given[side], turn_id=side) for side in ("chosen", "rejected")]
        ours = _pair_ids(renderer, turns, *answers, conversation_id="p")
        for side, ids in zip(("chosen", "rejected"), ours, strict=True):
            # Text and not ids: TRL lets tokens merge over the border between a state and its answer.
            theirs = row["prompt_ids"] + row[f"{side}_ids"]
            assert renderer.tokenizer.decode(theirs) == renderer.tokenizer.decode(ids.ids)


def test_dpo_trainer_runs_two_steps(trainer, note):
    before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    result = trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    note(f"TRL {trl.__version__} DPOTrainer, two steps: losses {losses}")
    assert result.global_step == 2
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)  # log 2: the policy is the reference before the first update
    assert any(not value.equal(before[name]) for name, value in trainer.model.named_parameters())
