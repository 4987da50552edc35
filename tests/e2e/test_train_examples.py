"""The training examples as a user runs them: an erring call is unlearned, and a reward is climbed."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from output_facts import lines_with

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name, monkeypatch):
    """`run.py` of an example, beside what it imports from its own folder."""
    monkeypatch.syspath_prepend(str(EXAMPLES / name))
    spec = importlib.util.spec_from_file_location(f"{name}_run", EXAMPLES / name / "run.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def threads():
    """Examples on small models take one thread for themselves; the next test gets its own back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_channel_2_makes_erring_calls_unlikely_with_no_hint_in_sight(monkeypatch, capsys, tmp_path, note):
    run = example("sdpo_end_to_end", monkeypatch)
    assert run.main(["--keep", str(tmp_path), "--steps", "20"]) == 0
    printed = capsys.readouterr().out
    rows = re.findall(r"^(\w+) +(\d+) +(-[\d.]+) +(-[\d.]+) +(-[\d.]+)$", printed, re.MULTILINE)
    assert [(kind, number) for kind, number, *_ in rows] == [("cmd_not_found", "6"), ("tool_not_found", "6")]
    for kind, _, before, hinted, after in rows:
        note(f"log-prob of the erring call, {kind}: {before} -> {after} (with its hint {hinted})")
        assert float(hinted) < float(before) - 0.5  # the hint works
        assert float(after) < float(before) - 0.5  # and is no longer needed
    losses = [float(each) for each in re.findall(r"trace_replay_dpo ([\d.]+)", printed)]
    assert losses[-1] < losses[0]


def test_the_example_takes_a_model_and_a_run_of_ones_own(monkeypatch, capsys, tmp_path):
    run = example("sdpo_end_to_end", monkeypatch)
    import world

    logs = tmp_path / "logs"
    tokenizer = world.build_tokenizer()
    # Random weights heed hints by chance: under this seed some do.
    for part in (tokenizer, world.new_model(tokenizer, seed=1)):
        part.save_pretrained(tmp_path / "model")
    logs.mkdir()
    world.write_logs(logs)
    assert run.crf(["ingest", str(logs), "-o", str(tmp_path / "run")]) == 0
    assert run.crf(["sites", str(tmp_path / "run")]) == 0
    options = ["--model", str(tmp_path / "model"), "--run", str(tmp_path / "run"), "--keep", str(tmp_path / "kept")]
    run.main([*options, "--steps", "2"])
    printed = capsys.readouterr().out
    assert "sessions: {'conversations': 12, 'sites': 12, 'pairs': 0" in printed
    assert re.search(r"^step +2 +sdpo_jsd ", printed, re.MULTILINE)
    assert run.main(["--model", "model", "--run", str(tmp_path / "nowhere")]) == 1
    assert lines_with(capsys.readouterr().err, "RunError", tmp_path / "nowhere")
    with pytest.raises(SystemExit):
        run.main(["--model", "model"])


def test_grpo_climbs_the_reward_that_a_random_model_can_reach(monkeypatch, capsys):
    run = example("gsm8k", monkeypatch)
    assert run.main(["--tiny"]) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"\d+", printed.splitlines()[0]) == ["4", "8"]  # questions, and rollouts of each
    rewards = [float(each) for each in re.findall(r"^step +\d+  reward ([\d.]+)", printed, re.MULTILINE)]
    assert len(rewards) == 6
    assert rewards[-1] > 3 * rewards[0]


def test_data_in_the_format_of_gsm8k_is_read_and_judged(monkeypatch, capsys, tmp_path):
    run = example("gsm8k", monkeypatch)
    rows = [
        {"question": "2 + 2?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"},
        {"question": "500 * 4?", "answer": "#### 2,000"},
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for data in (tmp_path, tmp_path / "train.jsonl"):
        prompts = run.gsm8k_prompts(str(data))
        assert prompts["number"][:] == ["4", "2000"]
        assert prompts[0]["prompt"][0]["content"].startswith("2 + 2?\n")
    said = ["so #### 4", "#### 5\n#### 4.0", "four", "#### $2,000.00", "#### -4"]
    completions = [[{"role": "assistant", "content": text}] for text in said]
    assert run.right_number(completions, number=["4", "4", "4", "2000", "4"]) == [1.0, 1.0, 0.0, 1.0, 0.0]
    (tmp_path / "train.jsonl").write_text('{"question": "?", "answer": "none"}\n')
    assert run.main(["--tiny", "--data", str(tmp_path)]) == 1
    assert lines_with(capsys.readouterr().err, "InputError", tmp_path, "####")
