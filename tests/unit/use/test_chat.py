"""`crf chat`: before and after are asked the same, at a state as training renders it; nothing they say is obeyed."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys

import pytest
import torch

from composer_replication.batch.render.renderer import Renderer
from composer_replication.cli.chat import _ChatModels, _ChatReply, _Prompt, _Sampling
from composer_replication.cli.main import main
from composer_replication.envs.student import TRAINED_CONTEXT, load_student, student_folder
from composer_replication.runs import RunDir
from composer_replication.runs.files import read_site, read_sites
from composer_replication.trainer.from_config.inputs import tools_of
from composer_replication.trainer.trained import find_trained

SHORT = _Sampling(max_tokens=16)


@pytest.fixture(scope="module")
def arms(adapter):
    return _ChatModels(find_trained(str(adapter)), device="cpu")


@pytest.fixture(scope="module")
def run(example_run, adapter, tmp_path_factory):
    folder = shutil.copytree(example_run, tmp_path_factory.mktemp("chat") / "run")
    shutil.copytree(adapter, folder / "adapter")
    return folder


def greedy(model, ids, num_tokens):
    written = list(ids)
    for _ in range(num_tokens):
        with torch.inference_mode():
            written.append(int(model(torch.tensor([written])).logits[0, -1].argmax()))
    return written[len(ids) :]


def test_before_is_the_start_weights_and_after_has_the_adapter(arms, adapter):
    from peft import PeftModel

    prompt = arms.prompt_for([{"role": "user", "content": "Read src/app.py and fix the test."}], tools=None)
    model, tokenizer = load_student(dtype=torch.float32)
    assert list(prompt.ids)[-3:] == tokenizer("<|im_start|>assistant\n")["input_ids"][-3:]
    start = greedy(model, prompt.ids, 16)
    adapted = greedy(PeftModel.from_pretrained(model, adapter), prompt.ids, 16)
    said = {arm: arms.answer(arm, prompt, SHORT) for arm in arms.names}
    assert start != adapted
    for arm, ids in (("before", start), ("after", adapted)):
        end = ids.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in ids else len(ids)
        assert said[arm].text == tokenizer.decode(ids[:end]).strip()
        assert said[arm].num_tokens == end
        assert said[arm].is_cut == (end == len(ids))


def test_a_seed_draws_the_same_answer_again_and_another_draws_another(arms):
    prompt = arms.prompt_for([{"role": "user", "content": "Begin."}], tools=None)
    texts = [
        arms.answer("after", prompt, _Sampling(max_tokens=12, temperature=3.0, seed=seed)).text for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_the_prompt_of_a_state_is_what_training_renders_up_to_the_turn(arms, run):
    site = next(site for site, hint in read_sites(RunDir.open(run)) if hint is not None)
    _, _, conversation = read_site(RunDir.open(run), site.id)
    renderer = Renderer(arms.tokenizer, tools=tools_of(RunDir.open(run)))
    (start,) = [(s.ids, p.start) for s in renderer.render(conversation) for p in s.spans if p.turn_id == site.turn_id]
    prompt = arms.prompt_at_site(RunDir.open(run), site.id[:8])
    expected = start[0][: start[1]]
    assert list(prompt.ids) == expected[-len(prompt.ids) :]
    assert len(prompt.ids) + prompt.num_left_out == len(expected)
    assert prompt.num_left_out == 0 or len(prompt.ids) == TRAINED_CONTEXT // 2
    assert prompt.logged.startswith("[TOOL_USE] name=") or "\n[TOOL_USE]" in prompt.logged
    assert site.kind in prompt.about


def test_the_command_prints_both_and_what_the_session_did(run, capsys):
    site = next(site for site, hint in read_sites(RunDir.open(run)) if hint is not None)
    given = ["chat", str(run), "--compare", "--state", site.id, "--max-tokens", "4"]
    assert main([*given, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["answers"]) == {"before", "after"}
    assert told["logged"].startswith("[TOOL_USE]") or "[TOOL_USE]" in told["logged"]
    assert main(given) == 0
    head, *_ = capsys.readouterr().out.splitlines()
    assert re.search(r"\bsession\s+before\s+after$", head.rstrip())


def test_control_characters_of_a_model_are_shown_and_not_sent(run, capsys, monkeypatch):
    monkeypatch.setattr(_ChatModels, "answer", lambda *_: _ChatReply("a\x1b[2Jb\x07[red]c", 3, False))
    for more in ([], ["--compare"]):
        assert main(["chat", str(run), "--once", "hi", *more]) == 0
        shown = capsys.readouterr().out
        assert "a\ufffd[2Jb\ufffd[red]c" in shown
        assert "\x1b" not in shown
    assert main(["chat", str(run), "--once", "hi", "--json"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_each_arm_remembers_its_own_answers_until_told_to_begin_anew(run, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(
        _ChatModels,
        "prompt_for",
        lambda _self, messages, tools: asked.append(json.loads(json.dumps(messages))) or _Prompt([1]),
    )
    monkeypatch.setattr(
        _ChatModels, "answer", lambda _self, arm, _prompt, _sampling: _ChatReply(f"{arm} says", 1, False)
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\n/new\nthree\n"))
    assert main(["chat", str(run), "--compare", "--system", "be brief", "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    contents = [[each["content"] for each in messages] for messages in asked]
    assert contents[0] == contents[1] == ["be brief", "one"]
    assert contents[2:4] == [["be brief", "one", "before says", "two"], ["be brief", "one", "after says", "two"]]
    assert contents[4] == contents[5] == ["be brief", "three"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["MODEL", "--state", "abcd"], r"--state\b.*`crf chat RUN --state\b"),
        (["MODEL", "--state", "abcd", "--once", "x"], r"--state\b.*--once\b"),
        (["MODEL", "--max-tokens", "0"], r"--max-tokens 0\b"),
        (["MODEL", "--adapter", "nowhere"], r"\bnowhere\b.*\badapter_config\.json\b"),
        (["no/such/folder/here", "--once", "x"], r"\bno/such/folder/here\b.*\bcache\b"),
    ],
)
def test_what_cannot_be_asked_is_a_sentence(given, said, capsys):
    assert main(["chat", *(str(student_folder()) if each == "MODEL" else each for each in given)]) == 1
    assert re.search(said, capsys.readouterr().err, re.DOTALL)


def test_a_model_without_a_template_is_named(tmp_path, capsys):
    bare = shutil.copytree(student_folder(), tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    assert main(["chat", str(bare), "--once", "x"]) == 1
    assert re.search(r"\bbare\b.*\bchat_template\.jinja\b", capsys.readouterr().err, re.DOTALL)
