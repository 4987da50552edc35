"""`crf export RUN --to DIR`: merged weights that say what the adapter says, folders for others, cards."""

from __future__ import annotations

import json
import re
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from random_adapter import make_adapter
from transformers import AutoModelForCausalLM, AutoTokenizer

from composer_replication.cli.export_weights import (
    _merge_adapter,
    _ollama_template,
    _probe_ids,
    _write_ollama,
    export_weights,
)
from composer_replication.cli.main import main
from composer_replication.envs.student import student_folder
from composer_replication.errors import InputError, RunError
from composer_replication.trainer.trained import find_trained
from refusals import refusal

CONVERTER = """
import pathlib, sys
folder, _, target, _, kind = sys.argv[1:]
assert (pathlib.Path(folder) / "model.safetensors").exists()
if "refuse" in pathlib.Path(__file__).parent.name:
    sys.exit("NotImplementedError: BPE pre-tokenizer was not recognized")
pathlib.Path(target).write_bytes(b"GGUF" + kind.encode())
"""


@pytest.fixture(scope="module")
def exported(adapter, example_run, tmp_path_factory):
    """An export of a run that holds the adapter, with a converter of llama.cpp's name on the path."""
    root = tmp_path_factory.mktemp("export")
    run = shutil.copytree(example_run, root / "run")
    shutil.copytree(adapter, run / "adapter")
    (root / "tools").mkdir()
    (root / "tools" / "convert_hf_to_gguf.py").write_text(CONVERTER)
    done = export_weights(str(run), root / "out", environment={"LLAMA_CPP": str(root / "tools")})
    return root, done


def logits_of(folder, *, adapter=None):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    probe = _probe_ids(AutoTokenizer.from_pretrained(student_folder()), model.config)
    with torch.inference_mode():
        return model(probe).logits


def test_merged_weights_say_what_the_adapter_on_its_start_weights_says(exported, adapter):
    root, done = exported
    wanted, start = logits_of(student_folder(), adapter=adapter), logits_of(student_folder())
    merged = logits_of(root / "out" / "merged")
    moved, lost = (wanted - start).abs().mean(), (merged - wanted).abs().mean()
    assert moved > 0.02
    assert lost < 0.2 * moved
    assert done.check.is_close
    assert 0 < done.check.difference < 0.25 * done.check.effect


def test_in_full_precision_nothing_is_lost(adapter, tmp_path):
    check = _merge_adapter(find_trained(str(adapter)), tmp_path / "merged", precision="float32")
    assert check.difference < 1e-4
    assert torch.allclose(
        logits_of(tmp_path / "merged"), logits_of(student_folder(), adapter=adapter), atol=1e-3, rtol=1e-4
    )


def test_an_adapter_that_rounds_away_in_bf16_is_refused_there_and_written_in_float32_by_default(tmp_path):
    faint = make_adapter(tmp_path / "faint", student_folder(), scale=1e-2)
    with refusal(InputError, got="bfloat16", fix="--precision float32") as refused:
        export_weights(str(faint), tmp_path / "out", precision="bfloat16")
    assert re.search(r"\b\d+%.*\badapter\b", refused.value.expected)
    assert [each.name for each in tmp_path.iterdir()] == ["faint"]
    done = export_weights(str(faint), tmp_path / "out", environment={})
    assert done.check.precision == "float32"
    assert done.check.difference < 1e-4
    assert re.search(r"\bfloat32\b.*\bbfloat16\b.*\b\d+%", str(done.check))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged", dtype="auto")
    assert merged.dtype == torch.float32


def test_the_folder_holds_what_others_need(exported):
    root, done = exported
    out = root / "out"
    names = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())
    assert {"DATA.md", "ollama/Modelfile", "ollama/model.gguf", "vllm/serve.sh"} <= set(names)
    assert {f"merged/{name}" for name in ("README.md", "chat_template.jinja", "model.safetensors")} <= set(names)
    assert {"adapter/README.md", "adapter/adapter_config.json", "adapter/adapter_model.safetensors"} <= set(names)
    assert (out / "ollama" / "model.gguf").read_bytes() == b"GGUFbf16"
    assert (out / "ollama" / "Modelfile").read_text().startswith("FROM ./model.gguf\nTEMPLATE ")
    assert (
        "vllm serve ../merged --chat-template ../merged/chat_template.jinja" in (out / "vllm" / "serve.sh").read_text()
    )
    assert all(each.path is None or each.path.exists() for each in done.formats)
    assert list(root.glob(".out*")) == []


def test_without_a_converter_or_with_one_that_refuses_there_is_a_sentence(adapter, tmp_path):
    done = export_weights(str(adapter), tmp_path / "plain", environment={"PATH": ""})
    assert done.formats[0].path is None
    assert re.search(r"\bconvert_hf_to_gguf\.py\b.*\bPATH\b", done.formats[0].sentence)
    assert (tmp_path / "plain" / "ollama" / "Modelfile").read_text().startswith("FROM ../merged\n")
    (tmp_path / "refuse").mkdir()
    (tmp_path / "refuse" / "convert_hf_to_gguf.py").write_text(CONVERTER)
    done = export_weights(str(adapter), tmp_path / "other", environment={"LLAMA_CPP": str(tmp_path / "refuse")})
    assert done.formats[0].sentence.endswith("NotImplementedError: BPE pre-tokenizer was not recognized")


def test_weights_that_were_trained_whole_are_copied(tmp_path):
    shutil.copytree(student_folder(), tmp_path / "trained" / "model")
    (tmp_path / "trained" / "model" / "training.json").write_text(json.dumps({"start_weights": str(student_folder())}))
    done = export_weights(str(tmp_path / "trained"), tmp_path / "out", environment={})
    assert torch.equal(logits_of(tmp_path / "out" / "merged"), logits_of(student_folder()))
    assert done.check.num_tokens == 0
    assert not (tmp_path / "out" / "merged" / "training.json").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--to", "used"], r"\bused\b.*\bfolder\b"),
        (["--to", "new", "--push", "no-owner"], r"--push\b.*'no-owner'.*\bowner/name\b"),
        (["--to", "new", "--public"], r"--public\b.*--to DIR\b.*--push REPO\b"),
        (["--atif", "new", "--push", "a/b"], r"--push\b.*--to DIR\b"),
    ],
)
def test_what_cannot_be_exported_is_refused_before_anything_is_loaded(
    adapter, tmp_path, monkeypatch, capsys, given, said
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    monkeypatch.setitem(sys.modules, "peft", None)  # whoever gets that far fails in another way
    assert main(["export", str(adapter), *given]) == 1
    assert re.search(said, capsys.readouterr().err, re.DOTALL)
    assert not (tmp_path / "new").exists()


def test_a_run_without_weights_says_what_trains_some(example_run, tmp_path, capsys):
    assert main(["export", str(example_run), "--to", str(tmp_path / "out")]) == 1
    assert re.search(r"\badapter\b.*`crf train", capsys.readouterr().err, re.DOTALL)


class Hub:
    """Stands in for huggingface_hub.HfApi, and notes what it was asked."""

    def __init__(self, error=None):
        self.asked, self.error = [], error

    def create_repo(self, **given):
        self.asked.append(("create", given))
        if self.error is not None:
            raise self.error

    def repo_info(self, **_given):
        return SimpleNamespace(private=True)

    def upload_folder(self, *, folder_path, allow_patterns, **given):
        from fnmatch import fnmatch
        from pathlib import Path

        files = {each.name for each in Path(folder_path).rglob("*") if each.is_file()}
        sent = {each for each in files if any(fnmatch(each, pattern) for pattern in allow_patterns)}
        self.asked.append(("upload", given, sent, (Path(folder_path) / "README.md").read_text()))
        return "https://hub/ada/small/commit/1"


def test_only_merged_weights_and_a_card_without_paths_are_sent_and_privately(adapter, tmp_path):
    hub = Hub()
    done = export_weights(str(adapter), tmp_path / "out", push="ada/small", api=hub, environment={})
    (_, created), (_, given, sent, card) = hub.asked
    assert (created["repo_id"], created["private"], created["exist_ok"]) == ("ada/small", True, True)
    assert given["repo_id"] == "ada/small"
    assert sent == {path.name for path in (tmp_path / "out" / "merged").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja", "README.md"} <= sent
    assert str(student_folder().parent) not in card
    assert str(tmp_path) not in card
    assert 'from_pretrained("ada/small")' in card
    assert done.pushed == "https://hub/ada/small/commit/1"


def test_a_hub_that_refuses_is_a_sentence_and_the_export_stays(adapter, tmp_path):
    from huggingface_hub.errors import LocalTokenNotFoundError

    hub = Hub(LocalTokenNotFoundError("no token\nmore"))
    with refusal(RunError, what="ada/small", fix="`hf auth login`") as refused:
        export_weights(str(adapter), tmp_path / "out", push="ada/small", api=hub, environment={})
    assert refused.value.got == "LocalTokenNotFoundError: no token"
    assert (tmp_path / "out" / "merged" / "model.safetensors").exists()


class Templated:
    """A tokenizer that writes these texts around messages."""

    bos_token, eos_token = None, "<end>"

    def __init__(self, end="<end>\n", answer=""):
        self.end, self.answer = end, answer

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
        said = "".join(f"<{each['role']}>{each['content']}{self.end}" for each in messages)
        return said + f"<assistant>{self.answer}" * add_generation_prompt


@pytest.mark.parametrize(
    "given",
    [
        {"answer": '"""\nSYSTEM """evil'},
        {"answer": "{{ .System }}"},
        {"answer": 'a"'},
        {"end": "{{ . }}"},
        {"end": '"""'},
        {"end": 'a"b'},
        {"end": "{"},
    ],
)
def test_what_ollama_would_read_as_its_own_is_written_into_no_modelfile(given, tmp_path):
    assert _ollama_template(Templated(**given)) is None
    _write_ollama(tmp_path, Templated(**given), weights="w", max_length=None)
    assert (tmp_path / "Modelfile").read_text() == "FROM w\n"


def test_a_stop_is_written_as_it_is(tmp_path):
    _write_ollama(tmp_path, Templated(end="<\uff5cend\uff5c>"), weights="w", max_length=None)
    assert 'PARAMETER stop "<\uff5cend\uff5c>"' in (tmp_path / "Modelfile").read_text()
